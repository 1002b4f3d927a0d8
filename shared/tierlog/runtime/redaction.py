"""What must not be shown: values that are secret, wherever they turn up.

Owns two ways to find one: by the value, of those that this process was given as secrets; and by
where it stands, as behind ``Bearer`` or in a URL before the host. Logs, ``config show`` and debug
bundles go through here.

Invariants:
    * A secret that was learned is in nothing that comes out, however it is nested, quoted or split
      over fields: keys of tables are looked at as their values are.
    * A learned value shorter than ``SHORTEST`` is not looked for: it would blacken all the rest.
"""

import json
import re
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Final
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, SecretStr

MASK: Final = "***"
SHORTEST: Final = 4

_NAMES: Final = re.compile(
    r"(?:^|[_.-])(?:password|passwd|secret|secret_key|secretkey|token|authorization|credential"
    r"|credentials|private_key|api_key|apikey|set-cookie)s?$",
    re.IGNORECASE,
)
_SHAPES: Final = re.compile(
    r"(?P<url>(?<=://)[^/\s@'\"]+(?=@))"
    r"|(?P<bearer>(?<=\bBearer )[\w.~+/=-]+|(?<=\bBasic )[\w.~+/=-]{8,})"
    r"|(?P<signed>(?<=X-Amz-Signature=)[0-9A-Fa-f]+|(?<=X-Amz-Security-Token=)[^&\s'\"]+"
    r"|(?<=X-Amz-Credential=)[^&\s'\"]+|(?<=Signature=)[0-9a-f]{64})"
    r"|(?P<jwt>\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
    r"|(?P<pem>-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$))",
    re.IGNORECASE,
)


_HEADER: Final = re.compile(r"[A-Za-z][A-Za-z-]*=(?:Bearer |Basic )?(\S{8,})")


class Redactor:
    """Finds secrets in what is about to be shown."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.learn(secrets)

    def learn(self, secrets: Iterable[str]) -> None:
        """Look for these, too."""
        new = {form for one in secrets if len(one) >= SHORTEST for form in _forms(one)}
        if new <= self._secrets:
            return
        self._secrets |= new
        # The longest first: one may be the beginning of another.
        longest = sorted(self._secrets, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)))

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        if self._pattern is not None:
            text = self._pattern.sub(MASK, text)
        return _SHAPES.sub(MASK, text)

    def value(self, value: Any) -> Any:  # noqa: ANN401 - whatever somebody logs
        """Return a value without secrets; what is no plain value becomes its text."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.named(name, one) for name, one in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.value(one) for one in value]
        if isinstance(value, bytes):
            value = value.decode(errors="backslashreplace")
        return self.text(str(value))  # of a SecretStr that is stars

    def named(self, name: object, value: Any) -> Any:  # noqa: ANN401
        """Return a field's value: nothing of it where the name says that it is secret."""
        if value not in (None, "") and _NAMES.search(str(name)):
            return MASK
        return self.value(value)

    def __call__(
        self, _logger: object, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Redact an event of a log, as a processor of structlog."""
        for name, one in event.items():
            # What structlog and logging keep beside the event; the last step takes it out.
            if not name.startswith("_"):
                event[name] = self.named(name, one)
        return event


def _forms(secret: str) -> set[str]:
    """Return how a secret may stand in a text: as it is, quoted for a URL, escaped in JSON."""
    return {secret, quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]}


def secrets_of(model: BaseModel) -> set[str]:
    """Return the secret values of settings, and the passwords in their URLs."""
    found: set[str] = set()
    for name in type(model).model_fields:
        found |= _secrets_in(getattr(model, name))
    return found


def _secrets_in(value: object) -> set[str]:
    if isinstance(value, BaseModel):
        return secrets_of(value)
    if isinstance(value, SecretStr):
        secret = value.get_secret_value()
        # Of headers, NAME=VALUE,NAME=VALUE, each value by itself, too.
        pairs = (_HEADER.fullmatch(one.strip()) for one in secret.split(","))
        return {secret, *(match[1] for match in pairs if match)}
    if isinstance(value, Mapping):
        return {one for below in value.values() for one in _secrets_in(below)}
    if isinstance(value, str) and "://" in value and "@" in value:
        try:
            password = urlsplit(value).password
        except ValueError:
            return set()
        return {password} if password else set()
    return set()


_OF_PROCESS: Final = Redactor()


def learn_secrets(secrets: Iterable[str]) -> None:
    """Keep these out of the process's logs from now on."""
    _OF_PROCESS.learn(secrets)


def process_redactor() -> Redactor:
    """Return the redactor of the process's logs."""
    return _OF_PROCESS
