"""The counts of a process's requests to the object store, for /metrics and for ``tierlog cost``.

Metrics leave streams out, which may be many; ``/v1/costs`` names them.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator

from fastapi import FastAPI
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel

from tierlog.ports.spending import IN, NAMESPACE, OUT, PROCESS, Amount, CostMeter


class Cost(BaseModel):
    """What was sent to the store for one purpose through one operation."""

    stream: str
    cause: str
    operation: str
    requests: int
    bytes_sent: int
    bytes_received: int


class Costs(BaseModel):
    """All of it, since the process began."""

    service: str
    costs: list[Cost]


class CostCollector(Collector):
    """The counts as Prometheus reads them."""

    def __init__(self, meter: CostMeter) -> None:
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        """Give each cause and operation its counts."""
        labels = ["cause", "operation"]
        requests = CounterMetricFamily(
            "tierlog_s3_requests", "Requests to the object store, repeated ones too", labels=labels
        )
        sent = CounterMetricFamily(
            "tierlog_s3_sent_bytes", "Bytes of bodies sent to the object store", labels=labels
        )
        received = CounterMetricFamily(
            "tierlog_s3_received_bytes", "Bytes of bodies from the object store", labels=labels
        )
        sums: defaultdict[tuple[str, str], Amount] = defaultdict(Amount)
        for spent, amount in self._meter.amounts.items():
            total = sums[spent.cause.value, spent.operation]
            total.requests += amount.requests
            total.bytes_sent += amount.bytes_sent
            total.bytes_received += amount.bytes_received
        for of, total in sorted(sums.items()):
            requests.add_metric(list(of), total.requests)
            sent.add_metric(list(of), total.bytes_sent)
            received.add_metric(list(of), total.bytes_received)
        yield from (requests, sent, received)
        took = HistogramMetricFamily(
            "tierlog_s3_request_duration_seconds",
            "How long tries took, bodies included",
            labels=["operation"],
        )
        for operation, durations in sorted(self._meter.durations.items()):
            took.add_metric([operation], durations.buckets(), durations.sum_s)
        yield took
        ended = CounterMetricFamily(
            "tierlog_s3_answers", "How tries ended", labels=["operation", "code"]
        )
        for ending, count in sorted(self._meter.answers.items()):
            ended.add_metric(list(ending), count)
        yield ended
        waited = CounterMetricFamily(
            "tierlog_s3_throttled_seconds",
            "Time that bytes to (out) and from (in) the object store waited for a limit of the "
            "settings, the process's or a namespace's; waits beside each other add up",
            labels=["direction", "reason"],
        )
        for of in itertools.product((OUT, IN), (PROCESS, NAMESPACE)):
            waited.add_metric(list(of), self._meter.throttled_s[of])
        yield waited


def costs_of(service: str, meter: CostMeter) -> Costs:
    """Return the counts as they are now."""
    return Costs(
        service=service,
        costs=[
            Cost(
                stream=spent.stream,
                cause=spent.cause.value,
                operation=spent.operation,
                requests=amount.requests,
                bytes_sent=amount.bytes_sent,
                bytes_received=amount.bytes_received,
            )
            for spent, amount in sorted(meter.amounts.items(), key=lambda item: item[0])
        ],
    )


def add_costs_route(app: FastAPI, service: str, meter: CostMeter) -> None:
    """Add the route of the counts to ``app``."""

    async def costs() -> Costs:
        return costs_of(service, meter)

    app.add_api_route(
        "/v1/costs",
        costs,
        methods=["GET"],
        summary="Requests to the object store so far, by stream, cause and operation",
    )


@contextlib.asynccontextmanager
async def serve_costs(app: FastAPI, service: str, meter: CostMeter) -> AsyncIterator[None]:
    """Let ``app`` show the counts of this process for the length of the context."""
    add_costs_route(app, service, meter)
    collector = CostCollector(meter)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)
