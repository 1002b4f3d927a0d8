"""``tierlog config``: the settings as this machine's processes see them, and the profiles."""

from typing import Annotated, Any

import typer

from tierlog.cli.output import Output, OutputOption, print_rows
from tierlog.cli.session import command, config_file, load
from tierlog.model.errors import Reason, RefusedError

app = typer.Typer(no_args_is_help=True, help="Settings: their values, and where these came from.")


@app.command("show")
@command
def show(
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Only these, as s3 or ingest.owner.")
    ] = "",
    *,
    origin: Annotated[
        bool, typer.Option("--origin", help="Say where each value came from.")
    ] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what is not by default.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show every setting. Secrets are masked.

    An argument (--set, --profile) comes before the environment, that before the profile, the
    profile before the file that TIERLOG_CONFIG names, and the file before the defaults.
    """
    from tierlog.runtime.origins import DEFAULT, redacted_settings

    file = config_file()
    rows = redacted_settings(load(), file)
    named = [
        row
        for row in rows
        if not prefix or f"{row['setting']}.".startswith(f"{prefix.rstrip('.')}.")
    ]
    if not named:
        from tierlog.runtime.naming import nearest

        known = {part for row in rows for part in _beginnings(str(row["setting"]))}
        meant = nearest(prefix, sorted(known))
        raise RefusedError(
            f"there are no settings {prefix}",
            reason=Reason.INVALID_ARGUMENT,
            remedy=f"Did you mean {meant}?" if meant else "tierlog config show lists all",
        )
    shown = [row for row in named if not changed or row["origin"] != DEFAULT]
    columns: dict[str, Any] = dict.fromkeys(["setting", "value", *(["origin"] if origin else [])])
    print_rows(shown, columns, output, title="settings")


def _beginnings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


@app.command("profiles")
@command
def profiles(output: OutputOption = Output.TABLE) -> None:
    """Show the profiles and what each sets; TIERLOG_PROFILE or --profile chooses one."""
    from tierlog.runtime.profiles import profile_rows

    print_rows(profile_rows(), dict.fromkeys(("profile", "setting", "value")), output)
