"""Who asks, and what every service's operations need; the audit log; limits of rates.

Owns telling a subject from a token or a certificate, the rules of what all services have, and the
record of what administrators did. Does not own the decision (``tierlog.model.access``), nor where
tokens and certificates come from: HTTP, gRPC and the wire each hand theirs over.

Invariants:
    * A token that is shown decides alone: a bad one is not made good by a certificate.
    * What the settings grant a subject is all that it may; else its token says it.
    * Whatever needs an audited permission leaves one record, also when it is refused.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from tierlog.model.access import (
    AUDITED,
    Grant,
    Permission,
    Rule,
    Rules,
    Subject,
    authorise,
    unauthenticated,
)
from tierlog.model.errors import Reason, RetryableError, TierlogError
from tierlog.ports.access import TokenVerifier
from tierlog.ports.clock import Clock
from tierlog.runtime.requests import bound_request_id

_OBSERVE: Final = Rule(permission=Permission.OBSERVE)
_PUBLIC: Final = Rule(permission=None)

COMMON_HTTP_RULES: Final[Rules] = {
    # Who keeps processes alive shows no token.
    "GET /livez": _PUBLIC,
    "GET /readyz": _PUBLIC,
    "GET /metrics": _OBSERVE,
    "GET /docs": _OBSERVE,
    "GET /docs/oauth2-redirect": _OBSERVE,
    "GET /openapi.json": _OBSERVE,
}
COSTS_RULES: Final[Rules] = {"GET /v1/costs": _OBSERVE}
COMMON_RPC_RULES: Final[Rules] = {
    "/grpc.health.v1.Health/Check": _PUBLIC,
    "/grpc.health.v1.Health/Watch": _PUBLIC,
    "/grpc.health.v1.Health/List": _OBSERVE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OBSERVE,
}

TOKEN_LEN_MAX: Final = 8 * 1024
BEARER: Final = "bearer "
SUBJECTS_MAX: Final = 1024

# Not filtered by log.level: what administrators did is written down whatever else is not.
_AUDIT: Final = structlog.wrap_logger(
    None, wrapper_class=structlog.BoundLogger, cache_logger_on_first_use=False
)


class Gate:
    """Tells who asks, and whether they may. One for a process."""

    def __init__(
        self,
        *,
        grants: Mapping[str, Grant],
        verifier: TokenVerifier | None,
        clock: Clock,
        actions_per_s: float,
    ) -> None:
        self._grants = dict(grants)
        self._verifier = verifier
        self._clock = clock
        self._rates = _Rates(clock, per_s=actions_per_s)

    def __repr__(self) -> str:
        tokens = "no tokens" if self._verifier is None else "tokens"
        return f"<Gate {tokens}, {len(self._grants)} grants>"

    def identify(self, *, token: str | None, names: Sequence[str]) -> Subject | None:
        """Return who asks; None: somebody who shows nothing. Raises UNAUTHENTICATED.

        ``names`` are those of the client's certificate, which TLS has verified.
        """
        if token is not None:
            if self._verifier is None:
                raise unauthenticated("tokens are not taken here")
            if len(token) > TOKEN_LEN_MAX:
                raise unauthenticated(f"a token has at most {TOKEN_LEN_MAX} characters")
            claims = self._verifier.verify(token)
            name = f"token:{claims.subject}"
            grant = self._grants.get(name, claims.grant)
            return Subject(name=name, grant=grant, until_ms=claims.until_ms)
        subjects = [f"certificate:{name}" for name in names]
        for name in subjects:
            if name in self._grants:
                return Subject(name=name, grant=self._grants[name])
        return Subject(name=subjects[0]) if subjects else None

    def admit(
        self, subject: Subject | None, rule: Rule | None, *, operation: str, stream: str
    ) -> None:
        """Return if ``subject`` may do this now, or raise."""
        authorise(subject, rule, operation=operation, stream=stream)
        if subject is not None and is_audited(rule):
            self._rates.take(subject.name)

    def check_still(self, subject: Subject) -> None:
        """Return if what ``subject`` showed holds still, or raise UNAUTHENTICATED."""
        if subject.until_ms is not None and self._clock.wall_ms() >= subject.until_ms:
            raise unauthenticated("its token has expired")


def is_audited(rule: Rule | None) -> bool:
    """Tell whether what asks for this is written down."""
    return rule is not None and rule.permission in AUDITED


def bearer_token(authorization: str | None) -> str | None:
    """Return the token of an ``Authorization``; None: there is none. Raises UNAUTHENTICATED."""
    if authorization is None:
        return None
    if authorization[: len(BEARER)].lower() != BEARER:
        raise unauthenticated("its Authorization is no bearer token")
    return authorization[len(BEARER) :].strip()


def audit(
    subject: Subject | None,
    *,
    action: str,
    target: str,
    outcome: str,
    peer: str,
) -> None:
    """Write down what was done, or refused. ``outcome`` is ``done``, or a reason."""
    _AUDIT.bind(logger="audit").info(
        "action.audited",
        subject=subject.name if subject is not None else None,
        action=action,
        target=target,
        outcome=outcome,
        request_id=bound_request_id(),
        peer=peer,
    )


def outcome_of(error: BaseException) -> str:
    """Return what the audit log says of an action that ended with ``error``."""
    return error.reason.value if isinstance(error, TierlogError) else "failed"


class _Rates:
    """Actions of each subject: so many a second, twice as many at once."""

    def __init__(self, clock: Clock, *, per_s: float) -> None:
        self._clock = clock
        self._per_s = per_s
        self._paid_until_s: OrderedDict[str, float] = OrderedDict()

    def take(self, subject: str) -> None:
        now_s, step_s = self._clock.monotonic_s(), 1 / self._per_s
        until_s = max(self._paid_until_s.pop(subject, now_s), now_s)
        ahead_s = until_s - now_s
        refused = ahead_s > 2 * max(1.0, step_s) - step_s
        self._paid_until_s[subject] = until_s if refused else until_s + step_s
        while len(self._paid_until_s) > SUBJECTS_MAX:
            self._paid_until_s.popitem(last=False)
        if refused:
            raise RetryableError(
                f"{subject} does more than {self._per_s:g} administrative actions a second",
                reason=Reason.RESOURCE_EXHAUSTED,
                remedy="Wait, or raise security.actions_per_s",
                details={"budget": "security.actions_per_s"},
                retry_after_s=step_s,
            )
