"""A radix tree over blocks of bytes, with a bound and least-recently-used eviction from the leaves.

```
root ── [A B C] ──┬── [D E]        sequences seen: A B C D E, A B C F, A B C F G H I
                  └── [F] ── [G H I]
```
A node is a run of blocks. Runs end where sequences part, and where a shorter sequence was used
later than a longer one, so that all blocks of a run were used at the same time: eviction takes
blocks in exactly the order of their use, and never one with blocks after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from lmcache_core.errors import IntegrityError

V = TypeVar("V")


class _Node(Generic[V]):
    """A run of blocks, at least one of them (but for the root), each with its value."""

    __slots__ = ("blocks", "children", "last_use", "parent", "values")

    def __init__(
        self, parent: _Node[V] | None, blocks: list[bytes], values: list[V], last_use: int
    ) -> None:
        self.parent = parent
        self.blocks = blocks
        self.values = values
        self.last_use = last_use
        self.children: dict[bytes, _Node[V]] = {}


class RadixTree(Generic[V]):
    """Values of sequences of blocks, found by the blocks. Not thread-safe.

    Args:
        max_blocks: Bound on the blocks held, at least 1; those used longest ago go, from the ends
            of their sequences.

    Raises:
        ValueError: The bound is below 1.
    """

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks={max_blocks}: a tree holds at least one block")
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self._num_uses = 0
        self._root: _Node[V] = _Node(None, [], [], 0)
        # All nodes but the root, least recently used first. A use moves its whole path to the end,
        # deepest node first: children come before their parents, and so the first node is always a
        # leaf.
        self._by_use: OrderedDict[_Node[V], None] = OrderedDict()

    @property
    def num_nodes(self) -> int:
        """Runs of blocks."""
        return len(self._by_use)

    def prefix_length(self, blocks: Sequence[bytes]) -> int:
        """Return how many blocks, from the first, are held. Does not count as a use."""
        node, at = self._root, 0
        while at < len(blocks) and (child := node.children.get(blocks[at])) is not None:
            num_common = _num_common(child.blocks, blocks[at : at + len(child.blocks)])
            at += num_common
            if num_common < len(child.blocks):
                break
            node = child
        return at

    def find(self, blocks: Sequence[bytes]) -> list[V]:
        """Return the values of the longest prefix that is held; counts as a use of it."""
        values: list[V] = []
        for node in self._use(blocks):
            values += node.values
        return values

    def insert(self, blocks: Sequence[bytes], values: Sequence[V]) -> None:
        """Hold a sequence; counts as a use. What is held already stays unchanged; of more than
        `max_blocks` the first are held.

        Args:
            blocks: The sequence.
            values: One for each block, the same whenever the blocks up to it are the same.

        Raises:
            ValueError: There are not as many values as blocks.
        """
        if len(blocks) != len(values):
            raise ValueError(f"{len(values)} values for {len(blocks)} blocks")
        path = self._use(blocks)
        at = sum(len(node.blocks) for node in path)
        if at < len(blocks):
            self._append(path[-1] if path else self._root, list(blocks[at:]), list(values[at:]))
            self.num_blocks += len(blocks) - at
            self._evict()

    def check_integrity(self) -> None:
        """Compare the tree with its books.

        Raises:
            IntegrityError: They do not balance.
        """
        place = {node: i for i, node in enumerate(self._by_use)}
        num_blocks, open_nodes, num_nodes = 0, [self._root], 0
        while open_nodes:
            node = open_nodes.pop()
            for first, child in node.children.items():
                num_nodes += 1
                num_blocks += len(child.blocks)
                open_nodes.append(child)
                if (
                    child.parent is not node
                    or not child.blocks
                    or child.blocks[0] != first
                    or len(child.blocks) != len(child.values)
                ):
                    raise IntegrityError(
                        "a run is not where its first block says, or has not one value for each"
                        " block"
                    )
                if child not in place:
                    raise IntegrityError("a run is not in the order of use")
                if node is not self._root and (
                    child.last_use > node.last_use or place[child] > place[node]
                ):
                    raise IntegrityError("a run was used later than the one before it")
            if node is not self._root and [c.last_use for c in node.children.values()] == [
                node.last_use
            ]:
                raise IntegrityError("two runs that are one have not been joined")
        if num_nodes != len(place) or num_blocks != self.num_blocks or num_blocks > self.max_blocks:
            raise IntegrityError(
                f"{num_nodes} runs of {num_blocks} blocks; the books say {len(place)} and"
                f" {self.num_blocks}, the bound is {self.max_blocks}"
            )

    def _use(self, blocks: Sequence[bytes]) -> list[_Node[V]]:
        """Return the runs that make up the longest prefix held, from the root on. They are now the
        most recently used, and end where it ends.
        """
        self._num_uses += 1
        path: list[_Node[V]] = []
        node, at = self._root, 0
        while at < len(blocks) and (child := node.children.get(blocks[at])) is not None:
            num_common = _num_common(child.blocks, blocks[at : at + len(child.blocks)])
            if num_common < len(child.blocks):
                child = self._cut(child, num_common)
            at += num_common
            child.last_use = self._num_uses
            path.append(child)
            node = child
        for node in reversed(path):
            self._by_use.move_to_end(node)
        for node in path:
            self._join(node)
        return [node for node in path if node in self._by_use]

    def _cut(self, tail: _Node[V], at: int) -> _Node[V]:
        """Make a run of the first `at` blocks of a run; the rest keeps its node and with it its
        place in the order of use.
        """
        assert tail.parent is not None
        head = _Node(tail.parent, tail.blocks[:at], tail.values[:at], tail.last_use)
        tail.parent.children[head.blocks[0]] = head
        del tail.blocks[:at], tail.values[:at]
        tail.parent = head
        head.children[tail.blocks[0]] = tail
        self._by_use[head] = None
        return head

    def _join(self, node: _Node[V]) -> None:
        """Make one run of this one and those after it, as long as there is only one and both
        were used at the same time.
        """
        while node is not self._root and len(node.children) == 1:
            (child,) = node.children.values()
            if child.last_use != node.last_use:
                break
            node.blocks += child.blocks
            node.values += child.values
            node.children = child.children
            for grandchild in node.children.values():
                grandchild.parent = node
            child.children = {}
            del self._by_use[child]

    def _append(self, node: _Node[V], blocks: list[bytes], values: list[V]) -> None:
        """Put blocks after a run that has just been used."""
        if node is not self._root and not node.children:
            node.blocks += blocks
            node.values += values
            return
        child = _Node(node, blocks, values, self._num_uses)
        node.children[blocks[0]] = child
        self._by_use[child] = None
        while child.parent is not None and child.parent is not self._root:
            child = child.parent
            self._by_use.move_to_end(child)

    def _evict(self) -> None:
        while self.num_blocks > self.max_blocks:
            leaf = next(iter(self._by_use))
            assert leaf.parent is not None
            keep = max(0, len(leaf.blocks) - (self.num_blocks - self.max_blocks))
            self.num_blocks -= len(leaf.blocks) - keep
            if keep:
                del leaf.blocks[keep:], leaf.values[keep:]
            else:
                del leaf.parent.children[leaf.blocks[0]], self._by_use[leaf]
                self._join(leaf.parent)


def _num_common(run: Sequence[bytes], wanted: Sequence[bytes]) -> int:
    """Return how many blocks two sequences share from their beginnings; `wanted` is not the longer
    one.
    """
    if run == wanted:
        return len(run)
    return next(
        (i for i, (a, b) in enumerate(zip(run, wanted, strict=False)) if a != b), len(wanted)
    )
