"""Carrying a plan out: compute a prefix from its front while it is loaded from its back, until both ends meet.

A plan says where they should meet; here they meet where they do. Whoever is slower than predicted is left less:

- The loading end goes on down from the back for as long as there is a page that nobody has taken.
- Before each step the computing end asks where the two would meet at the speeds of now, and computes to there at most.
- A page on its way may be waited for, but no longer than it would take to compute it: a disk that hangs costs its hits
  and that wait, not the request.
- A page that could not be loaded is computed.

Pages that were loaded are of no use before everything in front of them is there. They are **private** to the request
until then: `Meeting.joined` counts the pages from the root without a gap, and only these may be published.

`Meeting` decides and does nothing; it is told what happened and when. `hicache.both_ends` carries it out.
"""

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from itertools import dropwhile, islice, takewhile
from typing import Final

from hicache.errors import BadRequest
from hicache.planner import PageRange, Plan
from hicache.prefill import PrefillSpeed

PATIENCE_S: Final = 2.0
"""How long pages on their way are waited for without any of them coming, while nobody knows what computing costs."""
SLOWER: Final = 2.0
"""When so many times the predicted time is over, pages that were to be loaded first are left to whichever end is
faster."""
_PACE: Final = 0.75
"""How much of what earlier batches taught about the pace of pages a newer one leaves."""


class _Page(IntEnum):
    """What is known of a page."""

    THERE = 0
    OPEN = 1
    """Nobody has taken it: either end may."""
    PROMISED = 2
    """It is to be loaded first: the computing end waits for it."""
    LOADING = 3
    LEFT = 4
    """It is not worth loading, or could not be loaded: computing is left."""
    COMPUTING = 5


class Meeting:
    """The two ends of one plan. Belongs to one event loop; never waits.

    Args:
        plan: what `hicache.planner.plan` said. What it computes at last is not part of the meeting.
        page_size: tokens of a page.
        prefill: what computing costs; learns from the steps of this meeting.
        chunk_tokens: most tokens that the engine computes in one step.
        load_pages: most pages to load at once.
        now: monotonic seconds.

    Raises `BadRequest` for sizes below 1.
    """

    def __init__(
        self, plan: Plan, *, page_size: int, prefill: PrefillSpeed, chunk_tokens: int, load_pages: int, now: float
    ) -> None:
        for name, value in (("page_size", page_size), ("chunk_tokens", chunk_tokens), ("load_pages", load_pages)):
            if value < 1:
                raise BadRequest(name, f"{value} is below 1")
        self.plan: Final = plan
        self.num_loaded = 0
        """Pages that were loaded."""
        self.num_computed = 0
        """Pages that were computed."""
        self.num_lost = 0
        """Pages that could not be loaded."""
        self._page_size = page_size
        self._prefill = prefill
        self._chunk_pages = max(1, chunk_tokens // page_size)
        self._load_pages = load_pages
        self._began_at = self._arrived_at = now
        self._wait_s = plan.load_wait_s
        # Batches may arrive together: sums of seconds and of pages, not a mean of speeds. The prediction is one batch.
        self._pace_pages = float(load_pages) if plan.load_page_s else 0.0
        self._pace_s = plan.load_page_s * self._pace_pages
        self._front = 0
        self._first = deque(plan.load_first)
        """What is left to load from the front on."""
        # The loading end goes on into what the plan computes, if it is faster than planned.
        self._back = deque((*plan.load_back, *reversed(plan.compute)) if plan.load_back else ())
        """What is left to load from the back on."""
        self._num_open = sum(map(len, self._back))
        """Open pages."""
        self._of_back: dict[int, int] = {}
        """Batches of `_back` under way: their first page, and how many they have."""
        num_pages = max((each.stop for each in (*plan.load_first, *plan.compute, *plan.load_back)), default=0)
        self._pages = bytearray(num_pages)
        """A `_Page` for each."""
        for each in plan.compute:
            self._mark(each, _Page.LEFT)
        for each in self._back:
            self._mark(each, _Page.OPEN)
        for each in plan.load_first:
            self._mark(each, _Page.PROMISED)

    @property
    def joined(self) -> int:
        """Pages from the root that are there without a gap: these may be attended over, and published."""
        while self._front < len(self._pages) and self._pages[self._front] == _Page.THERE:
            self._front += 1
        return self._front

    @property
    def is_over(self) -> bool:
        """Every page is there."""
        return self.joined == len(self._pages)

    # -- the loading end ----------------------------------------------------------------------------------------------

    def next_load(self) -> PageRange | None:
        """Take pages to load: neighbours of one range of the plan, at most `load_pages`. None: nothing is left."""
        taken = self._take(self._first, _Page.PROMISED, self._load_pages, front_first=True)
        if taken is None:
            taken = self._take(self._back, _Page.OPEN, self._load_at_most(), front_first=False)
            if taken is None:
                return None
            self._num_open -= len(taken)
            self._of_back[taken.start] = len(taken)
        self._mark(taken, _Page.LOADING)
        return taken

    def loaded(self, pages: PageRange, ok: Sequence[bool], now: float) -> None:
        """What `next_load` gave has been loaded: for each page, whether it came whole."""
        if len(ok) != len(pages):
            raise BadRequest("ok", f"{len(ok)} values for {len(pages)} pages")
        if self._of_back.pop(pages.start, 0):
            if all(ok):
                self._learn_pace(len(pages), now)
        else:
            self._wait_s = max(0.0, self._wait_s - (now - self._arrived_at))
        self._arrived_at = now
        self.num_loaded += sum(ok)
        self.num_lost += len(ok) - sum(ok)
        for page, good in zip(range(pages.start, pages.stop), ok, strict=True):
            # The computing end may have lost patience with it: then the page is its own, or there already.
            if self._pages[page] == _Page.LOADING:
                self._pages[page] = _Page.THERE if good else _Page.LEFT

    # -- the computing end --------------------------------------------------------------------------------------------

    def next_compute(self, now: float) -> PageRange | float:
        """Take pages to compute: everything before them is there. Or seconds for which to wait for something to be
        loaded, and then to ask again."""
        front = self.joined
        assert front < len(self._pages), "the meeting is over"
        until_open_up = float("inf")
        if self._first and self._prefill.curve is not None:
            until_open_up = self._began_at + SLOWER * self.plan.seconds - now
            if until_open_up <= 0:
                self._open_up()
                until_open_up = float("inf")
        state = self._pages[front]
        rest = self._pages[front:]
        stop = len(self._pages) - len(rest.lstrip(bytes([state])))
        if state == _Page.LEFT:
            return self._begin(front, stop)
        if state == _Page.OPEN and (target := self._meeting_point(front, stop, now)) > front:
            return self._begin(front, target)
        # Counted from when something last came, so that a disk that hangs is waited for once.
        cost = PATIENCE_S if self._prefill.curve is None else self._compute_seconds(front, stop)
        left = self._arrived_at + self._wait_s + cost - now
        return min(left, until_open_up) if left > 0 else self._begin(front, stop)

    def computed(self, pages: PageRange, seconds: float) -> None:
        """What `next_compute` gave has been computed in so many seconds."""
        self._mark(pages, _Page.THERE)
        self.num_computed += len(pages)
        if seconds > 0:
            self._prefill.add(pages.start * self._page_size, pages.stop * self._page_size, seconds)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, start: int, stop: int) -> PageRange:
        taken = PageRange(start, min(stop, start + self._chunk_pages))
        self._num_open -= self._pages[taken.start : taken.stop].count(_Page.OPEN)
        self._mark(taken, _Page.COMPUTING)
        return taken

    @property
    def _page_s(self) -> float:
        """Seconds from one page of the back to the next, as things go now."""
        return self._pace_s / self._pace_pages if self._pace_pages else 0.0

    def _load_at_most(self) -> int:
        """How many open pages to load at once: less towards the end, so that the last ones do not go far beyond the
        meeting point."""
        compute_s = self._compute_seconds(self._front, self._front + 1)
        share = compute_s / (compute_s + self._page_s) if compute_s else 1.0
        return min(self._load_pages, max(1, int(self._num_open * share / 4)))

    def _open_up(self) -> None:
        """Leave what was to be loaded first to both ends."""
        for each in self._first:
            self._num_open += self._pages[each.start : each.stop].count(_Page.PROMISED)
            self._pages[each.start : each.stop] = self._pages[each.start : each.stop].replace(
                bytes([_Page.PROMISED]), bytes([_Page.OPEN])
            )
        self._back.extend(reversed(self._first))
        self._first.clear()

    def _meeting_point(self, front: int, stop: int, now: float) -> int:
        """Up to where of open pages `[front, stop)` to compute, so that both ends end at the same moment."""
        ready_s = self._wait_s + sum(self._of_back.values()) * self._page_s - (now - self._arrived_at)
        # What is overdue may take as long again: nobody knows better.
        ready_s = abs(ready_s)

        def load_s(point: int) -> float:
            """How long loading what is left takes, if everything up to a point is computed."""
            return ready_s + (self._num_open - (point - front)) * self._page_s

        low, high = front, stop
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._compute_seconds(front, middle) <= load_s(middle) else (low, middle - 1)
        # The loading end is the later one now; with a page more the computing end may be, but sooner.
        return low + 1 if low < stop and self._compute_seconds(front, low + 1) < load_s(low) else low

    def _compute_seconds(self, start: int, stop: int) -> float:
        curve = self._prefill.curve
        if curve is None:
            return 0.0
        steps = -(-(stop - start) // self._chunk_pages)
        return curve.seconds(start * self._page_size, stop * self._page_size, steps=steps)

    def _learn_pace(self, num_pages: int, now: float) -> None:
        """Pages of the back came, one batch after the other."""
        # The first ones also waited: as long as predicted, as far as anybody knows.
        self._pace_s = _PACE * self._pace_s + max(0.0, now - self._arrived_at - self._wait_s)
        self._pace_pages = _PACE * self._pace_pages + num_pages
        self._wait_s = 0.0

    def _take(self, ranges: deque[PageRange], state: _Page, at_most: int, *, front_first: bool) -> PageRange | None:
        """The next neighbours of a state, from the front of the first range or from its back; the rest of it stays."""
        while ranges:
            left = ranges.popleft()
            pages = range(left.start, left.stop) if front_first else range(left.stop - 1, left.start - 1, -1)
            free = dropwhile(lambda page: self._pages[page] != state, pages)
            taken = list(islice(takewhile(lambda page: self._pages[page] == state, free), at_most))
            if taken:
                low, high = min(taken), max(taken)
                rest = PageRange(high + 1, left.stop) if front_first else PageRange(left.start, low)
                if len(rest):
                    ranges.appendleft(rest)
                return PageRange(low, high + 1)
        return None

    def _mark(self, pages: PageRange, state: _Page) -> None:
        self._pages[pages.start : pages.stop] = bytes([state]) * len(pages)
