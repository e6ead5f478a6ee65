"""Work that has to wait: a long walk on the event loop, of which calls notice as little as can be."""

import asyncio
from typing import Final

from hicache.clock import Clock

WORK_S: Final = 0.001
"""At most about so long others wait for one stretch of work."""
SHARE: Final = 0.2
"""Part of the time that is worked, at most."""


class Pace:
    """When to let others run. One for each piece of work; belongs to the event loop."""

    def __init__(self, clock: Clock, share: float = SHARE) -> None:
        """`share`: part of the time that is worked, above 0 and at most 1."""
        self._clock: Final = clock
        self._share: Final = share
        self._began = clock.monotonic()

    async def rest(self) -> None:
        """Wait as long as the work since the last rest asks for; not at all while that was short."""
        worked = self._clock.monotonic() - self._began
        if worked >= WORK_S:
            await asyncio.sleep(worked * (1 / self._share - 1))
            self._began = self._clock.monotonic()
