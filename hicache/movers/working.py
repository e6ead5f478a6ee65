"""What a lane does: takes the next pages in turn, has them copied, whole or layer by layer, and tells their owners."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from itertools import product

from hicache.movers.queueing import Queueing
from hicache.movers.transfer import Priority, Transfer
from hicache.tier import LayerWrites, Outcome, PageWrite


class Working(Queueing):
    """The workers of a lane."""

    async def _worker(self) -> None:
        while True:
            priority, batch = self._next_batch()
            if batch:
                self._num_batches[priority] += 1
                try:
                    transfer = batch[0][0]
                    if transfer.num_layers > 1:
                        await self._carry_out_layers(transfer)
                    else:
                        await self._carry_out(batch)
                finally:
                    self._num_batches[priority] -= 1
            elif self._closing and not self._queued_pages:
                return
            else:
                self._work.clear()
                await self._work.wait()

    def _next_batch(self) -> tuple[Priority, list[tuple[Transfer, int]]]:
        """What to copy next, as pages of transfers, under way from here on; empty if nothing may begin now. And at
        which priority it began: it may be hastened meanwhile.

        A batch has one priority: joining what is urgent with what is not would make the urgent wait for it. A transfer
        by layers is a batch of its own.
        """
        room = min(self._batch_pages, self._max_in_flight_pages - self._copying_pages)
        batch: list[tuple[Transfer, int]] = []
        for line in self._lines.values():
            while line.transfers and self._is_late(line.transfers[0]):
                self._withdraw(line.transfers[0])
        waiting = [priority for priority, line in self._lines.items() if line.transfers and self._may_begin(priority)]
        # Each line is in order of arrival, so its first transfer is the one whose turn comes first.
        for priority in sorted(waiting, key=lambda priority: self._turn(self._lines[priority].transfers[0])):
            line = self._lines[priority]
            while len(batch) < room and line.transfers:
                transfer = line.transfers[0]
                if self._is_late(transfer):
                    self._withdraw(transfer)
                    continue
                if batch and (transfer.num_layers > 1 or batch[0][0].num_layers > 1):
                    break
                begun = line.begin(transfer, room - len(batch))
                if not self._in_flight_pages:
                    self._measured_at = self.clock.monotonic()
                    self._exposed = True
                self._in_flight_pages += len(begun)
                # What goes by layers is copied two layers at a time.
                transfer._copying_pages = min(room, len(begun), -(-2 * len(begun) // transfer.num_layers))
                self._copying_pages += transfer._copying_pages
                batch += begun
            if batch:
                line.grant()
                return priority, batch
        return Priority.DEMAND, []

    def _may_begin(self, priority: Priority) -> bool:
        """What is only expected to be wanted takes few of the workers."""
        return priority is not Priority.PREFETCH or self._num_batches[priority] < self._num_prefetches

    async def _carry_out(self, batch: list[tuple[Transfer, int]]) -> None:
        # In the order in which they lie in the tier beside the host; memory does not mind.
        batch.sort(key=lambda page: self._copier.place(page[0].pages[page[1]]))
        outcomes = [Outcome.ERROR] * len(batch)
        try:
            copy = self._copier.copy([transfer.pages[index] for transfer, index in batch])
            outcomes = await self._outcomes_of(copy, len(batch))
        finally:
            self._copying_pages -= len(batch)
            self._learn(len(batch), outcomes)
            self._settle(batch, outcomes)

    async def _carry_out_layers(self, transfer: Transfer) -> None:
        outcomes: list[Outcome | None] = [None] * len(transfer.pages)
        self._by_layer.add(transfer)
        try:
            await self._copy_layers(transfer, outcomes)
        except (Exception, asyncio.CancelledError) as error:
            self._expect_no_cancellation()
            self._count_unexpected(f"{self.name}: a copy raised instead of reporting", error)
            outcomes = [outcome or Outcome.ERROR for outcome in outcomes]
        finally:
            self._by_layer.remove(transfer)
            self._copying_pages -= transfer._copying_pages
            self._settle([(transfer, index) for index in range(len(transfer.pages))], outcomes)

    async def _copy_layers(self, transfer: Transfer, outcomes: list[Outcome | None]) -> None:
        """Copy layer after layer until the transfer is stopped. Outcomes are entered where a page has one.

        The pages go in chunks. Two pieces, each one layer of a chunk, are under way at a time, so that the target need
        not wait for this loop; together they have the bytes that were set aside.
        """
        copier = self._layer_copier
        assert copier is not None
        pages, num_layers = transfer.pages, transfer.num_layers
        live: list[tuple[int, PageWrite]] = []
        for index in sorted(range(len(pages)), key=lambda index: self._copier.place(pages[index])):
            found = copier.begin(pages[index])
            if isinstance(found, Outcome):
                outcomes[index] = found
            else:
                live.append((index, found))
        size = max(1, transfer._copying_pages * num_layers // 2)
        chunks = [live[start : start + size] for start in range(0, len(live), size)]
        is_complete = False
        with ExitStack() as stack:
            writings: list[LayerWrites] = []
            for chunk in chunks:
                writings.append(await copier.open([write for _, write in chunk]))
                stack.callback(writings[-1].close)
            under_way: deque[tuple[int, int, Awaitable[list[Outcome]]]] = deque()

            async def end_one() -> None:
                layer, number, piece = under_way.popleft()
                chunk = chunks[number]
                found = await self._outcomes_of(piece, len(chunk))
                self._learn(len(chunk) / num_layers, found)
                if found.count(Outcome.OK) < len(found):
                    for (index, _), outcome in zip(chunk, found, strict=True):
                        if outcome is not Outcome.OK and outcomes[index] is None:
                            outcomes[index] = outcome
                if number == len(chunks) - 1 and layer < num_layers - 1 and not any(outcomes):
                    self._advance(transfer, layer)

            try:
                for layer, (number, writing) in product(range(num_layers), enumerate(writings)):
                    if transfer._stopped or all(outcomes):
                        break
                    under_way.append((layer, number, writing.start_layer(layer)))
                    if len(under_way) == 2:
                        await end_one()
                else:
                    is_complete = True
            finally:
                while under_way:
                    await end_one()
        for index, _ in live if is_complete else ():
            if outcomes[index] is None:
                outcomes[index] = copier.end(pages[index])
        if all(outcome is Outcome.OK for outcome in outcomes):
            self._advance(transfer, num_layers - 1)

    async def _outcomes_of(self, copy: Awaitable[list[Outcome]], num_pages: int) -> list[Outcome]:
        """What a copy reports; `ERROR` for all of its pages if it raises instead."""
        try:
            outcomes = await copy
            assert len(outcomes) == num_pages, f"{len(outcomes)} outcomes for {num_pages} pages"
            return outcomes
        except (Exception, asyncio.CancelledError) as error:
            self._expect_no_cancellation()
            self._count_unexpected(f"{self.name}: a copy raised instead of reporting", error)
            return [Outcome.ERROR] * num_pages

    def _expect_no_cancellation(self) -> None:
        """Raise the error being handled again if this task is being cancelled. Else it is the tier's bug: it may have
        let the cancellation of some future of its own escape."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # noqa: PLE0704  # called while an error is handled

    def _learn(self, num_pages: float, outcomes: Sequence[Outcome]) -> None:
        """A copy of so many pages has ended."""
        now = self.clock.monotonic()
        seconds = now - self._measured_at
        if all(outcome is Outcome.OK for outcome in outcomes):
            self._speed.add(seconds, num_pages=num_pages, batch_pages=self._batch_pages, exposed=self._exposed)
        self._busy_s += seconds
        self._measured_at = now
        self._exposed = False

    def _advance(self, transfer: Transfer, layer: int) -> None:
        """A layer of all pages of a transfer is there."""
        transfer._layers_done = layer + 1
        transfer._advanced.set()
        transfer._advanced = asyncio.Event()
        if transfer._on_layer is not None:
            try:
                transfer._on_layer(transfer, layer)
            except Exception as error:
                self._count_unexpected("an owner's on_layer raised", error)

    def _settle(self, batch: Sequence[tuple[Transfer, int]], outcomes: Sequence[Outcome | None]) -> None:
        """The copies of a batch have ended."""
        self._in_flight_pages -= len(batch)
        for (transfer, index), outcome in zip(batch, outcomes, strict=True):
            transfer._outcomes[index] = outcome
            transfer._under_way -= 1
            if outcome is Outcome.OK:
                self._copied += 1
            elif outcome is None:
                self._cancelled += 1
            else:
                self._failed += 1
        # Only now, when all counters are right, are owners told: what they are called with, they may look at.
        for transfer in dict.fromkeys(transfer for transfer, _ in batch):
            self._end_if_over(transfer)
        self._work.set()
