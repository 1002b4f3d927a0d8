"""What attaches staging ledgers calls owners as the settings say: over TLS, with its token.

The threat: "no insecure fallback"; and a write that can be committed nowhere but in plain text.
"""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.security.making import Authority, Issuer, gate_of
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.ports.streams import Attachment, AttachOutcome
from tierlog.proto.v1 import ingest_pb2, ingest_pb2_grpc
from tierlog.runtime.rpc import serve_grpc
from tierlog.runtime.rpc_access import AccessInterceptor
from tierlog.runtime.settings import Settings
from tierlog.runtime.tls import ServerTls
from tierlog.wiring.client import open_attach_desk
from tierlog_ingest.access import RPC_RULES

CLUSTER = UUID(int=9)
STREAM = StreamName("orders")
WANTED = Attachment(ledger_ids=(LedgerId(7),), writer_id=UUID(int=1), number=1)


class Owner(ingest_pb2_grpc.IngestServicer):
    """An owner that lies on the address it is asked at."""

    address = ""

    async def FindOwner(self, request, context):  # noqa: N802 - gRPC's names
        return ingest_pb2.FindOwnerResponse(
            node_id="n", grpc_address=self.address, cluster_id=CLUSTER.bytes
        )

    async def Attach(self, request, context):  # noqa: N802
        return ingest_pb2.AttachResponse(outcome=ingest_pb2.ATTACH_OUTCOME_ATTACHED)


async def test_an_owner_is_found_and_asked_over_tls_with_the_token(tmp_path):
    authority, issuer = Authority(tmp_path), Issuer(tmp_path / "jwks.json")
    owner = Owner()  # type: ignore[abstract]

    async def attached(settings, cluster_id=CLUSTER):
        async with open_attach_desk(
            settings, ingest_grpc=owner.address, cluster_id=cluster_id
        ) as desk:
            return await desk.attach(STREAM, WANTED, deadline_s=10)

    def settings_of(*roles):
        token = issuer.token("spark", roles=roles, streams=("*",))
        security = {"tls": {"ca_file": str(authority.file)}, "token": token}
        return Settings.model_validate({"security": security})

    tls = ServerTls(authority.files(authority.issue("server")), client_certificates=False)
    access = AccessInterceptor(RPC_RULES, gate_of(issuer))
    async with serve_grpc(
        lambda server: ingest_pb2_grpc.add_IngestServicer_to_server(owner, server),
        host="127.0.0.1", port=0, tls=tls, access=access,
    ) as port:  # fmt: skip
        owner.address = f"127.0.0.1:{port}"
        assert await attached(settings_of("producer")) is AttachOutcome.ATTACHED
        with pytest.raises(RefusedError) as caught:
            await attached(settings_of("service"))
        assert caught.value.reason is Reason.PERMISSION_DENIED
        with pytest.raises(RetryableError, match="another cluster"):
            await attached(settings_of("producer"), UUID(int=2))
        with pytest.raises(RetryableError):
            await attached(Settings())
