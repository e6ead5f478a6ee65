"""Pages of an engine's host memory as ranges of addresses, and copies between these and the sidecar's shared memory.

A page is kept as its parts, one after the other. Copies go straight from memory to memory, and do not hold the
interpreter's lock.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """A range of memory."""

    address: int
    num_bytes: int


Page = Sequence[Part]
"""The parts of one page, in their order."""


def copy_in(page: Page, views: Sequence[memoryview], *, skip: int = 0) -> None:
    """Copy a page's parts, without their first `skip` bytes, to `views`, writable and one after the other; what is left
    of the last is zeroed."""
    left = skip + sum(map(len, views)) - sum(part.num_bytes for part in page)
    for own, shared, num_bytes in _pieces(page, views, skip):
        ctypes.memmove(shared, own, num_bytes)
    if left > 0:
        views[-1][-left:] = bytes(left)


def copy_out(views: Sequence[memoryview], page: Page) -> None:
    """Copy what `copy_in` has written back to a page's parts."""
    for own, shared, num_bytes in _pieces(page, views, 0):
        ctypes.memmove(own, shared, num_bytes)


def address_of(view: memoryview) -> int:
    """Where a contiguous view begins."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _pieces(page: Page, views: Sequence[memoryview], skip: int) -> Iterator[tuple[int, int, int]]:
    """Where parts and views meet, from their beginning on: an address in a part, one in a view, bytes."""
    shared = [Part(address_of(view), len(view)) for view in views]
    at = filled = 0
    for address, num_bytes in page:
        offset = min(skip, num_bytes)
        skip -= offset
        while offset < num_bytes:
            if filled == shared[at].num_bytes:
                at, filled = at + 1, 0
            some = min(num_bytes - offset, shared[at].num_bytes - filled)
            yield address + offset, shared[at].address + filled, some
            offset += some
            filled += some
