"""Pages on their way to the device, as steps read them: layer by layer, while later layers are copied.

Until such a move has ended, its pages are in the host as well, where the step has pinned them. So whoever reads them as
they come loses nothing where they do not: what has not come is read in the host. Who reads what:

    layers [0, num_layers)      on the device, in the slots that the move was given
    layers from there on        on their way, or, once the move is over without having brought them, in the host

While a step reads them, the slots are nobody else's, however the move ends: pages that arrived are pinned on the device
(`pins`), and the slots of those that did not are kept from becoming free (`freed`).
"""

import asyncio
from dataclasses import dataclass, field

from hicache.lease import Pin
from hicache.results import Freed
from hicache.tier import Slots


@dataclass(slots=True, eq=False)
class Arrival:
    """How far a move to the device has come. Changed on the cache's loop; `has` may be asked in any thread."""

    num_layers: int = 0
    """So many layers of all its pages are in place."""
    is_whole: bool = False
    """All are."""
    is_over: bool = False
    """The move has ended: what has not come does not come any more."""
    num_readers: int = 0
    """Steps under way that read its pages."""
    pins: tuple[Pin, ...] = ()
    freed: Freed = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def has(self, layer: int) -> bool | None:
        """Whether a layer, from 0, of all pages is in place: True; False, it will not come; or None, not yet."""
        if layer < self.num_layers or self.is_whole:
            return True
        return False if self.is_over else None

    async def wait(self, layer: int) -> bool:
        """Wait until a layer is in place, or will not come: what `has` says then. Takes as long as the move does."""
        while (has := self.has(layer)) is None:
            await self._changed.wait()
        return has

    def advance(self, layer: int) -> None:
        """A layer of all pages is in place now, as those before it are."""
        self.num_layers = layer + 1
        self._tell()

    def end(self, is_whole: bool) -> None:
        """The move has ended, with all layers of all pages in place or not."""
        # In this order, so that a thread that asks in between is not told that nothing more comes.
        self.is_whole = is_whole
        self.is_over = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class Arriving:
    """Where the pages of a run can be read on the device, each layer as soon as the arrival has it."""

    arrival: Arrival
    slots: Slots
    """`[num_pages]`, on the device."""
