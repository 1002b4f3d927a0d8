"""Errors out of task groups as what they are.

A TaskGroup wraps what its tasks raise. Callers here catch Tierlog's kinds; ``plain_errors``
gives them the first one, with the group as its cause.
"""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the first error of a group instead of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from group
