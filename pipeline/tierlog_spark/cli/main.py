"""``tierlog spark …``: the jobs, one command each.

Each job is a function too, in ``tierlog_spark.jobs``; a command only reads its options, and shows
the report. Imports of libraries are inside the commands.
"""

import typer

from tierlog_spark.cli import export, iceberg, moving, offload, scrub, usage

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Jobs on Spark, on this machine or on the cluster that spark-submit gives.",
)

app.command("export")(export.export)
app.command("exported")(export.exported)
app.command("iceberg")(iceberg.iceberg)
app.command("scrub")(scrub.scrub)
app.command("bulk-offload")(offload.bulk_offload)
app.command("copy")(moving.copy)
app.command("restore")(moving.restore)
app.command("usage")(usage.usage)
app.command("cost")(usage.cost)
