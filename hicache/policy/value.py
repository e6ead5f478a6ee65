"""Our own order: how many reads a page is likely to bring for each use that it stays.

Every page of a tier costs the same bytes and saves about the same time when it is read, so what differs is how soon it
is read again. That is counted online by class and age, and a page is worth its index there (`hicache.policy.reuse`).
The class of a page is told by its last use:

    lineage  how many prompts that prompt went on from, at most `TURNS_MAX`, and whether from the end of one
    size     its length if it went on from none, else how much it added
    tail     whether the node was its end
    past     how long before the last use the one before was, and how often the node was used: the sum of its uses, each
             halved `DECAY` times a use (LRFU's sum). Classes of one past are kin.
    hint     what a caller said of it: that it returns, when, or that it does not. Part of the past too, so a hint is
             believed as far as hints like it came true.

The nodes that one use put into one class are a batch. They age together, so what moves as time passes is a batch a half
octave, not a node; batches of one class and span of age share a cell, and the next victim is in the cell that is worth
least.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import log2
from typing import Final, NamedTuple

from hicache.collector import untrack
from hicache.node import Box, Node
from hicache.policy.base import Hint, Use
from hicache.policy.history import RECORDS_MAX, History
from hicache.policy.lineage import Mark, ends_at, lineage_of
from hicache.policy.reuse import AGES, SPANS, Reuse

DECAY: Final = 1 / 2048
"""Halvings a use of what a use counts for."""
REFRESH_USES: Final = 16
"""Uses between two looks at what was counted."""
LENGTHS: Final = (2, 4, 16, 48)
"""Pages of a prompt that goes on from none: the largest of each class but the last."""
ADDED: Final = (1, 2, 5)
"""New pages of a prompt that goes on from another: the largest of each class but the last."""
GAPS: Final = (3, 15, 63, 255, 1023)
"""Uses between the last use and the one before: the largest of each class but the last."""
SUMS_MAX: Final = 11
"""Classes of sums, two an octave from 1 on, but for the last."""
CLASSES_MAX: Final = 2048
"""Classes that are told apart. What comes later is counted by its kin alone."""
RETURNS, STAYS_AWAY, RETURNS_SOON = 1, 2, 3
"""Hints: it returns; it does not; and the first of those that say when, by `WAITS`."""
WAITS: Final = (16, 64, 256, 1024)
"""Uses until an expected return: the largest of each class but the last."""
HINT_SCALE: Final = 4.0
"""How much more often pages that return are expected to be read than those of which nothing is known, at first."""
PACE_USES: Final = 64
"""Uses over which the time between two is averaged."""


class _Class(NamedTuple):
    """What nodes of one class have in common."""

    prompt: int
    """Lineage, size and tail; -1 for all of them."""
    gap: int
    """Class of the uses between the last two; 0 for a node that was used once."""
    total: int
    """Class of the sum."""
    hint: int = 0


@dataclass(slots=True)
class _Batch:
    """The pages that one use put into one class."""

    at: int
    """The use."""
    index: int
    """The class."""
    span: int = 0
    num_pages: int = 0
    """Those that were not read again."""
    listed: dict[Box, None] = field(default_factory=dict)
    """Nodes of it that may leave."""


@dataclass(slots=True)
class _Record(Mark):
    """What is known of a prefix."""

    total: float
    """Sum of its uses as of use `at`."""
    at: int
    batch: _Batch


class ValuePolicy:
    """Evicts what is least likely to be read again soon, by its own uses and by what became of prompts like its last.

    Args:
        records_max: prefixes remembered, resident or not.
    """

    def __init__(self, *, records_max: int = RECORDS_MAX) -> None:
        self._records: History[_Record] = History(records_max)
        self._uses = 0
        self._reuse = Reuse()
        self._classes: dict[_Class, int] = {}
        self._class_of: list[_Class] = []
        self._kins: dict[tuple[int, int, int], int] = {}
        self._worth: list[list[float]] = []  # by class and span
        self._aging: list[deque[_Batch]] = [deque() for _ in range(SPANS - 1)]  # by span, first to leave it first
        self._listed: dict[Box, _Batch] = {}
        untrack(self._listed)
        self._cells: dict[tuple[int, int], dict[int, _Batch]] = {}  # by class and span: those with listed nodes, by id
        self._order: list[tuple[float, int, int]] = []  # a heap of cells by worth; some are empty by now
        self._stray: _Batch | None = None
        self._hinted: dict[int, _Batch] = {}  # by class: those of hints since the last use
        self._last_use = 0.0
        self._pace = 0.0  # seconds a use
        self._stray_class = self._class(_Class(-1, 0, 0))

    # -- events -------------------------------------------------------------------------------------------------------

    def add(self, node: Node, now: float) -> None:
        record = self._records.get(node)
        self._list(node, self._stray_batch() if record is None else record.batch)

    def discard(self, node: Node) -> None:
        batch = self._listed.pop(node.box)
        del batch.listed[node.box]
        if not batch.listed:
            self._drop(batch)

    def touch(self, node: Node, now: float) -> None:
        pass  # `used` tells it

    def split(self, upper: Node, lower: Node) -> None:
        known = self._records.get(lower)
        if known is not None:
            self._remember(upper, _Record(known.turn, False, known.total, known.at, known.batch))

    def joined(self, upper: Node, lower: Node) -> None:
        above, below = self._records.get(upper), self._records.get(lower)
        if above is None:
            return
        if below is None:
            self._records.put(lower, above)
            return
        # What went through the lower one went through the upper one too: the better past is that of both.
        if self._key(above) > self._key(below):
            _move(below.batch, above.batch, lower.num_pages)
            below.total, below.at, below.batch = above.total, above.at, above.batch
        else:
            _move(above.batch, below.batch, upper.num_pages)

    def used(self, use: Use) -> None:
        now, path = self._uses, use.path
        if now % REFRESH_USES == 0:
            self._refresh()
        parts = [self._records.parts(node) for node in path]
        lineage = lineage_of(part for of_node in parts for part in of_node)
        if lineage.goes_on:
            kind, size = 2 * lineage.turn - lineage.from_end, bisect_left(ADDED, lineage.num_added)
        else:
            kind, size = 0, bisect_left(LENGTHS, lineage.num_pages)
        prompt = 2 * (kind * (len(LENGTHS) + 1) + size)
        batches: dict[int, _Batch] = {}
        # Tail before head, so that of nodes with equal worth the tail leaves first.
        for place in range(len(path) - 1, -1, -1):
            node = path[place]
            is_tail, ended, total, gap = place == len(path) - 1, ends_at(path, place), 1.0, 0
            # A run that comes back with more behind it has the past of what it begins with.
            for num_pages, known in parts[place]:
                if known is not None:
                    ended = ended or (known.ended and num_pages == node.num_pages)
                    total = 1.0 + known.total * 2.0 ** (-DECAY * (now - known.at))
                    gap = 1 + bisect_left(GAPS, now - known.at)
                    self._count(known, num_pages)
            index = self._class(_Class(prompt + is_tail, gap, min(int(2 * log2(total)), SUMS_MAX)))
            batch = batches.get(index)
            if batch is None:
                batch = batches[index] = self._new_batch(now, index)
            batch.num_pages += node.num_pages
            self._remember(node, _Record(lineage.turn, ended, total, now, batch))
            if node.box in self._listed:
                self.discard(node)
                self._list(node, batch)
        self._uses += 1
        self._hinted.clear()
        self._age()
        if now:
            self._pace += (use.now - self._last_use - self._pace) / min(now, PACE_USES)
        self._last_use = use.now

    def hinted(self, path: Sequence[Node], hint: Hint, now: float) -> None:
        # However many hints come between two uses, they make no more batches than there are classes.
        code, batches = self._hint_code(hint, now), self._hinted
        for node in reversed(path):
            record = self._records.get(node)
            if record is None:
                continue
            index = self._class(self._class_of[record.batch.index]._replace(hint=code))
            batch = batches.get(index)
            if batch is None:
                batch = batches[index] = self._new_batch(max(0, self._uses - 1), index)
            _move(record.batch, batch, node.num_pages)
            record.batch = batch
            if node.box in self._listed:
                self.discard(node)
                self._list(node, batch)

    def victims(self) -> Iterator[Node]:
        order = self._order
        while order and not self._cells.get(order[0][1:]):
            del self._cells[heappop(order)[1:]]
        left = order.copy()
        while left:
            for batch in self._cells.get(heappop(left)[1:], {}).values():
                for box in batch.listed:
                    yield box[0]

    # -- classes ------------------------------------------------------------------------------------------------------

    def _class(self, wanted: _Class) -> int:
        index = self._classes.get(wanted)
        if index is not None:
            return index
        if len(self._classes) >= CLASSES_MAX and wanted.prompt >= 0:
            return self._class(wanted._replace(prompt=-1))
        past = wanted[1:]
        kin = self._kins.get(past)
        if kin is None:
            hint_scale = {0: 1.0, STAYS_AWAY: 1 / HINT_SCALE}.get(wanted.hint, HINT_SCALE)
            kin = self._kins[past] = self._reuse.new_kin(hint_scale * 2.0 ** (wanted.total / 2))
        index = self._classes[wanted] = self._reuse.new_class(kin)
        self._class_of.append(wanted)
        self._refresh()
        return index

    def _hint_code(self, hint: Hint, now: float) -> int:
        if hint.returns is False:
            return STAYS_AWAY
        if hint.expected_return is not None and self._pace > 0:
            return RETURNS_SOON + bisect_left(WAITS, (hint.expected_return - now) / self._pace)
        return 0 if hint.returns is None and hint.expected_return is None else RETURNS

    # -- batches ------------------------------------------------------------------------------------------------------

    def _new_batch(self, at: int, index: int) -> _Batch:
        """An empty batch of the last use, or of one that is under way."""
        batch = _Batch(at, index)
        untrack(batch)
        self._aging[0].append(batch)
        return batch

    def _stray_batch(self) -> _Batch:
        """For nodes whose use has not been told yet, or is long forgotten: as if they had been used now."""
        if self._stray is None or self._stray.at != self._uses:
            self._stray = self._new_batch(self._uses, self._stray_class)
        return self._stray

    def _age(self) -> None:
        """Move the batches on that have come to the end of their span."""
        for span, batches in enumerate(self._aging):
            while batches and batches[0].at + AGES[span + 1] <= self._uses:
                batch = batches.popleft()
                if not batch.num_pages and not batch.listed:
                    continue  # nothing is left of it
                self._reuse.waited(batch.index, span, batch.num_pages)
                if batch.listed:
                    self._drop(batch)
                batch.span += 1
                if batch.listed:
                    self._show(batch)
                if batch.span < SPANS - 1:
                    self._aging[batch.span].append(batch)

    def _count(self, record: _Record, num_pages: int) -> None:
        """Pages were read again, in the use that is under way."""
        batch = record.batch
        num_pages = min(num_pages, batch.num_pages)
        batch.num_pages -= num_pages
        self._reuse.read(batch.index, batch.span, max(1, self._uses - batch.at), num_pages)

    def _remember(self, node: Node, record: _Record) -> None:
        untrack(record)  # there may be as many as pages
        self._records.put(node, record)

    def _key(self, record: _Record) -> float:
        """What orders sums whenever they were taken."""
        return log2(record.total) + DECAY * record.at

    # -- cells --------------------------------------------------------------------------------------------------------

    def _list(self, node: Node, batch: _Batch) -> None:
        self._listed[node.box] = batch
        batch.listed[node.box] = None
        if len(batch.listed) == 1:
            self._show(batch)

    def _show(self, batch: _Batch) -> None:
        """Put a batch with listed nodes into its cell."""
        place = batch.index, batch.span
        cell = self._cells.get(place)
        if cell is None:  # one that has become empty still stands in the order
            cell = self._cells[place] = {}
            heappush(self._order, (self._worth[batch.index][batch.span], *place))
        cell[id(batch)] = batch

    def _drop(self, batch: _Batch) -> None:
        """Take a batch out of its cell."""
        del self._cells[batch.index, batch.span][id(batch)]

    def _refresh(self) -> None:
        """Bring the worth of all cells up to date."""
        self._worth = self._reuse.indices()
        self._cells = {place: cell for place, cell in self._cells.items() if cell}
        self._order = [(self._worth[index][span], index, span) for index, span in self._cells]
        heapify(self._order)


def _move(source: _Batch, target: _Batch, num_pages: int) -> None:
    """Let another batch answer for pages that were not read again."""
    num_pages = min(num_pages, source.num_pages)
    source.num_pages -= num_pages
    target.num_pages += num_pages
