"""The ingest nodes of one machine: their numbers, names, folders, and how many copies they keep.

Node 1 alone is the process ``ingest``; of several, node ``i`` is ``ingest-<i>``. Its id is
``node-<i>`` in either case, and the folder of node 1 is the same, so that a state directory with
one node grows by starting it with more.

    <state>/nodes.json  {"last": 3}, the highest number that was ever given

Invariant: a number is one disk's for good. The folder holds the node's cookie, and the id of a disk
that is gone or was decommissioned is never given to another one.
"""

import contextlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierlog.model.errors import RefusedError
from tierlog.model.quorums import quorums_of

KIND: Final = "ingest"
FILE_NAME: Final = "nodes.json"
NODES_MAX: Final = 32
OWNER: Final = "TIERLOG_INGEST__OWNER__"
QUORUMS: Final = tuple(f"{OWNER}{name}" for name in ("ENSEMBLE_SIZE", "WRITE_QUORUM", "ACK_QUORUM"))

_FOLDER: Final = re.compile(rf"{KIND}(?:-([1-9]\d*))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """One ingest node: its number, and whether it is the only one."""

    number: int
    alone: bool = False

    @property
    def process(self) -> str:
        """The process's name."""
        return KIND if self.alone else f"{KIND}-{self.number}"

    @property
    def folder(self) -> str:
        """The name of its data directory."""
        return KIND if self.number == 1 else f"{KIND}-{self.number}"

    @property
    def env(self) -> dict[str, str]:
        """The settings that are this node's own. One node alone may be named otherwise."""
        return {} if self.alone else {"TIERLOG_INGEST__NODE_ID": f"node-{self.number}"}


def numbers_in(data: Path) -> list[int]:
    """Return the numbers of the nodes that have a folder in a data directory."""
    if not data.is_dir():
        return []
    matches = (_FOLDER.fullmatch(path.name) for path in data.iterdir() if path.is_dir())
    return sorted({int(match[1] or 1) for match in matches if match is not None})


def last_number(state_dir: Path) -> int:
    """Return the highest number that was ever given to a node of a state directory; 0: none."""
    numbers = numbers_in(state_dir / "data")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or cut
        numbers.append(int(json.loads((state_dir / FILE_NAME).read_text(encoding="utf-8"))["last"]))
    return max(numbers, default=0)


def give_number(state_dir: Path, place: NodePlace) -> None:
    """Keep that a node has its number; its folder too, so that it has it after a cut start."""
    last = max(last_number(state_dir), place.number)
    (state_dir / "data" / place.folder).mkdir(parents=True, exist_ok=True)
    (state_dir / FILE_NAME).write_text(json.dumps({"last": last}), encoding="utf-8")


def places_of(count: int | None, known: Collection[int], *, last: int = 0) -> list[NodePlace]:
    """Return ``count`` nodes, the known ones and new ones; None: the known ones, or one.

    New ones get numbers behind ``last``.
    """
    wanted = max(1, len(known)) if count is None else count
    if not 1 <= wanted <= NODES_MAX:
        raise RefusedError(
            f"{wanted} nodes on one machine", remedy=f"Start 1 to {NODES_MAX}, best 3"
        )
    if wanted < len(known):
        raise RefusedError(
            f"the state directory has {len(known)} nodes, and {wanted} are to be started",
            remedy=f"Start all: --nodes {len(known)}; then take one out with: tierlog node "
            "decommission NODE, and remove its folder",
        )
    first = max(last, *known, 0) + 1
    numbers = [*sorted(known), *range(first, first + wanted - len(known))]
    return [NodePlace(number=one, alone=numbers == [1]) for one in numbers]


def quorum_environment(count: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of how many copies are kept, unless any of them is given.

    One node keeps one; two keep two, and both acknowledge; from three on it is 3/3/2.
    """
    if any(name in given for name in QUORUMS):
        return {}
    return {name: str(value) for name, value in zip(QUORUMS, quorums_of(count), strict=True)}
