"""Whatever comes in whatever sizes: entries stay in order, once each, within every limit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import ALONE, STREAM, SmallCluster, draft
from tests.unit.streams.test_owners import make_owners, read_stream, running
from tierlog.model.policy import Policy

# mypy: disable-error-code="index,arg-type"

SIZES = st.lists(st.sampled_from([0, 1, 12, 50, 99, 100, 101, 500]), min_size=1, max_size=12)
APPENDS = st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=12)


@pytest.mark.covers("A06", "D05", "D09")
@settings(max_examples=60, deadline=None)
@given(
    appends=APPENDS,
    entries_max=st.integers(1, 9),
    bytes_max=st.sampled_from([1, 100, 300, 1000]),
    run_bytes_max=st.sampled_from([1, 64, 300, 65536]),
    wait_every=st.integers(1, 5),
)
def test_order_places_and_limits(appends, entries_max, bytes_max, run_bytes_max, wait_every):
    async def main():
        cluster = SmallCluster()
        policy = Policy(ledger_entries_max=entries_max, ledger_bytes_max=bytes_max)
        catalog = await cluster.start(policy=policy)
        small_runs = ALONE.model_copy(update={"run_bytes_max": run_bytes_max})
        owners = make_owners(cluster, "n1", settings=small_runs)
        expected, places, answers, serial = [], [], [], 0
        async with running(owners):
            for number, (sizes, timed) in enumerate(appends):
                entries = []
                for size in sizes:
                    serial += 1
                    entries.append((b"%d " % serial * size)[:size])
                expected += entries
                times = (number + 1, number + 2) if timed else (0, 0)
                answers.append(owners.submit(STREAM, draft(*entries, publish_ms=times)))
                if number % wait_every == 0:
                    await answers[-1]
            for answer, (sizes, _) in zip(answers, appends, strict=True):
                ranges = await answer
                own = [
                    (one.ledger_id, entry_id)
                    for one in ranges
                    for entry_id in range(one.first_entry_id, one.last_entry_id + 1)
                ]
                assert len(own) == len(sizes)
                places += own
        assert await read_stream(cluster) == expected
        assert places == sorted(set(places))
        for listed in (await catalog.streams.snapshot(STREAM)).ledgers:
            assert 1 <= listed.entry_count <= entries_max
            runs = cluster.nodes["n1"].runs[listed.ledger_id].values()
            last = max(runs, key=lambda run: run.first_entry_id)
            *_, last_entry = last.entries()
            assert listed.length - len(last_entry) < bytes_max or listed.entry_count == 1
            for run in runs:
                assert run.header.count == 1 or run.header.frames_len <= run_bytes_max
        assert owners._parts.budget.used == 0

    run_virtual(main())
