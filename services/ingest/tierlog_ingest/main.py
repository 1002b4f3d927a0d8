"""The ingest process: real adapters, HTTP and gRPC in front of one ``IngestNode``.

A node whose disk failed ends with exit code 1 and answers nothing more; what it acknowledged is
in its journal. SIGTERM drains: open ledgers are closed, so that the next start has nothing to
recover.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Final

import grpc
from prometheus_client import REGISTRY

from tierlog.proto.v1 import ingest_pb2
from tierlog.runtime.http import build_http_app, serve_http
from tierlog.runtime.rpc import serve_grpc
from tierlog.runtime.service import announce_ready, run_service
from tierlog.runtime.settings import ListenSettings, Settings
from tierlog.wiring.build import open_metadata, system_clock, system_ids
from tierlog.wiring.keys import ledger_keys
from tierlog.wiring.nodes import open_all_files, open_files, open_transport, wire_connector
from tierlog_ingest import http_runs, http_status, rpc_ingest, rpc_storage
from tierlog_ingest.app import FrontAddresses, IngestNode, NodePorts
from tierlog_ingest.interpreter import set_up_interpreter
from tierlog_ingest.metrics import NodeCollector

_SERVICES: Final = [one.full_name for one in ingest_pb2.DESCRIPTOR.services_by_name.values()]


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run the node until ``stop``."""
    ingest = settings.ingest

    @contextlib.asynccontextmanager
    async def front(node: IngestNode) -> AsyncIterator[FrontAddresses]:
        async with _front(node, ingest.listen) as addresses:
            yield addresses

    async with (
        open_metadata(settings) as store,
        open_files(ingest.data_dir) as files,
        open_all_files(ingest.ledger_directories) as ledger_dirs,
    ):
        ports = NodePorts(
            files=files,
            ledger_dirs=ledger_dirs,
            transport=open_transport(settings.wire),
            store=store,
            clock=system_clock(),
            ids=system_ids(),
            connect=wire_connector(open_transport(settings.wire)),
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
async def _front(node: IngestNode, listen: ListenSettings) -> AsyncIterator[FrontAddresses]:
    async def is_registered() -> bool:
        return node.registered

    async def is_ready() -> bool:
        return node.ready.is_set()

    app = build_http_app(
        "Tierlog ingest", checks={"registered": is_registered, "serving": is_ready}
    )
    http_runs.add_routes(app, node.storage)
    http_status.add_routes(app, node)
    collector = NodeCollector(node)
    REGISTRY.register(collector)

    def register(server: grpc.aio.Server) -> None:
        rpc_ingest.register(server, catalog=node.catalog, owners=node.owners, finder=node)
        rpc_storage.register(server, node.storage)

    host = listen.advertise_host or listen.host
    try:
        async with (
            serve_grpc(
                register, services=_SERVICES, host=listen.host, port=listen.grpc_port
            ) as grpc_port,
            serve_http(app, host=listen.host, port=listen.http_port) as http_port,
        ):
            yield FrontAddresses(f"{host}:{grpc_port}", f"{host}:{http_port}")
    finally:
        REGISTRY.unregister(collector)


def main() -> int:
    """Run the service; the process's exit code."""
    set_up_interpreter()
    return run_service("ingest", serve)


if __name__ == "__main__":
    sys.exit(main())
