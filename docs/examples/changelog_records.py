"""Prints the changelogs installed with Debian as lines of JSON, for the notebook beside it.

python docs/examples/changelog_records.py | tierlog append changelogs --format ndjson

Where there are none, the history of the repository around it is printed instead.
"""

import json
import sys
from collections.abc import Iterator

from tierlog.cli.demo import records


def lines() -> Iterator[str]:
    """Iterate over the records, oldest first."""
    for one in records.load().records:
        yield json.dumps(
            {
                "package": one.package,
                "version": one.version,
                "time_ms": one.time_ms,
                "text": one.text,
            }
        )


if __name__ == "__main__":
    for line in lines():
        sys.stdout.write(line + "\n")
