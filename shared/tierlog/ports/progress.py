"""How long work tells what it does, to whoever watches."""

from typing import Protocol


class Progress(Protocol):
    """Takes notes of progress; must return at once."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """``done`` of ``total`` (None: unknown) units of ``what``."""
        ...
