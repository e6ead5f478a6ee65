"""Notices threads and files that a piece of work has left behind."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

EXIT_TIMEOUT_S: Final = 30.0
"""How long what was told to stop may take to end."""


@contextmanager
def nothing_left_behind(timeout_s: float = EXIT_TIMEOUT_S) -> Iterator[None]:
    """Raise `AssertionError` if, after the block, threads run or files are open that did not and were not before it.

    Threads on their way out, and files that threads of a library are still to close, get `timeout_s` seconds, all
    together.
    """
    threads, files = set(threading.enumerate()), open_files()
    yield
    deadline = time.monotonic() + timeout_s
    for thread in set(threading.enumerate()) - threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    left_threads = sorted(thread.name for thread in set(threading.enumerate()) - threads)
    assert not left_threads, f"threads left running: {left_threads}"
    left_files = open_files() - files
    if left_files:
        # What only the collector closes reports itself by a ResourceWarning, which is an error here; a cycle in a
        # library that holds a closed-over file is not a leak.
        gc.collect()
        while (left_files := open_files() - files) and time.monotonic() < deadline:
            threading.Event().wait(0.01)
    assert not left_files, f"files left open: {sorted(left_files)}"


def open_files() -> frozenset[tuple[int, str]]:
    """Descriptors of this process and what they stand for."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return frozenset(found)


def named_memory() -> frozenset[str]:
    """Shared memory of this machine that has a name, but for semaphores, which other programs come and go with."""
    return frozenset(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))
