"""What a prompt goes on from, read off what is remembered of the prefixes on its path."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hicache.node import Node

TURNS_MAX: Final = 3
"""Most prompts, one gone on from the other, that are told apart."""
COMMON_PAGES: Final = 1
"""So many known pages say nothing: everybody begins with them."""


@dataclass(slots=True)
class Mark:
    """What is remembered of a prefix, or of a stretch."""

    turn: int
    """How many prompts the last one that used it went on from, one after the other, at most `TURNS_MAX`."""
    ended: bool
    """Whether a prompt ended here."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a prompt comes from."""

    num_pages: int
    """Of the prompt, as far as it is cached."""
    num_known: int
    """Of these, from the first on, of prefixes that were used before."""
    turn: int
    """As `Mark.turn`; 0 for a prompt that goes on from none."""
    from_end: bool
    """Whether it goes on from the end of one."""

    @property
    def num_added(self) -> int:
        """Pages behind the known ones."""
        return self.num_pages - self.num_known

    @property
    def goes_on(self) -> bool:
        """Whether it goes on from another prompt at all."""
        return self.num_known > COMMON_PAGES


def lineage_of(parts: Iterable[tuple[int, Mark | None]], *, unit: int = 1) -> Lineage:
    """The lineage of a prompt, from the pages of each of its parts and what is remembered of it, in order from its
    beginning. With `unit`, so many pages count as one."""
    num_known, turn, from_end, num_pages, is_known = 0, 0, False, 0, True
    for part_pages, mark in parts:
        num_pages += part_pages
        if mark is None:
            is_known = False
        elif is_known:
            num_known += part_pages
            turn, from_end = min(mark.turn + 1, TURNS_MAX), mark.ended
    num_pages = -(-num_pages // unit)
    num_known = -(-num_known // unit)
    if num_known <= COMMON_PAGES:
        turn, from_end = 0, False
    return Lineage(num_pages, num_known, turn, from_end)


def ends_at(path: Sequence[Node], place: int) -> bool:
    """Whether a later prompt that goes on from this one may do so behind `path[place]`: at its end, or before its last
    page, which may hold its remainder and is then continued by none."""
    last = len(path) - 1
    return place == last or (place == last - 1 and path[last].num_pages == 1)
