"""NVMe admission that predicts the first return of a page instead of waiting for it.

A page's class says what its last prompt went on from and how long it was or how much it added, whether the prompt knew
the page, whether it ends there, and what a hint said of it. `hicache.policy.returns` counts online what share of each
class comes back.

How much is written follows from the same counts. To know the future would need one write for each page that comes back;
this spends `writes_per_return` times as many, on the classes that come back most often, the last one in part. So the
threshold steers itself to a number of writes, whatever the load; nothing in it is fitted to a load. Two bounds hold
beside it: what has come back so far, with what is still expected of the pages asked about, pays for everything that is
written, but for a loan of `LOAN` of the tier at the beginning, which is paid back; and no more is planned than a budget
of bytes grants.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from hicache.errors import BadRequest
from hicache.node import Node
from hicache.policy.admission import Verdict
from hicache.policy.base import Hint, Use
from hicache.policy.history import RECORDS_MAX
from hicache.policy.lineage import lineage_of
from hicache.policy.returns import Asked, PageClass, Returns, class_of
from hicache.policy.stretches import Stretches, cut

WRITES_PER_RETURN: Final = 1.55
"""Pages written for each one that comes back, where knowing the future needs 1 and writing everything about 3 to 5."""
LOAN: Final = 0.25
"""Part of the tier that is written before anything is known, so that it is of use from the beginning."""
PAID_BACK: Final = 4.0
"""The loan is paid back by the time that so many times the tier's pages were asked about."""
WINDOW_MIN: Final = 1024
"""Pages asked about before one that has not come back is not waited for any more: as many as the tier has, but so many
at least, and no more than are remembered."""
_SPREAD: Final = 0.6180339887498949
"""Multiples of it fall evenly over 0 to 1: they choose the uses of a class that is admitted in part."""
_PACE_WEIGHT: Final = 0.2
"""Of the latest step, in the running pages a second that are asked about."""


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
        self._stretches: Stretches[Asked] = Stretches(stride=stride, records_max=records_max)
        self._uses = 0
        self._per_return = writes_per_return
        self._pages_per_s = pages_per_s
        # Records that are forgotten are not seen to come back.
        window = max(WINDOW_MIN, min(capacity_pages, records_max * stride // 2))
        self._returns = Returns(window)
        self._loan = LOAN * capacity_pages
        self._paid_back = PAID_BACK * capacity_pages
        self._written = 0.0
        self._shares: dict[PageClass, float] = {}
        self._threshold = 0.0  # return rate above which a class that was not seen yet is admitted
        self._refreshed_at = float("inf")
        self._asked_per_s = 0.0

    # -- events -------------------------------------------------------------------------------------------------------

    def used(self, use: Use) -> None:
        stretches = cut(use.path, self._stretches.stride)
        known = self._stretches.known(stretches)
        lineage = lineage_of(
            zip([stretch.num_pages for stretch in stretches], known, strict=True), unit=self._stretches.stride
        )
        last, records = len(stretches) - 1, []
        for place, (stretch, before) in enumerate(zip(stretches, known, strict=True)):
            if before is not None:
                self._returns.count_return(before)
            # What is behind the last cut may not come again, so a prompt that goes on does so from before it, too.
            ends_here = place >= last - 1
            records.append(Asked(
                num_pages=stretch.num_pages,
                turn=lineage.turn,
                ended=ends_here or (before is not None and before.ended),
                use=self._uses,
                of=class_of(lineage, is_known=before is not None, is_tail=place == last),
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
            return Verdict.ADMITTED if self._returns.common_rate > self._threshold else Verdict.UNLIKELY
        self._returns.count_asked(records)
        self._refresh(now)
        rate = fmean([self._returns.rate(record.of) for record in records])
        loan = self._loan * max(0.0, 1.0 - self._returns.asked / self._paid_back)
        is_spent = self._written >= self._per_return * (self._returns.returned + self._returns.expected) + loan
        if is_spent and rate * self._per_return < 1.0:  # others pay for themselves
            return Verdict.UNLIKELY
        if self._returns.asked > self._loan:
            share = fmean([self._share(record.of) for record in records])
            if records[-1].use * _SPREAD % 1.0 >= share:
                return Verdict.UNLIKELY
        return Verdict.ADMITTED

    def written(self, node: Node, now: float) -> None:
        self._written += node.num_pages
        self._returns.count_asked(self._stretches.of(node))

    def split(self, upper: Node, lower: Node) -> None:
        """See `HearsShape`."""
        self._stretches.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        """See `HearsShape`."""
        self._stretches.joined(upper, lower)

    # -- steering -----------------------------------------------------------------------------------------------------

    def _share(self, of: PageClass) -> float:
        """What part of a class is admitted."""
        return self._shares.get(of, float(self._returns.rate(of) > self._threshold))

    def _refresh(self, now: float) -> None:
        """Bring rates and shares up to date, when it is time."""
        step = self._returns.refresh()
        if not step:
            return
        if now > self._refreshed_at:
            self._asked_per_s += _PACE_WEIGHT * (step / (now - self._refreshed_at) - self._asked_per_s)
        self._refreshed_at = now
        self._share_out()

    def _share_out(self) -> None:
        """Spend writes on the classes that come back most often."""
        volumes, rate = self._returns.volumes(), self._returns.rate
        left = self._per_return * sum([fresh * rate(of) for of, (_, fresh) in volumes.items()])
        if self._pages_per_s is not None and self._asked_per_s:
            left = min(left, sum([asked for asked, _ in volumes.values()]) * self._pages_per_s / self._asked_per_s)
        self._shares, self._threshold = {}, 0.0
        for of in sorted(volumes, key=rate, reverse=True):
            asked, _ = volumes[of]
            share = self._shares[of] = min(1.0, max(0.0, left / asked)) if asked else 1.0
            if share < 1.0:
                self._threshold = max(self._threshold, rate(of))  # that of the first one
            left -= asked
