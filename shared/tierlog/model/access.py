"""Who may do what: roles, permissions, streams. Pure.

Owns what each role may, what an operation asks for (``Rule``) and the decision over the two. Does
not own who somebody is (``tierlog.runtime.gate``), nor which operation there is: each service has
the rules of its own routes beside them, and the tables stand in docs/reference/access.md.

Invariants:
    * An operation without a rule is refused; so is a subject without a grant.
    * What belongs to no single stream is for those alone who may use all streams.
    * A permission without a stream's pattern that fits allows nothing on that stream.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tierlog.model.errors import Reason, RefusedError

ALL_STREAMS: Final = "*"
_PATTERN: Final = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127}\*?", re.ASCII)
_PARTITION: Final = re.compile(r"-partition-[0-9]{1,4}", re.ASCII)


class Permission(StrEnum):
    """What an operation needs."""

    OBSERVE = "observe"
    """See how a process is: metrics, status, costs, what its API is."""
    LOCATE = "locate"
    """Find a stream's owner, and its attributes."""
    APPEND = "append"
    CREATE = "create"
    """Make a stream."""
    READ = "read"
    DESCRIBE = "describe"
    """See streams, ledgers, attempts and policies; no entries."""
    OPERATE = "operate"
    """Seal, offload, pause, resume, replay, scrub: nothing of it loses data."""
    ADMINISTER = "administer"
    """Set policies and delete streams."""
    STORE = "store"
    """Speak to storage nodes as services do: add, read and fence runs of any ledger."""


class Role(StrEnum):
    """What is granted to a subject."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    OPERATOR = "operator"
    ADMIN = "admin"
    SERVICE = "service"


_OPERATES: Final = frozenset(
    {Permission.OBSERVE, Permission.LOCATE, Permission.DESCRIBE, Permission.OPERATE}
)
PERMISSIONS: Final[Mapping[Role, frozenset[Permission]]] = {
    # Whoever may append may make what it appends to, as clients do by themselves.
    Role.PRODUCER: frozenset({Permission.LOCATE, Permission.APPEND, Permission.CREATE}),
    Role.CONSUMER: frozenset({Permission.LOCATE, Permission.READ}),
    Role.OPERATOR: _OPERATES,
    # Neither reads nor writes entries: who needs both has two roles.
    Role.ADMIN: _OPERATES | {Permission.CREATE, Permission.ADMINISTER},
    Role.SERVICE: frozenset({Permission.OBSERVE, Permission.STORE}),
}
AUDITED: Final = frozenset({Permission.CREATE, Permission.OPERATE, Permission.ADMINISTER})
"""What is done with these is written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one operation needs. Without a permission it is for everybody.

    ``stream`` names the parameter of the route, or the field of the request, that says which stream
    it is about; empty: it is about all of them.
    """

    permission: Permission | None
    stream: str = ""


Rules = Mapping[str, Rule]
"""By operation: ``GET /v1/…`` with the route's own parameters, ``/package.Service/Method``, or the
name of a message on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Roles, and the streams they are for: a name, a prefix with ``*`` behind it, or ``*``."""

    roles: frozenset[Role] = frozenset()
    streams: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in self.streams:
            if _PATTERN.fullmatch(pattern) is None:
                raise RefusedError(
                    f"{pattern[:140]!r} is no pattern of streams",
                    remedy="Give a stream's name, a prefix with * behind it, or *",
                )

    def has(self, permission: Permission) -> bool:
        """Tell whether one of the roles has it."""
        return any(permission in PERMISSIONS[role] for role in self.roles)

    def includes(self, stream: str) -> bool:
        """Tell whether a pattern fits the stream; a name fits its partitions too."""
        return any(_fits(pattern, stream) for pattern in self.streams)


NO_GRANT: Final = Grant()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Somebody who has shown who it is."""

    name: str
    """``token:…`` or ``certificate:…``: an issuer of tokens can't name a certificate's subject."""
    grant: Grant = field(default=NO_GRANT)
    until_ms: int | None = None
    """When what it has shown ends; None: a certificate, which is looked at when it is shown."""


def _fits(pattern: str, stream: str) -> bool:
    if pattern.endswith("*"):
        return stream.startswith(pattern[:-1])
    return stream == pattern or (
        stream.startswith(pattern) and _PARTITION.fullmatch(stream, len(pattern)) is not None
    )


def authorise(subject: Subject | None, rule: Rule | None, *, operation: str, stream: str) -> None:
    """Return if ``subject`` may do ``operation``, or raise ``RefusedError``."""
    if rule is not None and rule.permission is None:
        return
    if subject is None:
        raise unauthenticated("nobody has said who asks")
    who = subject.name
    if rule is None or rule.permission is None:
        raise RefusedError(
            f"{who} may not do {operation}",
            reason=Reason.PERMISSION_DENIED,
            remedy="No role allows it (docs/reference/access.md)",
        )
    if not subject.grant.has(rule.permission):
        roles = " or ".join(role for role in Role if rule.permission in PERMISSIONS[role])
        raise denied(who, f"do {operation}", f"the role {roles}")
    if rule.stream and not stream:
        raise RefusedError(
            f"{who} may not do {operation} on no stream",
            reason=Reason.PERMISSION_DENIED,
            remedy="Name the stream in the request",
        )
    if not rule.stream and ALL_STREAMS not in subject.grant.streams:
        raise denied(who, f"do {operation}, which is about all streams", "the stream pattern *")
    if rule.stream and not subject.grant.includes(stream):
        shown = stream[:140]
        raise denied(
            who, f"do {operation} on stream {shown!r}", f"a stream pattern that fits {shown!r}"
        )


def denied(who: str, what: str, missing: str) -> RefusedError:
    """Return the refusal of somebody who is known, and whose grant lacks something."""
    of_token = who.startswith("token:")
    claims = "; without one there the claims of its token count" if of_token else ""
    return RefusedError(
        f"{who} may not {what}",
        reason=Reason.PERMISSION_DENIED,
        remedy=f"Its grant lacks {missing}. An administrator sets it in security.grants of the "
        f"services, subject {who!r}{claims} (docs/reference/access.md)",
    )


def unauthenticated(why: str) -> RefusedError:
    """Return the refusal of somebody who is not known. ``why`` shows nothing of what was shown."""
    return RefusedError(
        f"who asks is not known: {why}",
        reason=Reason.UNAUTHENTICATED,
        remedy="Show a token that is valid (security.token_file), or a client certificate",
    )
