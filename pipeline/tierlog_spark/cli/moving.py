"""``tierlog spark copy`` and ``restore``: a whole bucket into another one, or out of it."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tierlog.cli.output import Output, OutputOption, size_text
from tierlog.cli.session import command
from tierlog_spark.cli.running import (
    CORES,
    EXIT_INCOMPLETE,
    MEMORY,
    Cores,
    DryRun,
    Memory,
    Metrics,
    Quiet,
    run_job,
)
from tierlog_spark.cli.usage import Streams, stream_names

if TYPE_CHECKING:
    from tierlog.runtime.settings import S3Settings

COLUMNS: Final = {
    "stream": None,
    "ledger_id": None,
    "outcome": None,
    "bytes": size_text,
    "error": None,
}


class Layout(StrEnum):
    """How copies are laid out."""

    TWO_OBJECTS = "two-objects"
    SINGLE_OBJECT = "single-object"


class Compared(StrEnum):
    """How much of what arrived is read back."""

    NONE = "none"
    SAMPLE = "sample"
    FULL = "full"


Endpoint = Annotated[
    str | None, typer.Option(help="Of the other bucket; else that of the settings.")
]
Secret = Annotated[
    str | None,
    typer.Option(envvar="TIERLOG_OTHER_SECRET_KEY", help="Better given by its variable."),
]
ReadBackOption = Annotated[
    Compared, typer.Option(help="How much of what arrives is read back and compared.")
]
Pace = Annotated[
    str | None, typer.Option(help="What one executor sends a second, at most, as 50MB.")
]


@command
def copy(  # noqa: PLR0913 - one option each
    to: Annotated[str, typer.Option(help="s3://BUCKET or s3://BUCKET/PREFIX, which is there.")],
    *,
    endpoint_url: Endpoint = None,
    endpoint_name: Endpoint = None,
    region: Endpoint = None,
    access_key: Endpoint = None,
    secret_key: Secret = None,
    stream: Streams = None,
    layout: Annotated[
        Layout | None, typer.Option(help="The layout of copies there; else the one they have.")
    ] = None,
    read_back: ReadBackOption = Compared.FULL,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read and compare also what arrived before.")
    ] = False,
    bytes_per_s: Pace = None,
    dry_run: DryRun = False,
    cores: Cores = CORES,
    memory: Memory = MEMORY,
    metrics: Metrics = None,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Copy the bucket of the settings into another one: objects first, manifests last.

    Run it again and it brings what is missing. Then: tierlog restore --from the new bucket. A
    bucket, or prefix, that is another cluster's is refused.
    """
    from tierlog.cli.objects import load_s3
    from tierlog.offload.verify import ReadBack
    from tierlog_spark.jobs.moving import Move
    from tierlog_spark.jobs.moving import copy as job

    own = load_s3().s3
    other = _other(
        own,
        to,
        "--to",
        endpoint_url=endpoint_url,
        endpoint_name=endpoint_name,
        region=region,
        access_key=access_key,
        secret_key=secret_key,
    )
    move = Move(
        source=own,
        target=other,
        streams=tuple(stream_names(stream)),
        deep=deep,
        read_back=ReadBack(read_back.value),
        layout=None if layout is None else layout.value,
        bytes_per_s=_pace(bytes_per_s),
    )
    run_job(
        lambda run: job(run, move),
        columns=COLUMNS,
        dry_run=dry_run,
        cores=cores,
        memory=memory,
        metrics=metrics,
        output=output,
        quiet=quiet,
        ends={"failed": EXIT_INCOMPLETE},
    )


@command
def restore(  # noqa: PLR0913 - one option each
    source: Annotated[
        str, typer.Option("--from", help="A copy of the bucket: s3://BUCKET or s3://BUCKET/PREFIX.")
    ],
    *,
    endpoint_url: Endpoint = None,
    endpoint_name: Endpoint = None,
    region: Endpoint = None,
    access_key: Endpoint = None,
    secret_key: Secret = None,
    stream: Streams = None,
    deep: Annotated[
        bool,
        typer.Option("--deep/--no-deep", help="Read and compare all that is there, or lengths."),
    ] = True,
    bytes_per_s: Pace = None,
    dry_run: DryRun = False,
    cores: Cores = CORES,
    memory: Memory = MEMORY,
    metrics: Metrics = None,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Bring back into the bucket of the settings what is missing or damaged, out of a copy of it.

    With --dry-run nobody looks at attribute indexes, nor at the cluster's manifest. Where metadata
    are lost too, run then: tierlog restore --from the bucket.
    """
    from tierlog.cli.objects import load_s3
    from tierlog_spark.jobs.moving import Move
    from tierlog_spark.jobs.moving import restore as job

    own = load_s3().s3
    other = _other(
        own,
        source,
        "--from",
        endpoint_url=endpoint_url,
        endpoint_name=endpoint_name,
        region=region,
        access_key=access_key,
        secret_key=secret_key,
    )
    move = Move(
        source=other,
        target=own,
        streams=tuple(stream_names(stream)),
        deep=deep,
        bytes_per_s=_pace(bytes_per_s),
    )
    run_job(
        lambda run: job(run, move),
        columns=COLUMNS,
        dry_run=dry_run,
        cores=cores,
        memory=memory,
        metrics=metrics,
        output=output,
        quiet=quiet,
        ends={"failed": EXIT_INCOMPLETE},
    )


def _other(own: "S3Settings", url: str, option: str, **given: str | None) -> "S3Settings":
    """Return the settings of the other bucket: what is not said is as in the own ones."""
    from pydantic import SecretStr

    from tierlog.model.errors import RefusedError
    from tierlog_spark.options import is_endpoint

    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not url.startswith("s3://") or not bucket:
        raise RefusedError(f"{option}: {url!r} names no bucket", remedy="Write s3://BUCKET/PREFIX")
    if (given["access_key"] is None) != (given["secret_key"] is None):
        raise RefusedError(
            "--access-key and --secret-key belong together",
            remedy="Give both: the secret in TIERLOG_OTHER_SECRET_KEY",
        )
    if not is_endpoint(given["endpoint_url"] or ""):
        raise RefusedError(
            f"--endpoint-url: {given['endpoint_url']!r} is no address",
            remedy="Write http://HOST:PORT, or https://",
        )
    values: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if given["secret_key"] is not None:
        values["secret_key"] = SecretStr(given["secret_key"])
    values |= {"bucket": bucket, "key_prefix": prefix.strip("/")}
    return own.model_copy(update=values)


def _pace(text: str | None) -> float:
    from tierlog.cli.cost import positive
    from tierlog.cli.policy import parse_size

    return 0.0 if text is None else positive(parse_size(text), "--bytes-per-s")
