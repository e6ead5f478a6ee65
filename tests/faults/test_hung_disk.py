"""A disk that answers no call for a while, under the embedded cache: real calls that wait in the kernel (F18, I26)."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

import hicache.tiers.nvme.store
from hicache.errors import DeadlineExceeded, TierUnavailable
from hicache.service.compose import HiCache
from hicache.tier import NVME
from tests.cases.client import MODEL, Client, P, check_at_rest, opened, sequence
from tests.faults.machine import hung, make_ext4, mounted
from tests.punctual import in_time

pytestmark = [pytest.mark.faults, pytest.mark.machine]

PROMPTS: Final = [sequence(letter, 4 * P) for letter in range(24)]
"""More than device and host hold, less than all three."""
DEADLINE_S: Final = 2.0
"""Of every call while the disk hangs."""
SLACK_S: Final = 0.3
"""By so much a call may end after its deadline."""


def wait_for(what: Callable[[], bool], problem: str) -> None:
    until = time.monotonic() + 30
    while not what():
        assert time.monotonic() < until, problem


def why_down(cache: HiCache) -> str:
    return cache.stats()["tiers"][NVME]["down"] or ""


def answered(call: Callable[[], int]) -> int | None:
    """What a call returns; None where it says that the disk did not answer. It says so by its deadline."""
    with in_time(DEADLINE_S + SLACK_S):
        try:
            return call()
        except (DeadlineExceeded, TierUnavailable):
            return None


def test_a_disk_that_hangs_takes_the_tier_down_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hicache.tiers.nvme.store, "HUNG_AFTER_S", 0.5)
    make_ext4(tmp_path / "image", 48 << 20)
    with mounted("ext4", tmp_path / "disk", tmp_path / "image", "loop") as disk:
        with opened(disk / "store", device=24, host=24) as cache:
            client = Client(cache)
            for prompt in PROMPTS:
                client.insert(prompt)
            assert client.persist(PROMPTS[0]) == 4 * P
            assert cache.match(MODEL, PROMPTS[1]).by_tier == {NVME: 4 * P}
            new = sequence(50, 4 * P)
            with hung(disk):
                # What needs the disk ends by its deadline; what does not, goes on.
                answered(partial(client.read, PROMPTS[1], timeout_s=DEADLINE_S))
                wait_for(lambda: "has not answered" in why_down(cache), "the tier is not down")
                for turn in range(6):
                    mine = sequence(60 + turn, 4 * P)
                    assert answered(partial(client.insert, mine, timeout_s=DEADLINE_S)) == 0
                    assert answered(partial(client.read, mine, timeout_s=DEADLINE_S)) == 4 * P
                assert answered(partial(client.insert, new, timeout_s=DEADLINE_S)) == 0
                assert not answered(lambda: cache.persist(MODEL, new, timeout_s=DEADLINE_S).num_tokens)
            wait_for(lambda: not why_down(cache), "the tier does not come back")
            assert client.read(new) == 4 * P
            assert client.persist(new) == 4 * P
            assert sum(map(client.read, PROMPTS)) > 4 * P * len(PROMPTS) // 2
            check_at_rest(cache)
        with opened(disk / "store") as cache:
            assert [Client(cache).read(prompt) for prompt in (PROMPTS[0], new)] == [4 * P] * 2
