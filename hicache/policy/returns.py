"""Which pages come back: counted online by class, of those that were asked about.

Pages asked about lately count less, by the share of all returns that come so early: else what is new would look as if
it never came back. A class of which little is known is taken to be like its family, and a family like everything.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Final, NamedTuple

from hicache.policy.lineage import Lineage, Mark

EPOCHS: Final = 32
"""Pages asked about are kept apart by when that was, in so many parts of the window, which is as many pages as the tier
has; what comes back later than that counts as well, but is not expected."""
WINDOW_MIN: Final = 1024
HALF_LIFE: Final = 5.0
"""What is older than the window counts half after so many windows."""
PRIOR_PAGES: Final = 200.0
"""Pages asked about before a class's own count weighs as much as that of the classes like it."""
FIRST_RATE: Final = 0.3
"""Return rate of everything while nothing is known."""
PRIOR_RETURNS: Final = 100.0
"""Returns before their own delays weigh as much as the assumption that they are spread over the window."""
ADDED: Final = (1, 2, 5)
"""New stretches of a prompt that goes on from another: the largest of each class but the last."""

Family = tuple[bool, bool, bool, bool | None]
"""See `PageClass.family`."""


class PageClass(NamedTuple):
    """What pages are counted by."""

    kind: int
    """Twice the prompts that the last one went on from, less one where it went on from an end; 0 for none."""
    size: int
    """By how much it added; where it goes on from none, half octaves of its length."""
    known: bool
    """Whether the prompt knew the page, so that it was used twice at least."""
    is_tail: bool
    returns: bool | None
    """What was hinted."""

    @property
    def family(self) -> Family:
        """The classes that a class is taken to be like while little is known of it."""
        return self.kind > 0, self.known, self.is_tail, self.returns


@dataclass(slots=True)
class _Count:
    """Pages of a class that were asked about in one epoch, or in all that are older."""

    asked: float = 0.0
    fresh: float = 0.0
    """Of these, how many had not come back before."""
    awaited: float = 0.0
    """Of the fresh ones, how many have not come back since."""


@dataclass(slots=True)
class _Epoch:
    number: int
    counts: dict[PageClass, _Count] = field(default_factory=dict)


@dataclass(slots=True)
class Asked(Mark):
    """What is known of a stretch of a prompt that may be asked about."""

    num_pages: int
    use: int
    of: PageClass
    has_returned: bool = False
    """Whether it came back after it was asked about, ever."""
    asked: tuple[_Epoch, PageClass] | None = None
    """When, and as what, it was asked about since its last use."""


def class_of(lineage: Lineage, *, is_known: bool, is_tail: bool) -> PageClass:
    """The class of a stretch of a prompt, by where the prompt comes from."""
    if lineage.goes_on:
        kind, size = 2 * lineage.turn - lineage.from_end, bisect_left(ADDED, lineage.num_added)
    else:
        kind, size = 0, int(2 * log2(lineage.num_pages))
    return PageClass(kind, size, is_known, is_tail, None)


class Returns:
    """Counts of what was asked about and of what came back, in pages.

    Args:
        window: pages asked about before one that has not come back is not waited for any more, at least 1.
    """

    def __init__(self, window: float) -> None:
        self.asked = 0.0
        """Asked about so far."""
        self.returned = 0.0
        """Of these, how many came back, each once."""
        self.expected = 0.0
        """How many have not come back yet, but should. As of the last refresh, as are all rates."""
        self.common_rate = FIRST_RATE
        """The share of everything that comes back."""
        self._span = window / EPOCHS
        self._half_life = HALF_LIFE * window
        self._refreshed_at = 0.0
        self._epochs = deque([_Epoch(0)])
        self._older: dict[PageClass, _Count] = {}
        self._back: dict[PageClass, float] = {}  # pages that came back, by what they were asked about as
        self._delays = [0.0] * (EPOCHS + 1)  # pages that came back, by epochs since they were asked about
        self._rates: dict[PageClass, float] = {}
        self._family_rates: dict[Family, float] = {}

    def count_asked(self, records: Sequence[Asked]) -> None:
        """Stretches are asked about; those that were since their last use are not counted again."""
        epoch = self._epochs[-1]
        for record in records:
            if record.asked is None:
                record.asked = epoch, record.of
                count = epoch.counts.setdefault(record.of, _Count())
                count.asked += record.num_pages
                if not record.has_returned:
                    count.fresh += record.num_pages
                    count.awaited += record.num_pages
                self.asked += record.num_pages

    def count_return(self, record: Asked) -> None:
        """A stretch is used again; nothing, where it was not asked about since its last use."""
        if record.asked is None:
            return
        epoch, of = record.asked
        if not record.has_returned:
            record.has_returned = True
            self.returned += record.num_pages
            epoch.counts[of].awaited -= record.num_pages
        self._back[of] = self._back.get(of, 0.0) + record.num_pages
        self._delays[min(EPOCHS, self._epochs[-1].number - epoch.number)] += record.num_pages

    def rate(self, of: PageClass) -> float:
        """The share of a class that comes back."""
        rate = self._rates.get(of)
        return rate if rate is not None else self._family_rates.get(of.family, self.common_rate)

    def volumes(self) -> dict[PageClass, tuple[float, float]]:
        """Pages asked about lately, and how many of them had not come back before, by class. Every class that there is
        has a rate of its own."""
        volumes: dict[PageClass, tuple[float, float]] = {}
        for of, count, _ in self._counted([1.0] * (EPOCHS + 1)):
            asked, fresh = volumes.get(of, (0.0, 0.0))
            volumes[of] = asked + count.asked, fresh + count.fresh
        return volumes

    def refresh(self) -> float:
        """Bring rates up to date, once an epoch. Returns how many pages were asked about since the last time; 0.0 while
        it is not time yet."""
        step = self.asked - self._refreshed_at
        if step < self._span:
            return 0.0
        self._refreshed_at = self.asked
        self._age(step)
        early = self._early()
        self._learn(early)
        self._expect(early)
        return step

    def _age(self, step: float) -> None:
        """Begin an epoch, and let what is old count less."""
        fading = 2.0 ** (-step / self._half_life)
        for count in self._older.values():
            count.asked *= fading
            count.fresh *= fading
        for of in self._back:
            self._back[of] *= fading
        self._epochs.append(_Epoch(self._epochs[-1].number + 1))
        if len(self._epochs) > EPOCHS:
            for of, count in self._epochs.popleft().counts.items():
                older = self._older.setdefault(of, _Count())
                older.asked += count.asked
                older.fresh += count.fresh

    def _early(self) -> list[float]:
        """The share of returns that come within so many epochs."""
        total, so_far, early = sum(self._delays) + PRIOR_RETURNS, 0.0, []
        for pages in self._delays:
            so_far += pages + PRIOR_RETURNS / len(self._delays)
            early.append(so_far / total)
        return early

    def _counted(self, early: Sequence[float]) -> "Iterator[tuple[PageClass, _Count, float]]":
        """All counts, each with the share of its returns that should have been seen by now."""
        for of, count in self._older.items():
            yield of, count, 1.0
        newest = self._epochs[-1].number
        for epoch in self._epochs:
            seen = early[newest - epoch.number]
            for of, count in epoch.counts.items():
                yield of, count, seen

    def _learn(self, early: Sequence[float]) -> None:
        """What share of each class comes back."""
        ripe: dict[PageClass, float] = {}
        for of, count, seen in self._counted(early):
            ripe[of] = ripe.get(of, 0.0) + count.asked * seen
        families: dict[Family, tuple[float, float]] = {}
        for of, pages in ripe.items():
            asked, back = families.get(of.family, (0.0, 0.0))
            families[of.family] = asked + pages, back + self._back.get(of, 0.0)
        self.common_rate = _shrunk(sum(self._back.values()), sum(ripe.values()), FIRST_RATE)
        self._family_rates = {
            family: _shrunk(back, asked, self.common_rate) for family, (asked, back) in families.items()
        }
        self._rates = {
            of: _shrunk(self._back.get(of, 0.0), pages, self._family_rates[of.family]) for of, pages in ripe.items()
        }

    def _expect(self, early: Sequence[float]) -> None:
        """How many pages that were asked about should still come back, for the first time."""
        self.expected = 0.0
        for of, count, seen in self._counted(early):
            late = self._rates[of] * (1.0 - seen)
            self.expected += count.awaited * late / (late + 1.0 - self._rates[of] + 1e-9)


def _shrunk(back: float, asked: float, prior: float) -> float:
    """A share that was counted, drawn towards `prior` as long as little was."""
    return min(1.0, (back + PRIOR_PAGES * prior) / (asked + PRIOR_PAGES))
