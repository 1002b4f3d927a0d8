"""What each operation of the scheduler needs (``tierlog.model.access``).

Ledgers and dead letters belong to any stream, so that routes which name them, and no stream, are
for those who may use all.

Invariant: every route has a rule; one without is refused, and fails a test.
"""

from typing import Final

from tierlog.model.access import Permission, Rule, Rules
from tierlog.runtime.access import COMMON_HTTP_RULES, COSTS_RULES

_DESCRIBE: Final = Rule(permission=Permission.DESCRIBE, stream="name")
_OPERATE: Final = Rule(permission=Permission.OPERATE, stream="name")
_ADMINISTER: Final = Rule(permission=Permission.ADMINISTER, stream="name")
_DESCRIBE_ALL: Final = Rule(permission=Permission.DESCRIBE)
_OPERATE_ALL: Final = Rule(permission=Permission.OPERATE)
_ADMINISTER_ALL: Final = Rule(permission=Permission.ADMINISTER)

HTTP_RULES: Final[Rules] = {
    **COMMON_HTTP_RULES,
    **COSTS_RULES,
    "GET /v1/streams": _DESCRIBE_ALL,
    "GET /v1/streams/{name}": _DESCRIBE,
    "DELETE /v1/streams/{name}": _ADMINISTER,
    "GET /v1/streams/{name}/policy": _DESCRIBE,
    "PUT /v1/streams/{name}/policy": _ADMINISTER,
    "PATCH /v1/streams/{name}/policy": _ADMINISTER,
    "GET /v1/streams/{name}/policy/explain": _DESCRIBE,
    "GET /v1/streams/{name}/offload": _DESCRIBE,
    "POST /v1/streams/{name}/offload": _OPERATE,
    "POST /v1/streams/{name}/offload/pause": _OPERATE,
    "POST /v1/streams/{name}/offload/resume": _OPERATE,
    "GET /v1/streams/{name}/attempts": _DESCRIBE,
    "GET /v1/streams/{name}/leftovers": _DESCRIBE,
    "GET /v1/streams/{name}/manifest": _DESCRIBE,
    "GET /v1/ledgers/{ledger_id}": _DESCRIBE_ALL,
    "GET /v1/ledgers/{ledger_id}/attempts": _DESCRIBE_ALL,
    "GET /v1/offloads": _DESCRIBE_ALL,
    "GET /v1/policies": _DESCRIBE_ALL,
    "GET /v1/policies/cluster": _DESCRIBE_ALL,
    "PUT /v1/policies/cluster": _ADMINISTER_ALL,
    "PATCH /v1/policies/cluster": _ADMINISTER_ALL,
    "GET /v1/policies/namespaces/{namespace}": _DESCRIBE_ALL,
    "PUT /v1/policies/namespaces/{namespace}": _ADMINISTER_ALL,
    "PATCH /v1/policies/namespaces/{namespace}": _ADMINISTER_ALL,
    "GET /v1/dead-letters": _DESCRIBE_ALL,
    "POST /v1/dead-letters/replay": _OPERATE_ALL,
    "GET /v1/dead-letters/{place}": _DESCRIBE_ALL,
    "POST /v1/dead-letters/{place}/replay": _OPERATE_ALL,
    "POST /v1/dead-letters/{place}/dismiss": _OPERATE_ALL,
    "POST /v1/scrubs": _OPERATE_ALL,
    "GET /v1/scrubs": _DESCRIBE_ALL,
    "GET /v1/scrubs/{scrub_id}": _DESCRIBE_ALL,
}
