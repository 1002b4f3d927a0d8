"""The ingest process: real adapters, HTTP and gRPC in front of one ``IngestNode``.

ZooKeeper may be away when it starts: it is waited for. A node whose disk failed ends
with exit code 1 and answers nothing more; what it acknowledged is in its journal. SIGTERM drains:
open ledgers are closed, so that the next start has nothing to recover.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Final

import grpc
from prometheus_client import REGISTRY

from tierlog.catalog import Catalog
from tierlog.model.node import Cluster
from tierlog.ports.spending import CostMeter
from tierlog.proto.v1 import ingest_pb2
from tierlog.runtime.costs import serve_costs
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.http_access import guard_http
from tierlog.runtime.rpc import serve_grpc
from tierlog.runtime.sections import MetricsSettings
from tierlog.runtime.service import announce_ready, run_service
from tierlog.runtime.settings import ListenSettings, Settings
from tierlog.wiring.attributes import attribute_index, open_offloaded
from tierlog.wiring.awaiting import waiting_at
from tierlog.wiring.build import open_metadata, open_objects, system_clock, system_ids
from tierlog.wiring.keys import ledger_keys
from tierlog.wiring.nodes import open_all_files, open_files, open_transport, wire_connector
from tierlog.wiring.security import Protection, calling_of, protection_of, wire_credentials
from tierlog.wiring.tracing import open_tracer
from tierlog_ingest import access, rpc_ingest, rpc_storage
from tierlog_ingest.app import FrontAddresses, IngestNode, NodePorts, Tier2
from tierlog_ingest.interpreter import set_up_interpreter
from tierlog_ingest.metrics import NodeCollector
from tierlog_ingest.routes import add_all_routes

_SERVICES: Final = [one.full_name for one in ingest_pb2.DESCRIPTOR.services_by_name.values()]


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run the node until ``stop``."""
    ingest = settings.ingest
    protection, calling = protection_of(settings), calling_of(settings.security)
    awaited = waiting_at(ingest.listen, "Tierlog ingest", protection, stop)
    meter = CostMeter()

    @contextlib.asynccontextmanager
    async def front(node: IngestNode) -> AsyncIterator[FrontAddresses]:
        await awaited.leave()
        async with _front(node, ingest.listen, settings.metrics, protection, meter) as addresses:
            yield addresses

    async with (
        awaited,
        open_metadata(settings, come=awaited.come) as store,
        open_files(ingest.data_dir) as files,
        open_all_files(ingest.ledger_directories) as ledger_dirs,
        # Appends go on while it is away.
        open_objects(settings, meter=meter, at_once=False) as objects,
        open_tracer(settings, "ingest", instance=ingest.node_id) as tracer,
    ):

        def tier2(catalog: Catalog, cluster: Cluster) -> Tier2:
            return Tier2(
                index=attribute_index(settings, objects, catalog, cluster),
                open_ledger=open_offloaded(settings, objects, catalog, cluster),
            )

        ports = NodePorts(
            files=files,
            ledger_dirs=ledger_dirs,
            transport=open_transport(settings.wire, calling=calling, tls=protection.tls),
            store=store,
            clock=system_clock(),
            ids=system_ids(),
            connect=wire_connector(open_transport(settings.wire, calling=calling), calling),
            authenticator=protection.authenticator,
            credentials=wire_credentials(settings, calling),
            tier2=tier2,
            tracer=tracer,
        )
        node = IngestNode(
            ports,
            settings=ingest,
            wire=settings.wire,
            front=front,
            ledger_id_base=settings.cluster.ledger_id_base,
            keys=ledger_keys(settings),
        )
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(_tell_ready(node))
            try:
                await node.run(stop)
            finally:
                telling.cancel()


async def _tell_ready(node: IngestNode) -> None:
    await node.ready.wait()
    assert node.info is not None
    announce_ready(
        node_id=node.node_id,
        wire=node.info.wire_address,
        grpc=node.info.grpc_address,
        http=node.info.http_address,
    )


@contextlib.asynccontextmanager
async def _front(
    node: IngestNode,
    listen: ListenSettings,
    metrics: MetricsSettings,
    protection: Protection,
    meter: CostMeter,
) -> AsyncIterator[FrontAddresses]:
    async def is_registered() -> bool:
        return node.registered

    async def is_ready() -> bool:
        return node.ready.is_set()

    assert node.cluster is not None
    app = build_http_app(
        "Tierlog ingest",
        checks={"registered": is_registered, "serving": is_ready},
        ids=system_ids(),
        cluster_id=node.cluster.cluster_id,
    )
    add_all_routes(app, node, clock=system_clock())
    guard_http(app, access.HTTP_RULES, protection.gate)
    collector = NodeCollector(node, appends=node.owners.budget, streams_max=metrics.streams_shown)
    REGISTRY.register(collector)

    def register(server: grpc.aio.Server) -> None:
        rpc_ingest.register(server, catalog=node.catalog, owners=node.owners, finder=node)
        rpc_storage.register(server, node.storage)

    host = listen.advertise_host or listen.host
    try:
        async with (
            serve_costs(app, "ingest", meter),
            serve_grpc(
                register,
                services=_SERVICES,
                host=listen.host,
                port=listen.grpc_port,
                ids=system_ids(),
                tls=protection.tls,
                access=protection.interceptor(access.RPC_RULES),
                cluster_id=node.cluster.cluster_id,
            ) as grpc_port,
            serve_http(
                app, host=listen.host, port=listen.http_port, tls=protection.tls
            ) as http_port,
        ):
            yield FrontAddresses(f"{host}:{grpc_port}", f"{host}:{http_port}")
    finally:
        REGISTRY.unregister(collector)


def main() -> int:
    """Run the service; the process's exit code."""
    set_up_interpreter()
    return run_service("ingest", serve, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
