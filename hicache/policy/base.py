"""The contract of an eviction policy. One instance serves one tier, over all namespaces."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hicache.node import Node
from hicache.tier import TierId


class EvictionPolicy(Protocol):
    """An index over the nodes that may leave one tier now, in the order in which they should.

    The tree feeds it, from one thread, and keeps this true: what was added and not discarded is a live node, resident
    in the tier, without a child in the tier, neither pinned nor moving, and able to leave (evicted, or demoted to a
    slower tier). Nothing here raises for what a caller of the tree does, waits, or changes a node. Every call must cost
    O(log n) at most; a victim that is taken comes back as `discard`.

    A policy that looks at more than the nodes that may leave also offers `HearsUses`, `HearsShape`, `HearsResidency`,
    `HearsHints` or `HearsCapacity`.
    """

    def add(self, node: Node, now: float) -> None:
        """The node may leave from now on. `node.last_access` is when it was last used, which may be long ago: an inner
        node becomes a leaf of its tier when its last child leaves."""
        ...

    def discard(self, node: Node) -> None:
        """The node may not leave any more, or has left. It was added before."""
        ...

    def touch(self, node: Node, now: float) -> None:
        """An added node was used at `now`; `node.last_access` is already `now`. Times never go backwards."""
        ...

    def split(self, upper: Node, lower: Node) -> None:
        """An added node was split: `lower` is that same object, with fewer pages, and stays added; `upper` is new and
        comes by `add` when it may leave."""
        ...

    def victims(self) -> Iterator[Node]:
        """The added nodes, next to leave first. Valid until the next call that changes the index."""
        ...


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a prefix: a prompt that was looked up or stored."""

    path: Sequence[Node]
    """From the root to the end of what is cached of the prompt now, at least one node; all live, and none of them used
    more recently than this."""
    now: float
    """Monotonic seconds."""


@runtime_checkable
class HearsUses(Protocol):
    """A policy that is told of every use as a whole: of inner nodes too, and of what one prompt shares with another."""

    def used(self, use: Use) -> None:
        """A prefix was used. Comes once a use, after the `add` and `touch` calls that belong to it. O(path x log n)."""
        ...


@runtime_checkable
class HearsShape(Protocol):
    """A policy that remembers more of a prefix than whether it may leave. Told of every split and join in the tree, of
    nodes that its tier has no copy of too: `split` then comes whether the node was added or not."""

    def split(self, upper: Node, lower: Node) -> None:
        """As `EvictionPolicy.split`, of any node."""
        ...

    def joined(self, upper: Node, lower: Node) -> None:
        """Two nodes become one: `lower` takes the pages of `upper`, which ends. Told before it is done, while neither
        is added; the node is added again afterwards if it may leave."""
        ...


@runtime_checkable
class HearsResidency(HearsShape, Protocol):
    """A policy that counts pages of the whole tier, not only of what may leave it."""

    def entered(self, node: Node) -> None:
        """The tier holds or awaits a copy of the node from now on. Before any `add` of it."""
        ...

    def left(self, node: Node) -> None:
        """It does not any longer. The node is still in the tree; a `discard` of it comes before or after."""
        ...


@runtime_checkable
class HearsCopies(Protocol):
    """Who is told of every copy that can be served: what an index elsewhere is kept up to date with. Not a policy."""

    def copied(self, node: Node, tier: TierId, is_there: bool) -> None:
        """The tier's copy of a node can be served from now on, or cannot any longer. The node is in the tree, with the
        pages that this is about; splits and joins are not told, as they change no page. Never raises."""
        ...


@runtime_checkable
class HearsCapacity(Protocol):
    """A policy that goes by how many pages it may keep, where that changes: its tenant's part of a tier, say."""

    def resized(self, capacity_pages: int) -> None:
        """It has about so many pages from now on, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Hint:
    """What a caller knows of the future of a prefix. What it does not know is None."""

    returns: bool | None = None
    """Whether a later prompt goes on from the end of this one: a conversation that continues, a tool call that will be
    answered."""
    expected_return: float | None = None
    """Monotonic seconds at which that prompt is expected."""


@runtime_checkable
class HearsHints(Protocol):
    """A policy that makes use of what callers know."""

    def hinted(self, path: Sequence[Node], hint: Hint, now: float) -> None:
        """What is known of a prefix, given as in `Use.path`. Comes after the `used` of the prompt that it speaks of,
        replaces an earlier hint about the same end, and holds until the next use of that end. O(path x log n)."""
        ...
