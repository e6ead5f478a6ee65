"""NVMe admission that predicts the first return of a page instead of waiting for it.

A page's class says what its last prompt went on from and how long it was or how much it added, whether the prompt knew
the page, whether it ends there, and what a hint said of it. For each class it is counted online what share of the pages
that were asked about came back. Pages asked about lately count less, by the share of all returns that come so early:
else what is new would look as if it never came back.

How much is written follows from the same counts. To know the future would need one write for each page that comes back;
this spends `writes_per_return` times as many, on the classes that come back most often, the last one in part. So the
threshold steers itself to a number of writes, whatever the load; nothing in it is fitted to a load. Two bounds hold
beside it: what has come back so far, with what is still expected of the pages asked about, pays for everything that is
written, but for a loan of `LOAN` of the tier at the beginning, which is paid back; and no more is planned than a budget
of bytes grants.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log2
from statistics import fmean
from typing import Final, NamedTuple

from hicache.errors import BadRequest
from hicache.node import Node
from hicache.policy.admission import Verdict
from hicache.policy.base import Hint, Use
from hicache.policy.history import RECORDS_MAX
from hicache.policy.lineage import Lineage, Mark, lineage_of
from hicache.policy.stretches import Stretches, cut

WRITES_PER_RETURN: Final = 1.55
"""Pages written for each one that comes back, where knowing the future needs 1 and writing everything about 3 to 5."""
LOAN: Final = 0.25
"""Part of the tier that is written before anything is known, so that it is of use from the beginning."""
PAID_BACK: Final = 4.0
"""The loan is paid back by the time that so many times the tier's pages were asked about."""
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
"""New pages of a prompt that goes on from another: the largest of each class but the last."""
_SPREAD: Final = 0.6180339887498949
"""Multiples of it fall evenly over 0 to 1: they choose the uses of a class that is admitted in part."""
_PACE_WEIGHT: Final = 0.2
"""Of the latest step, in the running pages a second that are asked about."""


class _Class(NamedTuple):
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
    def family(self) -> tuple[bool, bool, bool, bool | None]:
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
    counts: dict[_Class, _Count] = field(default_factory=dict)


@dataclass(slots=True)
class _Record(Mark):
    """What is known of a stretch of a prompt."""

    num_pages: int
    use: int
    of: _Class
    has_returned: bool = False
    asked: tuple[_Epoch, _Class] | None = None
    """When, and as what, it was asked about since its last use."""


class PredictedAdmission:
    """Admits the classes of pages that come back most often, as many as pay for their writes.

    Args:
        capacity_pages: pages of the NVMe tier.
        writes_per_return: pages that may be written for each one that comes back, from 0 on.
        pages_per_s: pages that a budget grants in the long run, above 0; None for no budget.
        stride: pages that are judged together, from 1 on (`hicache.policy.stretches`).
        records_max: stretches of so many pages remembered, resident or not; at least 1.

    Raises `BadRequest` naming what is out of bounds.
    """

    def __init__(
        self,
        *,
        capacity_pages: int,
        stride: int = 1,
        writes_per_return: float = WRITES_PER_RETURN,
        pages_per_s: float | None = None,
        records_max: int = RECORDS_MAX,
    ) -> None:
        for name, value, is_fine in (
            ("capacity_pages", capacity_pages, capacity_pages >= 1),
            ("writes_per_return", writes_per_return, 0 <= writes_per_return < float("inf")),
            ("pages_per_s", pages_per_s, pages_per_s is None or pages_per_s > 0),
        ):
            if not is_fine:
                raise BadRequest(name, f"{value} is out of bounds")
        self._stretches: Stretches[_Record] = Stretches(stride=stride, records_max=records_max)
        self._uses = 0
        self._per_return = writes_per_return
        self._pages_per_s = pages_per_s
        # Records that are forgotten are not seen to come back.
        window = max(WINDOW_MIN, min(capacity_pages, records_max * stride // 2))
        self._span = window / EPOCHS
        self._half_life = HALF_LIFE * window
        self._loan = LOAN * capacity_pages
        self._paid_back = PAID_BACK * capacity_pages
        self._asked = self._returned = self._written = 0.0  # pages so far
        self._epochs = deque([_Epoch(0)])
        self._older: dict[_Class, _Count] = {}
        self._back: dict[_Class, float] = {}  # pages that came back, by what they were asked about as
        self._delays = [0.0] * (EPOCHS + 1)  # pages that came back, by epochs since they were asked about
        self._rates: dict[_Class, float] = {}
        self._family_rates: dict[tuple[bool, bool, bool, bool | None], float] = {}
        self._common_rate = FIRST_RATE
        self._shares: dict[_Class, float] = {}
        self._threshold = 0.0  # return rate above which a class that was not seen yet is admitted
        self._expected = 0.0  # pages that have not come back yet, but should
        self._refreshed_at: tuple[float, float] | None = None  # pages asked about, seconds
        self._asked_per_s = 0.0

    # -- events -------------------------------------------------------------------------------------------------------

    def used(self, use: Use) -> None:
        stretches = cut(use.path, self._stretches.stride)
        known = self._stretches.known(stretches)
        lineage = lineage_of(stretches, known)
        last, records = len(stretches) - 1, []
        for place, (stretch, before) in enumerate(zip(stretches, known, strict=True)):
            if before is not None:
                self._count_return(before)
            # What is behind the last cut may not come again, so a prompt that goes on does so from before it, too.
            ends_here = place >= last - 1
            records.append(_Record(
                num_pages=stretch.num_pages,
                turn=lineage.turn,
                ended=ends_here or (before is not None and before.ended),
                use=self._uses,
                of=_class_of(lineage, is_known=before is not None, is_tail=place == last),
                has_returned=before is not None and before.has_returned,
            ))  # fmt: skip
        self._stretches.keep(use.path, stretches, records)
        self._uses += 1

    def hinted(self, path: Sequence[Node], hint: Hint, now: float) -> None:
        """See `HearsHints`. Pages whose prompt is said to go on are a class of their own, and so are those of one that
        is said to end: what hints are worth is learnt as everything else, so wrong ones cost little."""
        returns = True if hint.returns is None and hint.expected_return is not None else hint.returns
        for node in path:
            for record in self._stretches.of(node):
                record.of = record.of._replace(returns=returns)

    def admits(self, node: Node, now: float) -> Verdict:
        records = self._stretches.of(node)
        if not records:
            # Its use has not been told yet, or it is long forgotten.
            return Verdict.ADMITTED if self._common_rate > self._threshold else Verdict.UNLIKELY
        self._count_asked(records)
        self._refresh(now)
        rate = fmean([self._rate(record.of) for record in records])
        loan = self._loan * max(0.0, 1.0 - self._asked / self._paid_back)
        is_spent = self._written >= self._per_return * (self._returned + self._expected) + loan
        if is_spent and rate * self._per_return < 1.0:  # others pay for themselves
            return Verdict.UNLIKELY
        if self._asked > self._loan:
            share = fmean([self._share(record.of) for record in records])
            if records[-1].use * _SPREAD % 1.0 >= share:
                return Verdict.UNLIKELY
        return Verdict.ADMITTED

    def written(self, node: Node, now: float) -> None:
        self._written += node.num_pages
        self._count_asked(self._stretches.of(node))

    def split(self, upper: Node, lower: Node) -> None:
        """See `HearsShape`."""
        self._stretches.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        """See `HearsShape`."""
        self._stretches.joined(upper, lower)

    # -- counting -----------------------------------------------------------------------------------------------------

    def _count_asked(self, records: Sequence[_Record]) -> None:
        epoch = self._epochs[-1]
        for record in records:
            if record.asked is None:
                record.asked = epoch, record.of
                count = epoch.counts.setdefault(record.of, _Count())
                count.asked += record.num_pages
                if not record.has_returned:
                    count.fresh += record.num_pages
                    count.awaited += record.num_pages
                self._asked += record.num_pages

    def _count_return(self, record: _Record) -> None:
        if record.asked is None:
            return
        epoch, of = record.asked
        if not record.has_returned:
            record.has_returned = True
            self._returned += record.num_pages
            epoch.counts[of].awaited -= record.num_pages
        self._back[of] = self._back.get(of, 0.0) + record.num_pages
        self._delays[min(EPOCHS, self._epochs[-1].number - epoch.number)] += record.num_pages

    # -- learning -----------------------------------------------------------------------------------------------------

    def _rate(self, of: _Class) -> float:
        """The share of a class that comes back."""
        rate = self._rates.get(of)
        return rate if rate is not None else self._family_rates.get(of.family, self._common_rate)

    def _share(self, of: _Class) -> float:
        """What part of a class is admitted."""
        return self._shares.get(of, float(self._rate(of) > self._threshold))

    def _refresh(self, now: float) -> None:
        """Bring rates and shares up to date, once an epoch."""
        if self._refreshed_at is None:
            self._refreshed_at = self._asked, now
        asked_at, refreshed_at = self._refreshed_at
        step = self._asked - asked_at
        if step < self._span:
            return
        self._refreshed_at = self._asked, now
        if now > refreshed_at:
            self._asked_per_s += _PACE_WEIGHT * (step / (now - refreshed_at) - self._asked_per_s)
        self._age(step)
        early = self._early()
        self._learn(early)
        self._expect(early)
        self._share_out()

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

    def _counted(self, early: Sequence[float]) -> "Iterator[tuple[_Class, _Count, float]]":
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
        ripe: dict[_Class, float] = {}
        for of, count, seen in self._counted(early):
            ripe[of] = ripe.get(of, 0.0) + count.asked * seen
        families: dict[tuple[bool, bool, bool, bool | None], tuple[float, float]] = {}
        for of, pages in ripe.items():
            asked, back = families.get(of.family, (0.0, 0.0))
            families[of.family] = asked + pages, back + self._back.get(of, 0.0)
        self._common_rate = _shrunk(sum(self._back.values()), sum(ripe.values()), FIRST_RATE)
        self._family_rates = {
            family: _shrunk(back, asked, self._common_rate) for family, (asked, back) in families.items()
        }
        self._rates = {
            of: _shrunk(self._back.get(of, 0.0), pages, self._family_rates[of.family]) for of, pages in ripe.items()
        }

    def _expect(self, early: Sequence[float]) -> None:
        """How many pages that were asked about should still come back, for the first time."""
        self._expected = 0.0
        for of, count, seen in self._counted(early):
            late = self._rates[of] * (1.0 - seen)
            self._expected += count.awaited * late / (late + 1.0 - self._rates[of] + 1e-9)

    def _share_out(self) -> None:
        """Spend writes on the classes that come back most often."""
        asked: dict[_Class, float] = {}
        left = 0.0
        for of, count, _ in self._counted([1.0] * (EPOCHS + 1)):
            asked[of] = asked.get(of, 0.0) + count.asked
            left += self._per_return * count.fresh * self._rates[of]
        if self._pages_per_s is not None and self._asked_per_s:
            left = min(left, sum(asked.values()) * self._pages_per_s / self._asked_per_s)
        self._shares, self._threshold = {}, 0.0
        for of in sorted(asked, key=lambda of: self._rates[of], reverse=True):
            share = self._shares[of] = min(1.0, max(0.0, left / asked[of])) if asked[of] else 1.0
            if share < 1.0:
                self._threshold = max(self._threshold, self._rates[of])  # that of the first one
            left -= asked[of]


def _class_of(lineage: Lineage, *, is_known: bool, is_tail: bool) -> _Class:
    if lineage.goes_on:
        kind, size = 2 * lineage.turn - lineage.from_end, bisect_left(ADDED, lineage.num_added)
    else:
        kind, size = 0, int(2 * log2(lineage.num_pages))
    return _Class(kind, size, is_known, is_tail, None)


def _shrunk(back: float, asked: float, prior: float) -> float:
    """A share that was counted, drawn towards `prior` as long as little was."""
    return min(1.0, (back + PRIOR_PAGES * prior) / (asked + PRIOR_PAGES))
