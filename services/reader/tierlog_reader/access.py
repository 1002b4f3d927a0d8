"""What each operation of the reader needs (``tierlog.model.access``).

Invariant: every route and every call has a rule; one without is refused, and fails a test.
"""

from typing import Final

from tierlog.model.access import Permission, Rule, Rules
from tierlog.runtime.access import COMMON_HTTP_RULES, COMMON_RPC_RULES, COSTS_RULES

_READ: Final = Rule(permission=Permission.READ, stream="stream")

HTTP_RULES: Final[Rules] = {
    **COMMON_HTTP_RULES,
    **COSTS_RULES,
    "GET /v1/streams/{stream}/runs": _READ,
    "GET /v1/streams/{stream}/bounds": _READ,
    "GET /v1/streams/{stream}/ledgers": _READ,
    "GET /v1/streams/{stream}/position": _READ,
    "GET /v1/streams/{stream}/explain": _READ,
    "GET /v1/streams/{stream}/entries": _READ,
    "GET /v1/streams/{stream}/ledgers/{ledger_id}": _READ,
}

RPC_RULES: Final[Rules] = {
    **COMMON_RPC_RULES,
    "/tierlog.v1.Reader/Read": _READ,
    "/tierlog.v1.Reader/Follow": _READ,
    "/tierlog.v1.Reader/GetBounds": _READ,
}
