"""Data that pass are compared as a whole, wherever they are cut: a byte that differs is told."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.spark.moving_kit import COPY, begun
from tierlog.format.manifest import unkeep
from tierlog.format.side import SideObject
from tierlog.format.single import SingleIndex
from tierlog.model.errors import CorruptError
from tierlog.model.offload import Tier2Copy
from tierlog.offload.comparing import Comparing, ComparingGrains, ComparingSingle


def written(layout: Any) -> tuple[Tier2Copy, bytes, SideObject | SingleIndex]:
    """A copy, its data, and what says what they must be."""

    async def main() -> tuple[Tier2Copy, bytes, SideObject | SingleIndex]:
        life, buckets, ids = await begun(uncopied=0)
        await buckets.move(replace(COPY, layout=layout))
        places = buckets.manifests(buckets.store(COPY.target), COPY.target)
        known = await places.newest(life.claimed.name, life.claimed.incarnation)
        found = unkeep(known.ledgers[ids[1]].packed).copy
        assert found is not None
        data = buckets.other.objects[found.location.data_key][1]
        if found.location.is_single:
            return found.copy, data, SingleIndex.decode(data, len(data))
        side = buckets.other.objects[found.location.side_key][1]
        return found.copy, data, SideObject.decode(side)

    return run_virtual(main(), until_s=1000)


def compare(copy: Tier2Copy, by: SideObject | SingleIndex, pieces: list[bytes]) -> None:
    comparing: Comparing
    if isinstance(by, SingleIndex):
        comparing = ComparingSingle("data", copy, by)
    else:
        comparing = ComparingGrains("data", copy, by)
    for one in pieces:
        comparing.take(one)
    comparing.end()


@pytest.mark.parametrize("layout", ["two-objects", "single-object"])
def test_a_byte_that_differs_is_told_wherever_it_is_and_however_the_data_are_cut(
    layout: str,
) -> None:
    copy, data, by = written(layout)
    first = by.index_len if isinstance(by, SingleIndex) else 0
    used = by.used_len if isinstance(by, SingleIndex) else 0
    grain = 64 if isinstance(by, SingleIndex) else by.header.grain_len

    def cut(body: bytes, size: int) -> list[bytes]:
        places = sorted({0, first, *range(first, len(body), size), len(body)})
        return [body[start:stop] for start, stop in pairwise(places)]

    for size in (1, 7, grain - 1, grain, grain + 1, 3 * grain, len(data)):
        compare(copy, by, cut(data, size))
    grains = range(first, len(data), 3 * grain)
    for at in {0, used, first, first + grain - 1, first + grain, len(data) - 1, *grains}:
        damaged = bytearray(data)
        damaged[at] ^= 1
        for size in (max(1, grain // 3), len(data)):
            with pytest.raises(CorruptError, match="object data"):
                compare(copy, by, cut(bytes(damaged), size))
    with pytest.raises(CorruptError, match="object data"):
        compare(copy, by, cut(data[:-1], grain))
