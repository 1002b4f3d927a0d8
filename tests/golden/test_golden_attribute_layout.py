"""The five steps by which the article shows progressive compaction, node by node (seeds/004).

Pages have room for four attributes, or three children. A page's name is what the article calls
the node then, by its level and its first key.
"""

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import pytest

from tierlog.attributes.memory import MemoryTree
from tierlog.attributes.update import SEED, Shape
from tierlog.format.attribute_page import Page, capacity
from tierlog.model.attributes import AttributeKey

PAGE_BYTES = 122
WITH = replace(SEED, page_bytes=PAGE_BYTES)
WITHOUT = replace(WITH, compaction=None)

ROOT = 1


class Step(NamedTuple):
    """What changes, what the nodes are called then, and what is appended."""

    keys: tuple[int, ...]
    names: dict[tuple[int, int], int]
    without: list[int]
    compacting: list[int]


STEPS = [
    Step((40, 50, 60, 70), {(0, 40): 6}, [6], [6]),
    Step((80,), {(0, 40): 6, (0, 60): 7, (ROOT, 40): 3}, [6, 7, 3], [6, 7, 3]),
    Step(
        (45, 52, 54, 56),
        {(0, 40): 5, (0, 52): 6, (0, 60): 7, (ROOT, 40): 3},
        [5, 6, 3],
        [5, 6, 3],
    ),
    Step(
        (10, 20),
        {
            (0, 10): 4, (0, 40): 5, (0, 52): 6, (0, 60): 7,
            (1, 10): 2, (1, 52): 3, (2, 10): 1,
        },
        [5, 4, 3, 2, 1],
        [7, 5, 4, 3, 2, 1],
    ),
    Step((52,), {(0, 52): 6, (1, 52): 3, (2, 10): 1}, [6, 3, 1], [6, 3, 1]),
]  # fmt: skip


def _key(number: int) -> AttributeKey:
    return AttributeKey(bytes([number]) + bytes(15))


def _layout(shape: Shape) -> tuple[list[list[int]], int]:
    """Return what each step appends, and how many nodes lie below what is needed at the end."""
    tree = MemoryTree(shape)
    appended, offsets = [], []
    for number, step in enumerate(STEPS):
        at = tree.root.end
        names = []
        for raw in tree.update({_key(key): number for key in step.keys}).pages:
            page = Page(raw, at)
            names.append(step.names[page.level, page.key(0)[0]])
            offsets.append(at)
            at += len(raw)
        appended.append(names)
    return appended, sum(offset < tree.root.start for offset in offsets)


def test_pages_are_as_small_as_in_the_figure():
    assert (capacity(0, PAGE_BYTES), capacity(1, PAGE_BYTES)) == (4, 3)


@pytest.mark.covers("E44", "E45", "E46", "E47", "E48", "E49")
def test_without_compaction():
    appended, needless = _layout(WITHOUT)
    assert appended == [step.without for step in STEPS]
    assert [*chain(*appended)] == [6, 6, 7, 3, 5, 6, 3, 5, 4, 3, 2, 1, 6, 3, 1]
    assert needless == 2


@pytest.mark.covers("E40", "E44", "E45", "E46", "E47", "E48", "E49")
def test_with_compaction():
    appended, needless = _layout(WITH)
    assert appended == [step.compacting for step in STEPS]
    assert [*chain(*appended)] == [6, 6, 7, 3, 5, 6, 3, 7, 5, 4, 3, 2, 1, 6, 3, 1]
    assert needless == 7
