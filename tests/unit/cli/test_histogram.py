"""Latencies in buckets: no value is told wrong by more than a hundredth, and none is lost."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tierlog.cli.histogram import BUCKETS, VALUE_MAX, Histogram, bucket_of, top_of

MICROSECONDS = st.one_of(st.integers(0, 2000), st.integers(0, VALUE_MAX))


@given(value=MICROSECONDS)
def test_a_bucket_ends_within_a_hundredth_of_what_it_holds(value):
    bucket = bucket_of(value)
    assert 0 <= bucket < BUCKETS
    assert value <= top_of(bucket) <= value * (1 + 1 / 128)
    assert bucket_of(top_of(bucket)) == bucket
    assert bucket_of(min(VALUE_MAX, top_of(bucket) + 1)) in {bucket + 1, BUCKETS - 1}


@given(values=st.lists(MICROSECONDS, min_size=1, max_size=200), share=st.floats(0, 1))
def test_a_quantile_is_that_of_the_sorted_values(values, share):
    counted = Histogram()
    for value in values:
        counted.add(value / 1e6)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1] / 1000
    assert exact <= counted.quantile_ms(share) <= exact * (1 + 1 / 128)
    assert counted.count == len(values)
    assert math.isclose(counted.average_ms(), sum(values) / len(values) / 1000)


def test_one_latency_may_count_for_many():
    counted = Histogram()
    counted.add(0.001, 98)
    counted.add(0.2, 2)
    told = counted.document()
    # 1,000 µs are in the bucket from 1,000 to 1,003.
    assert (told["p50_ms"], told["p90_ms"]) == (1.003, 1.003)
    assert (told["p99_ms"], told["max_ms"]) == (200.0, 200.0)
    assert told["average_ms"] == (98 + 400) / 100


def test_of_nothing_all_is_nothing():
    assert set(Histogram().document().values()) == {0.0}
