"""How soon pages are read again, learned online by class, and what a page is worth because of it.

A page that was used `age` uses ago and not since is read again now with some probability, its hazard. For each class
the hazard is counted by age: reads over trials, where a trial is a use during which a page waited. What a page is worth
is the index of Gittins: the best rate, over all times one could go on keeping it, of reads per use that it is kept,

    index(class, age) = max over later ages `a` of  reads(age .. a) / trials(age .. a)

so a page that is never read early, but surely later, is worth keeping through its early age; and one that was overdue
is not. Gittins, "Bandit processes and dynamic allocation indices".

A class that has seen little borrows from its kin: its counts begin with `CLASS_PAGES` pages as its kin's hazards have
it, those of the kin with `KIN_PAGES` pages as all classes together have it, times what its scale promises, and those
with `ALL_PAGES` pages of which in each octave of age the share 1 - 2^-0.5 is read, which keeps the order of LRU.
"""

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

AGES: Final = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096,
               5793, 8192)  # fmt: skip
"""First age, in uses, of each span over which a hazard is taken to be the same: half octaves."""
SPANS: Final = len(AGES)
CLASS_PAGES: Final = 400.0
KIN_PAGES: Final = 400.0
ALL_PAGES: Final = 5000.0

Floats = npt.NDArray[np.float64]

_WIDTHS: Final[Floats] = np.diff(np.array([*AGES, 2 * AGES[-1]], np.float64))
_FIRST_READ: Final = 1 - 2**-0.25  # of what is left, in a span


class Reuse:
    """What was counted of each class. Classes are numbered from 0 as they are made; so are their kins."""

    def __init__(self) -> None:
        self._reads = array("d")  # pages, by class and span
        self._trials = array("d")  # pages times uses
        self._kins: list[int] = []  # of each class
        self._scales: list[float] = []  # of each kin

    def __len__(self) -> int:
        return len(self._kins)

    def new_kin(self, scale: float) -> int:
        """A new kin of classes, whose pages are expected to be read `scale` times as often as those of all."""
        self._scales.append(scale)
        return len(self._scales) - 1

    def new_class(self, kin: int) -> int:
        self._kins.append(kin)
        self._reads.extend([0.0] * SPANS)
        self._trials.extend([0.0] * SPANS)
        return len(self._kins) - 1

    def waited(self, index: int, span: int, num_pages: int) -> None:
        """So many pages of a class waited all through a span."""
        self._trials[index * SPANS + span] += num_pages * (AGES[span + 1] - AGES[span])

    def read(self, index: int, span: int, age: int, num_pages: int) -> None:
        """So many pages of a class were read at this age, which lies in this span."""
        self._reads[index * SPANS + span] += num_pages
        self._trials[index * SPANS + span] += num_pages * (age - AGES[span] + 1)

    def indices(self) -> list[list[float]]:
        """The index of every class in every span. O(classes)."""
        reads = np.frombuffer(self._reads).reshape(-1, SPANS)
        trials = np.frombuffer(self._trials).reshape(-1, SPANS)
        kins, scales = np.array(self._kins), np.array(self._scales)[:, np.newaxis]
        kin_reads, kin_trials = _sum_by(kins, reads, len(scales)), _sum_by(kins, trials, len(scales))
        first_reads, first_trials = _page(_FIRST_READ_HAZARDS)
        all_hazards = (kin_reads.sum(0) + ALL_PAGES * first_reads) / (
            (scales * kin_trials).sum(0) + ALL_PAGES * first_trials
        )
        page_reads, page_trials = _page(np.minimum(scales * all_hazards, 1.0))
        kin_hazards = (kin_reads + KIN_PAGES * page_reads) / (kin_trials + KIN_PAGES * page_trials)
        page_reads, page_trials = _page(kin_hazards)
        return _best_rates(reads + CLASS_PAGES * page_reads[kins], trials + CLASS_PAGES * page_trials[kins])


def _sum_by(kins: npt.NDArray[np.int64], counts: Floats, num_kins: int) -> Floats:
    found = np.zeros((num_kins, SPANS))
    np.add.at(found, kins, counts)
    return found


def _page(hazards: Floats) -> tuple[Floats, Floats]:
    """What one page with these hazards, by span in the last dimension, would count: reads and trials."""
    hazards = np.maximum(hazards, 1e-12)
    read = 1 - np.exp(-hazards * _WIDTHS)  # of what is left at the beginning of the span
    left = np.ones_like(read)
    np.cumprod(1 - read[..., :-1], axis=-1, out=left[..., 1:])
    reads = np.maximum(left, 1e-9) * read
    return reads, reads / hazards


def _best_rates(reads: Floats, trials: Floats) -> list[list[float]]:
    """For each row and span, the largest of reads over trials from there to any later span."""
    reads_before, trials_before = (np.pad(np.cumsum(counts, 1), ((0, 0), (1, 0))) for counts in (reads, trials))
    found = np.empty_like(reads)
    for span in range(SPANS):
        more_reads = reads_before[:, span + 1 :] - reads_before[:, span : span + 1]
        more_trials = trials_before[:, span + 1 :] - trials_before[:, span : span + 1]
        found[:, span] = (more_reads / np.maximum(more_trials, 1e-12)).max(1)
    rates: list[list[float]] = found.tolist()
    return rates


_FIRST_READ_HAZARDS: Final[Floats] = -np.log(1 - _FIRST_READ) / _WIDTHS
