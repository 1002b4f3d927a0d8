"""Where everything lies in ZooKeeper (formats.md, "Metadata in ZooKeeper"; seeds/003).

    /ledgers/LAYOUT                      BookKeeper's mark of the hierarchical layout
    /ledgers/{2}/{4}/L{4}                a ledger's metadata; the digits are its id, ten of them
    /ledgers/idgen/ID-{10}               ephemeral, sequential: whoever makes it owns the number
    /ledgers/available/<node>            ephemeral: a live storage node and its addresses
    /ledgers/available/readonly/<node>   the same, of a node that takes no entries now
    /ledgers/cookies/<node>              a storage node's identity
    /tierlog/cluster                     the cluster's identity
    /tierlog/restoring                   it is being made anew from its bucket: nobody starts
    /tierlog/restored                    it was, and no scrub by schedule repairs until one is asked
    /tierlog/policies                    thresholds of the cluster and of namespaces
    /tierlog/streams/<name>              a stream: epoch, policy, tail of its list of ledgers
    /tierlog/streams/<name>/pages/{10}   older ledgers of the list
    /tierlog/streams/<name>/attributes   the checkpoints of its attributes
    /tierlog/contexts/{2}/{4}/L{4}       a ledger's offload context
    /tierlog/locks/ledgers/L{10}         ephemeral: a worker is offloading the ledger
    /tierlog/deleted/{2}/{4}/L{4}        a bare ledger that was deleted: its last metadata
    /tierlog/staging/L{10}               empty: a staging ledger that is not attached yet
    /tierlog/scheduler/progress          how long leaders were at work
    /tierlog/scheduler/scrubs            when scrubs by schedule last began
    /tierlog/scheduler/scrubs/<id>       what a scrub found
    /tierlog/underreplicated/{2}/{4}/L{4}   a ledger that lacks copies
    /tierlog/locks/underreplicated/L{10} ephemeral: a worker is replicating the ledger
    /tierlog/draining/<node>             a storage node that is being emptied, or was
    /tierlog/tallies/<node>              empty; its version counts a storage node's looks at new ids
    /tierlog/replication/audit           when all copies were last looked at
    /tierlog/election/<office>/…         ephemeral, sequential: candidates for leader

Invariants:
    * ``ledger_id_of(ledger_path(i)) == i`` for every id of up to ten digits; more are refused.
    * No folder of the hierarchy gets more than 10,000 children (100 x 10,000 x 10,000 ids).
"""

import re
from typing import Final
from uuid import UUID

from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import LEDGER_ID_MAX, READONLY_NAME, LedgerId, NodeId, StreamName

ROOT: Final = "/tierlog"
LEDGERS_ROOT: Final = "/ledgers"

LAYOUT: Final = f"{LEDGERS_ROOT}/LAYOUT"
LAYOUT_DATA: Final = b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1"
_FLAT: Final = b"FlatLedgerManagerFactory"

AVAILABLE: Final = f"{LEDGERS_ROOT}/available"
AVAILABLE_READONLY: Final = f"{AVAILABLE}/{READONLY_NAME}"
COOKIES: Final = f"{LEDGERS_ROOT}/cookies"
IDGEN: Final = f"{LEDGERS_ROOT}/idgen"
IDGEN_PREFIX: Final = f"{IDGEN}/ID-"

CLUSTER: Final = f"{ROOT}/cluster"
RESTORING: Final = f"{ROOT}/restoring"
RESTORED: Final = f"{ROOT}/restored"
POLICIES: Final = f"{ROOT}/policies"
STREAMS: Final = f"{ROOT}/streams"
CONTEXTS: Final = f"{ROOT}/contexts"
DELETED: Final = f"{ROOT}/deleted"
STAGING: Final = f"{ROOT}/staging"
LEDGER_LOCKS: Final = f"{ROOT}/locks/ledgers"
SCHEDULER_PROGRESS: Final = f"{ROOT}/scheduler/progress"
SCRUBS: Final = f"{ROOT}/scheduler/scrubs"
UNDERREPLICATED: Final = f"{ROOT}/underreplicated"
UNDERREPLICATED_LOCKS: Final = f"{ROOT}/locks/underreplicated"
DRAINING: Final = f"{ROOT}/draining"
TALLIES: Final = f"{ROOT}/tallies"
AUDIT: Final = f"{ROOT}/replication/audit"

LEDGER_ID_DIGITS: Final = 10
CHILDREN_MAX: Final = 10_000
assert LEDGER_ID_MAX == 10**LEDGER_ID_DIGITS - 1

_HIERARCHY: Final = re.compile(r"/(\d{2})/(\d{4})/L(\d{4})", re.ASCII)
_STAGED: Final = re.compile(r"L(\d{10})", re.ASCII)
# Past 2**31 - 1 ZooKeeper goes on with negative numbers.
_SEQUENCE: Final = re.compile(r"-(\d{10}|-\d{9,10})$", re.ASCII)


def ledger_path(ledger_id: int) -> str:
    """Return where a ledger's metadata lies: ledger 1 is ``/ledgers/00/0000/L0001``."""
    return LEDGERS_ROOT + _hierarchy(ledger_id)


def ledger_id_of(path: str) -> LedgerId:
    """Invert ``ledger_path``, or raise ``CorruptError``."""
    return _ledger_id_below(LEDGERS_ROOT, path)


def context_path(ledger_id: int) -> str:
    """Return where a ledger's offload context lies."""
    return CONTEXTS + _hierarchy(ledger_id)


def context_ledger_id_of(path: str) -> LedgerId:
    """Invert ``context_path``, or raise ``CorruptError``."""
    return _ledger_id_below(CONTEXTS, path)


def deleted_path(ledger_id: int) -> str:
    """Return where the deletion of a bare ledger is on record."""
    return DELETED + _hierarchy(ledger_id)


def staging_path(ledger_id: int) -> str:
    """Return where it stands that a ledger is a staging ledger."""
    return f"{STAGING}/L{_digits(ledger_id)}"


def staging_ledger_id_of(name: str) -> LedgerId:
    """Return which ledger a name below ``STAGING`` stands for, or raise ``CorruptError``."""
    match = _STAGED.fullmatch(name)
    if match is None:
        raise CorruptError(
            f"{name[:200]!r} below {STAGING} names no ledger",
            remedy="Check what else writes below this path",
        )
    return LedgerId(int(match[1]))


def is_hierarchy_name(name: str, *, level: int) -> bool:
    """Tell whether ``name`` is a folder (levels 1, 2) or a ledger (3) of the hierarchy.

    ``/ledgers`` has other children: available, cookies, idgen, LAYOUT.
    """
    pattern = {1: r"\d{2}", 2: r"\d{4}", 3: r"L\d{4}"}[level]
    return re.fullmatch(pattern, name, re.ASCII) is not None


def ledger_lock_path(ledger_id: int) -> str:
    """Return the lock that saves two workers from offloading the same ledger at once."""
    return f"{LEDGER_LOCKS}/L{_digits(ledger_id)}"


def underreplicated_path(ledger_id: int) -> str:
    """Return where a ledger that lacks copies is queued."""
    return UNDERREPLICATED + _hierarchy(ledger_id)


def underreplicated_ledger_id_of(path: str) -> LedgerId:
    """Invert ``underreplicated_path``, or raise ``CorruptError``."""
    return _ledger_id_below(UNDERREPLICATED, path)


def underreplicated_lock_path(ledger_id: int) -> str:
    """Return the lock that saves two workers from replicating the same ledger at once."""
    return f"{UNDERREPLICATED_LOCKS}/L{_digits(ledger_id)}"


def scrub_path(scrub_id: UUID) -> str:
    """Return where the report of a scrub lies."""
    return f"{SCRUBS}/{scrub_id}"


def draining_path(node: NodeId) -> str:
    """Return where it stands that a node is being emptied."""
    return f"{DRAINING}/{node}"


def tally_path(node: NodeId) -> str:
    """Return what a storage node counts up to know the store again (``seen_ids``)."""
    return f"{TALLIES}/{node}"


def available_path(node: NodeId, *, read_only: bool = False) -> str:
    """Return where a live node announces itself; nobody writes to those that are read-only."""
    assert node != READONLY_NAME, "this name is a folder's"
    return f"{AVAILABLE_READONLY if read_only else AVAILABLE}/{node}"


def cookie_path(node: NodeId) -> str:
    """Return where a node's identity lies."""
    return f"{COOKIES}/{node}"


def stream_path(name: StreamName) -> str:
    """Return where a stream lies."""
    return f"{STREAMS}/{name}"


def pages_path(name: StreamName) -> str:
    """Return the folder of a stream's pages."""
    return f"{STREAMS}/{name}/pages"


def page_path(name: StreamName, page_number: int) -> str:
    """Return where a page of a stream's older ledgers lies."""
    assert 0 <= page_number < 10**10
    return f"{pages_path(name)}/{page_number:010d}"


def attributes_path(name: StreamName) -> str:
    """Return where the checkpoints of a stream's attributes lie."""
    return f"{STREAMS}/{name}/attributes"


def sequence_of(path: str) -> int:
    """Return the number that ZooKeeper gave a sequential node; its prefix ends with a dash."""
    match = _SEQUENCE.search(path)
    if match is None:
        raise CorruptError(
            f"{path[:200]!r} does not end with a sequence number",
            remedy="Check what else writes below this path",
        )
    return int(match[1])


def ledger_id_from_sequence(path: str, *, base: int) -> LedgerId:
    """Return the id that a node below ``IDGEN`` stands for, or raise ``RefusedError``."""
    sequence = sequence_of(path)
    if sequence < 0 or base + sequence > LEDGER_ID_MAX:
        raise RefusedError(
            f"ledger ids are used up: sequence number {sequence} with base {base}",
            remedy=f"Ids end at {LEDGER_ID_MAX}, ZooKeeper's numbers at {2**31 - 1}; "
            "make a new idgen node and raise the cluster's ledger-id base",
        )
    return LedgerId(base + sequence)


def check_layout(data: bytes) -> None:
    """Raise ``RefusedError`` unless ``/ledgers/LAYOUT`` names the hierarchical layout."""
    if data.strip() == LAYOUT_DATA:
        return
    if _FLAT in data:
        raise RefusedError(
            "ZooKeeper holds ledgers in the flat layout, deprecated since BookKeeper 4.7.0",
            remedy="Give Tierlog a ZooKeeper root of its own",
        )
    raise RefusedError(
        f"ZooKeeper holds ledgers in an unknown layout: {data[:120]!r}",
        remedy="Give Tierlog a ZooKeeper root of its own",
    )


def _digits(ledger_id: int) -> str:
    if not 0 <= ledger_id <= LEDGER_ID_MAX:
        raise RefusedError(
            f"ledger id {ledger_id} has no place in ZooKeeper",
            remedy=f"Ledger ids go from 0 to {LEDGER_ID_MAX} (ten digits)",
        )
    return f"{ledger_id:010d}"


def _hierarchy(ledger_id: int) -> str:
    digits = _digits(ledger_id)
    return f"/{digits[:2]}/{digits[2:6]}/L{digits[6:]}"


def _ledger_id_below(root: str, path: str) -> LedgerId:
    match = _HIERARCHY.fullmatch(path.removeprefix(root)) if path.startswith(root) else None
    if match is None:
        raise CorruptError(
            f"{path[:200]!r} is not the path of a ledger below {root}",
            remedy="Check what else writes below this path",
        )
    return LedgerId(int("".join(match.groups())))
