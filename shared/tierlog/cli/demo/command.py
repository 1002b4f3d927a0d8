"""The command itself: options, temporary state, exit code."""

from tierlog.cli.session import command


@command
def demo() -> None:
    """Run the main job end to end."""
