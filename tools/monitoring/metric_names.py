"""The metrics that the code has: what alerts and dashboards may name.

Owns finding them: what modules register when they are imported, and what collectors give for a
state with every number in it. Nothing is listed by hand.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import REGISTRY

import tierlog.adapters.kafka
import tierlog.offload
import tierlog_ingest.metrics
import tierlog_offloader
import tierlog_reader
import tierlog_scheduler
from tierlog.model.scrub import FindingKind, KnownFaults
from tierlog.ports.spending import CostMeter
from tierlog.runtime.costs import CostCollector
from tierlog_ingest.metrics import NodeCollector
from tierlog_ingest.streams.appends import QueueBudget
from tierlog_scheduler.metrics import SchedulerCollector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from tierlog_scheduler.policy import OffloadLag

PREFIX: Final = "tierlog_"
ROOMS: Final = (
    tierlog.adapters.kafka,
    tierlog.offload,
    tierlog_offloader,
    tierlog_reader,
    tierlog_scheduler,
)
SUFFIXES: Final = {
    "counter": ("_total",),
    "summary": ("_count", "_sum"),
    "histogram": ("_bucket", "_count", "_sum"),
}


def metric_names() -> set[str]:
    """Return the names of all samples that a process of ours can have."""
    for room in ROOMS:
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            if not module.name.endswith(("__main__", ".main")):
                importlib.import_module(module.name)
    found = _names(REGISTRY.collect())
    found |= _names(NodeCollector(_EveryNumber(), appends=QueueBudget(1), streams_max=1).collect())
    leader: Any = _Leader()
    found |= _names(SchedulerCollector(leader, leader, leader, streams_max=1).collect())
    return found | _names(CostCollector(CostMeter()).collect())


def _names(metrics: Iterable[Metric]) -> set[str]:
    return {
        f"{metric.name}{suffix}"
        for metric in metrics
        if metric.name.startswith(PREFIX)
        for suffix in SUFFIXES.get(metric.type, ("",))
    }


class _EveryNumber:
    """A node whose statistics have every number that has a name."""

    def statistics(self) -> dict[str, Any]:
        own = vars(tierlog_ingest.metrics)
        keys = [*own["_GAUGES"], *own["_COUNTERS"], own["_SYNC_COUNT"], own["_SYNC_SUM"]]
        for pattern, *_ in own["_LABELLED"]:
            keys.append(pattern.replace(r"(\d+)", "0").replace(r"(\w+)", "any"))
        return {
            "streams": [],
            "recovering": {},
            "gc_alarm": None,
            "storage": dict.fromkeys(keys, 0.0),
            "replication": defaultdict(float),
        }


class _Leader:
    """A scheduler that leads, with its manifests and its scrubs."""

    leading = decided = True
    passes = 0
    pass_s = 0.0
    streams_unread = 0
    behind_s = failing_s = 0.0
    lags: Final[dict[str, OffloadLag]] = {}
    ledger_states: Final[Counter[str]] = Counter()
    faults, incomplete_s = KnownFaults(by_kind={FindingKind.ORPHAN_OBJECTS: 0}), 0.0

    def stopped_streams(self) -> dict[str, int]:
        """Return one cause."""
        return {"any": 0}

    class mirror:  # noqa: N801 - an attribute's name
        """What it knows."""

        reads = 0
        streams: Final[dict[str, int]] = {}
