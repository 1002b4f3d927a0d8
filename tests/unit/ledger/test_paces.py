"""Which replica is asked first: the fastest, but those as fast keep their order (``paces``)."""

# Ids are plain names here.
# mypy: disable-error-code="arg-type"

from hypothesis import given
from hypothesis import strategies as st

from tierlog.ledger.paces import PaceLimits, Paces

NAMES = ["n1", "n2", "n3"]
LIMITS = PaceLimits(weight=0.5, remembered_s=30, failed_s=10, equal_factor=2, equal_s=0.005)


def paces_of(**taken_s):
    paces = Paces(LIMITS)
    for name, took_s in taken_s.items():
        paces.answered(name, took_s, now_s=0)
    return paces


def test_the_fastest_comes_first_and_equals_keep_their_order():
    assert paces_of(n1=0.5, n2=0.1, n3=0.11).order(NAMES, now_s=1) == ["n2", "n3", "n1"]
    assert paces_of(n1=0.19, n2=0.1, n3=0.11).order(NAMES, now_s=1) == NAMES
    assert paces_of(n1=0.005, n2=0.001).order(NAMES, now_s=1) == NAMES
    assert Paces(LIMITS).order(NAMES, now_s=0) == NAMES


def test_who_is_not_known_counts_as_quick_and_is_so_tried_again():
    assert paces_of(n1=0.5, n2=0.1).order(NAMES, now_s=1) == ["n2", "n3", "n1"]
    assert paces_of(n1=0.5, n2=0.1).order(NAMES, now_s=30) == NAMES


def test_who_failed_lately_comes_last_until_it_answers():
    paces = paces_of(n2=3.0)
    paces.failed("n1", now_s=1)
    assert paces.order(NAMES, now_s=2) == ["n3", "n2", "n1"]
    assert paces.failed_lately("n1", now_s=10.9)
    assert paces.order(NAMES, now_s=11) == ["n1", "n3", "n2"]
    paces.failed("n1", now_s=12)
    paces.answered("n1", 0.001, now_s=13)
    assert paces.order(NAMES, now_s=13) == ["n1", "n3", "n2"]


def test_answers_are_smoothed_and_silence_only_makes_slower():
    paces = paces_of(n1=1.0)
    paces.answered("n1", 2.0, now_s=1)
    assert paces.expected_s("n1", now_s=1) == 1.5
    paces.silent("n1", 1.0, now_s=2)
    assert paces.expected_s("n1", now_s=2) == 1.5
    paces.silent("n1", 4.0, now_s=2)
    assert paces.expected_s("n1", now_s=2) == 4.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["answered", "silent", "failed"]),
            st.sampled_from(NAMES),
            st.floats(0, 10),
            st.floats(0, 20),
        ),
        max_size=20,
    ),
    st.permutations(NAMES),
)
def test_whatever_happened_each_node_is_asked_once(events, asked):
    paces, now_s = Paces(LIMITS), 0.0
    for what, name, took_s, later_s in events:
        now_s += later_s
        if what == "failed":
            paces.failed(name, now_s=now_s)
        else:
            getattr(paces, what)(name, took_s, now_s=now_s)
    ordered = paces.order(asked, now_s=now_s)
    assert sorted(ordered) == sorted(NAMES)
    failed = [paces.failed_lately(one, now_s=now_s) for one in ordered]
    assert failed == sorted(failed)
