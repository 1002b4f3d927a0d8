"""The life of a service process: settings, logs, signals, an exit code.

A service is a coroutine that is given its settings and an event that asks it to stop. It says on
standard output, in one line of JSON, where it listens, once it is ready.
"""

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import orjson
import structlog

from tierlog.model.errors import SURFACES, TierlogError, first_error
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.naming import flags_of
from tierlog.runtime.redaction import secrets_of
from tierlog.runtime.security_check import check_security
from tierlog.runtime.settings import Settings, load_settings

log = structlog.get_logger()

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2

ServiceMain = Callable[[Settings, asyncio.Event], Awaitable[None]]


class StoppedError(Exception):
    """A service was asked to end before it had what it needs."""


def run_service(name: str, main: ServiceMain, arguments: Sequence[str] = ()) -> int:
    """Run a service until SIGTERM or SIGINT, and return the process's exit code.

    ``arguments``: those of the command line, which come before all other settings.
    """
    given = _parser(name).parse_args(arguments)
    config_file = os.environ.get("TIERLOG_CONFIG")
    try:
        flags = flags_of(Settings, given.set)
        if given.profile is not None:
            flags["profile"] = given.profile
        settings = load_settings(Path(config_file) if config_file else None, flags=flags)
        check_security(settings, name)
    except TierlogError as error:
        print(f"error: {error.message}\nremedy: {error.remedy}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    configure_logging(settings.log, service=name, secrets=secrets_of(settings))
    # Long-lived objects of the imports are never garbage; keep the collector from walking them.
    gc.freeze()
    try:
        asyncio.run(_until_signal(name, settings, main))
    except BaseExceptionGroup as group:
        failed = first_error(group)
    except Exception as error:  # noqa: BLE001 - the last stop before the exit code
        failed = error
    else:
        return 0
    if isinstance(failed, TierlogError):
        log.error("service.failed", reason=failed.reason.value, cause=str(failed))
        return SURFACES[failed.reason].exit_code
    log.error("service.crashed", exc_info=failed)
    return EXIT_FAILURE


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tierlog-{name}",
        description="Runs until SIGTERM. Settings come from arguments, TIERLOG_… variables, the "
        "profile, the file that TIERLOG_CONFIG names, and defaults; the first one counts.",
    )
    parser.add_argument("--profile", help="a named set of settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="as s3.bucket=logs"
    )
    return parser


async def _until_signal(name: str, settings: Settings, main: ServiceMain) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log.info("service.started", pid=os.getpid())
    try:
        await main(settings, stop)
    except* StoppedError:
        pass  # it had not begun
    log.info("service.stopped", name=name)


def announce_ready(**addresses: str | int) -> None:
    """Say where the service listens, for whoever started the process."""
    sys.stdout.write(orjson.dumps({"ready": True, **addresses}).decode() + "\n")
    sys.stdout.flush()
