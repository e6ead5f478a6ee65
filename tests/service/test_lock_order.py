"""Locks are taken in one order: while a server and its clients are at work, each lock that is taken under another one
is noted, with a name for all locks that are made at the same line, and the notes have no cycle.

Two locks of one line under each other would be a cycle too: nothing says in which order they come.
"""

import asyncio
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.errors import HicacheError
from hicache.service.client import connect
from tests.repository import PARTS, ROOT
from tests.service.loader import act
from tests.service.serving import thread_server
from tests.service.stored import LAYOUT

ACTS: Final = 60
"""Of each client."""
CLIENTS: Final = 3
_held: ContextVar[tuple[str, ...]] = ContextVar("held", default=())
"""Names of what this thread or task has taken and not given back."""


class Order:
    """Which locks were taken while which others were held."""

    def __init__(self) -> None:
        self.taken: dict[str, set[str]] = {}
        """By the name of each lock that was taken, what was held then."""

    def take(self, name: str) -> None:
        self.taken.setdefault(name, set()).update(_held.get())
        _held.set((*_held.get(), name))

    def give_back(self, name: str) -> None:
        held = list(_held.get())
        with suppress(ValueError):  # given back by another thread than the one that took it
            held.remove(name)
        _held.set(tuple(held))

    def check(self) -> None:
        """Raise `CycleError` unless there is an order in which locks are taken."""
        for name, held in self.taken.items():
            if name in held:
                raise CycleError("a lock under one of the same line", [name, name])
        TopologicalSorter(self.taken).prepare()


class Noted:
    """A lock of threads that notes when it is taken; also what a `Condition` needs of one."""

    def __init__(self, order: Order, name: str, lock: Any) -> None:
        self._order, self._name, self._lock = order, name, lock

    def acquire(self, *how: Any, **more: Any) -> bool:
        taken: bool = self._lock.acquire(*how, **more)
        if taken:
            self._order.take(self._name)
        return taken

    def release(self) -> None:
        self._order.give_back(self._name)
        self._lock.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class NotedTaskLock(asyncio.Lock):
    """A lock of tasks that notes when it is taken."""

    order: Order
    name: str

    async def acquire(self) -> "Any":
        taken = await super().acquire()
        self.order.take(self.name)
        return taken

    def release(self) -> None:
        self.order.give_back(self.name)
        super().release()


def _line() -> str | None:
    """Where the project makes a lock, as "file:line"; None for other code."""
    frame = sys._getframe(2)
    path = Path(frame.f_code.co_filename).resolve()
    if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PARTS:
        return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
    return None


@contextmanager
def noting() -> Iterator[Order]:
    """Within the block, locks that the project makes are noted."""
    order, make_lock, make_condition = Order(), threading.Lock, threading.Condition

    def lock() -> Any:
        name = _line()
        return make_lock() if name is None else Noted(order, name, make_lock())

    def condition(lock: Any = None) -> Any:
        name, made = _line(), lock
        if made is None and name is not None:
            made = Noted(order, name, make_lock())
        return make_condition(made)

    def task_lock() -> Any:
        name = _line()
        made = asyncio.locks.Lock() if name is None else NotedTaskLock()
        if isinstance(made, NotedTaskLock):
            made.order, made.name = order, str(name)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "Lock", lock)
        patch.setattr(threading, "Condition", condition)
        patch.setattr(asyncio, "Lock", task_lock)
        yield order


def _work(directory: Path, seed: int) -> None:
    draw = random.Random(seed)
    with connect(directory) as client:
        for _ in range(ACTS):
            with suppress(HicacheError):
                assert act(client, draw)


def _all(threads: Iterable[threading.Thread]) -> None:
    begun = list(threads)
    for thread in begun:
        thread.start()
    for thread in begun:
        thread.join()


def test_locks_are_taken_in_one_order(tmp_path: Path) -> None:
    """I27: several clients store, read, pin, prefetch and abandon while pages move between full tiers, and all is
    flushed meanwhile."""
    nvme = {"nvme__bytes": 64 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with noting() as order, thread_server(tmp_path, host_pages=24, **nvme) as server:
        workers = [threading.Thread(target=_work, args=(server.directory, seed)) for seed in range(CLIENTS)]
        flushing = threading.Thread(target=lambda: server.run(server.server.cache.flush_in_steps()))
        _all([*workers, flushing])
    assert len(order.taken) >= 4, order.taken
    order.check()


def test_two_orders_are_found() -> None:
    """The notes above would have shown it."""
    order = Order()
    first, second = Noted(order, "first", threading.Lock()), Noted(order, "second", threading.Lock())
    with first, second:
        pass
    order.check()
    with second, first:
        pass
    with pytest.raises(CycleError):
        order.check()


def test_two_locks_of_one_line_are_found() -> None:
    order = Order()
    with Noted(order, "one", threading.Lock()), Noted(order, "one", threading.Lock()):
        pass
    with pytest.raises(CycleError):
        order.check()
