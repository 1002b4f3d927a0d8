"""Claim: inserts into a sorted container are cheaper than into a balanced tree, lookups dearer.

sorted    ``SortedDict``, as the reader's index has it
avl       an AVL tree written here, the seed's choice, as lean as Python lets it be

Both map where an entry begins to the entry. Measured with ``--entries`` in them: inserts at the
end, as a tail does; inserts anywhere, as fetches do; floor lookups anywhere.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Final

from sortedcontainers import SortedDict

from common import positive

ROUNDS: Final = 5


class Node:
    """One entry of the tree, and how high it stands."""

    __slots__ = ("height", "key", "left", "right", "value")

    def __init__(self, key: int, value: object) -> None:
        self.key, self.value, self.height = key, value, 1
        self.left: Node | None = None
        self.right: Node | None = None


def _height(node: Node | None) -> int:
    return node.height if node is not None else 0


def _measured(node: Node) -> Node:
    node.height = 1 + max(_height(node.left), _height(node.right))
    return node


def _turned_right(node: Node) -> Node:
    left = node.left
    assert left is not None
    node.left, left.right = left.right, node
    _measured(node)
    return _measured(left)


def _turned_left(node: Node) -> Node:
    right = node.right
    assert right is not None
    node.right, right.left = right.left, node
    _measured(node)
    return _measured(right)


def _balanced(node: Node) -> Node:
    lean = _height(node.left) - _height(node.right)
    if lean > 1 and node.left is not None:
        if _height(node.left.left) < _height(node.left.right):
            node.left = _turned_left(node.left)
        return _turned_right(node)
    if lean < -1 and node.right is not None:
        if _height(node.right.right) < _height(node.right.left):
            node.right = _turned_right(node.right)
        return _turned_left(node)
    return _measured(node)


class AvlTree:
    """Insert and floor, all that is compared."""

    def __init__(self) -> None:
        self.root: Node | None = None

    def insert(self, key: int, value: object) -> None:
        """Put a key in that is not there yet."""
        path: list[Node] = []
        node = self.root
        while node is not None:
            path.append(node)
            node = node.left if key < node.key else node.right
        new = Node(key, value)
        while path:
            above = path.pop()
            if key < above.key:
                above.left = new
            else:
                above.right = new
            height = above.height
            new = _balanced(above)
            if new is above and above.height == height:
                return
        self.root = new

    def floor(self, key: int) -> object:
        """Return the value of the largest key that is not larger."""
        node, found = self.root, None
        while node is not None:
            if node.key <= key:
                found, node = node.value, node.right
            else:
                node = node.left
        return found


class Sorted:
    """The same two calls on the sorted container."""

    def __init__(self) -> None:
        self.entries: SortedDict = SortedDict()

    def insert(self, key: int, value: object) -> None:
        """Put a key in that is not there yet."""
        self.entries[key] = value

    def floor(self, key: int) -> object:
        """Return the value of the largest key that is not larger."""
        at = self.entries.bisect_right(key) - 1
        return self.entries.peekitem(at)[1] if at >= 0 else None


def measure(make: Callable[[], AvlTree | Sorted], keys: list[int]) -> dict[str, float]:
    """Return microseconds of CPU for each kind of call."""
    count = len(keys)

    def timed(run: Callable[[], object]) -> float:
        start = time.process_time()
        run()
        return (time.process_time() - start) / count * 1e6

    def fill(index: AvlTree | Sorted, order: list[int]) -> None:
        for key in order:
            index.insert(key, key)

    full, other = make(), make()
    in_order = sorted(keys)
    result = {"insert at the end": timed(lambda: fill(full, in_order))}
    result["insert anywhere"] = timed(lambda: fill(other, keys))
    result["floor"] = timed(lambda: [full.floor(key + 7) for key in keys])
    assert all(full.floor(key + 7) == key == other.floor(key) for key in keys[:1000])
    return result


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description="the read index's map")
    parser.add_argument("--entries", type=positive, default=100_000)
    parser.add_argument("--quick", action="store_true", help="small and short: to try it out")
    arguments = parser.parse_args()
    count = 10_000 if arguments.quick else arguments.entries
    keys = [number * 1000 for number in range(count)]
    random.Random(1).shuffle(keys)
    runs: dict[str, list[dict[str, float]]] = {"sorted": [], "avl": []}
    for _ in range(ROUNDS):
        runs["sorted"].append(measure(Sorted, keys))
        runs["avl"].append(measure(AvlTree, keys))
    print(f"read_index, {count:,} entries; median µs of CPU a call, and sorted / avl")
    for what in runs["avl"][0]:
        ours, tree = ([run[what] for run in runs[name]] for name in ("sorted", "avl"))
        ratio = statistics.median(a / b for a, b in zip(ours, tree, strict=True))
        print(
            f"  {what:18} sorted {statistics.median(ours):6.2f}  "
            f"avl {statistics.median(tree):6.2f}  ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
