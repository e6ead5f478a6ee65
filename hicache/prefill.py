"""What computing a prompt costs: a curve over positions, and how it is learnt while an engine runs."""

from dataclasses import dataclass
from itertools import combinations
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from hicache.errors import BadRequest

_UNIT: Final = 1024.0
"""Tokens are counted in these inside a fit, so that its three terms are of like size."""


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Seconds to compute tokens of a prompt. Later tokens attend over more of it and cost more:

        seconds(a, b) = step_s * steps + token_s * (b - a) + attend_s * (b**2 - a**2)

    >>> curve = PrefillCurve(token_s=22.6e-6, attend_s=0.452e-9)
    >>> round(curve.seconds(0, 32_768), 3), round(curve.seconds(32_768, 65_536), 3)
    (1.226, 2.197)

    Raises `BadRequest` for a term below zero, or all of them zero.
    """

    token_s: float
    """Seconds a token costs wherever it stands."""
    attend_s: float = 0.0
    """Seconds a token costs for each token before it, halved."""
    step_s: float = 0.0
    """Seconds that a step of the engine costs beside its tokens."""

    def __post_init__(self) -> None:
        for name in ("token_s", "attend_s", "step_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadRequest(f"PrefillCurve.{name}", f"{getattr(self, name)} is not a time")
        if not (self.token_s or self.attend_s or self.step_s):
            raise BadRequest("PrefillCurve", "computes in no time at all")

    def seconds(self, start: int, stop: int, *, steps: int = 1) -> float:
        """Seconds to compute tokens `[start, stop)` of a prompt in `steps` steps; 0.0 for none."""
        if stop <= start:
            return 0.0
        return self.step_s * steps + (stop - start) * (self.token_s + self.attend_s * (stop + start))


class PrefillSpeed:
    """A `PrefillCurve` learnt from steps of an engine. Belongs to one event loop; never waits.

    The three terms are fitted to the *relative* errors of steps, so that short steps count as much as long ones, by
    least squares whose weights decay with each new step, under the condition that none is negative. A small ridge
    decides where the steps seen cannot tell terms apart: equal steps are explained by their tokens. One step in which
    the machine did something else must not move the curve far: once it rests on `SETTLED` steps, a new one counts for
    at most `OUTLIER` times what was expected of it, and no less than that part of it. But each such step halves what
    was known before, so that a lasting change is followed within a dozen steps.
    """

    DECAY: Final = 1 - 1 / 32
    SETTLED: Final = 8
    OUTLIER: Final = 4.0
    _RIDGE: Final = np.diag([1e-6, 1e-9, 1e-6])

    def __init__(self) -> None:
        self._normal = np.zeros((3, 3))
        self._right = np.zeros(3)
        self._num_steps = 0
        self._curve: PrefillCurve | None = None

    @classmethod
    def like(cls, curve: PrefillCurve) -> Self:
        """As if `SETTLED` steps had gone as a curve says."""
        speed = cls()
        for start in range(0, 4096 * cls.SETTLED, 8192):
            for num_tokens in (64, 1024):
                speed.add(start, start + num_tokens, curve.seconds(start, start + num_tokens))
        return speed

    def copy(self) -> Self:
        """What is known so far, to learn on alone."""
        speed = type(self)()
        speed._normal, speed._right = self._normal.copy(), self._right.copy()
        speed._num_steps, speed._curve = self._num_steps, self._curve
        return speed

    @property
    def curve(self) -> PrefillCurve | None:
        """The curve as known now; None until a step was seen."""
        if self._curve is None and self._num_steps:
            step_s, token_s, attend_s = self._fit()
            self._curve = PrefillCurve(
                token_s=float(token_s / _UNIT), attend_s=float(attend_s / _UNIT**2), step_s=float(step_s)
            )
        return self._curve

    def add(self, start: int, stop: int, seconds: float) -> None:
        """One step computed tokens `[start, stop)` of one prompt in `seconds`.

        Raises `BadRequest` for an empty range or a time that is not above zero, with nothing learnt.
        """
        if not 0 <= start < stop:
            raise BadRequest("start, stop", f"[{start}, {stop}) is not a range of tokens")
        if not 0 < seconds < float("inf"):
            raise BadRequest("seconds", f"{seconds} is not above 0")
        decay = self.DECAY
        if self._num_steps >= self.SETTLED and self.curve is not None:
            expected = self.curve.seconds(start, stop)
            believed = min(max(seconds, expected / self.OUTLIER), expected * self.OUTLIER)
            if believed != seconds:
                seconds, decay = believed, 0.5
        count = (stop - start) / _UNIT
        terms = np.array([1.0, count, count * (stop + start) / _UNIT]) / seconds
        self._normal = decay * self._normal + np.outer(terms, terms)
        self._right = decay * self._right + terms
        self._num_steps += 1
        self._curve = None

    def _fit(self) -> npt.NDArray[np.float64]:
        """The terms with the least squared error among those of which none is negative."""
        normal = self._normal + self._RIDGE * np.diag(self._normal)
        best, least = np.zeros(3), float("inf")
        for size in (3, 2, 1):
            for chosen in combinations(range(3), size):
                part = np.ix_(chosen, chosen)
                terms = np.zeros(3)
                terms[list(chosen)] = np.linalg.solve(normal[part], self._right[list(chosen)])
                error = float(terms @ normal @ terms - 2 * terms @ self._right)
                if (terms >= 0).all() and error < least:
                    best, least = terms, error
        return best
