"""The command itself: options, a temporary state directory, the end of everything."""

import asyncio
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tierlog.cli.demo.stage import Telling
from tierlog.cli.output import Output, OutputOption, say
from tierlog.cli.session import Quiet, command, load
from tierlog.embedded.nodes import NODES_MAX
from tierlog.model.errors import RefusedError
from tierlog.model.quorums import COPIES

if TYPE_CHECKING:
    from tierlog.cli.demo.records import Source

MEGABYTES_DEFAULT: Final = 60
MEGABYTES_MIN: Final = 50
NODES_KILLED_MIN: Final = COPIES


@command
def demo(
    *,
    megabytes: Annotated[
        int, typer.Option(min=MEGABYTES_MIN, help="How much to append, in MB.")
    ] = MEGABYTES_DEFAULT,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=NODES_MAX, help="Ingest nodes (1, or 3).")
    ] = None,
    kill_node: Annotated[
        bool, typer.Option("--kill-node", help="Take a node away for good; another comes back.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the state directory, with its logs.")
    ] = False,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Run the main job here: real servers, real records, two crashes, everything read back.

    With --nodes 3 --kill-node: the stream's owner is lost with its disk while events are appended,
    another node is killed and comes back, and in the end no ledger lacks a copy.
    """
    load()  # for the logs
    count = nodes if nodes is not None else NODES_KILLED_MIN if kill_node else 1
    if kill_node and count < NODES_KILLED_MIN:
        raise RefusedError(
            f"{count} nodes can't go on without one of them",
            remedy=f"Start with --nodes {NODES_KILLED_MIN} or more",
        )
    state_dir = Path(tempfile.mkdtemp(prefix="tierlog-demo-"))
    try:
        work = _demo_cluster if kill_node else _demo
        tell = Telling(quiet=quiet)
        asyncio.run(work(state_dir, megabytes * 1_000_000, output, tell, nodes=count))
    finally:
        if keep:
            say(f"kept {state_dir}", quiet=quiet)
        else:
            shutil.rmtree(state_dir, ignore_errors=True)


async def _demo(
    state_dir: Path, bytes_min: int, output: Output, tell: Telling, *, nodes: int
) -> None:
    from tierlog.cli.demo import report
    from tierlog.cli.demo.job import Job
    from tierlog.cli.demo.stage import open_stage

    source = _begin(tell)
    async with open_stage(state_dir, tell, nodes=nodes) as stage:
        outcome = await Job(stage, source, bytes_min=bytes_min).run()
    report.show(outcome, output, elapsed_s=tell.elapsed_s)


async def _demo_cluster(
    state_dir: Path, bytes_min: int, output: Output, tell: Telling, *, nodes: int
) -> None:
    from tierlog.cli.demo import cluster_report
    from tierlog.cli.demo.cluster_job import ClusterJob
    from tierlog.cli.demo.stage import open_stage

    source = _begin(tell)
    async with open_stage(state_dir, tell, nodes=nodes) as stage:
        outcome = await ClusterJob(stage, source, bytes_min=bytes_min).run()
    cluster_report.show(outcome, output, elapsed_s=tell.elapsed_s)


def _begin(tell: Telling) -> "Source":
    """Have the demo end its servers, in order, when it is told to end; read the records."""
    from tierlog.cli.demo import records

    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    tell("reading the changelogs of this machine")
    return records.load()
