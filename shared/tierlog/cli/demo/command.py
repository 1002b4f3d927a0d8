"""The command itself: options, a temporary state directory, the end of everything."""

import asyncio
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from tierlog.cli.output import Output, OutputOption, say
from tierlog.cli.session import Quiet, command, load

MEGABYTES_DEFAULT: Final = 60
MEGABYTES_MIN: Final = 50


@command
def demo(
    *,
    megabytes: Annotated[
        int, typer.Option(min=MEGABYTES_MIN, help="How much to append, in MB.")
    ] = MEGABYTES_DEFAULT,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the state directory, with its logs.")
    ] = False,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Run the main job here: real servers, real records, two crashes, everything read back."""
    load()  # for the logs
    state_dir = Path(tempfile.mkdtemp(prefix="tierlog-demo-"))
    try:
        asyncio.run(_demo(state_dir, megabytes * 1_000_000, output, quiet=quiet))
    finally:
        if keep:
            say(f"kept {state_dir}", quiet=quiet)
        else:
            shutil.rmtree(state_dir, ignore_errors=True)


async def _demo(state_dir: Path, bytes_min: int, output: Output, *, quiet: bool) -> None:
    from tierlog.cli.demo import records, report
    from tierlog.cli.demo.job import Job
    from tierlog.cli.demo.stage import Telling, open_stage

    running = asyncio.current_task()
    assert running is not None
    # Whoever ends the demo ends its servers too, in order.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    tell = Telling(quiet=quiet)
    tell("reading the changelogs of this machine")
    source = records.load()
    async with open_stage(state_dir, tell) as stage:
        outcome = await Job(stage, source, bytes_min=bytes_min).run()
    report.show(outcome, output, elapsed_s=tell.elapsed_s)
