"""The chart as helm renders it.

`chart(values)` gives the objects of a rendering, `chart.refused(values)` what helm says to values
that it does not take. Both need helm and PyYAML (`make deploy-tools`); without them a test that
asks for the fixture is skipped, and the reason names what is missing.
"""

from __future__ import annotations

import pytest

from tests.deployment.rendering import Chart, missing_tool


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Chart:
    if missing := missing_tool():
        pytest.skip(f"{missing} is missing: make deploy-tools")
    return Chart(tmp_path_factory.mktemp("chart"))
