"""Authorisation in front of all routes of an HTTP application.

Owns finding the route and its rule before anything of the body is read. The routes themselves
decide which one is meant, so that no path means one thing here and another there.

Invariants:
    * A route without a rule is refused; a path without a route is told of to known subjects alone.
    * Nothing behind this is called for a request that is refused, and its body is not read.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierlog.model.access import Rule, Rules, Subject, unauthenticated
from tierlog.model.errors import Reason, TierlogError
from tierlog.runtime.access import Gate, audit, bearer_token, is_audited, outcome_of
from tierlog.runtime.http import CERTIFICATE_NAMES, UNKNOWN_CALLER, problem_response

_NO_SUBJECT: Final = Rule(permission=None)
_STILL: Final = "tierlog.still"


def guard_http(app: FastAPI, rules: Rules, gate: Gate | None) -> None:
    """Let nobody do anything in ``app`` but what ``rules`` allow; no gate: everybody may all."""
    if gate is not None:
        assert app.middleware_stack is None, "it would not be asked any more"
        # Behind what names the request, which comes first: the audit log has the name that all
        # other lines have. Before all else.
        app.user_middleware.insert(
            1, Middleware(HttpAccess, routes=lambda: app.router.routes, rules=rules, gate=gate)
        )


def still_admitted(request: Request) -> Callable[[], None]:
    """Return what raises UNAUTHENTICATED once the token that was shown has ended.

    For answers that go on and on: of others nobody asks twice.
    """
    still: Callable[[], None] = request.scope.get(_STILL, _nothing)
    return still


def _nothing() -> None:
    """Of what was open from the start nothing ends."""


class HttpAccess:
    """The middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Callable[[], Sequence[BaseRoute]],
        rules: Rules,
        gate: Gate,
    ) -> None:
        self._app = app
        self._routes = routes
        self._rules = rules
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authorise one request, and pass it on."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        operation, params = _operation(self._routes(), scope)
        rule = self._rules.get(operation) if operation is not None else _NO_SUBJECT
        subject: Subject | None = None
        headers = dict(scope["headers"])
        stream = str(params.get(rule.stream, "")) if rule is not None and rule.stream else ""
        told = {
            "action": operation or "",
            "target": _target(params, stream),
            "peer": _peer(scope),
        }
        try:
            subject = self._who(scope, headers, operation, rule)
            self._gate.admit(subject, rule, operation=operation or "", stream=stream)
        except TierlogError as error:
            if is_audited(rule):
                audit(subject, outcome=outcome_of(error), **told)
            await _refuse(error, scope, receive, send)
            return
        if subject is not None:
            scope[_STILL] = partial(self._gate.check_still, subject)
        else:
            scope[UNKNOWN_CALLER] = True
        if not is_audited(rule):
            await self._app(scope, receive, send)
            return
        await self._audited(subject, told, scope, receive, send)

    def _who(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        operation: str | None,
        rule: Rule | None,
    ) -> Subject | None:
        """Return who asks; nobody is asked who it is for what is public."""
        if operation is not None and rule is not None and rule.permission is None:
            return None
        token = bearer_token(_text(headers.get(b"authorization")))
        names = scope.get("state", {}).get(CERTIFICATE_NAMES, ())
        subject = self._gate.identify(token=token, names=names)
        if subject is None:
            raise unauthenticated("neither a token nor a certificate was shown")
        return subject

    async def _audited(
        self,
        subject: Subject | None,
        told: Mapping[str, str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        outcome = "failed"

        async def sending(message: Message) -> None:
            nonlocal outcome
            if message["type"] == "http.response.start":
                status = message["status"]
                outcome = "done" if status < 400 else f"refused with {status}"
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            audit(subject, outcome=outcome, **told)


def operations_of(app: FastAPI) -> set[str]:
    """Return every operation of an application, as rules name them."""
    return {
        f"{method} {getattr(route, 'path', '')}"
        for route in app.routes
        for method in (getattr(route, "methods", None) or {"ANY"}) - {"HEAD"}
    }


def _operation(routes: Sequence[BaseRoute], scope: Scope) -> tuple[str | None, Mapping[str, Any]]:
    """Return the route as the rules name it, and its parameters; None: there is none."""
    for route in routes:
        match, found = route.matches(scope)
        if match is Match.FULL:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            # One without a path of its own has no rule either, and is refused.
            return f"{method} {getattr(route, 'path', '')}", found.get("path_params", {})
    return None, {}


async def _refuse(error: TierlogError, scope: Scope, receive: Receive, send: Send) -> None:
    response = problem_response(error)
    if error.reason is Reason.UNAUTHENTICATED:
        response.headers["WWW-Authenticate"] = "Bearer"
    # Of a body that nobody reads the next request could not be told apart.
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


def _text(header: bytes | None) -> str | None:
    return header.decode("latin-1") if header is not None else None


def _target(params: Mapping[str, Any], stream: str) -> str:
    return stream or ",".join(f"{name}={value}"[:140] for name, value in sorted(params.items()))


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return f"{client[0]}:{client[1]}" if client else ""
