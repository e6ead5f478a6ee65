"""What is under way between callers and lane threads: runs of pages, layers, probes; and whose turn a slot is.

Each job is made on the event loop, runs on a lane thread, and lands on the loop again, where what it learnt is taken
into the index if the slot is still the same.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hicache.errors import DeadlineExceeded, TierUnavailable
from hicache.tier import LayerRead, Outcome, PageIdentity, PageRead, PageWrite
from hicache.tiers.nvme.budget import SpaceFloor
from hicache.tiers.nvme.commits import Commits
from hicache.tiers.nvme.findings import OUTCOMES, Counters, Finding, Operation
from hicache.tiers.nvme.geometry import Geometry
from hicache.tiers.nvme.health import Health
from hicache.tiers.nvme.index import Index
from hicache.tiers.nvme.io import Scratch
from hicache.tiers.nvme.lanes import Lanes
from hicache.tiers.nvme.namespaces import Namespaces
from hicache.tiers.nvme.recovery import MAX_GENERATION
from hicache.tiers.nvme.segment import LayerGet, PageGet, PagePut, SegmentFile, Written
from hicache.tiers.slots import SlotPool
from hicache.tiers.sums import page_sums


def cut_runs(slots: Sequence[int], geometry: Geometry, longest: int) -> Iterator[tuple[int, int, slice]]:
    """Cut the slots into runs of at most `longest` neighbours in one segment: its ordinal, the first one's place there,
    and which of the slots."""
    start = 0
    while start < len(slots):
        ordinal, index = geometry.locate(slots[start])
        limit = min(start + longest, len(slots), start + geometry.slots_of(ordinal) - index)
        stop = start + 1
        while stop < limit and slots[stop] == slots[stop - 1] + 1:
            stop += 1
        yield ordinal, index, slice(start, stop)
        start = stop


class Keeper:
    """Who may do what with a slot: the pool, the index and the commits behind one door. The event loop alone calls,
    except for `holds`.
    """

    def __init__(self, pool: SlotPool, index: Index, commits: Commits, namespaces: Namespaces) -> None:
        self.pool = pool
        self.index = index
        self.commits = commits
        self._namespaces = namespaces
        self._writing: set[int] = set()
        self._write_landed: list[asyncio.Future[None]] = []
        self._is_closed = False

    def takes(self, identity: PageIdentity) -> bool:
        """Whether the page may pass through the store's codec: a lossy one must be part of the page's namespace."""
        coding = self.index.shape.coding
        return coding is None or coding.codec.lossless or (
            self._namespaces.codec_of(identity.namespace) == coding.codec.name
        )

    def is_current(self, slot: int, generation: int) -> bool:
        """Whether the slot is handed out in that life."""
        return self.pool.is_current(slot, generation)

    def holds(self, slot: int, generation: int) -> bool:
        """Whether a page of that generation lies in the slot, whole."""
        return self.index.holds(slot, generation)

    async def wait_for_turn(self, pages: Sequence[PageWrite]) -> str | None:
        """Wait until the slots may be written: until no earlier write into one of them is under way, and until the
        log says durably that none of them holds a page. What they held is served no more from the beginning.

        Returns why some cannot be written, None if all that are current can.
        """
        while not self._is_closed:
            current = [page.slot for page in pages if self.is_current(page.slot, page.generation)]
            if not self._writing.isdisjoint(current):
                landed = asyncio.get_running_loop().create_future()
                self._write_landed.append(landed)
                await landed
                continue
            self.index.forget_all(current)
            used = [slot for slot in current if not self.commits.is_reusable(slot)]
            if not used:
                return None
            try:
                await self.commits.reach(max(map(self.commits.clear, used)), is_frees_only=True)
            except TierUnavailable as error:
                return str(error)
        return None

    def begin(self, slot: int) -> None:
        """A write into the slot begins."""
        self._writing.add(slot)

    def written(self, page: PageWrite, written: Written, *, is_lost: bool) -> Finding:
        """A write landed: serve the page if it went well and the slot is still the same. `is_lost`: a flush of its
        segment failed meanwhile, and may have been one of these bytes. A generation that recovery would not take, as
        only a forged log leads to, is no place for a page."""
        self._writing.discard(page.slot)
        if not self.is_current(page.slot, page.generation):
            return Finding.FREED
        if written.finding is Finding.OK and (is_lost or page.generation >= MAX_GENERATION):
            return Finding.DEVICE_ERROR
        if written.finding is Finding.OK:
            number = self._namespaces.number_of(page.identity.namespace)
            self.index.record(page.slot, page.generation, number, page.identity, written.words)
            self.commits.wrote(page.slot)
        return written.finding

    def wake_writers(self) -> None:
        """Have those look again who wait for a slot's turn."""
        waiting, self._write_landed = self._write_landed, []
        for landed in waiting:
            if not landed.done():
                landed.set_result(None)

    def close(self) -> None:
        """No turn comes any more."""
        self._is_closed = True
        self.wake_writers()


class Batch:
    """The pages of one `write` or `read`: what was found so far, and who waits for the rest."""

    def __init__(self, counters: Counters, operation: Operation, num_pages: int) -> None:
        self._counters = counters
        self._operation = operation
        self._findings: list[Finding | None] = [None] * num_pages
        self._num_runs = 0
        self._waiter: asyncio.Future[None] | None = None
        self._is_given_up = False

    def found(self, place: int, finding: Finding, num_bytes: int = 0) -> None:
        """What became of a page, for which so many bytes were moved."""
        self._findings[place] = finding
        self._counters.add(self._operation, finding, num_bytes)

    def expect(self, run: "WriteRun | ReadRun", lanes: Lanes) -> None:
        self._num_runs += 1
        lanes.submit(run)

    def run_landed(self) -> None:
        self._num_runs -= 1
        if not self._num_runs:
            self._wake()

    def give_up(self) -> None:
        """Wait for no run any more; their buffers are theirs for as long as the process lives."""
        self._is_given_up = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def outcomes(self) -> list[Outcome]:
        """Wait for all runs. A cancellation is kept until they have landed: they own buffers of the caller."""
        cancelled: asyncio.CancelledError | None = None
        while self._num_runs and not self._is_given_up:
            # A fresh future each time: a cancelled task cancels the future that it waits for.
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        assert self._is_given_up or None not in self._findings, "a page was forgotten"
        return [OUTCOMES[finding or Finding.DEVICE_ERROR] for finding in self._findings]


class WriteRun:
    """Pages for neighbouring slots of one segment."""

    def __init__(
        self,
        keeper: Keeper,
        batch: Batch,
        ordinal: int,
        segment: SegmentFile,
        first: int,
        puts: Sequence[tuple[int, PageWrite, memoryview]],
    ) -> None:
        self._keeper = keeper
        self._batch = batch
        self._ordinal = ordinal
        self._segment = segment
        self._failures = keeper.commits.failures(ordinal)
        self._pages = [(place, page) for place, page, _ in puts]
        sequence = keeper.commits.accepted
        self._puts = [
            PagePut(first + offset, page.generation, page.identity, data, page.sums, sequence)
            for offset, (_, page, data) in enumerate(puts)
        ]
        self._written: list[Written] = []

    def run(self, scratch: Scratch) -> None:
        self._written = self._segment.write_pages(self._puts, scratch)

    def land(self, error: Exception | None) -> None:
        written = self._written if error is None else [Written(Finding.BUG)] * len(self._puts)
        is_lost = self._keeper.commits.failures(self._ordinal) != self._failures
        for (place, page), each in zip(self._pages, written, strict=True):
            finding = self._keeper.written(page, each, is_lost=is_lost)
            self._batch.found(place, finding, each.num_bytes)
        self._keeper.wake_writers()
        self._batch.run_landed()


class ReadRun:
    """Pages from neighbouring slots of one segment."""

    def __init__(
        self,
        keeper: Keeper,
        batch: Batch,
        segment: SegmentFile,
        first: int,
        gets: Sequence[tuple[int, PageRead, memoryview]],
    ) -> None:
        self._keeper = keeper
        self._batch = batch
        self._segment = segment
        self._pages = [(place, page) for place, page, _ in gets]
        self._gets = [
            PageGet(
                first + offset, page.generation, page.identity, keeper.index.payload_sum(page.slot),
                keeper.index.layer_ends(page.slot), into,
            )
            for offset, (_, page, into) in enumerate(gets)
        ]
        self._findings: list[Finding] = []

    def run(self, scratch: Scratch) -> Callable[[], None]:
        return partial(self._verify, self._segment.fetch_pages(self._gets, scratch), scratch)

    def _verify(self, fetched: Sequence[Finding | None], scratch: Scratch) -> None:
        self._findings = self._segment.verify_pages(self._gets, fetched, scratch)
        if (shape := self._keeper.index.shape).coding is not None:
            for (_, page), get, finding in zip(self._pages, self._gets, self._findings, strict=True):
                if page.sums is not None and finding is Finding.OK:
                    page.sums[:] = page_sums(get.into, shape.layer_ranges)

    def land(self, error: Exception | None) -> None:
        findings = self._findings if error is None else [Finding.BUG] * len(self._gets)
        for (place, page), finding in zip(self._pages, findings, strict=True):
            if self._keeper.pool.generation(page.slot) != page.generation:
                finding = Finding.FREED
            elif finding is Finding.OK and page.sums is not None and not page.sums:
                page.sums[:] = self._keeper.index.sums(page.slot)
            self._batch.found(place, finding, page.into.nbytes if finding is Finding.OK else 0)
        self._batch.run_landed()


class LayerTicket:
    """Layer reads under way; what `start_layer_reads` returns."""

    def __init__(self, num_reads: int, counters: Counters) -> None:
        self._counters = counters
        self._findings: list[Finding | None] = [None] * num_reads
        self._num_open = num_reads
        self._changed = threading.Condition()

    def found(self, place: int, finding: Finding, num_bytes: int = 0) -> None:
        self._counters.add(Operation.READ_LAYER, finding, num_bytes if finding is Finding.OK else 0)
        with self._changed:
            assert self._findings[place] is None, "a layer was reported twice"
            self._findings[place] = finding
            self._num_open -= 1
            if not self._num_open:
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Block the calling thread until every read reported; one outcome each, in order.

        Raises `DeadlineExceeded` after `timeout_s` seconds; the buffers then still belong to the reads.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_open, timeout_s):
                raise DeadlineExceeded(f"{self._num_open} layer reads did not end within {timeout_s:g} s")
            return [OUTCOMES[finding] for finding in self._findings if finding is not None]


class LayerRun:
    """Layers that one thread reads one after the other."""

    def __init__(
        self, keeper: Keeper, ticket: LayerTicket, gets: Sequence[tuple[int, LayerRead, SegmentFile, LayerGet]]
    ) -> None:
        self._keeper = keeper
        self._ticket = ticket
        self._gets = list(gets)

    def run(self, scratch: Scratch) -> None:
        while self._gets:
            place, read, segment, get = self._gets[0]
            finding = segment.read_layer(get, scratch)
            if not self._keeper.holds(read.slot, read.generation):
                finding = Finding.FREED
            del self._gets[0]
            self._ticket.found(place, finding, len(get.into))

    def land(self, error: Exception | None) -> None:
        self.end_with(Finding.BUG)

    def end_with(self, finding: Finding) -> None:
        """Report everything that has not been read."""
        for place, *_ in self._gets:
            self._ticket.found(place, finding)
        self._gets.clear()


class Probe:
    """Tries a device that is down."""

    def __init__(self, segment: SegmentFile, health: Health) -> None:
        self._segment = segment
        self._health = health

    def run(self, scratch: Scratch) -> None:
        self._health.probed(self._segment.probe(scratch))

    def land(self, error: Exception | None) -> None:
        if error is not None:
            self._health.probed(str(error))


class Look:
    """Looks at the free space."""

    def __init__(self, floor: SpaceFloor) -> None:
        self._floor = floor

    def run(self, scratch: Scratch) -> None:
        self._floor.look()

    def land(self, error: Exception | None) -> None:
        """`SpaceFloor` keeps what was seen."""
