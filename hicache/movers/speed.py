"""What a lane has learnt about its speed."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class LaneSpeed:
    """What a lane costs whoever submits to it now: `ahead_s + latency_s + pages * page_s` seconds."""

    name: str
    """The lane's, as in `host->nvme`: equal names share one lane."""
    ahead_s: float
    """Seconds until what is queued or under way at this priority has been copied; 0.0 in an idle lane."""
    latency_s: float
    """Seconds that a first batch costs beside its bytes."""
    page_s: float
    """Seconds of one page's bytes."""
    batch_pages: int
    """Pages that the lane hands over at once: nothing arrives before so many have."""
    is_measured: bool
    """Some copy has ended well. Until then all times are 0.0, as if copying cost nothing."""

    @property
    def wait_s(self) -> float:
        """Seconds before the first byte of what is submitted now."""
        return self.ahead_s + self.latency_s


class Speed:
    """What a lane's copies cost, learnt from those that ended well.

    Between two ends of copies in a busy lane, `x` batches' worth of pages (0 < x <= 1) take

        seconds = latency * h + full_batch * x          h = 1 if the lane was idle before, else 0

    because a lane with several workers hides all but the first latency. Both unknowns are fitted by least squares over
    samples whose weight decays with each new one. A small ridge decides where samples cannot tell the two apart (full
    batches from an idle lane, nothing else): it splits their time evenly, which is right for full batches.
    """

    _DECAY: Final = 1 - 1 / 32
    _RIDGE: Final = 1e-6

    def __init__(self) -> None:
        self._hh = self._hx = self._xx = self._hy = self._xy = 0.0
        self.latency_s: float | None = None
        """Seconds of a batch beside its bytes; None until something was measured."""
        self.page_s: float | None = None
        """Seconds of one page's bytes; None until something was measured, or if that took no time."""

    def add(self, seconds: float, *, num_pages: float, batch_pages: int, exposed: bool) -> None:
        """A copy of `num_pages` pages, or as many bytes, ended `seconds` after the one before it, or after the lane
        became busy."""
        h, x = float(exposed), num_pages / batch_pages
        decay = self._DECAY
        self._hh = decay * self._hh + h * h
        self._hx = decay * self._hx + h * x
        self._xx = decay * self._xx + x * x
        self._hy = decay * self._hy + h * seconds
        self._xy = decay * self._xy + x * seconds
        ridge = self._RIDGE * (self._hh + self._xx)
        hh, xx = self._hh + ridge, self._xx + ridge
        determinant = hh * xx - self._hx * self._hx
        latency = (xx * self._hy - self._hx * self._xy) / determinant
        full_batch = (hh * self._xy - self._hx * self._hy) / determinant
        if latency < 0 or full_batch < 0:
            # Noise may ask for less than nothing of one; then the other explains all there is.
            latency = 0.0 if latency < 0 else self._hy / hh
            full_batch = 0.0 if full_batch < 0 else self._xy / xx
        self.latency_s = latency
        self.page_s = full_batch / batch_pages or None

    def seconds(self, num_pages: int, batch_pages: int, *, overlapped: bool) -> float:
        """What `num_pages` pages take in an idle lane; with `overlapped`, only the first batch shows its latency."""
        num_batches = -(-num_pages // batch_pages)
        exposed = min(num_batches, 1) if overlapped else num_batches
        return exposed * (self.latency_s or 0.0) + num_pages * (self.page_s or 0.0)
