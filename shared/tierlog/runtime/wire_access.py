"""Who may speak on the wire: a HELLO's token or the certificate of its connection."""

from collections.abc import Sequence

from tierlog.model.access import Subject, authorise, denied, unauthenticated
from tierlog.runtime.access import Gate
from tierlog.wire.access import MESSAGES_OF_ROLE, WIRE_RULES
from tierlog.wire.messages import AUTH_JWT, AUTH_NONE, Credentials


class GateAuthenticator:
    """An ``Authenticator`` of ``tierlog.wire.auth`` that asks the process's gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def check(
        self, credentials: Credentials, *, role: str, peer: str, names: Sequence[str]
    ) -> "SubjectAdmission":
        """Return what the connection may do, or raise."""
        del peer
        token: str | None = None
        if credentials.method == AUTH_JWT:
            token = credentials.data.decode("ascii", "replace")
        elif credentials.method != AUTH_NONE:
            raise unauthenticated("its HELLO shows neither a token nor a certificate")
        subject = self._gate.identify(token=token, names=names)
        if subject is None:
            raise unauthenticated("its HELLO shows neither a token nor a certificate")
        for message in sorted(MESSAGES_OF_ROLE.get(role, ())):
            rule = WIRE_RULES[message]
            if not rule.stream:
                authorise(subject, rule, operation=message, stream="")
            elif rule.permission is None or not subject.grant.has(rule.permission):
                raise denied(subject.name, message, f"the role {role}")
        return SubjectAdmission(subject)


class SubjectAdmission:
    """What one connection's subject may append to."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def __repr__(self) -> str:
        return f"<SubjectAdmission {self._subject.name}>"

    def authorise(self, stream: str) -> None:
        """Return if the subject may append to ``stream``, or raise."""
        authorise(self._subject, WIRE_RULES["append"], operation="append", stream=stream)
