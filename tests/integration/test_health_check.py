"""The images' health check against the real services, in plain text; over TLS it stands with the
services that have it (``test_secured_services``)."""

from __future__ import annotations

import pytest

from tests.deployment.health import health_check
from tierlog.embedded.services import SERVICE_PORTS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


async def test_each_service_is_healthy_and_one_that_is_away_is_not(cluster):
    specs = cluster.services.specs
    for kind in SERVICE_PORTS:
        code, told = await health_check(kind, specs[kind].env)
        assert (code, '"ready":true' in told) == (0, True), told
    cluster.kill("reader")
    try:
        assert (await health_check("reader", specs["reader"].env))[0] == 1
    finally:
        await cluster.restart("reader")
