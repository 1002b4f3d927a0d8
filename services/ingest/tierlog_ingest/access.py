"""What each operation of ingest needs (``tierlog.model.access``).

Invariant: every route and every call has a rule; one without is refused, and fails a test.
"""

from typing import Final

from tierlog.model.access import Permission, Rule, Rules
from tierlog.runtime.access import COMMON_HTTP_RULES, COMMON_RPC_RULES, COSTS_RULES

_STORE: Final = Rule(permission=Permission.STORE)

HTTP_RULES: Final[Rules] = {
    **COMMON_HTTP_RULES,
    **COSTS_RULES,
    "GET /v1/status": Rule(permission=Permission.OBSERVE),
    "GET /v1/streams/{stream}/owner": Rule(permission=Permission.LOCATE, stream="stream"),
    "POST /v1/streams/{stream}/events": Rule(permission=Permission.APPEND, stream="stream"),
    "POST /v1/streams/{stream}/seal": Rule(permission=Permission.OPERATE, stream="stream"),
    "GET /v1/ledgers/{ledger_id}/runs": _STORE,
}

RPC_RULES: Final[Rules] = {
    **COMMON_RPC_RULES,
    "/tierlog.v1.Ingest/CreateStream": Rule(permission=Permission.CREATE, stream="stream"),
    "/tierlog.v1.Ingest/Append": Rule(permission=Permission.APPEND, stream="stream"),
    "/tierlog.v1.Ingest/Attach": Rule(permission=Permission.APPEND, stream="stream"),
    "/tierlog.v1.Ingest/FindOwner": Rule(permission=Permission.LOCATE, stream="stream"),
    "/tierlog.v1.Ingest/Seal": Rule(permission=Permission.OPERATE, stream="stream"),
    "/tierlog.v1.Ingest/GetAttributes": Rule(permission=Permission.LOCATE, stream="stream"),
    "/tierlog.v1.Ingest/ListAttributes": Rule(permission=Permission.LOCATE, stream="stream"),
    "/tierlog.v1.StorageNode/Fence": _STORE,
    "/tierlog.v1.StorageNode/GetLac": _STORE,
    "/tierlog.v1.StorageNode/ListLedgers": _STORE,
    "/tierlog.v1.StorageNode/GetHeldEntries": _STORE,
}
