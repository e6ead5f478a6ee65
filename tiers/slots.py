"""Which slots of a tier are free, and how often each has been freed.

Invariants (`SlotPool.check_integrity`):

1. A slot is free or handed out, never both: `num_free` counts the free ones.
2. `_block_free[b]` counts the free slots of block `b`, so a search looks only where something is.
3. A generation never falls; it rises by one each time its slot is freed.
4. `num_taken - num_freed` slots are handed out.

One thread calls everything that changes (the event loop); `generation` may be read from any thread.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.errors import BadRequest, NoRoom
from hicache.tier import Slots, TierId

MAX_SLOTS: Final = 2**31 - 1
"""Slot ids are int32."""
_BLOCK: Final = 512
"""Slots a counter stands for. A search reads one counter a block, then the slots of few blocks."""
_NEAR: Final = 4096
"""Slots behind the last allocation that are looked at before any counter, where slots are to be reused late."""
_MIN_BLOCKS: Final = 16
"""Blocks that a search looks into at least."""
_LOOK_AHEAD: Final = 4
"""How many times the slots that are wanted are looked at for a run of them, where slots are to be reused late."""


class SlotPool:
    """Hands out slots `0 .. capacity - 1`, neighbours where possible.

    A run long enough is taken whole, the one that fits best among those looked at; failing that, the longest runs
    first. The place of the last allocation or free is tried before anything else, so that filling an empty tier, and
    refilling what an eviction emptied, are one comparison and stay in order. With `reuse_late` it is the place behind
    the last allocation, round and round; a run long enough is then looked for among the next free slots only.

    >>> pool = SlotPool(TierId("host"), 4)
    >>> pool.allocate(3)
    array([0, 1, 2], dtype=int32)
    >>> pool.free(np.array([1], np.int32)); pool.num_free, pool.generation(1)
    (2, 1)
    """

    def __init__(self, tier_id: TierId, capacity: int, *, reuse_late: bool = False) -> None:
        """`reuse_late`: what was freed last is given last, as far as neighbours allow; for slots that cost something to
        take again at once."""
        if not 1 <= capacity <= MAX_SLOTS:
            raise BadRequest("capacity_pages", f"{capacity} is not within 1 to {MAX_SLOTS} pages")
        self.tier_id = tier_id
        self.capacity = capacity
        self._num_free = capacity
        self.num_taken = 0
        """Slots handed out so far, those of a restored pool included; each time counts."""
        self.num_freed = 0
        """Slots given back so far: `num_taken` less these are handed out now."""
        num_blocks = -(-capacity // _BLOCK)
        # Padded to whole blocks with slots that are never free, so that blocks are rows.
        self._free = np.zeros(num_blocks * _BLOCK, np.bool_)
        self._free[:capacity] = True
        self._rows = self._free.reshape(num_blocks, _BLOCK)
        self._block_free = self._rows.sum(axis=1, dtype=np.int32)
        self._generation = np.zeros(capacity, np.int64)
        self._hint = 0
        self._reuse_late = reuse_late

    @classmethod
    def restored(
        cls,
        tier_id: TierId,
        generations: npt.NDArray[np.int64],
        allocated: Slots,
        *,
        reuse_late: bool = False,
    ) -> "SlotPool":
        """A pool that goes on where an earlier one ended: `generations` of all slots, and which are handed out."""
        pool = cls(tier_id, generations.size, reuse_late=reuse_late)
        pool._generation[:] = generations
        pool._free[allocated] = False
        pool._block_free[:] = pool._rows.sum(axis=1, dtype=np.int32)
        pool._num_free = int(pool._block_free.sum())
        pool.num_taken = len(allocated)
        return pool

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can give now."""
        return self._num_free

    def generation(self, slot: int) -> int:
        """How often `slot` has been freed, from 0. Raises `BadRequest` for a slot that does not exist."""
        if not 0 <= slot < self.capacity:
            raise BadRequest("slot", f"{slot} is not within 0 to {self.capacity - 1}")
        return int(self._generation[slot])

    def generations(self, slots: npt.NDArray[np.int64] | Slots) -> npt.NDArray[np.int64]:
        """How often each of the slots has been freed."""
        return self._generation[slots]

    def keep_generations_in(self, memory: npt.NDArray[np.int64]) -> None:
        """Move the generations of all slots to `memory`, int64 `[capacity]`, where others may read them from now on."""
        memory[:] = self._generation
        self._generation = memory

    def is_allocated(self, slot: int) -> bool:
        """Whether `slot` is handed out now. Raises `BadRequest` for a slot that does not exist."""
        if not 0 <= slot < self.capacity:
            raise BadRequest("slot", f"{slot} is not within 0 to {self.capacity - 1}")
        return not self._free[slot]

    def are_allocated(self, slots: Slots) -> bool:
        """Whether all of the slots, which exist, are handed out now."""
        return not self._free[slots].any()

    def is_current(self, slot: int, generation: int) -> bool:
        """Whether `slot`, which exists, is handed out in that life."""
        return bool(self._generation[slot] == generation) and not self._free[slot]

    def are_current(
        self, slots: npt.NDArray[np.int64], generations: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """`is_current` of each of the slots, which exist, in its generation."""
        current: npt.NDArray[np.bool_] = self._generation[slots] == generations
        return current & ~self._free[slots]

    def allocated(self) -> Slots:
        """Every slot handed out now, ascending. Walks the whole pool: for checks and inspection."""
        return np.flatnonzero(~self._free[: self.capacity]).astype(np.int32)

    def allocate(self, num_pages: int) -> Slots:
        """Take `num_pages` slots, ascending; all or none.

        Raises `NoRoom` when fewer are free, `BadRequest` for a negative number.
        """
        if num_pages < 0:
            raise BadRequest("num_pages", f"{num_pages} is negative")
        if num_pages > self._num_free:
            raise NoRoom(self.tier_id, pages_asked=num_pages, pages_free=self._num_free)
        if num_pages == 0:
            return np.empty(0, np.int32)
        start, end = self._hint, self._hint + num_pages
        if end > self.capacity and self._reuse_late:
            start, end = 0, num_pages
        if end <= self.capacity and bool(self._free[start:end].all()):
            slots = np.arange(start, end, dtype=np.int32)
            self._hint = end
        elif self._reuse_late:
            slots = _first_run(self._next_free(_LOOK_AHEAD * num_pages), num_pages)
            self._hint = int(slots[-1]) + 1
            slots.sort()
        else:
            slots = _choose(self._candidates(num_pages), num_pages)
            self._hint = int(slots[-1]) + 1
        self._free[slots] = False
        self._count(slots, -1)
        self._num_free -= num_pages
        self.num_taken += num_pages
        return slots

    def free(self, slots: Slots) -> None:
        """Give slots back and bump their generations. Any order.

        Raises `AssertionError`, and changes nothing, if a slot does not exist, is not handed out, or is named twice.
        """
        if slots.size == 0:
            return
        ordered = np.sort(slots)
        if ordered[0] < 0 or ordered[-1] >= self.capacity:
            raise AssertionError(f"{self.tier_id}: a slot outside 0 to {self.capacity - 1} was freed")
        if not bool((ordered[1:] != ordered[:-1]).all()):
            raise AssertionError(f"{self.tier_id}: a slot was named twice in one free")
        if bool(self._free[ordered].any()):
            raise AssertionError(f"{self.tier_id}: a slot was freed that is not handed out")
        self._free[ordered] = True
        self._generation[ordered] += 1
        self._count(ordered, 1)
        self._num_free += int(ordered.size)
        self.num_freed += int(ordered.size)
        if not self._reuse_late:
            starts, lengths = _runs(ordered)
            self._hint = int(ordered[starts[int(np.argmax(lengths))]])

    def counters(self) -> dict[str, int]:
        """`slots.taken` and `slots.freed`, as `SupportsCounters` gives them."""
        return {"slots.taken": self.num_taken, "slots.freed": self.num_freed}

    def check_integrity(self) -> None:
        """Raises `AssertionError` if an invariant at the head of this file does not hold."""
        counts = self._rows.sum(axis=1, dtype=np.int32)
        if not np.array_equal(counts, self._block_free) or int(counts.sum()) != self._num_free:
            raise AssertionError(f"{self.tier_id}: free counts and free slots disagree")
        if self.num_taken - self.num_freed != self.capacity - self._num_free:
            raise AssertionError(f"{self.tier_id}: slots taken and freed do not add up to those handed out")
        if bool(self._free[self.capacity :].any()):
            raise AssertionError(f"{self.tier_id}: a slot beyond the capacity is free")

    def _count(self, ordered: npt.NDArray[np.int32], change: int) -> None:
        first, last = int(ordered[0]) // _BLOCK, int(ordered[-1]) // _BLOCK
        if first == last:
            self._block_free[first] += change * ordered.size
        else:
            counts = np.bincount(ordered // _BLOCK - first, minlength=last - first + 1)
            self._block_free[first : last + 1] += (change * counts).astype(np.int32)

    def _candidates(self, num_pages: int) -> npt.NDArray[np.int32]:
        """Free slots to choose from, ascending: those of the blocks with most of them, enough blocks for `num_pages`
        and as many again, so that a long run is likely among them."""
        order = np.argsort(-self._block_free, kind="stable")
        enough = int(np.searchsorted(np.cumsum(self._block_free[order]), num_pages)) + 1
        blocks = np.sort(order[: max(2 * enough, _MIN_BLOCKS)])
        rows, columns = np.divmod(np.flatnonzero(self._rows[blocks]), _BLOCK)
        return (blocks[rows] * _BLOCK + columns).astype(np.int32)

    def _next_free(self, num_pages: int) -> npt.NDArray[np.int32]:
        """The next `num_pages` free slots behind the hint, round and round, or all if there are fewer; so ordered."""
        num_blocks, hint = len(self._rows), self._hint % self.capacity
        near = np.flatnonzero(self._free[hint : hint + _NEAR])[:num_pages]
        if near.size == num_pages:
            return (near + hint).astype(np.int32)
        first = hint // _BLOCK
        # The hint's block stands at both ends, for what lies behind the hint and before it.
        order = (np.arange(num_blocks + 1) + first) % num_blocks
        counts = np.cumsum(self._block_free[order])
        blocks = order[: int(np.searchsorted(counts, num_pages + int(counts[0]))) + 1]
        rows, columns = np.divmod(np.flatnonzero(self._rows[blocks]), _BLOCK)
        slots = (blocks[rows] * _BLOCK + columns).astype(np.int32)
        is_before = (blocks[rows] == first) & (slots < hint)
        is_kept: npt.NDArray[np.bool_] = np.where(rows == 0, ~is_before, (rows < num_blocks) | is_before)
        return slots[is_kept][:num_pages]


def _runs(ordered: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Positions in `ordered` (not empty) where runs of ascending neighbours begin, and how long they are."""
    starts = np.concatenate(([0], np.flatnonzero(ordered[1:] - ordered[:-1] != 1) + 1))
    return starts, np.diff(starts, append=ordered.size)


def _first_run(candidates: npt.NDArray[np.int32], num_pages: int) -> Slots:
    """`num_pages` of the candidates (at least as many): the first run of so many neighbours, or else the first ones."""
    starts, lengths = _runs(candidates)
    fitting = np.flatnonzero(lengths >= num_pages)
    start = int(starts[fitting[0]]) if fitting.size else 0
    return candidates[start : start + num_pages].copy()


def _choose(candidates: npt.NDArray[np.int32], num_pages: int) -> Slots:
    """`num_pages` of the candidates (ascending, at least as many), in as few runs as is easily had; ascending."""
    starts, lengths = _runs(candidates)
    fitting = np.flatnonzero(lengths >= num_pages)
    if fitting.size:
        best = int(fitting[np.argmin(lengths[fitting])])
        return candidates[starts[best] : starts[best] + num_pages]
    order = np.argsort(-lengths, kind="stable")
    longest_first = np.cumsum(lengths[order])
    needed = int(np.searchsorted(longest_first, num_pages)) + 1
    taken = np.zeros(lengths.size, np.intp)
    taken[order[:needed]] = lengths[order[:needed]]
    taken[order[needed - 1]] -= longest_first[needed - 1] - num_pages
    offset_in_run = np.arange(candidates.size) - np.repeat(starts, lengths)
    return candidates[offset_in_run < np.repeat(taken, lengths)]
