"""How a process calls services: over TLS or not, what it shows of itself, and of which cluster.

Invariant: a token goes over TLS alone, to a server whose name was verified.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from tierlog.model.errors import RefusedError
from tierlog.runtime.clusters import KnownCluster
from tierlog.runtime.tls import ClientTls


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """One for a process. ``token`` gives what is shown now."""

    tls: ClientTls | None = None
    token: Callable[[], str] | None = None
    cluster: KnownCluster | None = None
    """Whose answers count; None: everybody's."""

    def __post_init__(self) -> None:
        if self.token is not None and self.tls is None:
            raise RefusedError(
                "a token would be sent in plain text",
                remedy="Set security.tls.ca_file, or take security.token_file away",
            )

    def __repr__(self) -> str:
        return f"<Calling {self.tls!r}{' with a token' if self.token is not None else ''}>"

    @property
    def scheme(self) -> str:
        """The scheme of URLs."""
        return "http" if self.tls is None else "https"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the context of the next connection; None: it is not encrypted."""
        return self.tls.context() if self.tls is not None else None

    def headers(self) -> dict[str, str]:
        """Return what a request over HTTP carries."""
        named = self.cluster.named() if self.cluster is not None else {}
        if self.token is not None:
            named["Authorization"] = f"Bearer {self.token()}"
        return named

    def within(self, cluster_id: UUID) -> "Calling":
        """Return the same for whoever knows its cluster."""
        return replace(self, cluster=KnownCluster(cluster_id))

    def check(self, told: str | None, *, where: str) -> None:
        """Take what an answer says of its cluster; raise if it is another one than is called."""
        if self.cluster is not None:
            self.cluster.check(told, where=where)


PLAIN: Final = Calling()
