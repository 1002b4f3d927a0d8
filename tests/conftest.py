"""Lists the plugins, which are the modules tests/plugins/fix_*.py, and nothing else."""

from __future__ import annotations

from pathlib import Path

pytest_plugins = [
    f"tests.plugins.{path.stem}"
    for path in sorted((Path(__file__).parent / "plugins").glob("fix_*.py"))
]
