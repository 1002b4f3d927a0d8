"""What is in front of a call that answers on and on keeps none of its answers.

The next one may be long in coming, and the room of the one before was given back.
"""

import weakref
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import grpc

from tierlog.runtime.requests import RequestIds
from tierlog.runtime.rpc import ClusterInterceptor, ErrorInterceptor
from tierlog.runtime.rpc_access import AccessInterceptor

DETAILS = SimpleNamespace(method="/tierlog.v1.Reader/Follow")


class Message:
    """An answer that can be asked whether anybody has it."""

    def ByteSize(self):  # noqa: N802 - as a message of protobuf has it
        return 1


class Context:
    """A call whose client takes everything at once."""

    def __init__(self):
        self.sent = 0

    def invocation_metadata(self):
        return ()

    def auth_context(self):
        return {}

    def peer(self):
        return "ipv4:10.0.0.1:1"

    async def read(self):
        return object()

    async def send_initial_metadata(self, _):
        """Nobody looks at it."""

    async def write(self, message):
        assert isinstance(message, Message)
        self.sent += 1


async def test_no_interceptor_keeps_an_answer_while_the_next_one_is_waited_for():
    given = []

    async def answers(_request, _context):
        for _ in range(3):
            message = Message()
            given.append(weakref.ref(message))
            yield message
            del message
            assert [one() for one in given] == [None] * len(given)

    async def innermost(_details):
        return grpc.unary_stream_rpc_method_handler(answers)

    gate: Any = SimpleNamespace(
        identify=lambda **_: "somebody", admit=lambda *_, **__: None, check_still=lambda _: None
    )
    cluster = ClusterInterceptor(UUID(int=1), public=False)
    access = AccessInterceptor({}, gate)
    errors = ErrorInterceptor(RequestIds(None))
    handler = await errors.intercept_service(
        lambda details: access.intercept_service(
            lambda inner: cluster.intercept_service(innermost, inner), details
        ),
        DETAILS,
    )
    context = Context()
    await handler.stream_stream(object(), context)
    assert (len(given), context.sent) == (3, 3)
