"""Asks for the offload of a stream's sealed ledgers over the queue, with no code of Tierlog.

    python request_offload.py --rest http://127.0.0.1:8080 --kafka 127.0.0.1:9092 STREAM

The contract is docs/reference/events.md: a protobuf value, CloudEvents headers, a key. The value is
written by hand here; elsewhere, compile shared/proto/tierlog/v1/events.proto. Asking is all that
this does: a worker checks the request against the metadata, and tells how it ended on the topic
``<prefix>.offload.completed.v1``, in the same trace.

Needs: confluent-kafka.
"""

import argparse
import json
import sys
import time
import urllib.parse
import urllib.request
import uuid
from datetime import UTC, datetime
from typing import Any

from confluent_kafka import KafkaError, Producer


def varint(number: int) -> bytes:
    """Return an unsigned number as protobuf has it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, value: int | str | bytes) -> bytes:
    """Return a field of a protobuf message; what is zero or empty is left out."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value) if value else b""
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data if data else b""


def offload_request(stream: str, incarnation: uuid.UUID, ledger_id: int, now_ms: int) -> bytes:
    """Return a tierlog.v1.OffloadRequest."""
    return b"".join(
        (
            field(1, stream),
            field(2, incarnation.bytes),
            field(3, ledger_id),
            field(4, "admin"),
            field(5, now_ms),
            field(6, 1),
        )
    )


def headers(topic: str, subject: str, trace_id: str) -> dict[str, str]:
    """Return CloudEvents 1.0 in binary mode, and a trace for whoever follows it."""
    return {
        "ce_specversion": "1.0",
        "ce_id": str(uuid.uuid4()),
        "ce_source": "request-offload-example",
        "ce_type": topic,
        "ce_subject": subject,
        "ce_time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "ce_dataschema": "tierlog.v1.OffloadRequest",
        "content-type": "application/protobuf",
        "traceparent": f"00-{trace_id}-{uuid.uuid4().hex[:16]}-01",
    }


def described(rest: str, stream: str) -> dict[str, Any]:
    """Return what the scheduler says of the stream."""
    url = f"{rest}/v1/streams/{urllib.parse.quote(stream, safe='')}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def main() -> None:
    """Ask for every sealed ledger that is not in tier 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stream")
    parser.add_argument("--rest", required=True, help="the scheduler's HTTP address")
    parser.add_argument("--kafka", required=True, help="host:port of a broker")
    parser.add_argument("--prefix", default="tierlog", help="of the topics")
    given = parser.parse_args()

    stream = described(given.rest, given.stream)
    topic = f"{given.prefix}.offload.requested.v1"
    producer = Producer({"bootstrap.servers": given.kafka, "acks": "all"})
    failed: list[str] = []

    def delivered(error: KafkaError | None, _: object) -> None:
        if error is not None:
            failed.append(error.str())

    for ledger in stream["ledgers"]:
        if ledger["state"] != "CLOSED" or ledger["complete"]:
            continue
        key, trace_id = f"{stream['stream']}/{ledger['ledger_id']}", uuid.uuid4().hex
        producer.produce(
            topic,
            offload_request(
                stream["stream"],
                uuid.UUID(stream["incarnation"]),
                ledger["ledger_id"],
                round(time.time() * 1000),
            ),
            key.encode(),
            headers=list(headers(topic, key, trace_id).items()),
            on_delivery=delivered,
        )
        print(f"asked for {key} in trace {trace_id}")
    left = producer.flush(30)
    if left or failed:
        sys.exit(f"error: {left + len(failed)} requests were not taken: {failed}")


if __name__ == "__main__":
    main()
