"""Threads for short work that is all waited for: they stay while there is more of it, and end by themselves."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Final

_IDLE_S: Final = 0.05
"""A thread that was given nothing for so long ends: longer than a model takes from one layer to the next, and short
enough that nobody has to end it."""


class Crew:
    """Runs work in several threads at once. Callable from several threads."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._queue: Final[SimpleQueue[tuple[Callable[[], None], Future[None]]]] = SimpleQueue()
        # Guards the two counts and what is put: a thread that ends does not miss what is put meanwhile.
        self._lock: Final = threading.Lock()
        self._num_threads = 0
        self._num_unfinished = 0

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Do all of `works`, at least one, the first in this thread, each of the others in one of its own, and wait for
        all. Raises what one of them raises, after all have ended."""
        futures = [self._start(work) for work in works[1:]]
        try:
            works[0]()
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def _start(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            self._queue.put((work, future))
            self._num_unfinished += 1
            if self._num_unfinished > self._num_threads:
                self._num_threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                work, future = self._queue.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if not self._queue.empty():
                        continue
                    self._num_threads -= 1
                    return
            error = _error_of(work)
            with self._lock:
                self._num_unfinished -= 1
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
            # Nothing of the work is kept while waiting for the next.
            del work, future, error


def _error_of(work: Callable[[], None]) -> BaseException | None:
    """Do the work: what it raised, for the thread that waits for it."""
    try:
        work()
    except BaseException as error:
        return error
    return None
