"""``cost``: what each stream of a bucket costs a month, and would with other thresholds.

Owns the rows. Does not own the sums (``cost_plan``, ``usage_plan``), nor prices. Nothing is
written.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from tierlog.model.errors import RefusedError
from tierlog.model.ids import StreamName
from tierlog.model.manifest import NO_LEDGER
from tierlog.model.policy import NO_LEVELS, Policy, PolicyLevels, breaks_below
from tierlog.model.prices import Prices
from tierlog.model.stream import StreamLifecycle
from tierlog.runtime.settings import S3Settings
from tierlog_spark.bucket import opened
from tierlog_spark.jobs.cost_plan import Steady, past_of, price_of_bytes, steady_of
from tierlog_spark.jobs.fanout import Requests
from tierlog_spark.jobs.frame import JobReport, JobRun
from tierlog_spark.jobs.usage import StreamLedgers, ledgers_of, sums_of, wanted_of
from tierlog_spark.jobs.usage_plan import Sums

RANGE_BYTES: Final = 1024 * 1024
Levels = Mapping[UUID | None, PolicyLevels]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What is asked: thresholds in the place of those that hold, and how often all is read."""

    policy: Policy = Policy()
    reads: float = 1.0
    range_bytes: int = RANGE_BYTES


def cost(
    run: JobRun,
    s3: S3Settings,
    prices: Prices,
    *,
    streams: Sequence[StreamName] = (),
    what_if: WhatIf | None = None,
) -> JobReport:
    """Say what streams cost: what lies there now, and a month of each as its thresholds make it.

    With ``what_if`` those thresholds go before what each stream, its namespace and the cluster say.
    """
    wanted = asyncio.run(wanted_of(s3, streams))
    if run.dry_run:
        counts = {"streams": len({name for name, _ in wanted})}
        return JobReport(job="cost", dry_run=True, counts=counts)
    requests, asked = Requests(), what_if or WhatIf()
    levels = asyncio.run(_levels(s3))
    found, unread = ledgers_of(run, s3, wanted, requests)
    stored = _bytes_of(sums_of(run, s3, found, requests))
    names = {name for name, _ in wanted}
    living = _living(found)
    rows = []
    for name in sorted({*living, *(stored if not streams else stored.keys() & names)}):
        row = {"stream": name or None, **_now(stored.get(name, 0), prices)}
        if name in living:
            row |= predicted(
                living[name], levels, prices, asked, run.clock.wall_ms(), read_back=s3.read_back
            )
        rows.append(row)
    summed = ("bytes", "price_of_bytes", "if_tier2_bytes", "if_price")
    counts = {name: sum(row.get(name, 0) for row in rows) for name in summed}
    counts |= {"streams": len(living), "streams_failed": len(unread)}
    rows += [one._asdict() for one in unread]
    return JobReport(job="cost", dry_run=False, counts=counts | requests.counts, rows=rows)


async def _levels(s3: S3Settings) -> Levels:
    """Return what each cluster of the bucket says above its streams."""
    async with opened(s3) as bucket:
        found = {
            one: await bucket.manifests.cluster(one) for one in await bucket.manifests.clusters()
        }
    return {one: manifest.levels for one, (_, manifest) in found.items() if manifest is not None}


def _bytes_of(sums: Sums) -> dict[str, int]:
    found: dict[str, int] = {}
    for place, used in sums.items():
        found[place.stream] = found.get(place.stream, 0) + used.bytes
    return found


def _living(found: Sequence[StreamLedgers]) -> dict[str, StreamLedgers]:
    """Return the newest living incarnation of each stream that has entries itself."""
    living = [
        one
        for one in found
        if one.head.lifecycle is StreamLifecycle.ACTIVE and not one.head.partitions
    ]
    ordered = sorted(living, key=lambda one: one.head.created_ms)
    return {one.head.stream: one for one in ordered}


def _now(stored: int, prices: Prices) -> dict[str, Any]:
    return {"bytes": stored, "price_of_bytes": price_of_bytes(stored, prices)}


def predicted(
    stream: StreamLedgers,
    levels: Levels,
    prices: Prices,
    asked: WhatIf,
    now_ms: int,
    *,
    read_back: str,
) -> dict[str, Any]:
    """Return what becomes of a stream under its thresholds, those of its own cluster above them."""
    head, above = stream.head, levels.get(stream.cluster_id, NO_LEVELS)
    past = past_of(
        stream.ledgers,
        created_ms=head.created_ms,
        now_ms=now_ms,
        trimmed=head.trimmed_through != NO_LEDGER,
    )
    try:
        policy = asked.policy.over(above.effective(head.stream, head.policy))
    except RefusedError as error:
        raise breaks_below(f"stream {head.stream}", error) from error
    found: Steady = steady_of(
        past,
        policy,
        prices,
        range_bytes=asked.range_bytes,
        reads=asked.reads,
        read_back=read_back,
    )
    return {
        "bytes_per_day": round(past.bytes_per_day),
        "ledger_bytes": past.ledger_bytes,
        "if_tier1_bytes": round(found.tier1_bytes),
        "if_tier2_bytes": round(found.tier2_bytes),
        "if_requests": round(found.requests),
        "if_price_of_requests": found.price_of_requests,
        "if_price_of_bytes": found.price_of_bytes,
        "if_price": found.price,
    }
