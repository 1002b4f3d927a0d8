"""The node's state as Prometheus metrics, read when they are asked for."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Node(Protocol):
    """What has a state."""

    def statistics(self) -> dict[str, object]:
        """Return it."""
        ...


class NodeCollector(Collector):
    """Gauges of one node: of its storage, and of its streams together."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        state = self._node.statistics()
        streams = state["streams"]
        assert isinstance(streams, list)
        yield _gauge("streams", "Streams that this node owns", len(streams))
        for name, what in (
            ("appends_waiting", "Appends that were not sent yet"),
            ("appends_sent", "Shares of appends that are not confirmed yet"),
            ("in_flight_bytes", "Bytes of runs that are not confirmed yet"),
        ):
            yield _gauge(name, what, sum(one[name] for one in streams))
        recovering, storage = state["recovering"], state["storage"]
        assert isinstance(recovering, Mapping)
        yield _gauge("recoveries_waiting", "Recoveries that wait for nodes", len(recovering))
        assert isinstance(storage, Mapping)
        for name, value in storage.items():
            yield _gauge(f"storage_{name}", f"Storage node: {name.replace('_', ' ')}", value)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tierlog_ingest_{name}", what, value=float(value))
