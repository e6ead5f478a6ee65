"""Copies of single pages into device slots that are not in the tree, to their end whatever becomes of the request."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hicache.errors import Closed, DeadlineExceeded
from hicache.guarding import guarded
from hicache.lease import Pin
from hicache.node import Node
from hicache.room import NO_SLOTS, Room
from hicache.tier import DEVICE, HOST, NVME, Outcome, PageIdentity, PageRead, PageWrite, Slots

T = TypeVar("T")


class Copying(Room):
    """Copies that no residency tells of."""

    async def copy_page(self, node: Node, page: int, target_slot: int, *, deadline: float) -> bool:
        """Copy one page of a node, from wherever it is, into a device slot that is not in the tree.

        False if it cannot be had. The copy is the caller's own, whatever becomes of the node. Once this has ended, by
        an exception too, nothing is copied into the slot any more. Raises `DeadlineExceeded`, `Closed`.
        """
        tier_id = self.fastest(node)
        slot, identity = int(node.slots(tier_id)[page]), self.tree.identities(node)[page]
        if tier_id == NVME:
            aside = await self._read_aside(node, slot, identity, deadline)
            try:
                return len(aside) > 0 and await self._copy_to_device(int(aside[0]), identity, target_slot)
            finally:
                self.free({HOST: aside})
        pins = self.pin({tier_id: [node]})
        try:
            if tier_id == DEVICE:
                return await self.copy_device_page(slot, target_slot)
            return await self._copy_to_device(slot, identity, target_slot)
        finally:
            self.unpin(pins)

    async def copy_device_page(self, source_slot: int, target_slot: int) -> bool:
        """Copy one device page onto another, all layers; True when it was copied. Ends as `copy_page` does."""
        return await self._to_the_end(self.device.copy_page(source_slot, target_slot)) is Outcome.OK

    async def _copy_to_device(self, host_slot: int, identity: PageIdentity, target_slot: int) -> bool:
        device = self.tiers[DEVICE]
        write = PageWrite(target_slot, device.generation(target_slot), identity, self._host_view(host_slot))
        return await self._to_the_end(device.write([write])) == [Outcome.OK]

    async def _to_the_end(self, copy: Coroutine[Any, Any, T]) -> T | None:
        """Run a copy between pages in memory as a task of the cache. Returns, even when cancelled, only after it has
        ended: until then its slots are in use. None if the tier raised against its contract."""
        if self._closing:
            copy.close()
            self._require_open()
        task = self._tasks.create_task(guarded(copy))
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return task.result()

    async def _read_aside(self, node: Node, slot: int, identity: PageIdentity, deadline: float) -> Slots:
        """Read a page from NVMe into a host slot that is not in the tree: `[1]`, the caller's; `[0]` if it cannot be
        had. A disk may hang: a request that is late or cancelled leaves both slots to the read."""
        self._require_open()
        reading = _Reading(slot, identity, self.pin({NVME: [node]}))
        self._tasks.create_task(self._carry_out_reading(reading, deadline), name=f"read {NVME} aside")
        try:
            await self.wait(reading.done, deadline)
        except BaseException:
            reading.is_wanted = False
            self.free({HOST: reading.host_slots})
            raise
        return reading.host_slots

    async def _carry_out_reading(self, reading: "_Reading", deadline: float) -> None:
        outcomes = None
        slots = NO_SLOTS
        try:
            slots = await self.allocate_up_to(HOST, 1, deadline=deadline)
            if len(slots):
                nvme, slot, into = self.tiers[NVME], reading.slot, self._host_view(int(slots[0]))
                page = PageRead(slot, nvme.generation(slot), reading.identity, into)
                outcomes = await guarded(nvme.read([page]))
        except (DeadlineExceeded, Closed):
            pass  # whoever waits for it is told the same
        if outcomes == [Outcome.OK] and reading.is_wanted:
            reading.host_slots = slots
        else:
            self.free({HOST: slots})
        self.unpin(reading.pins)
        reading.done.set()


@dataclass(slots=True, eq=False)
class _Reading:
    """A page on its way from NVMe to a host slot that is not in the tree."""

    slot: int
    identity: PageIdentity
    pins: tuple[Pin, ...]
    done: asyncio.Event = field(default_factory=asyncio.Event)
    is_wanted: bool = True
    """Nobody has given up waiting for it."""
    host_slots: Slots = field(default_factory=lambda: NO_SLOTS)
    """Where the page is once `done` is set: `[1]`, or `[0]` if it could not be read."""
