"""Parts of a check that go wrong in every way there is, for `tests/tools/test_gpu_check.py`."""

import os
import signal
import threading
from collections.abc import Callable
from importlib import import_module

from hicache.tools.bench.results import Row
from hicache.tools.gpu_check.__main__ import PARTS
from hicache.tools.gpu_check.parts import LeftOut, Place


def fails(place: Place, report: Callable[[Row], None]) -> None:
    report(Row("before", 1.0, "", goal=1.0))
    raise RuntimeError("as it was told to")


def dies(place: Place, report: Callable[[Row], None]) -> None:
    report(Row("before", 1.0, ""))
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(place: Place, report: Callable[[Row], None]) -> None:
    report(Row("before", 1.0, ""))
    threading.Event().wait()


def is_off(place: Place, report: Callable[[Row], None]) -> None:
    report(Row("error", 2.0, "", goal=1.0))


def is_left_out(place: Place, report: Callable[[Row], None]) -> None:
    raise LeftOut("needs more than there is")


def is_well(place: Place, report: Callable[[Row], None]) -> None:
    (place.directory / "file").write_text("of its own")
    report(Row("error", 0.5, "", goal=1.0))


def rehearses(place: Place, report: Callable[[Row], None]) -> None:
    """Every part that measures, in one process, which spares most of the time that they take in one each."""
    left_out = 0
    for part in PARTS.values():
        if part.measures:
            module, function = part.where.split(":")
            try:
                getattr(import_module(module), function)(place, report)
            except LeftOut as reason:
                left_out += str(reason) == "needs a GPU; rehearsed with small sizes"
    report(Row("rehearsed", left_out, "parts"))
