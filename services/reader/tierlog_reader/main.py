"""The reader process: ``python -m tierlog_reader.main``, settings from the environment.

ZooKeeper and the bucket may be away when it starts: they are waited for.
"""

import asyncio
import sys
from collections.abc import Mapping

from tierlog.offload.drivers import MakeDriver
from tierlog.runtime.costs import serve_costs
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.http_access import guard_http
from tierlog.runtime.rpc import serve_grpc
from tierlog.runtime.service import announce_ready, run_service
from tierlog.runtime.settings import ReaderSettings, Settings
from tierlog.wiring.awaiting import waiting_at
from tierlog.wiring.build import system_ids
from tierlog.wiring.compression import decompressors
from tierlog.wiring.reader import open_reader_parts
from tierlog.wiring.security import protection_of
from tierlog_reader.access import HTTP_RULES, RPC_RULES
from tierlog_reader.app import add_all_routes
from tierlog_reader.documents import Unpacking
from tierlog_reader.engine import running_reads
from tierlog_reader.grpc_server import REQUEST_BYTES_MAX, SERVICE, ReaderServicer
from tierlog_reader.limits import ReadLimits
from tierlog_reader.memory import PIECES_BYTES, parts_of
from tierlog_reader.seek import TimeSeek


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
        running_reads(settings, parts, budget, drivers) as served,
    ):
        seek = TimeSeek(served)
        reads = _read_limits(limits)
        ids, cluster_id = system_ids(), parts.cluster.cluster_id
        checks = {"metadata": parts.catalog.answers}
        app = build_http_app("Tierlog reader", checks=checks, ids=ids, cluster_id=cluster_id)
        add_all_routes(app, served, seek, reads, _unpacking(reads))
        guard_http(app, HTTP_RULES, protection.gate)
        await awaited.leave()
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
                ReaderServicer(served, seek, reads).add_to,
                services=[SERVICE],
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
            announce_ready(service="reader", http=f"{host}:{http_port}", grpc=f"{host}:{grpc_port}")
            await stop.wait()


def _read_limits(settings: ReaderSettings) -> ReadLimits:
    return ReadLimits(
        response_bytes_max=settings.response_bytes_max,
        wait_ms_max=settings.wait_ms_max,
        send_s_max=settings.send_wait_ms_max / 1000,
    )


def _unpacking(limits: ReadLimits) -> Unpacking:
    return Unpacking(decompressors=decompressors(), events_len_max=limits.response_bytes_max)


def main() -> None:
    """Run the service and exit with its code."""
    sys.exit(run_service("reader", serve, sys.argv[1:]))


if __name__ == "__main__":
    main()
