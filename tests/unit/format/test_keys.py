"""Objects are named, and described, as Pulsar names and describes them."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.format.keys import (
    ObjectRole,
    Software,
    check_object_metadata,
    cluster_of,
    object_keys,
    object_metadata,
    parse_key,
    require_key,
)
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import INT64_MAX, LedgerId, StreamName

ATTEMPT = UUID("0d8f3a52-6d2b-4c1e-9b7a-2f1f4c9f7e11")
CLUSTER = UUID("11111111-2222-3333-4444-555555555555")


def metadata_of(role: ObjectRole) -> dict[str, str]:
    return object_metadata(
        role,
        stream=StreamName("orders"),
        cluster_id=CLUSTER,
        cluster_name="cellar",
        software=Software(version="0.1.0", gitsha="abc"),
    )


def test_one_ledger_has_a_data_and_an_index_object() -> None:
    keys = object_keys("", ATTEMPT, LedgerId(12))
    assert keys.data == "0d8f3a52-6d2b-4c1e-9b7a-2f1f4c9f7e11-ledger-12"
    assert keys.index == "0d8f3a52-6d2b-4c1e-9b7a-2f1f4c9f7e11-ledger-12-index"
    assert keys.side == "0d8f3a52-6d2b-4c1e-9b7a-2f1f4c9f7e11-ledger-12-side"


@pytest.mark.parametrize("prefix", ["cellar/a", "/cellar/a", "cellar/a/"])
def test_a_prefix_ends_with_one_slash(prefix: str) -> None:
    assert object_keys(prefix, ATTEMPT, LedgerId(1)).data == f"cellar/a/{ATTEMPT}-ledger-1"


@given(st.uuids(), st.integers(0, INT64_MAX), st.sampled_from(["", "p", "a/b"]))
def test_keys_and_back(uuid: UUID, ledger_id: int, prefix: str) -> None:
    keys = object_keys(prefix, uuid, LedgerId(ledger_id))
    for role in ObjectRole:
        key = getattr(keys, role.value)
        assert parse_key(prefix, key) == (uuid, ledger_id, role)
        assert parse_key("other", key) is None


@pytest.mark.parametrize(
    "key",
    [
        "",
        "streams/orders/manifest",
        f"{ATTEMPT}",
        f"{ATTEMPT}-index",
        f"{ATTEMPT}-ledger-",
        f"{ATTEMPT}-ledger-01",
        f"{ATTEMPT}-ledger-1-INDEX",
        f"{ATTEMPT}-ledger-1-index2",
        f"{ATTEMPT}-ledger-9223372036854775808",
        f"{str(ATTEMPT).upper()}-ledger-1",
        f"x{ATTEMPT}-ledger-1",
    ],
)
def test_other_keys_are_not_ours(key: str) -> None:
    assert parse_key("", key) is None
    with pytest.raises(RefusedError, match="not the key of an offloaded ledger"):
        require_key("", key)


def test_user_metadata_is_pulsars_and_the_cluster_id() -> None:
    assert metadata_of(ObjectRole.DATA) == {
        "role": "data",
        "s3managedledgeroffloaderformatversion": "1",
        "managedledgername": "orders",
        "s3managedledgeroffloadersoftwareversion": "0.1.0",
        "s3managedledgeroffloadersoftwaregitsha": "abc",
        "pulsarclustername": "cellar",
        "tierlogclusterid": str(CLUSTER),
    }
    assert metadata_of(ObjectRole.INDEX)["role"] == "index"
    assert cluster_of(metadata_of(ObjectRole.DATA)) == CLUSTER
    assert cluster_of({}) is None
    assert cluster_of({"tierlogclusterid": "?"}) is None


def test_the_format_version_is_checked_on_every_object() -> None:
    good = metadata_of(ObjectRole.INDEX)
    check_object_metadata(good, ObjectRole.INDEX)
    check_object_metadata({key.upper(): value for key, value in good.items()}, ObjectRole.INDEX)
    version = "s3managedledgeroffloaderformatversion"
    for missing in ({}, {version: ""}, {version: "one"}, {version: "1" * 50}, {version: "-1"}):
        with pytest.raises(CorruptError, match="not one of ours"):
            check_object_metadata(missing, ObjectRole.INDEX, key="k")
    with pytest.raises(RefusedError, match="format version 2"):
        check_object_metadata({**good, version: "2"}, ObjectRole.INDEX)
    with pytest.raises(CorruptError, match="is a index object where a data object belongs"):
        check_object_metadata(good, ObjectRole.DATA)
    check_object_metadata({version: "1"}, ObjectRole.DATA)
