"""What the offloader counts of its queue, for /metrics."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from tierlog.model.errors import Reason
from tierlog.proto.v1 import events_pb2 as pb

OUTCOMES: Final = {
    value: name.removeprefix("OUTCOME_").lower()
    for name, value in pb.OffloadResult.Outcome.items()
    if value
}

REQUESTS: Final = Counter(
    "tierlog_offload_attempts_total", "Requests that ended, by how", ["outcome"]
)
DEAD_LETTERS: Final = Counter(
    "tierlog_dlq_messages_total", "Events that were put aside, by reason", ["reason"]
)
UNEXPECTED: Final = Counter(
    "tierlog_offloader_unexpected_errors_total",
    "Errors that nobody foresaw, each a try that failed; the log has their traces",
)
# From the start: of what appears with its first increase nobody sees an increase.
for _outcome in OUTCOMES.values():
    REQUESTS.labels(_outcome)
for _reason in Reason:
    DEAD_LETTERS.labels(_reason.value)
BYTES: Final = Counter(
    "tierlog_offload_bytes_total", "Bytes of the data objects of complete copies"
)
IN_HAND: Final = Gauge("tierlog_offloader_requests_in_hand", "Requests that are being handled")
SECONDS: Final = Histogram(
    "tierlog_offload_attempt_duration_seconds",
    "How long requests took that ended in a complete copy",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000),
)
