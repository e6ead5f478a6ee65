"""Random histories of the tree beside a plain dictionary, compared after every step.

The dictionary maps a namespace and the tokens of a path of pages to a `Page`: which tiers hold it, in which slot, who
uses the copy. It knows no nodes, no splits and no merges, and shares no code with the tree. Every answer of the tree is
compared with what the dictionary says, after every step the tree checks itself, and every few steps everything that is
in the tree is compared with everything that should be, both ways.

One number decides a whole history. A failure names it and the command that repeats it:

    python -m tests.hicache.histories --seed 17 [--steps 100]
"""

import argparse
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hicache.errors import BadRequest, LeaseExpired, NoRoom, NotResident
from hicache.layout import KVDtype, KVLayout
from hicache.lease import Lease, Move, Pin
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.policies import LRU
from hicache.policy.base import HearsUses, Use
from hicache.residency import IN_TIER, Residency
from hicache.results import Freed, NodeInfo, Removed
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tree import HiRadixTree
from tests.hicache.counting import POLICIES, check_counts

Tokens = tuple[int, ...]
Path = tuple[int, tuple[Tokens, ...]]
"""Index of a namespace, and the tokens of each page from the root."""

CAPACITY, WIDE_CAPACITY = 40, 200
"""Slots of each tier; the second where one node gets many children."""
NODE_BYTES, PLACE_BYTES, NAMESPACE_BYTES = 480, 100, 640
"""The budget as this side understands it: what a node, a place in an order of eviction, and a namespace count for."""
SHARING_WEIGHTS = (
    ("do_publish", 6), ("do_match", 8), ("do_read", 2), ("do_unpublish", 1), ("do_lease", 3), ("do_remove", 4),
)  # fmt: skip
"""How often what in a history where tenants share."""
ARRIVING, RESIDENT, CONDEMNED = "arriving", "resident", "condemned"
STATES = {
    Residency.ABSENT: None,
    Residency.ARRIVING: ARRIVING,
    Residency.RESIDENT: RESIDENT,
    Residency.CONDEMNED: CONDEMNED,
}


class HistoryFailure(AssertionError):
    """A history went wrong; the message repeats it."""


@dataclass(eq=False)
class Page:
    """One life of one page. Removed and inserted again, it is another object."""

    path: Path
    copies: dict[TierId, tuple[str, int]] = field(default_factory=dict)
    """State and slot of each copy."""
    users: dict[TierId, int] = field(default_factory=dict)
    """Open pins and moves that use the copy."""
    used: float = 0.0
    num_uses: int = 0
    alive: bool = True
    reports: set[TierId] = field(default_factory=set)
    """Engines that say they have it."""
    priority: int = 0
    retained_until: float | None = None

    def is_in(self, tier: TierId) -> bool:
        return self.copies.get(tier, ("",))[0] in (ARRIVING, RESIDENT)

    def has(self, tier: TierId) -> bool:
        return self.copies.get(tier, ("",))[0] == RESIDENT

    def num_copies(self) -> int:
        return sum(state == RESIDENT for state, _ in self.copies.values())


@dataclass
class ModelLease:
    lease: Lease
    page: Page | None
    deadline: float | None


@dataclass
class ModelHold:
    handle: Pin | Move
    pages: list[Page]


@dataclass
class ModelPublication:
    num_pages: int
    """How many of its pages are still published: those that have never left since."""
    readers: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """A node as it was before an insert."""

    pages: list[Page]
    used: float
    children: list["Run"] = field(default_factory=list)

    def num_bytes(self, page_size: int) -> int:
        copies = len(self.pages[0].copies)
        return NODE_BYTES + (copies + 1) * PLACE_BYTES + len(self.pages) * 4 * (page_size + copies)


class History:
    """One tree, one dictionary, and the steps that change both."""

    def __init__(
        self, seed: int, make_tree: Callable[..., HiRadixTree] = HiRadixTree, policy: str | None = None
    ) -> None:
        self.random = random.Random(seed)
        pick = self.random
        self.page_size = pick.choice([1, 2, 4, 16]) if pick.random() < 0.95 else pick.choice([3, 17, 64, 256])
        self.is_wide = pick.random() < 0.02
        self.tiers: tuple[TierId, ...] = pick.choice(
            [(HOST,), (HOST, NVME), (DEVICE, HOST, NVME), (DEVICE, HOST, NVME), (DEVICE, HOST, NVME)]
        )
        layout = KVLayout.uniform(
            num_layers=1, num_kv_heads=1, head_dim=8, dtype=KVDtype.FLOAT32, page_size=self.page_size
        )
        sharing = pick.random() < 0.4
        num_namespaces = [2, 3, 4] if sharing else [1, 2, 3]
        self.namespaces = [
            Namespace(model="m", layout=layout, tenant=tenant, salt=salt)
            for tenant, salt in [("a", b""), ("b", b""), ("a", b"s"), ("c", b"")][: pick.choice(num_namespaces)]
        ]
        self.budget = pick.choice([None, None, None, 3_000, 6_000, 12_000]) if not self.is_wide else None
        self.capacity = WIDE_CAPACITY if self.is_wide else CAPACITY
        self.policy = policy or pick.choice([*[LRU] * 5, *POLICIES])
        self.policies = {tier: POLICIES[self.policy](self.capacity) for tier in self.tiers}
        self.tree = make_tree(
            page_size=self.page_size, tiers=self.tiers, policies=self.policies, metadata_bytes=self.budget
        )
        self.variants = self._page_variants()
        self.max_pages = pick.choice([3, 6, 12]) if pick.random() < 0.97 else 30
        self.pages: dict[Path, Page] = {}
        self.published: dict[Path, ModelPublication] = {}
        self.free = {tier: list(range(self.capacity)) for tier in self.tiers}
        self.leases: list[ModelLease] = []
        self.ended: list[Lease] = []
        self.pins: list[ModelHold] = []
        self.moves: list[ModelHold] = []
        self.walker: Iterator[list[NodeInfo]] | None = None
        self.now = 1.0
        self.log: list[str] = []
        # Some operations far more often than others, some never: histories differ in kind, not only in detail.
        names = [name for name in dir(self) if name.startswith("do_")]
        weights = [pick.choice([0, 1, 1, 4]) for _ in names]
        weights[names.index("do_insert")] = pick.choice([4, 8, 16])
        weights[names.index("do_start_move")] = weights[names.index("do_finish_move")] = pick.choice([0, 2, 4, 8])
        if sharing:
            for name, most in SHARING_WEIGHTS:
                weights[names.index(name)] = most
        else:
            for name in ("do_publish", "do_unpublish", "do_read"):
                weights[names.index(name)] = 0
        weights[names.index("do_widen")] = 2 if self.is_wide else 0
        if pick.random() < 0.5:
            weights[names.index("do_report")] = weights[names.index("do_drop_instance")] = 0
        self.steps: list[Callable[[], None]] = [getattr(self, name) for name in names]
        self.weights = weights

    def _page_variants(self) -> list[Tokens]:
        size = self.page_size
        base = tuple(2**31 - 1 - i for i in range(size))
        others = [base[:cut] + tuple(range(cut, size)) for cut in sorted({0, size // 2, size - 1})]
        return [base, *others, tuple([5] * size)]

    def run(self, num_steps: int) -> None:
        for number in range(num_steps):
            (step,) = self.random.choices(self.steps, self.weights)
            self.log.append(step.__name__)
            self.now += self.random.choice([0.0, 0.25, 1.0])
            step()
            self.tree.check_integrity()
            self.check_policies()
            if number % 5 == 4:
                self.compare()
        self.settle()

    def settle(self) -> None:
        """End everything that is open, then flush: every slot must be free again."""
        for move in list(self.moves):
            self._finish(move, [True] * len(move.pages))
            self.tree.check_integrity()
        for pin in list(self.pins):
            self._unpin(pin)
        for held in list(self.leases):
            self._release(held)
        self.compare()
        removed = self.tree.flush()
        expected = self._drop_pages(list(self.pages.values()))
        self._take_back(removed.freed, expected)
        assert removed.held == ()
        assert removed.num_pending == 0
        self.tree.check_integrity()
        assert self.tree.num_nodes == 0
        assert self.tree.num_leases == 0
        assert self.tree.publications() == []
        assert self.tree.metadata_bytes == self.tree.aside_bytes == 0
        for tier in self.tiers:
            assert self.tree.occupancy(tier).total == 0
            assert sorted(self.free[tier]) == list(range(self.capacity)), "a slot was lost or is free twice"

    # -- the dictionary's side ----------------------------------------------------------------------------------------

    def _children(self, path: Path) -> list[Page]:
        space, pages = path
        return [page for key, page in self.pages.items() if key[0] == space and key[1][:-1] == pages]

    def _below(self, path: Path) -> list[Page]:
        """Pages strictly below a path."""
        space, pages = path
        depth = len(pages)
        return [
            page
            for key, page in self.pages.items()
            if key[0] == space and len(key[1]) > depth and key[1][:depth] == pages
        ]

    def _line(self, path: Path) -> list[Page]:
        """The pages from the root to the end of a path, as far as they exist."""
        space, pages = path
        line: list[Page] = []
        for end in range(1, len(pages) + 1):
            page = self.pages.get((space, pages[:end]))
            if page is None:
                break
            line.append(page)
        return line

    def _leased_ends(self) -> list[Page]:
        return [held.page for held in self.leases if held.page is not None and held.page.alive]

    def _is_needed(self, page: Page) -> bool:
        """Whether a lease ends at the page or below it."""
        space, pages = page.path
        return any(end.path[0] == space and end.path[1][: len(pages)] == pages for end in self._leased_ends())

    def _is_leased(self, page: Page) -> bool:
        return any(end is page for end in self._leased_ends())

    def _may_evict(self, page: Page, tier: TierId) -> bool:
        """Whether this page, the end of a run, may lose its copy."""
        if not page.has(tier) or page.users.get(tier, 0):
            return False
        return page.num_copies() > 1 or not (self._is_leased(page) or self._children(page.path))

    def _drop_copy(self, page: Page, tier: TierId, freed: dict[TierId, set[int]]) -> None:
        slot = page.copies[tier][1]
        if page.users.get(tier, 0):
            page.copies[tier] = (CONDEMNED, slot)
        else:
            del page.copies[tier]
            freed.setdefault(tier, set()).add(slot)

    def _drop_pages(self, pages: list[Page]) -> dict[TierId, set[int]]:
        freed: dict[TierId, set[int]] = {}
        for page in pages:
            page.alive = False
            self._withdraw(page)
            del self.pages[page.path]
            for tier in list(page.copies):
                self._drop_copy(page, tier, freed)
        return freed

    def _withdraw(self, page: Page) -> None:
        """The page, and so what follows it, is not published any more."""
        space, pages = page.path
        for path, publication in list(self.published.items()):
            if path[0] == space and path[1][: len(pages)] == pages:
                publication.num_pages = min(publication.num_pages, len(pages) - 1)
                if not publication.num_pages:
                    del self.published[path]

    def _is_published(self, page: Page) -> bool:
        space, pages = page.path
        return any(
            path[0] == space and path[1][: len(pages)] == pages and len(pages) <= publication.num_pages
            for path, publication in self.published.items()
        )

    def _readable(self, reader: int) -> list[int]:
        """The namespaces that differ from one in nothing but the tenant."""
        salt, tenant = self.namespaces[reader].salt, self.namespaces[reader].tenant
        return [i for i, each in enumerate(self.namespaces) if each.salt == salt and each.tenant != tenant]

    def _stop_using(self, page: Page, tier: TierId, freed: dict[TierId, set[int]]) -> None:
        page.users[tier] -= 1
        if not page.users[tier] and page.copies[tier][0] == CONDEMNED:
            freed.setdefault(tier, set()).add(page.copies.pop(tier)[1])

    def _take_back(self, freed: Freed, expected: dict[TierId, set[int]]) -> None:
        """Slots that the tree gave back: exactly the expected ones, each once; they are free now."""
        assert set(freed) == {tier for tier, slots in expected.items() if slots}, (freed, expected)
        for tier, slots in freed.items():
            assert slots.dtype == np.int32
            assert sorted(slots.tolist()) == sorted(expected[tier]), (tier, slots, expected[tier])
            self.free[tier] += slots.tolist()

    # -- looking at the tree through its public face -------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        return [info.node for batch in self.tree.walk() for info in batch]

    def any_node(self) -> Node | None:
        nodes = self.nodes()
        return self.random.choice(nodes) if nodes else None

    def pages_of(self, node: Node) -> list[Page]:
        """The dictionary's pages of a node, root side first."""
        space = next(i for i, each in enumerate(self.namespaces) if each.digest == node.namespace)
        tokens = tuple(self.tree.tokens_of(node).tolist())
        assert len(tokens) % self.page_size == 0
        pages = tuple(tokens[at : at + self.page_size] for at in range(0, len(tokens), self.page_size))
        line = self._line((space, pages))
        assert len(line) == len(pages), f"the tree offers {pages}, the dictionary only {len(line)} pages of it"
        return line[len(line) - node.num_pages :]

    def compare(self) -> None:
        """Everything in the tree is in the dictionary, with the same copies; and nothing else is in the dictionary."""
        seen: set[Path] = set()
        ends: dict[Node, Path] = {}
        for node in self.nodes():
            pages = self.pages_of(node)
            ends[node] = pages[-1].path
            for tier in self.tiers:
                state = STATES[node.residency(tier)]
                slots = node.slots(tier).tolist() if state else [None] * len(pages)
                for page, slot in zip(pages, slots, strict=True):
                    assert page.copies.get(tier, (None, None)) == (state, slot), (page, tier, state, slot)
                assert node.is_pinned(tier) == bool(pages[-1].users.get(tier, 0))
                assert self.tree.can_evict(node, tier) == self._may_evict(pages[-1], tier), (node, tier)
            assert [self._is_published(page) for page in pages] == [node.is_published] * len(pages)
            reported = self.tree.reported(node)
            assert all(flags.any() for flags in reported.values())
            for number, page in enumerate(pages):
                assert {instance for instance, flags in reported.items() if flags[number]} == page.reports
            assert {page.priority for page in pages} == {self.tree.priority(node)}, "another priority than was given"
            leases = sum(end is pages[-1] for end in self._leased_ends())
            assert node.num_leases == leases, (node.num_leases, leases)
            line = self._line(pages[-1].path)
            assert pages[-1].used <= node.last_access <= line[0].used, "recency is not that of a use of the path"
            # Of runs that were joined, and perhaps cut again, no page is said to be used less than it was.
            assert pages[0].num_uses <= node.num_uses <= line[0].num_uses, (pages[0].num_uses, node.num_uses)
            for page in pages:
                assert page.path not in seen, "a page is offered twice"
                seen.add(page.path)
        assert seen == set(self.pages), "pages are missing in the tree"
        publications = [
            (self.pages_of(each.node)[-1].path, each.num_pages, each.tenant, each.readers)
            for each in self.tree.publications()
        ]
        expected = [
            ((path[0], path[1][: each.num_pages]), each.num_pages, self.namespaces[path[0]].tenant, each.readers)
            for path, each in self.published.items()
        ]
        assert sorted(map(repr, publications)) == sorted(map(repr, expected))
        for tier in self.tiers:
            self._compare_victims(tier, ends)
            everything = [*self.pages.values(), *self._departed()]
            for state, counted in zip((RESIDENT, ARRIVING, CONDEMNED), self.tree.occupancy(tier), strict=True):
                assert counted == sum(page.copies.get(tier, ("",))[0] == state for page in everything)
            held = sum(tier in page.copies for page in everything)
            assert held + len(self.free[tier]) == self.capacity, "slots are not conserved"

    def _departed(self) -> list[Page]:
        """Removed pages with copies that something still uses."""
        used = {id(page): page for hold in (*self.pins, *self.moves) for page in hold.pages if not page.alive}
        return list(used.values())

    def _compare_victims(self, tier: TierId, ends: dict[Node, Path]) -> None:
        victims = self.tree.victims(tier, 10_000, self.now)
        found = {ends[node] for node in victims}
        slowest = tier == self.tiers[-1]
        expected = {
            page.path
            for page in self.pages.values()
            if page.has(tier)
            and not page.users.get(tier, 0)
            and not any(child.is_in(tier) for child in self._children(page.path))
            and (not slowest or self._may_evict(page, tier))
        }
        assert found == expected, (tier, found ^ expected)
        self._compare_retained()
        if self.policy == LRU:
            times = [node.last_access for node in victims]
            assert times == sorted(times), "victims are not in order of use"

    def _compare_retained(self) -> None:
        """Victims were just asked for: what is retained no longer has been looked at. A run that was joined is retained
        as long as one of its parts."""
        for node in self.nodes():
            ends = [page.retained_until for page in self.pages_of(node) if page.retained_until is not None]
            until = max([end for end in ends if end > self.now], default=None)
            assert self.tree.retained_until(node) == until, "retained for another time than was asked"

    def check_policies(self) -> None:
        """What the policies count is what is in their tiers."""
        for tier, policy in self.policies.items() if self.policy != LRU else ():
            in_tier = {node: node.num_pages for node in self.nodes() if node.residency(tier) in IN_TIER}
            check_counts(policy, in_tier)

    def view(self) -> list[object]:
        """Everything that a caller can see of the tree."""
        tree = self.tree
        seen: list[object] = [
            (info[1:], tree.tokens_of(node).tobytes(), [node.slots(tier).tobytes() for tier in self.tiers])
            for batch in tree.walk()
            for info in batch
            for node in info[:1]
        ]
        seen += [tree.occupancy(tier) for tier in self.tiers]
        seen += [tree.num_nodes, tree.num_leases, tree.metadata_bytes, tree.aside_bytes]
        return [*seen, *(each[1:] for each in tree.publications())]

    # -- choosing -----------------------------------------------------------------------------------------------------

    def any_path(self) -> Path:
        """Often an existing path or one that leaves it somewhere, else a new one."""
        pick = self.random
        space = pick.randrange(len(self.namespaces))
        pages: tuple[Tokens, ...] = ()
        known = [key for key in self.pages if key[0] == space]
        if known and pick.random() < 0.8:
            pages = pick.choice(known)[1]
            pages = pages[: pick.randint(0, len(pages))] if pick.random() < 0.4 else pages
        more = pick.choice([0, 1, 1, 2, self.max_pages])
        pages += tuple(pick.choice(self.variants) for _ in range(more))
        return space, pages[: self.max_pages]

    def tokens(self, pages: tuple[Tokens, ...]) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array([token for page in pages for token in page], np.int32)

    def take_slots(self, tier: TierId, count: int) -> list[int] | None:
        """Slots from the pool, in any order; None when there are not enough."""
        free = self.free[tier]
        if len(free) < count:
            return None
        self.random.shuffle(free)
        taken = free[:count]
        del free[:count]
        return taken

    # -- steps --------------------------------------------------------------------------------------------------------

    def do_insert(self) -> None:
        space, pages = self.any_path()
        tier = self.random.choice(self.tiers)
        if not pages:
            return
        line = self._line((space, pages))
        first = self.random.choice([0, len(line), self.random.randint(0, len(line))])
        slots = self.take_slots(tier, len(pages) - first)
        if slots is None:
            self.do_make_room()
            return
        self._insert(space, pages, tier, slots, first)

    def do_widen(self) -> None:
        """Many pages side by side, which share more or less of their tokens."""
        space, pages = self.any_path()
        pages = pages[: self.random.randint(0, 1)]
        if len(self._line((space, pages))) < len(pages):
            return
        base, size = self.variants[0], self.page_size
        for number in range(self.random.choice([20, 80])):
            cut = self.random.randrange(size)
            page = base[:cut] + tuple([1000 + number] * (size - cut))
            slots = self.take_slots(self.tiers[0], 1)
            if slots is None:
                return
            self._insert(space, (*pages, page), self.tiers[0], slots, len(pages))

    def _insert(self, space: int, pages: tuple[Tokens, ...], tier: TierId, slots: list[int], first: int) -> None:
        runs, size = self._runs(), self.tree.metadata_bytes
        before = None if self.budget is None else self.view()
        try:
            inserted = self.tree.insert(
                self.namespaces[space], self.tokens(pages), tier=tier, slots=slots, first_page=first, now=self.now
            )
        except NoRoom:
            assert self.view() == before, "a refused insert changed the tree"
            self.free[tier] += slots
            self._check_refusal(runs, (space, pages), size)
            return
        self._dropped(inserted.freed, inserted.num_dropped, runs, (space, pages), size)
        duplicates: list[int] = []
        for end in range(1, len(pages) + 1):
            key = (space, pages[:end])
            page = self.pages.get(key)
            if page is None:
                page = self.pages[key] = Page(key)
            page.used = self.now
            if end > first:
                slot = slots[end - 1 - first]
                if tier in page.copies:
                    duplicates.append(slot)
                else:
                    page.copies[tier] = (RESIDENT, slot)
        assert inserted.duplicates.tolist() == duplicates
        assert inserted.num_stored == len(slots) - len(duplicates)
        self.free[tier] += duplicates
        assert self.tree.tokens_of(inserted.node).tolist() == self.tokens(pages).tolist()
        if self.random.random() < 0.5:
            self.tell_use(inserted.node)

    def _runs(self) -> list[Run]:
        """The tree's nodes as runs of the dictionary's pages."""
        if self.budget is None:
            return []
        runs = {}
        for node in self.nodes():
            runs[node] = run = Run(self.pages_of(node), node.last_access)
            if node.parent is not None:
                runs[node.parent].children.append(run)
        return list(runs.values())

    def _may_drop(self, run: Run, path: Path) -> bool:
        """Whether nothing but its children keeps a node, while pages of a path are inserted."""
        return not any(
            self._is_leased(page)
            or any(page.users.values())
            or (page.path[0] == path[0] and page.path[1] == path[1][: len(page.path[1])])
            for page in run.pages
        )

    def _most_growth(self, num_pages: int) -> int:
        """More bytes than an insert of so many pages can need."""
        node = NODE_BYTES + (len(self.tiers) + 1) * PLACE_BYTES
        return NAMESPACE_BYTES + 3 * node + num_pages * (4 * self.page_size + 4 + PLACE_BYTES)

    def _check_refusal(self, runs: list[Run], path: Path, size: int) -> None:
        """Even without everything that may leave, there would have been no room."""
        assert self.budget is not None

        def droppable(run: Run) -> bool:
            return self._may_drop(run, path) and all(map(droppable, run.children))

        possible = sum(run.num_bytes(self.page_size) for run in runs if droppable(run))
        assert size - possible + self._most_growth(len(path[1])) > self.budget, "refused although there was room"

    def _dropped(self, freed: Freed, num_dropped: int, runs: list[Run], path: Path, size: int) -> None:
        """What an insert has dropped was the coldest that could leave, whole nodes, and only for want of room."""
        if self.budget is None:
            assert (freed, num_dropped) == ({}, 0)
            return
        assert self.tree.metadata_bytes <= self.budget, "the budget was passed"
        slots = {(tier, slot) for tier, of_tier in freed.items() for slot in of_tier.tolist()}
        gone = [
            page for page in self.pages.values() if any((tier, copy[1]) in slots for tier, copy in page.copies.items())
        ]
        assert len(gone) == num_dropped
        if not gone:
            return
        assert size + self._most_growth(len(path[1])) > self.budget, "dropped without need"
        left = [run for run in runs if run.pages[0] in gone]
        assert sum(len(run.pages) for run in left) == len(gone), "a node left in part"
        for run in left:
            assert self._may_drop(run, path), "what was kept by something left"
            assert all(child in left for child in run.children), "a node left before what is below it"
        could = [
            run.used
            for run in runs
            if run not in left and self._may_drop(run, path) and all(child in left for child in run.children)
        ]
        assert max(run.used for run in left) <= min(could, default=self.now), "something colder could have left"
        self._take_back(freed, self._drop_pages(gone))

    def do_publish(self) -> None:
        space, pages = self.random.choice(list(self.pages)) if self.pages else (0, ())
        if self.random.random() < 0.2:
            space, pages = self.any_path()
        namespace, tokens = self.namespaces[space], self.tokens(pages)
        if len(self._line((space, pages))) < len(pages) or not pages:
            error = NotResident if pages else BadRequest
            self.refused(error, lambda: self.tree.publish(namespace, tokens))
            return
        node = self.tree.publish(namespace, tokens)
        assert self.pages_of(node)[-1].path == (space, pages)
        self.published.setdefault((space, pages), ModelPublication(0)).num_pages = len(pages)

    def do_unpublish(self) -> None:
        path = self.any_path()
        if self.published and self.random.random() < 0.8:
            path = self.random.choice(list(self.published))
        if not path[1]:
            return
        found = self.tree.unpublish(self.namespaces[path[0]], self.tokens(path[1]))
        assert found == (self.published.pop(path, None) is not None)

    def do_read(self) -> None:
        """A use by another tenant."""
        node = self.any_node()
        if node is None:
            return
        reader = self.random.randrange(len(self.namespaces))
        space, pages = self.pages_of(node)[-1].path
        if space == reader:
            return
        self.tree.touch(node, self.now, reader=self.namespaces[reader])
        for path, publication in self.published.items():
            covered = path[0] == space and path[1][: publication.num_pages][: len(pages)] == pages
            if covered and space in self._readable(reader):
                publication.readers[self.namespaces[reader].tenant] = self.now

    def do_report(self) -> None:
        instance = TierId(f"device:session/{self.random.randrange(3)}")
        resident = self.random.random() < 0.8
        if self.random.random() < 0.4:
            node = self.any_node()
            if node is None:
                return
            pages = self.pages_of(node)
            self.tree.report_node(instance, node, resident=resident)
        else:
            space, prompt = self.any_path()
            first = self.random.randint(0, len(prompt))
            pages = self._line((space, prompt))[first:]
            noted = self.tree.report(
                instance, self.namespaces[space], self.tokens(prompt), resident=resident, first_page=first
            )
            assert noted == len(pages)
        for page in pages:
            if resident:
                page.reports.add(instance)
            else:
                page.reports.discard(instance)

    def do_drop_instance(self) -> None:
        if self.random.random() < 0.6:
            return
        instance = TierId(f"device:session/{self.random.randrange(3)}")
        reported = [page for page in self.pages.values() if instance in page.reports]
        assert self.tree.drop_instance(instance) == len(reported)
        for page in reported:
            page.reports.remove(instance)

    def any_readable_path(self) -> Path:
        """A path as another tenant's reader may ask for it, if there is one; else any."""
        space, pages = self.any_path()
        entries: list[tuple[Path, Sequence[int]]] = [(path, self._readable(path[0])) for path in self.published]
        chosen = [(path, readers) for path, readers in entries if readers]
        if not chosen or self.random.random() < 0.3:
            return space, pages
        path, readers = self.random.choice(chosen)
        if self.random.random() < 0.4:
            path = path[0], path[1][: self.random.randint(0, len(path[1]))]
        more = tuple(self.random.choice(self.variants) for _ in range(self.random.choice([0, 1, 2])))
        if self.random.random() < 0.2:
            readers = range(len(self.namespaces))  # also one that may not read it
        return self.random.choice(readers), path[1] + more

    def do_match(self) -> None:
        space, pages = self.any_readable_path()
        tokens = self.tokens(pages)
        cut = self.random.choice([len(tokens), self.random.randint(0, len(tokens))])
        tokens = tokens[:cut]
        if len(tokens) and self.random.random() < 0.3:
            tokens = tokens.copy()
            tokens[self.random.randrange(len(tokens))] = 77
        before = self.view()
        asked: Any = tokens if self.random.random() < 0.5 else tokens.tolist()
        published = self.random.random() < 0.7
        match = self.tree.match(self.namespaces[space], asked, published=published)
        assert self.view() == before, "a match changed the tree"
        size = self.page_size
        asked_pages = tuple(tuple(tokens[at : at + size].tolist()) for at in range(0, len(tokens) - size + 1, size))
        line = self._line((space, asked_pages))
        lengths = {space: len(line)}
        for other in self._readable(space) if published else ():
            theirs = [self._is_published(page) for page in self._line((other, asked_pages))]
            lengths[other] = [*theirs, False].index(False)
        longest = max(lengths.values())
        assert match.num_tokens == longest * size
        owner = next(i for i, each in enumerate(self.namespaces) if each.digest == match.owner)
        assert lengths[owner] == longest
        assert owner == space or lengths[space] < longest, "another tenant's pages instead of one's own"
        assert len(match.nodes) == len(set(match.nodes))
        if match.nodes:
            last = match.nodes[-1]
            assert last.namespace == match.owner
            assert list(match.nodes) == self.tree.path(last)
            assert 1 <= match.pages_in_last <= last.num_pages
            covered = sum(node.num_pages for node in match.nodes) - last.num_pages + match.pages_in_last
            assert covered == longest
        rest = tuple(tokens[match.num_tokens :].tolist())
        parent = asked_pages[:longest]
        candidates = [
            page
            for each, length in lengths.items()
            if length == longest
            for page in self._children((each, parent))
            if each == space or self._is_published(page)
        ]
        best = max((_shared(page.path[1][-1], rest) for page in candidates), default=0)
        if not best:
            assert match.partial is None
        else:
            assert match.partial is not None
            assert match.partial.num_tokens == best
            page = self.pages_of(match.partial.node)[match.partial.page]
            assert page in candidates, "a partial of pages that may not be read"
            assert _shared(page.path[1][-1], rest) == best

    def do_touch(self) -> None:
        node = self.any_node()
        if node is not None:
            self.tree.touch(node, self.now)
            for page in self._line(self.pages_of(node)[-1].path):
                page.used = self.now
            self.tell_use(node)

    def tell_use(self, node: Node) -> None:
        """A prompt that ends with a node was computed, which the tree has been told."""
        self.tree.count_use(node)
        for page in self._line(self.pages_of(node)[-1].path):
            page.num_uses += 1
        for policy in self.policies.values():
            if isinstance(policy, HearsUses):
                policy.used(Use(self.tree.path(node), self.now))

    def do_care(self) -> None:
        node = self.any_node()
        if node is None:
            return
        priority, until = self.random.choice([-4, -1, 0, 0, 3]), self.random.choice([None, self.now + 3.0, self.now])
        nodes = [node]

        def rank(each: Node) -> tuple[int, bool]:
            return self.tree.priority(each), self.tree.retained_until(each) is not None

        while (above := nodes[-1].parent) is not None and len(above.children) == 1 and rank(above) == rank(node):
            nodes.append(above)
        for page in [page for each in nodes for page in self.pages_of(each)]:
            page.priority, page.retained_until = priority, until
        self.tree.care(node, priority=priority, retain_until=until, now=self.now)

    def do_lease(self) -> None:
        space, pages = self.any_readable_path()
        deadline = self.random.choice([None, self.now + 2.0, self.now + 20.0])
        if len(self.leases) > 8:
            return
        if self.random.random() < 0.7:
            match = self.tree.match(self.namespaces[space], self.tokens(pages))
            if self.random.random() < 0.3:
                self.do_split()  # the match is older than a split now
            lease = self.tree.lease(match, owner="me", deadline=deadline, now=self.now)
            owner = next(i for i, each in enumerate(self.namespaces) if each.digest == match.owner)
            line = self._line((owner, pages))[: match.num_tokens // self.page_size]
            end = line[-1] if line else None
        else:
            node = self.any_node()
            if node is None:
                return
            end = self.pages_of(node)[-1]
            lease = self.tree.lease(node, owner="me", deadline=deadline, now=self.now)
        self.leases.append(ModelLease(lease, end, deadline))
        assert (lease.node is None) == (end is None)
        if lease.node is not None:
            assert self.pages_of(lease.node)[-1] is end

    def do_move_lease(self) -> None:
        if not self.leases:
            return
        held = self.random.choice(self.leases)
        node = self.any_node()
        if node is None:
            return
        if held.deadline is not None and held.deadline <= self.now:
            self.refused(LeaseExpired, lambda: self.tree.move_lease(held.lease, node, self.now))
            return
        self.refused(LeaseExpired, lambda: self.tree.move_lease(held.lease, node, self.now, owner="somebody else"))
        held.page = self.pages_of(node)[-1]
        self.tree.move_lease(held.lease, node, self.now, owner="me")

    def do_release(self) -> None:
        if self.leases:
            self._release(self.random.choice(self.leases))
        if self.ended:
            lease = self.random.choice(self.ended)
            before = self.view()
            self.tree.release(lease)
            assert self.view() == before, "a second release did something"
            self.refused(LeaseExpired, lambda: self.tree.renew(lease, None, now=self.now))

    def _release(self, held: ModelLease) -> None:
        self.refused(LeaseExpired, lambda: self.tree.release(held.lease, owner="somebody else"))
        self.tree.release(held.lease, owner="me")
        self.leases.remove(held)
        self.ended.append(held.lease)

    def do_renew(self) -> None:
        if not self.leases:
            return
        held = self.random.choice(self.leases)
        deadline = self.random.choice([None, self.now + 1.0, self.now + 10.0])
        is_late = held.deadline is not None and held.deadline <= self.now
        if is_late or (held.page is not None and not held.page.alive):
            self.refused(LeaseExpired, lambda: self.tree.renew(held.lease, deadline, now=self.now))
            return
        self.refused(LeaseExpired, lambda: self.tree.renew(held.lease, deadline, now=self.now, owner="somebody else"))
        self.tree.renew(held.lease, deadline, now=self.now, owner="me")
        held.deadline = deadline

    def do_expire(self) -> None:
        self.now += self.random.choice([0.0, 1.0, 5.0])
        expired = self.tree.expire(self.now)
        expected = [held for held in self.leases if held.deadline is not None and held.deadline <= self.now]
        assert {id(lease) for lease in expired} == {id(held.lease) for held in expected}
        assert len(expired) == len(expected)
        for held in expected:
            self.leases.remove(held)
            self.ended.append(held.lease)

    def do_pin(self) -> None:
        tier = self.random.choice(self.tiers)
        nodes = [node for node in self.nodes() if node.residency(tier) is Residency.RESIDENT]
        absent = [node for node in self.nodes() if node.residency(tier) is not Residency.RESIDENT]
        if absent:
            self.refused(NotResident, lambda: self.tree.pin([*nodes, absent[0]], tier))
        if len(self.pins) > 6:
            return
        chosen = self.random.sample(nodes, self.random.randint(0, min(3, len(nodes))))
        pages = [page for node in chosen for page in self.pages_of(node)]
        pin = self.tree.pin(chosen, tier)
        for page in pages:
            page.users[tier] = page.users.get(tier, 0) + 1
        self.pins.append(ModelHold(pin, pages))

    def do_unpin(self) -> None:
        if self.pins:
            hold = self.random.choice(self.pins)
            self._unpin(hold)
            assert isinstance(hold.handle, Pin)
            assert self.tree.unpin(hold.handle) == {}, "a second unpin gave something back"

    def _unpin(self, hold: ModelHold) -> None:
        pin = hold.handle
        assert isinstance(pin, Pin)
        self.pins.remove(hold)
        expected: dict[TierId, set[int]] = {}
        for page in hold.pages:
            self._stop_using(page, pin.tier, expected)
        self._take_back(self.tree.unpin(pin), expected)

    def do_start_move(self) -> None:
        node = self.any_node()
        if node is None or len(self.tiers) < 2:
            return
        source, target = self.random.sample(self.tiers, 2)
        pages = self.pages_of(node)
        slots = self.take_slots(target, len(pages))
        if slots is None:
            return
        if not pages[0].has(source) or target in pages[0].copies:
            error = BadRequest if pages[0].has(source) else NotResident
            self.refused(error, lambda: self.tree.start_move(node, source=source, target=target, slots=slots))
            self.free[target] += slots
            return
        move = self.tree.start_move(node, source=source, target=target, slots=slots)
        for page, slot in zip(pages, slots, strict=True):
            page.copies[target] = (ARRIVING, slot)
            for tier in (source, target):
                page.users[tier] = page.users.get(tier, 0) + 1
        self.moves.append(ModelHold(move, pages))

    def do_finish_move(self) -> None:
        if not self.moves:
            return
        hold = self.random.choice(self.moves)
        count = len(hold.pages)
        ok = self.random.choice(
            [[True] * count, [False] * count, [self.random.random() < 0.7 for _ in range(count)]]
        )
        handle = hold.handle
        assert isinstance(handle, Move)
        self.refused(BadRequest, lambda: self.tree.finish_move(handle, [*ok, True]))
        self._finish(hold, ok)
        again = self.tree.finish_move(handle, ok)
        assert again.nodes == ()
        assert again.freed == {}

    def _finish(self, hold: ModelHold, ok: list[bool]) -> None:
        move = hold.handle
        assert isinstance(move, Move)
        self.moves.remove(hold)
        finished = self.tree.finish_move(move, ok)
        expected: dict[TierId, set[int]] = {}
        arrived: set[Path] = set()
        for page, good in zip(hold.pages, ok, strict=True):
            state, slot = page.copies[move.target]
            if state == ARRIVING:
                if good:
                    page.copies[move.target] = (RESIDENT, slot)
                    arrived.add(page.path)
                else:
                    del page.copies[move.target]
                    expected.setdefault(move.target, set()).add(slot)
                page.users[move.target] -= 1
            else:
                self._stop_using(page, move.target, expected)
            self._stop_using(page, move.source, expected)
        self._take_back(finished.freed, expected)
        named = {page.path for node in finished.nodes for page in self.pages_of(node)}
        # Nodes may have been joined with neighbours that are resident in the target as well.
        assert arrived <= named
        assert all(self.pages[path].has(move.target) for path in named)
        if named != arrived:
            assert all(ok)
        bad = [self.random.random() < 0.5 and not good for good in ok]
        found = [
            page
            for node, first in self.tree.failed_pages(move, bad)
            for page in self.pages_of(node)[first : first + 1]
        ]
        flagged = [
            page for page, flag in zip(hold.pages, bad, strict=True) if flag and page.alive and page.has(move.source)
        ]
        assert set(map(id, found)) <= set(map(id, flagged))
        assert bool(found) == bool(flagged)

    def do_split(self) -> None:
        node = self.any_node()
        if node is None:
            return
        pages = self.pages_of(node)
        for bad in (0, -1, node.num_pages, node.num_pages + 1):
            self.refused(BadRequest, lambda bad=bad: self.tree.split(node, bad))  # type: ignore[misc]  # lambda default
        if node.num_pages > 1:
            at = self.random.randint(1, node.num_pages - 1)
            upper, lower = self.tree.split(node, at)
            assert lower is node
            assert self.pages_of(upper) == pages[:at]
            assert self.pages_of(lower) == pages[at:]

    def do_evict(self) -> None:
        node = self.any_node()
        if node is not None:
            self._evict(node, self.random.choice(self.tiers))

    def do_make_room(self) -> None:
        tier = self.random.choice(self.tiers)
        wanted = self.random.randint(1, 6)
        victims = self.tree.victims(tier, wanted, self.now)
        assert sum(node.num_pages for node in victims[:-1]) < wanted
        for node in victims:
            assert node.residency(tier) is Residency.RESIDENT
            self._evict(node, tier)

    def _evict(self, node: Node, tier: TierId) -> None:
        pages = self.pages_of(node)
        count = self.random.choice([None, len(pages), self.random.randint(1, len(pages))])
        if not pages[-1].has(tier):
            self.refused(NotResident, lambda: self.tree.evict(node, tier, count))
            return
        if not self._may_evict(pages[-1], tier):
            self.refused(BadRequest, lambda: self.tree.evict(node, tier, count))
            return
        self.refused(BadRequest, lambda: self.tree.evict(node, tier, len(pages) + 1))
        freed = self.tree.evict(node, tier, count)
        leaving = pages[-count:] if count else pages
        expected = {tier: {page.copies.pop(tier)[1] for page in leaving}}
        for page in leaving:
            if not page.num_copies():
                assert self._drop_pages([page]) == {}
        self._take_back(freed, expected)

    def do_forget(self) -> None:
        node = self.any_node()
        if node is None or self.random.random() < 0.6:
            return
        tier = self.random.choice(self.tiers)
        pages = self.pages_of(node)
        first = self.random.randrange(len(pages))
        self.refused(BadRequest, lambda: self.tree.forget(node, tier, len(pages)))
        freed = self.tree.forget(node, tier, first)
        expected: dict[TierId, set[int]] = {}
        if pages[-1].has(tier):
            bad = pages[first:]
            for page in bad:
                self._drop_copy(page, tier, expected)
            if not bad[0].num_copies():
                for gone, slots in self._drop_pages([*bad, *self._below(bad[-1].path)]).items():
                    expected.setdefault(gone, set()).update(slots)
        self._take_back(freed, expected)

    def do_remove(self) -> None:
        if self.random.random() < 0.7:
            return
        space, pages = self.any_path()
        prefix: Tokens = tuple(self.tokens(pages).tolist())
        first = None
        if self.random.random() < 0.5:
            first = self.random.randint(0, len(pages))
        else:
            prefix = prefix[: self.random.randint(0, len(prefix))]
        if self.random.random() < 0.5:
            removed = self.tree.remove(self.namespaces[space], prefix, first_page=first)
        else:
            most = self.random.choice([1, 3, 1000])
            removed = joined(
                self.tree.remove_in_steps(self.namespaces[space], prefix, first_page=first, max_nodes=most)
            )
        doomed = []
        for page in self.pages.values():
            own = tuple(token for each in page.path[1] for token in each)
            starts = len(own) - self.page_size
            if page.path[0] != space:
                continue
            if first is not None and first < len(pages):
                # The branch that begins with page `first` of the given ones.
                if page.path[1][: first + 1] == pages[: first + 1]:
                    doomed.append(page)
            elif starts >= len(prefix) and own[: len(prefix)] == prefix:
                doomed.append(page)
        self._removed(removed, doomed)

    def _removed(self, removed: Any, doomed: list[Page]) -> None:
        held = [page for page in doomed if self._is_needed(page)]
        for page in held:
            self._withdraw(page)
        gone = [page for page in doomed if page not in held]
        expected = self._drop_pages(gone)
        self._take_back(removed.freed, expected)
        assert removed.num_pages == len(gone)
        assert removed.num_pending == sum(len(page.copies) for page in gone)
        named = {page.path for node in removed.held for page in self.pages_of(node)}
        assert named == {page.path for page in held}

    def do_flush(self) -> None:
        if self.random.random() < 0.85:
            return
        space = self.random.choice([None, self.random.randrange(len(self.namespaces))])
        tenant = self.random.choice([None, None, "a", "b"])
        tier = self.random.choice([None, *self.tiers])
        chosen = [
            page
            for page in self.pages.values()
            if (space is None or page.path[0] == space)
            and (tenant is None or self.namespaces[page.path[0]].tenant == tenant)
        ]
        namespace = None if space is None else self.namespaces[space]
        if tier is not None or self.random.random() < 0.5:
            removed = self.tree.flush(namespace, tenant, tier)
        else:
            removed = joined(self.tree.flush_in_steps(namespace, tenant, max_nodes=self.random.choice([1, 3, 1000])))
        if tier is None:
            self._removed(removed, chosen)
            return
        expected: dict[TierId, set[int]] = {}
        held: set[Path] = set()
        dropped = pending = 0
        for page in sorted(chosen, key=lambda page: len(page.path[1])):
            if not page.alive or not page.is_in(tier):
                continue
            if page.has(tier) and page.num_copies() == 1:
                if self._is_needed(page):
                    held.add(page.path)
                    continue
                gone = [page, *self._below(page.path)]
                for other, slots in self._drop_pages(gone).items():
                    expected.setdefault(other, set()).update(slots)
                dropped += len(gone)
                pending += sum(len(each.copies) for each in gone)
            else:
                self._drop_copy(page, tier, expected)
                dropped += 1
                pending += tier in page.copies
        self._take_back(removed.freed, expected)
        assert {page.path for node in removed.held for page in self.pages_of(node)} == held
        assert (removed.num_pages, removed.num_pending) == (dropped, pending)

    def do_identities(self) -> None:
        node = self.any_node()
        if node is None:
            return
        pages = self.pages_of(node)
        chain = digest = self.namespaces[pages[0].path[0]].digest
        packed = [np.array(tokens, "<i4").tobytes() for tokens in pages[-1].path[1]]
        expected = []
        for tokens in packed:
            expected.append((digest, chain, tokens))
            header = b"hicache-page\x01" + chain + len(tokens).to_bytes(4, "little")
            chain = hashlib.sha256(header + tokens).digest()
        found = [(each.namespace, each.prefix, each.tokens) for each in self.tree.identities(node)]
        assert found == expected[-len(pages) :]

    def do_walk(self) -> None:
        """One step of a walk that goes on while the tree changes."""
        if self.walker is None:
            self.walker = self.tree.walk(batch=self.random.randint(1, 4))
        batch = next(self.walker, None)
        if batch is None:
            self.walker = None
            return
        for info in batch:
            pages = self.pages_of(info.node)
            assert info.first_page == len(pages[0].path[1]) - 1
            assert info.num_pages == len(pages)
            assert info.tenant == self.namespaces[pages[0].path[0]].tenant

    def do_bad_input(self) -> None:
        """What is refused changes nothing."""
        space = self.random.randrange(len(self.namespaces))
        namespace, tier = self.namespaces[space], self.tiers[0]
        pages = self.any_path()[1] or (self.variants[0],)
        tokens = self.tokens(pages)
        count = len(pages)
        now = self.now
        negative = np.concatenate([tokens, np.array([-5] * self.page_size, np.int32)])
        long_slots = list(range(1000, 1001 + count))
        tries: list[tuple[str, Callable[[], object]]] = [
            ("tokens", lambda: self.tree.match(namespace, negative)),
            ("tokens", lambda: self.tree.insert(namespace, negative, tier=tier, slots=long_slots, now=now)),
            ("tokens", lambda: self.tree.match(namespace, tokens.astype(np.float64))),
            ("tokens", lambda: self.tree.match(namespace, tokens.reshape(1, -1))),
            ("tokens", lambda: self.tree.match(namespace, [2**31])),
            ("tokens", lambda: self.tree.match(namespace, [2**80])),
            ("slots", lambda: self.tree.insert(namespace, tokens, tier=tier, slots=long_slots, now=now)),
            ("slots", lambda: self.tree.insert(namespace, tokens, tier=tier, slots=[-1] * count, now=now)),
            ("tier", lambda: self.tree.insert(namespace, tokens, tier=TierId("tape"), slots=[0] * count, now=now)),
            (
                "first_page",
                lambda: self.tree.insert(namespace, tokens, tier=tier, slots=[], first_page=count + 1, now=now),
            ),
        ]
        if self.page_size > 1:
            tries.append(
                ("tokens", lambda: self.tree.insert(namespace, tokens[:-1], tier=tier, slots=[0] * count, now=now))
            )
        if count > 1:
            tries.append(("slots", lambda: self.tree.insert(namespace, tokens, tier=tier, slots=[7] * count, now=now)))
        wanted, attempt = self.random.choice(tries)
        self.refused(BadRequest, attempt, wanted)

    def refused(self, error: type[Exception], attempt: Callable[[], object], wanted: str | None = None) -> None:
        before = self.view()
        refusal: Exception | None = None
        try:
            attempt()
        except error as caught:
            refusal = caught
        assert refusal is not None, f"{error.__name__} was expected"
        if wanted is not None:
            assert isinstance(refusal, BadRequest)
            assert refusal.field == wanted, f"the error names {refusal.field}, not {wanted}"
        assert self.view() == before, "a refused call changed the tree"


def joined(steps: Iterator[Removed]) -> Removed:
    """What several steps did together."""
    freed: dict[TierId, list[int]] = {}
    num_pages = num_pending = 0
    held: list[Node] = []
    for step in steps:
        for tier, slots in step.freed.items():
            freed.setdefault(tier, []).extend(slots.tolist())
        num_pages += step.num_pages
        num_pending += step.num_pending
        held += step.held
    packed = {tier: np.array(slots, np.int32) for tier, slots in freed.items()}
    return Removed(packed, num_pages, num_pending, tuple(held))


def _shared(page: Tokens, rest: Tokens) -> int:
    count = 0
    for one, other in zip(page, rest, strict=False):
        if one != other:
            break
        count += 1
    return count


def run_history(
    seed: int,
    num_steps: int,
    make_tree: Callable[..., HiRadixTree] = HiRadixTree,
    policy: str | None = None,
) -> None:
    """Run one history, with that policy for all tiers or else with one that the seed decides. Raises `HistoryFailure`
    that names the seed and how to repeat it."""
    history = History(seed, make_tree, policy)
    try:
        history.run(num_steps)
    except Exception as failure:
        command = f"python -m tests.hicache.histories --seed {seed} --steps {num_steps}"
        command += f" --policy {policy}" if policy else ""
        last = " ".join(history.log[-8:])
        raise HistoryFailure(
            f"seed {seed} failed at step {len(history.log)} ({last}): {type(failure).__name__}: {failure}\n"
            f"repeat with: {command}"
        ) from failure


def main() -> None:
    parser = argparse.ArgumentParser(description="Repeat histories of the tree.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1, help="histories to run, from the seed on")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--policy", choices=POLICIES, help="of all tiers; by default the seed decides")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        run_history(seed, arguments.steps, policy=arguments.policy)
    print(f"{arguments.count} histories of {arguments.steps} steps from seed {arguments.seed}: all right")


if __name__ == "__main__":
    main()
