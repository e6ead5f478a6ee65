"""How many lane threads may be at the same stage of their jobs at one time.

A run of pages that is read occupies the device, then a core that checks it. Left alone, the lanes fall into step:
transfers that share the device begin together and end together, then all checks share the cores and end together, and
the device has nothing to do meanwhile. With fewer transfers at a time than there are lanes, the next ones are under way
while the last ones are checked; and with few checks at a time, one after the other is done instead of all at last.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Final


class Turns:
    """Two stages, each with a bound that all lanes share; None for no bound. Waits in the order of arrival."""

    def __init__(self, *, transfers: int | None = None, checks: int | None = None) -> None:
        self.transfer: Final = _turns(transfers)
        """Held while the device moves bytes."""
        self.check: Final = _turns(checks)
        """Held while a core checks them."""


def _turns(limit: int | None) -> AbstractContextManager[object]:
    return nullcontext() if limit is None else threading.Semaphore(limit)
