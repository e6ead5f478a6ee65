"""F39: the directory is deleted, moved, or replaced by a link to somewhere else while a cache uses it."""

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from hicache.errors import NotResident, TierUnavailable
from hicache.tier import NVME
from tests.cases.client import Client, P, check_at_rest, opened, sequence

PROMPTS = [sequence(letter, 4 * P) for letter in range(24)]
"""More than device and host hold, less than all three."""


def engine(work: Callable[[], object]) -> None:
    """Do it as an engine would: where pages that were not durable went with their file under a running step, what was
    lost is computed again."""
    for _ in range(3):
        with suppress(NotResident):
            work()
            return
    work()


def replace_by_link(store: Path) -> None:
    store.rename(store.with_name("moved"))
    store.with_name("outside").mkdir()
    store.symlink_to(store.with_name("outside"))


def test_f39_a_directory_that_is_deleted_under_load_costs_what_was_not_durable(tmp_path: Path) -> None:
    store, outside = tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("untouched")
    with opened(store, device=24, host=24) as cache:
        first = Client(cache)
        for prompt in PROMPTS:
            first.insert(prompt)
        assert first.persist(PROMPTS[0]) == 4 * P
        deleted, failures = threading.Event(), list[BaseException]()

        def work(number: int) -> None:
            client = Client(cache)
            try:
                for turn in range(16):
                    engine(partial(client.insert, PROMPTS[(7 * number + turn) % len(PROMPTS)]))
                    engine(partial(client.read, PROMPTS[(5 * number + 3 * turn) % len(PROMPTS)]))
                    if turn == 6:
                        deleted.wait(60)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        shutil.rmtree(store)
        deleted.set()
        for thread in threads:
            thread.join()
        assert not failures
        # Nothing is called durable any more, and the tier says why.
        new = sequence(50, 4 * P)
        first.insert(new)
        with pytest.raises(TierUnavailable, match="deleted"):
            first.persist(new)
        assert "deleted" in cache.stats()["tiers"][NVME]["down"]
        assert first.read(new) == 4 * P
        check_at_rest(cache)
        assert not store.exists()
        # What lies on the disk is still read through the open files.
        assert sum(map(first.read, PROMPTS)) > len(PROMPTS) * P
    assert not store.exists()
    assert os.listdir(tmp_path) == ["outside"]
    assert (outside / "mine").read_text() == "untouched"
    with opened(store) as cache:
        assert Client(cache).insert(PROMPTS[0]) == 0


def test_f39_a_directory_that_is_moved_or_replaced_by_a_link_is_used_where_it_is(tmp_path: Path) -> None:
    store = tmp_path / "store"
    kept = PROMPTS[:6]
    with opened(store) as cache:
        client = Client(cache)
        for prompt in kept[:3]:
            client.insert(prompt)
        replace_by_link(store)
        for prompt in kept[3:]:
            client.insert(prompt)
        assert [client.persist(prompt) for prompt in kept] == [4 * P] * 6
        check_at_rest(cache)
    assert os.listdir(tmp_path / "outside") == []
    with opened(tmp_path / "moved") as cache:
        client = Client(cache)
        assert [client.read_there(prompt) for prompt in kept] == [4 * P] * 6
