"""The authorisation matrix: every operation of all four services has a rule; deny by default.

"Authorisation by role and stream prefix on every route, deny by default, the matrix generated from
the routes so that a new route without a rule fails a test."
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.model.access import (
    PERMISSIONS,
    Grant,
    Permission,
    Role,
    Rule,
    Subject,
    authorise,
)
from tierlog.model.errors import Reason, RefusedError
from tierlog.proto.v1 import ingest_pb2, reader_pb2, wire_pb2
from tierlog.runtime.http_access import operations_of
from tierlog_ingest.access import HTTP_RULES
from tools.access_matrix import ingest_app, page, surfaces

SURFACES = surfaces()
EVERY = [
    (surface, operation, rule)
    for surface in SURFACES
    for operation, rule in sorted(surface.rules.items())
]
NAMES = [f"{surface.service} {operation}" for surface, operation, _ in EVERY]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda one: f"{one.service}-{one.kind}")
def test_each_operation_has_a_rule_and_each_rule_an_operation(surface):
    assert surface.operations - set(surface.rules) == set(), "has no rule: it would be refused"
    assert set(surface.rules) - surface.operations == set(), "is a rule of nothing"
    assert len(surface.operations) > 2


def test_a_new_route_without_a_rule_is_found():
    app = ingest_app()
    app.add_api_route("/v1/surprise", lambda: None, methods=["POST"])
    assert operations_of(app) - set(HTTP_RULES) == {"POST /v1/surprise"}


def test_all_four_services_and_three_kinds_are_looked_at():
    assert {(one.service, one.kind) for one in SURFACES} == {
        ("ingest", "HTTP"), ("ingest", "gRPC"), ("ingest", "wire"), ("reader", "HTTP"),
        ("reader", "gRPC"), ("scheduler", "HTTP"), ("offloader", "HTTP"),
    }  # fmt: skip
    assert len(EVERY) > 70


@pytest.mark.parametrize(("surface", "operation", "rule"), EVERY, ids=NAMES)
def test_a_rule_names_a_stream_where_the_operation_does(surface, operation, rule):
    """An operation that names a stream and whose rule doesn't would be everybody's."""
    named = _stream_of(surface.kind, operation)
    if rule.permission is not None and rule.permission is not Permission.STORE:
        assert rule.stream == named
    else:
        assert not rule.stream


def _stream_of(kind: str, operation: str) -> str:
    if kind == "HTTP":
        found = re.search(r"/v1/streams/\{(\w+)\}", operation)
        return found[1] if found else ""
    if kind == "wire":
        message = wire_pb2.WireFrame.DESCRIPTOR.fields_by_name[operation].message_type
    else:
        full, _, method = operation.strip("/").partition("/")
        services = {
            service.full_name: service
            for file in (ingest_pb2, reader_pb2)
            for service in file.DESCRIPTOR.services_by_name.values()
        }
        if full not in services:
            return ""
        message = services[full].methods_by_name[method].input_type
    return "stream" if message is not None and "stream" in message.fields_by_name else ""


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("surface", "operation", "rule"), EVERY, ids=NAMES)
def test_a_role_may_do_what_its_permissions_say_and_nothing_else(surface, operation, rule, role):
    everywhere = Subject(name="token:x", grant=Grant(roles=frozenset({role}), streams=("*",)))
    elsewhere = Subject(name="token:x", grant=Grant(roles=frozenset({role}), streams=("b*",)))
    may = rule.permission is None or rule.permission in PERMISSIONS[role]
    assert _allows(everywhere, rule, operation) is may
    assert _allows(elsewhere, rule, operation) is (rule.permission is None)
    assert _allows(None, rule, operation) is (rule.permission is None)


def _allows(subject: Subject | None, rule: Rule | None, operation: str) -> bool:
    expected = Reason.UNAUTHENTICATED if subject is None else Reason.PERMISSION_DENIED
    stream = "a" if rule is not None and rule.stream else ""
    found = _refusal(subject, rule, operation, stream)
    assert found in {None, expected}
    return found is None


def _refusal(
    subject: Subject | None, rule: Rule | None, operation: str, stream: str
) -> Reason | None:
    try:
        authorise(subject, rule, operation=operation, stream=stream)
    except RefusedError as error:
        return error.reason
    return None


def test_what_has_no_rule_nobody_may():
    everything = Subject(name="token:x", grant=Grant(roles=frozenset(Role), streams=("*",)))
    assert not _allows(everything, None, "GET /v1/surprise")
    assert not _allows(Subject(name="token:x"), Rule(permission=Permission.READ), "GET /x")


def test_no_stream_named_is_no_stream_allowed():
    subject = Subject(name="token:x", grant=Grant(roles=frozenset(Role), streams=("*",)))
    rule = Rule(permission=Permission.READ, stream="stream")
    with pytest.raises(RefusedError, match=r"may not do read"):
        authorise(subject, rule, operation="read", stream="")


@pytest.mark.parametrize(
    ("pattern", "stream", "fits"),
    [
        ("*", "anything", True),
        ("orders", "orders", True),
        ("orders", "orders-partition-0", True),
        ("orders", "orders-partition-1023", True),
        ("orders", "orders-partition-", False),
        ("orders", "orders-partition-1x", False),
        ("orders", "orders-partition-12345", False),
        ("orders", "orders2", False),
        ("orders", "order", False),
        ("orders.*", "orders.eu", True),
        ("orders.*", "orders", False),
        ("orders.*", "ordersXeu", False),
        ("a-*", "a-", True),
        ("a-*", "b-a-", False),
    ],
)
def test_patterns_fit_names_prefixes_and_partitions(pattern, stream, fits):
    assert Grant(streams=(pattern,)).includes(stream) is fits


@pytest.mark.parametrize("pattern", ["", "**", "a*b", "*a", "../x", "a/b", "a b", "ä", "a" * 129])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(RefusedError, match="no pattern"):
        Grant(streams=(pattern,))


NAME = st.from_regex(r"[a-c][a-c.-]{0,6}", fullmatch=True)


@given(prefix=NAME, stream=NAME)
def test_a_prefix_fits_exactly_what_begins_so(prefix, stream):
    assert Grant(streams=(prefix + "*",)).includes(stream) is (stream[: len(prefix)] == prefix)


def test_the_page_has_every_operation():
    text = page()
    for surface in SURFACES:
        for operation in surface.operations:
            assert f"| `{operation}` |" in text


TOLD = [
    (
        Grant(roles=frozenset({Role.CONSUMER}), streams=("orders",)),
        Rule(permission=Permission.CREATE, stream="stream"),
        "Its grant lacks the role producer or admin. ",
    ),
    (
        Grant(roles=frozenset({Role.CONSUMER}), streams=("orders",)),
        Rule(permission=Permission.READ, stream="stream"),
        "Its grant lacks a stream pattern that fits 'billing'. ",
    ),
    (
        Grant(roles=frozenset({Role.OPERATOR}), streams=("orders",)),
        Rule(permission=Permission.OBSERVE),
        "Its grant lacks the stream pattern *. ",
    ),
]


@pytest.mark.parametrize(("grant", "rule", "missing"), TOLD)
@pytest.mark.parametrize("name", ["token:x", "certificate:x"])
def test_a_refusal_says_which_grant_is_missing_and_where_grants_are_set(name, grant, rule, missing):
    with pytest.raises(RefusedError) as caught:
        authorise(Subject(name=name, grant=grant), rule, operation="ask", stream="billing")
    remedy = caught.value.remedy
    assert remedy.startswith(missing)
    assert f"security.grants of the services, subject '{name}'" in remedy
    assert ("claims of its token" in remedy) is name.startswith("token:")
