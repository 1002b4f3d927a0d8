"""The ingest process over faulty disks, with a defect of the simulation's in its code.

Run by ``python -m``, as ``faulty_ingest`` is; ``TIERLOG_DEFECT`` names the defect. A judge of real
nodes is worth what it catches: ``python -m tests.histories.run --defect "recover without a fence"``
is to end with a history that is violated.
"""

import os
import sys
from pathlib import Path

from tests.plugins import faulty_ingest
from tests.simulation.mutants import MUTANTS

VARIABLE = "TIERLOG_DEFECT"
MODULE = "tests.histories.defective_ingest"


def main() -> int:
    """Serve until the end; the process's exit code."""
    from tierlog_ingest.main import main as serve

    faulty_ingest.install(Path(os.environ[faulty_ingest.VARIABLE]))
    with MUTANTS[os.environ[VARIABLE]].apply():
        return serve()


if __name__ == "__main__":
    sys.exit(main())
