"""Parts of a check that go wrong in every way there is, for `tests/tools/test_gpu_check.py`."""

import os
import signal
import threading
from collections.abc import Callable

from hicache.tools.bench.results import Row
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
