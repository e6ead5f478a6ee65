"""Our own order: how many seconds a page saves for each second that it stays.

Every page of a tier costs the same bytes and saves about the same time when it is read, so what differs is how soon it
is read again. A node's value is its reuse rate, a product of two parts:

1. Its own past: the sum of its uses, each halved `decay` times a use (LRFU's sum). `decay` is fitted to the median
   number of uses between two reads of one page, and kept as a power of two.
2. Its class: how often pages of prompts like the last one that used it were read again, over what their sums alone
   promised. Counted online over a window that also follows the median.

Classes say how many prompts the last one went on from and whether from the end of one, how long it was or how much it
added, whether it knew the node, and whether the node was its end. There are `CLASSES_MAX`; each keeps its nodes in the
order of part 1, which no passage of time changes, so a class whose rate changes moves as a whole, and the next victim
is the least of their heads.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from math import log2
from typing import Final

from hicache.node import Node
from hicache.policy.base import Use
from hicache.policy.history import RECORDS_MAX, History
from hicache.policy.ordered import Ordered

DECAY_SCALE: Final = 0.95
DECAY_POWER: Final = -1.16
"""A sum's halvings a use are `DECAY_SCALE * median ** DECAY_POWER`: 0.36 over a median of 400 uses between two reads,
0.71 over one of 6. What comes back at once is told by recency, what comes back late by how often it came."""
WINDOW_OF_MEDIAN: Final = 1.75
"""Uses over which a class is counted, in medians."""
PRIOR_PAGES: Final = 400.0
"""Expected reads of a class before its own count weighs as much as the assumption that it is like all others."""
REFRESH_USES: Final = 32
"""Uses between two looks at the rates."""
TURNS: Final = 3
"""Most prompts, one gone on from the other, that are told apart."""
COMMON_PAGES: Final = 1
"""So many known pages say nothing: everybody begins with them."""
LENGTHS: Final = (2, 4, 16, 48)
"""Pages of a prompt that goes on from none: the largest of each class but the last."""
ADDED: Final = (1, 2, 5)
"""New pages of a prompt that goes on from another: the largest of each class but the last."""
SIZES: Final = max(len(LENGTHS), len(ADDED)) + 1
CLASSES_MAX: Final = (1 + 2 * TURNS) * SIZES * 2 * 2
FIRST_MEDIAN: Final = 400.0
"""Median uses between two reads as long as few were seen, and how many pages read that counts for."""
FIRST_MEDIAN_PAGES: Final = 2000.0


@dataclass(slots=True)
class _Batch:
    """The pages that one use put into one class."""

    at: int
    group: int
    weight: float = 0.0
    """Sum of pages times sums of those not read again yet."""


@dataclass(slots=True)
class _Record:
    """What is known of a prefix."""

    total: float
    """Sum of its uses as of use `at`."""
    at: int
    group: int
    batch: _Batch
    turn: int
    """How many prompts the last one that used it went on from, one after the other, at most `TURNS`."""
    ended: bool
    """Whether a prompt ended here."""


GAPS: Final = 64


def _gap_index(gap: int) -> int:
    """Which half octave a number of uses is in."""
    return min(GAPS - 1, int(2 * log2(gap))) if gap > 1 else 0


class _Group:
    """One class: its nodes that may leave, and what was counted of it."""

    def __init__(self) -> None:
        self.listed = Ordered()
        self.read = 0.0  # pages, within the window
        self.outstanding = 0.0  # weight of what may still be read within the window
        self.exposed = 0.0  # the sum of that over uses, up to use `since`
        self.since = 0
        self.log_rate = 0.0  # of reads over what the sums alone promise, base 2

    def advance(self, use: int) -> None:
        """Bring `exposed` up to a use."""
        self.exposed += self.outstanding * (use - self.since)
        self.since = use


class ValuePolicy:
    """Evicts what is least likely to be read again soon, by its own uses and by what became of prompts like its last.

    Args:
        records_max: prefixes remembered, resident or not.
    """

    def __init__(self, *, records_max: int = RECORDS_MAX) -> None:
        self._records: History[_Record] = History(records_max)
        self._groups = [_Group() for _ in range(CLASSES_MAX)]
        self._batches: deque[_Batch] = deque()
        self._uses = 0
        self._gaps = [0.0] * GAPS  # pages read again, by half octaves of the uses between
        self._gaps[_gap_index(int(FIRST_MEDIAN))] = FIRST_MEDIAN_PAGES
        self._read = 1.0
        self._decay, self._decay_exponent = 1.0, 0
        self._window = 0
        self._fit(FIRST_MEDIAN)

    # -- events -------------------------------------------------------------------------------------------------------

    def add(self, node: Node, now: float) -> None:
        record = self._records.get(node)
        if record is None:
            # Its use has not been told yet, or it is long forgotten.
            self._groups[0].listed.place(node, self._decay * self._uses)
        else:
            self._groups[record.group].listed.place(node, self._key(record))

    def discard(self, node: Node) -> None:
        record = self._records.get(node)
        if record is None or not self._groups[record.group].listed.remove(node):
            for group in self._groups:
                if group.listed.remove(node):
                    return

    def touch(self, node: Node, now: float) -> None:
        pass  # `used` tells it

    def split(self, upper: Node, lower: Node) -> None:
        record = self._records.get(lower)
        if record is not None:
            # Of what is outstanding, the lower half answers for both.
            nothing = _Batch(record.at, record.group)
            self._records.put(upper, _Record(record.total, record.at, record.group, nothing, record.turn, ended=False))

    def used(self, use: Use) -> None:
        now, path = self._uses, use.path
        if now % REFRESH_USES == 0:
            self._refresh()
        records = [self._records.get(node) for node in path]
        num_pages = sum([node.num_pages for node in path])
        num_known, turn, from_end = 0, 0, False
        for node, record in zip(path, records, strict=True):
            if record is None:
                break
            num_known += node.num_pages
            turn, from_end = min(record.turn + 1, TURNS), record.ended
        if num_known > COMMON_PAGES:
            kind, size = 2 * turn - from_end, bisect_left(ADDED, num_pages - num_known)
        else:
            kind = turn = 0
            size = bisect_left(LENGTHS, num_pages)
        batches: dict[int, _Batch] = {}
        # Tail before head, so that of nodes with equal sums the tail leaves first.
        for place in range(len(path) - 1, -1, -1):
            node, known = path[place], records[place]
            is_tail = place == len(path) - 1
            index = 4 * (kind * SIZES + size) + 2 * is_tail + (known is not None)
            batch = batches.get(index)
            if batch is None:
                batch = batches[index] = _Batch(now, index)
            total, ended, listed = 1.0, False, self._groups[0].listed
            if known is not None:
                total += known.total * 2.0 ** (-self._decay * (now - known.at))
                ended, listed = known.ended, self._groups[known.group].listed
                self._count(known, node.num_pages)
            # The last page of a prompt may hold its remainder, which no later prompt goes on from.
            ended = ended or is_tail or (place == len(path) - 2 and path[-1].num_pages == 1)
            record = _Record(total, now, index, batch, turn, ended)
            self._records.put(node, record)
            if listed.remove(node):
                self._groups[index].listed.place(node, self._key(record))
            batch.weight += total * node.num_pages
        for batch in batches.values():
            group = self._groups[batch.group]
            group.advance(now)
            group.outstanding += batch.weight
            self._batches.append(batch)
        self._uses += 1

    def victims(self) -> Iterator[Node]:
        groups = [group for group in self._groups if len(group.listed)]
        if not groups:
            return
        least = min(groups, key=lambda group: group.listed.first_key() + group.log_rate)
        first = next(iter(least.listed))
        yield first
        entries = [((key + group.log_rate, node) for key, node in group.listed.entries()) for group in groups]
        for _, node in merge(*entries, key=lambda entry: entry[0]):
            if node is not first:
                yield node

    # -- learning -----------------------------------------------------------------------------------------------------

    def _key(self, record: _Record) -> float:
        return log2(record.total) + self._decay * record.at

    def _count(self, record: _Record, num_pages: int) -> None:
        """A page was read again."""
        gap = self._uses - record.at
        self._gaps[_gap_index(gap)] += num_pages
        batch = record.batch
        if not batch.weight:
            return  # out of the window
        group = self._groups[batch.group]
        group.advance(self._uses)
        weight = min(batch.weight, record.total * num_pages)
        batch.weight -= weight
        group.outstanding -= weight
        group.read += num_pages
        self._read += num_pages

    def _refresh(self) -> None:
        """Bring the rates, the decay and the window up to date."""
        now, batches = self._uses, self._batches
        while batches and batches[0].at < now - self._window:
            batch = batches.popleft()
            group = self._groups[batch.group]
            group.advance(now)
            # It was counted a little too long, until this refresh.
            group.exposed -= batch.weight * (now - self._window - batch.at)
            group.outstanding -= batch.weight
            batch.weight = 0.0
        for group in self._groups:
            group.advance(now)
        common = (self._read + 1.0) / (sum([group.exposed for group in self._groups]) + 1.0)
        for group in self._groups:
            group.log_rate = log2((group.read + PRIOR_PAGES) / (group.exposed * common + PRIOR_PAGES))
        half, below = sum(self._gaps) / 2, 0.0
        for index, pages in enumerate(self._gaps):
            below += pages
            if below >= half:
                self._fit(2.0 ** ((index + 0.5) / 2))
                break

    def _fit(self, median: float) -> None:
        """Follow the median number of uses between two reads."""
        self._window = max(REFRESH_USES, int(WINDOW_OF_MEDIAN * median))
        exponent = round(log2(DECAY_SCALE * median**DECAY_POWER))
        if exponent == self._decay_exponent:
            return
        self._decay_exponent, self._decay = exponent, 2.0**exponent
        for group in self._groups:
            for node in list(group.listed):
                record = self._records.get(node)
                group.listed.place(node, self._key(record) if record is not None else self._decay * self._uses)
