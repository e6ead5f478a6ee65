"""What is done where a pass finds part of its context gone, or out of reach: it is computed again, and the pass too."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from hicache.errors import CorruptPage, NotResident, TierUnavailable
from hicache.tier import NVME

if TYPE_CHECKING:
    from hicache.service.engines.transformers.request import Request

MAX_REOPENS: Final = 16
"""Damaged pages that one pass works around, each by recomputing from there on, before it gives up."""
SALT_BYTES: Final = 16
"""Of requests that go on apart from all others."""
DAMAGE: Final = (CorruptPage, NotResident, TierUnavailable)
"""What a pass raises that finds a page of the context gone, or on a device that fails or does not answer."""

T = TypeVar("T")
_logger = logging.getLogger(__name__)


def around_damage(requests: "Sequence[Request]", run: Callable[[], T]) -> T:
    """`run`, a pass of these requests, and again after each damaged page of theirs, once what was lost with it is
    computed again. Raises what the pass raises else.

    Pages on a device that fails, or does not answer, are not lost: it may give them later. What is computed in their
    place would be known to the cache as a copy of theirs, and soon leave for them again. So these requests go on apart
    from what is cached, and their pages are found by nobody else.
    """
    lengths = [request.length for request in requests]
    num_reopens = 0
    while True:
        try:
            # All of them first: what is cached for one is not evicted while another one's is computed.
            for request in requests:
                request.open_again()
            for request, length in zip(requests, lengths, strict=True):
                request.restore(length)
            return run()
        except DAMAGE as damage:
            if num_reopens == MAX_REOPENS:
                raise
            num_reopens += 1
            _logger.warning("%s; recomputing from there on", damage)
            is_there = isinstance(damage, TierUnavailable) and damage.tier == NVME
            salt = os.urandom(SALT_BYTES) if is_there else None
            for request, length in zip(requests, lengths, strict=True):
                request.go_back(length, salt)
