"""``tierlog up``: everything on this machine, until Ctrl-C."""

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from tierlog.cli.output import Output, OutputOption, print_json, print_rows, say
from tierlog.cli.session import SESSION, Quiet, command, load
from tierlog.embedded.nodes import KIND, NODES_MAX, OWNER
from tierlog.model.errors import RefusedError

if TYPE_CHECKING:
    from tierlog.client.endpoints import EndpointsFile
    from tierlog.embedded.cluster import EmbeddedCluster
    from tierlog.embedded.endpoints import ExternalServers
    from tierlog.runtime.settings import Settings

URLS: Final = {"http": "http://{}", "grpc": "{}", "wire": "{}"}


@command
def up(
    state_dir: Annotated[
        Path | None, typer.Option(help="Where everything is kept (default ./.tierlog).")
    ] = None,
    *,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=NODES_MAX,
            help="Ingest nodes; 3 and more keep three copies. Default: as many as there were, or 1",
        ),
    ] = None,
    external_s3: Annotated[
        str | None,
        typer.Option(help="An S3 server that runs: URL; keys and bucket from TIERLOG_S3__…"),
    ] = None,
    external_zookeeper: Annotated[str | None, typer.Option(help="host:port[,host:port…]")] = None,
    external_kafka: Annotated[str | None, typer.Option(help="host:port[,host:port…]")] = None,
    external_redis: Annotated[str | None, typer.Option(help="redis://host:port/0")] = None,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Start S3, ZooKeeper, Kafka, Redis and the four services; stop all on Ctrl-C.

    With --nodes 3 ingest is three processes, each entry is kept by all of them (3/3/2), and one
    may end, or be killed, without an end of anything else.
    External servers are named by these options, or by those of the section up
    (TIERLOG_UP__EXTERNAL_KAFKA).
    """
    if state_dir is not None:
        SESSION.state_dir = state_dir
    given = {
        "s3": external_s3,
        "zookeeper": external_zookeeper,
        "kafka": external_kafka,
        "redis": external_redis,
    }
    asyncio.run(_up(given, nodes, output, quiet=quiet))


async def _up(
    given: dict[str, str | None], nodes: int | None, output: Output, *, quiet: bool
) -> None:
    from tierlog.embedded.cluster import EmbeddedCluster
    from tierlog.embedded.external import check_external
    from tierlog.runtime.naming import variables_of

    settings = load()
    configured = settings.up
    named = {
        name: address or getattr(configured, f"external_{name}") for name, address in given.items()
    }
    external = _external(named, settings)
    await check_external(external)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    cluster = EmbeddedCluster(
        settings.state_dir,
        nodes=nodes,
        external=external,
        # The services have an environment, and none of this command's options.
        settings={**variables_of(settings.flags), **_chosen_quorums(settings)},
        background_niceness=configured.background_niceness,
    )

    def tell(what: str, _done: int, _total: int | None) -> None:
        say(what, quiet=quiet)

    if not await _start(cluster, stop, tell):
        return
    path = settings.state_dir / "endpoints.json"
    try:
        written = endpoints_of(cluster)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(written.model_dump_json(indent=2), encoding="utf-8")
        show(written, output)
        say(f"ready; {path} names all addresses; Ctrl-C stops everything", quiet=quiet)
        await _until_stopped(cluster, stop, tell)
    finally:
        path.unlink(missing_ok=True)
        say("stopping", quiet=quiet)
        await cluster.stop()
    say("stopped", quiet=quiet)


async def _start(cluster: "EmbeddedCluster", stop: asyncio.Event, tell: Any) -> bool:  # noqa: ANN401
    """Start all; False: somebody asked to stop meanwhile, and nothing is left running."""
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(cluster.start(tell))
        stopping = group.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
    return not stop.is_set()


async def _until_stopped(
    cluster: "EmbeddedCluster",
    stop: asyncio.Event,
    tell: Any,  # noqa: ANN401
) -> None:
    async with asyncio.TaskGroup() as group:
        stopping = group.create_task(stop.wait())
        failing = group.create_task(cluster.wait_failed(tell))
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        failing.cancel()
    if not failing.cancelled():
        raise failing.result()


def _chosen_quorums(settings: "Settings") -> dict[str, str]:
    """Return the quorums that somebody chose, whether by a variable or in the file."""
    owner = settings.ingest.owner
    names = ("ensemble_size", "write_quorum", "ack_quorum")
    if not owner.model_fields_set & set(names):
        return {}
    return {f"{OWNER}{name.upper()}": str(getattr(owner, name)) for name in names}


def _external(given: dict[str, str | None], settings: Any) -> "ExternalServers":  # noqa: ANN401
    from tierlog.embedded.endpoints import ExternalS3, ExternalServers

    s3 = None
    if given["s3"] is not None:
        access, secret = settings.s3.access_key, settings.s3.secret_key
        if not access or secret is None:
            raise RefusedError(
                "the external S3 server needs keys",
                remedy="Set TIERLOG_S3__ACCESS_KEY, TIERLOG_S3__SECRET_KEY, TIERLOG_S3__BUCKET",
            )
        s3 = ExternalS3(
            endpoint_url=given["s3"],
            access_key=access,
            secret_key=secret.get_secret_value(),
            bucket=settings.s3.bucket,
        )
    return ExternalServers(
        s3=s3, zookeeper=given["zookeeper"], kafka=given["kafka"], redis=given["redis"]
    )


def endpoints_of(cluster: "EmbeddedCluster") -> "EndpointsFile":
    """Return all addresses of a running cluster."""
    from tierlog.client.endpoints import EndpointsFile
    from tierlog.embedded.services import SERVICE_PORTS

    found = cluster.endpoints
    # Those of somebody else's server stay where they came from.
    keys = {"s3_access_key": found.s3_access_key, "s3_secret_key": found.s3_secret_key}
    if cluster.servers.external.s3 is not None:
        keys = {}
    return EndpointsFile(
        pid=os.getpid(),
        state_dir=str(cluster.servers.state_dir),
        services={
            name: {purpose: cluster.address(name, purpose) for purpose in SERVICE_PORTS[kind]}
            for kind in SERVICE_PORTS
            for name in ([kind] if kind != KIND else dict.fromkeys([kind, *cluster.nodes]))
        },
        servers={
            "s3": found.s3_endpoint_url,
            "s3_bucket": found.s3_bucket,
            "zookeeper": found.zookeeper_hosts,
            "kafka": found.kafka_bootstrap,
            "redis": found.redis_url,
            **keys,
        },
    )


def show(written: "EndpointsFile", output: Output) -> None:
    """Print the addresses: a table, or the whole file, but for its secrets, as JSON."""
    servers = {**written.servers, "redis": without_password(written.servers["redis"])}
    if output is not Output.TABLE:
        shown = written.model_dump(exclude={"servers": {"s3_secret_key"}})
        shown["servers"]["redis"] = servers["redis"]
        print_json(shown, indent=output is Output.JSON)
        return
    rows = [
        {"what": name, "for": "", "address": servers[name]}
        for name in ("s3", "zookeeper", "kafka", "redis")
    ]
    several = len(written.ingest_addresses("grpc")) > 1
    rows += [
        {"what": name, "for": purpose, "address": URLS[purpose].format(address)}
        for name, purposes in written.services.items()
        if not (several and name == KIND)  # the first node, which is there by its own name too
        for purpose, address in purposes.items()
    ]
    print_rows(rows, dict.fromkeys(("what", "for", "address")), output)


def without_password(url: str) -> str:
    """Return a URL as it may be shown."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
