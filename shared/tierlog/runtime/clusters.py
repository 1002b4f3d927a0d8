"""Whose cluster an answer is from: an address does not tell.

When a node has died, its address may be given to a node of another cluster, which answers what it
is asked: that it has no such stream. So a call over gRPC or HTTP names the cluster that it is meant
for, and an answer the one that it is from; the wire's HELLO and WELCOME do the same. It is against
mistakes; against who pretends there are TLS and tokens.

Invariants:
    * Nothing is done for a call that names another cluster. One that names none is served.
    * What a caller knows of its cluster never changes: it was told, or believed the first answer.
"""

from collections.abc import Iterable
from typing import Final
from uuid import UUID

from tierlog.model.node import another_cluster

CLUSTER_ID: Final = "tierlog-cluster-id"
"""A header of HTTP, and of gRPC's metadata."""


class KnownCluster:
    """The cluster that is called, once that is known."""

    def __init__(self, cluster_id: UUID | None = None) -> None:
        self._text = str(cluster_id) if cluster_id is not None else None

    def __repr__(self) -> str:
        return f"<KnownCluster {self._text}>"

    def named(self) -> dict[str, str]:
        """Return what a call says; nothing before the first answer."""
        return {CLUSTER_ID: self._text} if self._text is not None else {}

    def check(self, told: str | None, *, where: str) -> None:
        """Take what an answer says of its cluster; raise if it is another one.

        One that says nothing is of a version that does not know of this.
        """
        if told is None or told == self._text:
            return
        try:
            text = str(UUID(told))
        except ValueError:
            return
        if self._text is None:
            self._text = text
        elif text != self._text:
            raise another_cluster(where, answering=text, wanted=self._text)


class OwnCluster:
    """The cluster that a service is of, as it tells callers."""

    def __init__(self, cluster_id: UUID) -> None:
        self._text = str(cluster_id)
        self.metadata: Final = ((CLUSTER_ID, self._text),)
        self.header: Final = (CLUSTER_ID.encode(), self._text.encode())

    def __repr__(self) -> str:
        return f"<OwnCluster {self._text}>"

    def admit(self, named: str | None) -> None:
        """Raise if a call is meant for another cluster."""
        if named is not None and named.lower() != self._text:
            raise another_cluster("this address", answering=self._text, wanted=named[:40])


def named_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return what the metadata of a call, or of its answer, say of the cluster."""
    for name, value in metadata or ():
        if name == CLUSTER_ID:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None
