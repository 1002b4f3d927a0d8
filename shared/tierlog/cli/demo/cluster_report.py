"""What the demo of a cluster shows at its end: where the copies of each ledger lie."""

from typing import Any

from tierlog.cli.demo.cluster_job import ClusterOutcome
from tierlog.cli.demo.report import print_summary
from tierlog.cli.output import Output, print_json, print_rows, size_text


def document_of(outcome: ClusterOutcome, *, elapsed_s: float) -> dict[str, Any]:
    """Return the whole outcome as JSON."""
    return outcome.document() | {
        "lost_node": {
            "node_id": outcome.lost_node,
            "events_in_flight": outcome.in_flight_at_loss,
            "replaced_by": outcome.fresh_node or None,
        },
        "killed_node": {"node_id": outcome.killed_node},
        "acknowledged_events": outcome.acknowledged,
        "events_lost": outcome.lost_count,
        "events_doubled": outcome.doubled_count,
        "answers_settled_by_number": outcome.resolved_count,
        "longest_gap_s": round(outcome.longest_gap_s, 2),
        "replication": {
            "queued_max": outcome.queued_max,
            "under_replicated": outcome.under_replicated,
            "copies_lacking": sum(one["lacking"] for one in outcome.ledgers),
            "seconds": round(outcome.replicated_s, 1),
        },
        "ledgers": outcome.ledgers,
        "seconds": round(elapsed_s, 1),
    }


def show(outcome: ClusterOutcome, output: Output, *, elapsed_s: float) -> None:
    """Print the outcome."""
    document = document_of(outcome, elapsed_s=elapsed_s)
    if output is not Output.TABLE:
        print_json(document, indent=output is Output.JSON)
        return
    columns = {
        "ledger_id": None,
        "state": None,
        "epoch": None,
        "entries": None,
        "bytes": size_text,
        "copies": None,
        "lacking": None,
        "ensembles": None,
    }
    print_rows(outcome.ledgers, columns, Output.TABLE, title="The stream's ledgers and their nodes")
    _sum_up(document)


def _sum_up(document: dict[str, Any]) -> None:
    lost, replication = document["lost_node"], document["replication"]
    instead = f", {lost['replaced_by']} came in its place" if lost["replaced_by"] else ""
    lines = [
        (
            f"{lost['node_id']}, the owner, lost for good with {lost['events_in_flight']} events "
            f"in flight{instead}; {document['killed_node']['node_id']} killed, and back: "
            f"{document['events_lost']} lost, {document['events_doubled']} doubled "
            f"(lost answers settled: {document['answers_settled_by_number']})"
        ),
        f"longest time without an answer: {document['longest_gap_s']} s",
        (
            f"under-replicated ledgers: {replication['under_replicated']} "
            f"({replication['queued_max']} at most, whole again {replication['seconds']} s after "
            f"the last append); copies of entries lacking: {replication['copies_lacking']}"
        ),
    ]
    print_summary(document, lines)
