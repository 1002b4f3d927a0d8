"""The scheduler's whole HTTP API in one place, for the process and for what describes it."""

from uuid import UUID

from fastapi import FastAPI

from tierlog.catalog import Catalog
from tierlog.offload.dead_letters import DeadLetters
from tierlog.offload.manifests import ManifestStore
from tierlog.ports.ids import Ids
from tierlog.runtime.http import NO_CHECKS, Checks, build_http_app
from tierlog_scheduler.api import AdminApi
from tierlog_scheduler.attempts_api import AttemptsApi
from tierlog_scheduler.dead_letters_api import DeadLettersApi
from tierlog_scheduler.manifests_api import ManifestsApi
from tierlog_scheduler.policy_api import PolicyApi
from tierlog_scheduler.scheduler import Scheduler
from tierlog_scheduler.scrubs import ScrubRunner
from tierlog_scheduler.scrubs_api import ScrubsApi


def build_app(
    catalog: Catalog,
    scheduler: Scheduler,
    letters: DeadLetters,
    manifests: ManifestStore,
    scrubs: ScrubRunner,
    *,
    checks: Checks,
    told: Checks = NO_CHECKS,
    ids: Ids | None = None,
    cluster_id: UUID | None = None,
) -> FastAPI:
    """Return the application with every route."""
    app = build_http_app(
        "Tierlog scheduler", checks=checks, told=told, ids=ids, cluster_id=cluster_id
    )
    AdminApi(catalog, scheduler).add_routes(app)
    PolicyApi(catalog, scheduler).add_routes(app)
    AttemptsApi(catalog).add_routes(app)
    DeadLettersApi(letters).add_routes(app)
    ManifestsApi(catalog, manifests).add_routes(app)
    ScrubsApi(scrubs).add_routes(app)
    return app
