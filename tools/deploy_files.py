"""Writes what the chart has from the code: the schema of its values, alerts, dashboards.

With --check nothing is written, and the exit code says whether the committed files are what would
be written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tools.chart_schema import values_schema
from tools.monitoring.alerts import alerts_file
from tools.monitoring.dashboards import boards

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = ROOT / "deploy" / "helm" / "tierlog"


def deploy_files() -> dict[Path, str]:
    """Return the generated files."""
    return {
        CHART / "values.schema.json": values_schema(),
        CHART / "files" / "alerts.yaml": alerts_file(),
        **{CHART / "dashboards" / name: text for name, text in boards().items()},
    }


def stale() -> list[str]:
    """Return the names of files that are not what the code gives, and of dashboards too many."""
    wanted = deploy_files()
    found = [
        path.relative_to(ROOT).as_posix()
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    extra = set((CHART / "dashboards").glob("*.json")) - set(wanted)
    return found + sorted(path.relative_to(ROOT).as_posix() for path in extra)


def main() -> None:
    """Write the files, or compare them."""
    if "--check" in sys.argv[1:]:
        if found := stale():
            sys.exit(f"error: not what the code gives: {', '.join(found)}; run: make deploy-files")
        return
    for path, text in deploy_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
