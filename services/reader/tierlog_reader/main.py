"""The reader process: ``python -m tierlog_reader.main``, settings from the environment.

ZooKeeper and the bucket may be away when it starts: they are waited for.
"""

import asyncio
import sys
from collections.abc import Hashable, Mapping
from functools import partial

from tierlog.offload.drivers import MakeDriver
from tierlog.offload.pacing import ReadPace
from tierlog.offload.ranges import RangeLimits, Ranges
from tierlog.proto.v1 import reader_pb2, reader_pb2_grpc
from tierlog.runtime.costs import serve_costs
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.http_access import guard_http
from tierlog.runtime.rpc import serve_grpc
from tierlog.runtime.service import announce_ready, run_service
from tierlog.runtime.settings import ReaderSettings, Settings
from tierlog.wiring.awaiting import waiting_at
from tierlog.wiring.build import system_clock, system_ids
from tierlog.wiring.compression import decompressors
from tierlog.wiring.drivers import open_with, reading_drivers
from tierlog.wiring.keys import ledger_keys
from tierlog.wiring.reader import ReaderParts, open_reader_parts
from tierlog.wiring.security import protection_of
from tierlog_reader import metrics
from tierlog_reader.access import HTTP_RULES, RPC_RULES
from tierlog_reader.app import add_all_routes
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.cached_ranges import CachedRanges
from tierlog_reader.documents import Unpacking
from tierlog_reader.grpc_server import REQUEST_BYTES_MAX, ReaderServicer
from tierlog_reader.limits import ReadLimits
from tierlog_reader.memory import PIECES_BYTES, Held, held_of, parts_of
from tierlog_reader.seek import TimeSeek
from tierlog_reader.served import ServedReads
from tierlog_reader.shares import Client, GroupOf, Shares
from tierlog_reader.source import StreamSource
from tierlog_reader.tail import TailLimits, TailMemory
from tierlog_reader.tier1 import StorageNodeTier
from tierlog_reader.tier2 import ObjectTier, OpenOther, Tier2Limits
from tierlog_reader.trace import TracedMemory, TracedPace, TracedReads
from tierlog_reader.views import Views

_SERVICE = reader_pb2.DESCRIPTOR.services_by_name["Reader"].full_name


async def serve(
    settings: Settings,
    stop: asyncio.Event,
    *,
    drivers: Mapping[str, MakeDriver] | None = None,
) -> None:
    """Serve reads until ``stop``; ``drivers``: more of them, by name."""
    limits, listen = settings.reader, settings.reader.listen
    budget = parts_of(limits)
    protection = protection_of(settings)
    async with (
        waiting_at(listen, "Tierlog reader", protection, stop) as awaited,
        open_reader_parts(settings, pieces_bytes_max=PIECES_BYTES, come=awaited.come) as parts,
    ):
        known = reading_drivers(settings, parts.objects, cache=parts.shared, others=drivers)
        memory = CachedRanges(StreamingCache(budget.cache), objects_max=limits.handles_max)
        pace, group_of = _pace(parts, limits)
        walks = _walks(limits, budget.walks, group_of)
        ranges = _ranges(parts, settings, memory, walks, pace)
        tier2 = _tier2(parts, settings, partial(open_with, known), ranges)
        views = _views(parts, limits)
        tier1 = StorageNodeTier(
            views, parts.nodes, keys=ledger_keys(settings), on_damage=parts.damage
        )
        tails = TailLimits(ledgers_max=limits.handles_max)
        tail = TailMemory(tier1, memory.store, memory.manager, tails)
        source = StreamSource(views, tier1, tier2, tail)
        held = held_of(budget, ranges, memory, tier2, views)
        shares = _answers(limits, held, group_of)
        metrics.watch(ranges, memory, parts.meter)
        metrics.watch_memory(held)
        metrics.watch_clients(shares, walks, tail)
        async with memory.run(), ranges.run(), tier2.run(), tail.run():
            served = ServedReads(source, shares)
            seek = TimeSeek(served)
            reads = _read_limits(limits)
            ids, cluster_id = system_ids(), parts.cluster.cluster_id
            checks = {"metadata": parts.catalog.answers}
            app = build_http_app("Tierlog reader", checks=checks, ids=ids, cluster_id=cluster_id)
            add_all_routes(app, served, seek, reads, _unpacking(reads))
            guard_http(app, HTTP_RULES, protection.gate)
            await awaited.leave()
            servicer = ReaderServicer(served, seek, reads)
            async with (
                serve_costs(app, "reader", parts.meter),
                serve_http(
                    app,
                    host=listen.host,
                    port=listen.http_port,
                    tls=protection.tls,
                    taken_s_max=2 * reads.send_s_max,  # who made the answer leaves first
                ) as http_port,
                serve_grpc(
                    lambda server: reader_pb2_grpc.add_ReaderServicer_to_server(servicer, server),
                    services=[_SERVICE],
                    host=listen.host,
                    port=listen.grpc_port,
                    ids=ids,
                    tls=protection.tls,
                    access=protection.interceptor(RPC_RULES),
                    request_bytes_max=REQUEST_BYTES_MAX,
                    send_s_max=reads.send_s_max,
                    cluster_id=cluster_id,
                ) as grpc_port,
            ):
                host = listen.advertise_host or listen.host
                announce_ready(
                    service="reader", http=f"{host}:{http_port}", grpc=f"{host}:{grpc_port}"
                )
                await stop.wait()


def _read_limits(settings: ReaderSettings) -> ReadLimits:
    return ReadLimits(
        response_bytes_max=settings.response_bytes_max,
        wait_ms_max=settings.wait_ms_max,
        send_s_max=settings.send_wait_ms_max / 1000,
    )


def _unpacking(limits: ReadLimits) -> Unpacking:
    return Unpacking(decompressors=decompressors(), events_len_max=limits.response_bytes_max)


def _group_of(pace: ReadPace | None, client: Client) -> Hashable:
    """Return the namespace whose limit a client waits for; see ``limits.client_of``."""
    if pace is None or not isinstance(client, tuple):
        return None
    return pace.limited(client[1])


def _answers(limits: ReaderSettings, held: Held, group_of: GroupOf) -> Shares:
    return Shares(
        held.parts.answers,
        wait_s_max=limits.room_wait_ms_max / 1000,
        beyond=lambda: held.beyond,
        group_of=group_of,
    )


def _views(parts: ReaderParts, limits: ReaderSettings) -> Views:
    return Views(
        parts.catalog,
        age_s_max=limits.metadata_age_ms_max / 1000,
        entries_max=limits.handles_max,
    )


def _walks(limits: ReaderSettings, bytes_max: int, group_of: GroupOf) -> Shares:
    return Shares(
        bytes_max,
        wait_s_max=limits.room_wait_ms_max / 1000,
        what="a walk to an entry",
        remedy="Come again; begin fewer reads at once within copies that have no side object",
        group_of=group_of,
    )


def _ranges(
    parts: ReaderParts,
    settings: Settings,
    memory: CachedRanges,
    walks: Shares,
    pace: ReadPace | None,
) -> Ranges:
    limits = settings.reader
    return Ranges(
        TracedReads(parts.reads),
        RangeLimits(
            range_bytes=limits.range_bytes,
            in_flight_max=limits.ranges_in_flight_max,
            kept_bytes_max=limits.cache_bytes_max,
            growth_max=limits.range_growth_max,
        ),
        TracedMemory(memory),
        walks,
        None if pace is None else TracedPace(pace),
    )


def _pace(parts: ReaderParts, limits: ReaderSettings) -> tuple[ReadPace | None, GroupOf]:
    """Return what reads wait for, and which clients wait for one limit together."""
    per_s, namespaces = limits.tier2_bytes_per_s_max, limits.tier2_namespace_bytes_per_s_max
    pace = None
    if per_s or namespaces:
        pace = ReadPace(system_clock(), parts.meter, per_s=per_s, namespaces=namespaces)
    return pace, partial(_group_of, pace)


def _tier2(
    parts: ReaderParts, settings: Settings, open_other: OpenOther, ranges: Ranges
) -> ObjectTier:
    limits = settings.reader
    return ObjectTier(
        TracedReads(parts.reads),
        ranges,
        parts.shared,
        Tier2Limits(
            handles_max=limits.handles_max,
            index_ttl_s=settings.redis.index_ttl_s,
            ahead_bytes=limits.range_bytes * limits.ranges_in_flight_max,
            index_bytes_max=limits.index_bytes_max,
        ),
        bucket=settings.s3.bucket,
        endpoint_name=settings.s3.endpoint_name,
        open_other=open_other,
    )


def main() -> None:
    """Run the service and exit with its code."""
    sys.exit(run_service("reader", serve, sys.argv[1:]))


if __name__ == "__main__":
    main()
