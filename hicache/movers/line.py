"""The queue of one priority in a lane, and those who wait for room in it."""

import asyncio
from collections import deque
from dataclasses import dataclass

from hicache.movers.transfer import Transfer


@dataclass(slots=True, eq=False)
class Turn:
    """A submitter that waits for room."""

    num_pages: int
    ended: asyncio.Future[None]
    """Done when there is room, or when waiting is over: the lane closed, or the deadline passed."""
    granted: bool = False
    """`num_pages` are reserved for it in its line."""

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Line:
    """Transfers of one priority with pages that have not begun, first come first served, and who waits to join them."""

    def __init__(self, max_pages: int) -> None:
        self.transfers: deque[Transfer] = deque()
        self.turns: deque[Turn] = deque()
        self.num_pages = 0
        """Pages of `transfers` that have not begun."""
        self._reserved = 0
        self._max_pages = max_pages

    def _has_room(self, num_pages: int) -> bool:
        load = self.num_pages + self._reserved
        # What is larger than the queue goes in alone; it would otherwise wait for ever.
        return load == 0 or load + num_pages <= self._max_pages

    def takes(self, num_pages: int) -> bool:
        """Whether that many pages may join now, ahead of nobody."""
        return not self.turns and self._has_room(num_pages)

    def grant(self) -> None:
        """Let in who waits, as far as there is room. It is reserved until he has run: he may have been cancelled."""
        while self.turns and self._has_room(self.turns[0].num_pages):
            turn = self.turns.popleft()
            turn.granted = True
            self._reserved += turn.num_pages
            turn.end()

    def give_back(self, turn: Turn) -> None:
        """The turn is over, granted or not."""
        if turn.granted:
            self._reserved -= turn.num_pages
        elif turn in self.turns:
            self.turns.remove(turn)

    def end_turns(self) -> None:
        """Nobody is let in any more."""
        while self.turns:
            self.turns.popleft().end()

    def append(self, transfer: Transfer) -> None:
        if transfer.pages:
            self.transfers.append(transfer)
            self.num_pages += len(transfer.pages)

    def insert(self, transfer: Transfer) -> None:
        """Take in, by its time of arrival, what another line has waiting of a transfer; whether there is room or not:
        its pages are on the lane already."""
        place = sum(other._submitted_at <= transfer._submitted_at for other in self.transfers)
        self.transfers.insert(place, transfer)
        self.num_pages += len(transfer.pages) - transfer._next

    def begin(self, transfer: Transfer, max_pages: int) -> list[tuple[Transfer, int]]:
        """Begin the next pages of the first transfer, all of them if it goes by layers; it leaves the line with its
        last."""
        if transfer.num_layers > 1:
            max_pages = len(transfer.pages)
        start, stop = transfer._next, min(transfer._next + max_pages, len(transfer.pages))
        transfer._next = stop
        transfer._under_way += stop - start
        self.num_pages -= stop - start
        if stop == len(transfer.pages):
            self.transfers.popleft()
        return [(transfer, index) for index in range(start, stop)]

    def remove(self, transfer: Transfer) -> int:
        """Take out what has not begun of a transfer. Returns how many pages that were."""
        num_pages = len(transfer.pages) - transfer._next
        if num_pages:
            self.transfers.remove(transfer)
            self.num_pages -= num_pages
        return num_pages
