"""Refuses cases whose names or order follow hashes: no two workers would collect the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

SETS = (set, frozenset)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Generator[None, Any, Any]:
    made = yield
    for item in made if isinstance(made, list) else ():
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        sets = [one for one in values if isinstance(one, SETS) and len(one) > 1]
        marks = [mark.args[1] for mark in item.iter_markers("parametrize") if len(mark.args) > 1]
        if any(isinstance(one, SETS) for one in marks) or any(
            str(one) in item.callspec.id for one in sets
        ):
            raise collector.CollectError(f"{item.name}: sort the set that makes its cases' names")
    return made
