"""What the reader counts, for /metrics."""

from typing import Final

from prometheus_client import Counter

from tierlog_reader.chunk import Answer

READS: Final = Counter("tierlog_reader_reads_total", "Reads that were answered", ["tier"])
ENTRIES: Final = Counter("tierlog_reader_entries_total", "Entries that were served", ["tier"])
BYTES: Final = Counter("tierlog_reader_bytes_total", "Bytes of frames that were served", ["tier"])


def count(answer: Answer) -> None:
    """Count one answer; an empty one has no tier."""
    chunk = answer.chunk
    tier = chunk.tier.value if chunk is not None else "none"
    READS.labels(tier).inc()
    if chunk is not None:
        ENTRIES.labels(tier).inc(chunk.count)
        BYTES.labels(tier).inc(chunk.frames_len)
