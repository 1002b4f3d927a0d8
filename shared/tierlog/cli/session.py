"""What every command shares: the global options, settings, errors to exit codes.

Exit codes are those of ``EXIT_CODES``. Errors go to standard error in two lines, what happened and
what to do; a stack trace only with --debug.
"""

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, ParamSpec

import typer

from tierlog.model.errors import SURFACES, TierlogError, first_error

if TYPE_CHECKING:
    from tierlog.runtime.settings import Settings

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_CODES: Final = {
    0: "it is done",
    EXIT_FAILURE: "failed, for another reason than those below",
    EXIT_USAGE: "the command, or what it was given, is wrong",
    3: "not found",
    4: "a condition does not hold: somebody else was first",
    5: "unavailable, out of time, or not known whether it is done",
    6: "bytes are damaged, or differ",
    EXIT_INTERRUPTED: "interrupted",
}

Arguments = ParamSpec("Arguments")

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait.")]


@dataclass(slots=True)
class Session:
    """The global options of this invocation."""

    debug: bool = False
    state_dir: Path | None = None
    profile: str | None = None
    given: list[str] = field(default_factory=list)

    def flags(self) -> dict[str, Any]:
        """Return the tree of values that the options set."""
        from tierlog.runtime.naming import flags_of
        from tierlog.runtime.settings import Settings

        tree = flags_of(Settings, self.given)
        if self.profile is not None:
            tree["profile"] = self.profile
        if self.state_dir is not None:
            tree["state_dir"] = self.state_dir
        return tree


SESSION: Final = Session()


def command(function: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Turn what a command raises into a message and an exit code."""

    @functools.wraps(function)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (typer.Exit, typer.BadParameter):
            raise
        except BrokenPipeError:
            # Whoever read our output has enough. Nothing may be flushed to it at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            _say("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BaseException as error:  # noqa: BLE001 - the last stop before the exit code
            _end(error)

    return guarded


def load() -> "Settings":
    """Read the settings: options, environment, profile, file, defaults; the first one counts."""
    from tierlog.runtime.settings import load_settings

    settings = load_settings(config_file(), flags=SESSION.flags())
    _quiet_logs(settings)
    return settings


def config_file() -> Path | None:
    """Return the settings file that the environment names."""
    config = os.environ.get("TIERLOG_CONFIG")
    return Path(config) if config else None


def _quiet_logs(settings: "Settings") -> None:
    """Keep logs off standard output, and errors alone on standard error."""
    from tierlog.runtime.logs import configure_logging
    from tierlog.runtime.redaction import secrets_of

    level = "debug" if SESSION.debug else "error"
    wanted = settings.log.model_copy(update={"format": "console", "level": level})
    configure_logging(wanted, service="cli", secrets=secrets_of(settings))


def _end(error: BaseException) -> NoReturn:
    if SESSION.debug:
        import traceback

        traceback.print_exception(error)
    found = first_error(error)
    if isinstance(found, TierlogError):
        _say(f"error: {found.message} [{found.reason.value}]")
        if found.remedy:
            _say(f"remedy: {found.remedy}")
        raise typer.Exit(SURFACES[found.reason].exit_code) from None
    from asyncio import CancelledError

    if isinstance(found, KeyboardInterrupt | CancelledError):
        _say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if isinstance(found, typer.Exit):
        raise found
    if isinstance(found, OSError):
        name = f" {found.filename}" if found.filename else ""
        _say(f"error: {found.strerror or found}{name}")
        _say("remedy: check the path, its permissions and the disk's free space")
        raise typer.Exit(EXIT_FAILURE) from None
    if isinstance(found, ModuleNotFoundError) and found.name:
        _say(f"error: this needs the package {found.name.partition('.')[0]}, which is not there")
        _say("remedy: install it, or everything: pip install 'tierlog[all]'")
        raise typer.Exit(EXIT_FAILURE) from None
    _say(f"error: {type(found).__name__}: {found}")
    _say("remedy: this is a fault of tierlog; run it again with: tierlog --debug …")
    raise typer.Exit(EXIT_FAILURE) from None


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
