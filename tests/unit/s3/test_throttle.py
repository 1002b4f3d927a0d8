"""Rates of namespaces: what says them, and that each has a bucket of its own."""

import pytest

from tierlog.adapters.memory.clock import SimClock
from tierlog.model.errors import RefusedError
from tierlog.ports import throttle
from tierlog.ports.throttle import NamespaceBuckets, TokenBucket, rate_of_namespace
from tierlog.runtime.settings import load_settings

SETTINGS = ("S3__NAMESPACE_BYTES_PER_S_MAX", "READER__TIER2_NAMESPACE_BYTES_PER_S_MAX")


def _buckets(*rates: str) -> NamespaceBuckets[TokenBucket]:
    return NamespaceBuckets(rates, lambda rate: TokenBucket(SimClock(), per_s=rate))


def test_a_rate_is_of_one_namespace_or_of_each_other():
    assert rate_of_namespace("Acme_1=5000") == ("Acme_1", 5000)
    assert rate_of_namespace("*=0") == ("*", 0)
    buckets = _buckets("acme=5", "*=7", "free=0")
    acme = buckets.of("acme.orders")
    assert acme is not None
    assert acme is buckets.of("acme.payments.eu")
    assert acme._per_s == 5
    assert buckets.of("other.orders") is not buckets.of("acme")
    assert buckets.of("orders") is buckets.of("acme"), "neither name has a namespace"
    assert buckets.of("") is buckets.of("orders")
    assert buckets.of("free.orders") is None
    assert _buckets("acme=5").of("other.orders") is None
    assert _buckets().of("acme.orders") is None


def test_of_many_namespaces_those_used_last_have_buckets(monkeypatch):
    monkeypatch.setattr(throttle, "NAMESPACES_MAX", 3)
    buckets = _buckets("*=7")
    kept = buckets.of("a.x")
    for name in "bcd":
        buckets.of(f"{name}.x")
        assert buckets.of("a.y") is kept
    assert len(buckets._buckets) == 3


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('["acme"]', "NAMESPACE=BYTES_PER_S"),
        ('["acme=fast"]', "NAMESPACE=BYTES_PER_S"),
        ('["acme=-1"]', "NAMESPACE=BYTES_PER_S"),
        ('["acme.orders=5"]', "before the first dot"),
        ('["=5"]', "before the first dot"),
        ('["a=5", "b=6", "a=7"]', "namespace a has two rates"),
    ],
)
def test_a_rate_that_says_nothing_is_refused_with_what_to_write(monkeypatch, setting, value, says):
    monkeypatch.setenv(f"TIERLOG_{setting}", value)
    with pytest.raises(RefusedError) as caught:
        load_settings()
    assert says in f"{caught.value} {caught.value.remedy}"
    assert setting in caught.value.remedy


def test_rates_keep_the_case_of_names(monkeypatch):
    for setting in SETTINGS:
        monkeypatch.setenv(f"TIERLOG_{setting}", '["Acme=5", "*=6"]')
    settings = load_settings()
    assert settings.s3.namespace_bytes_per_s_max == ("Acme=5", "*=6")
    assert settings.reader.tier2_namespace_bytes_per_s_max == ("Acme=5", "*=6")
