"""What the offloader counts of its queue, for /metrics."""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

REQUESTS: Final = Counter(
    "tierlog_offloader_requests_total", "Requests that ended, by how", ["outcome"]
)
DEAD_LETTERS: Final = Counter(
    "tierlog_offloader_dead_letters_total", "Events that were put aside, by reason", ["reason"]
)
IN_HAND: Final = Gauge("tierlog_offloader_requests_in_hand", "Requests that are being handled")
SECONDS: Final = Histogram(
    "tierlog_offloader_request_seconds",
    "How long requests took that ended in a complete copy",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000),
)
