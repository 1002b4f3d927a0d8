"""Runs a module with the packages that a lock names and no others, as an image has them.

Run by ``python -m``, the module and its arguments behind it, or with the module in the
environment. A wrapper, since an environment of its own for each image takes a gigabyte.

Owns: refusing to import what is installed here and is not in the lock. Does not own the versions,
which are the same in all locks.
"""

from __future__ import annotations

import functools
import os
import re
import runpy
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

REFUSED = "TIERLOG_ONLY_NOT"
RUN = "TIERLOG_ONLY_RUN"
MODULE = "tests.plugins.only_locked"
REPOSITORY = Path(__file__).resolve().parents[2]


def env_of(names: Iterable[str], module: str) -> dict[str, str]:
    """What the process needs in its environment, to have these distributions alone."""
    allowed = set(names)
    refused = [
        one
        for one, distributions in installed().items()
        if not one.startswith("tierlog") and not allowed & distributions
    ]
    return {REFUSED: ",".join(refused), RUN: module, "PYTHONPATH": str(REPOSITORY)}


@functools.cache
def installed() -> Mapping[str, frozenset[str]]:
    """Return the modules that are installed here, each with the distributions that bring it."""
    return {
        module: frozenset(canonical(name) for name in distributions)
        for module, distributions in packages_distributions().items()
    }


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names_in(lock: Path) -> set[str]:
    """Return the distributions that a lock names."""
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)==", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonical(name) for name in found}


class Refusing:
    """Finds nothing, and ends the search for what the lock does not bring."""

    def __init__(self, refused: Iterable[str]) -> None:
        self._refused = frozenset(refused)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in self._refused:
            raise ModuleNotFoundError(f"{name} is not in the lock", name=name)
        return None


def main() -> None:
    sys.meta_path.insert(0, Refusing(os.environ[REFUSED].split(",")))
    runpy.run_module(os.environ[RUN], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
