"""Keeping the tree out of Python's cyclic garbage collector.

A full collection visits every object that the collector tracks: with a million nodes that is a pause of a second, in
whatever call happens to allocate. The tree needs no collector. It unlinks what leaves it, so reference counting frees a
node at once, and when a tree itself is dropped it unlinks everything (`HiRadixTree.__del__`). So nodes, and the
containers that hold all of them, are untracked: collections then cost what the rest of the process costs.

An untracked object is an ordinary object that collections do not visit. A dictionary is tracked again as soon as an
object of a kind that can be tracked is put into it, with one exception, an untracked tuple: so dictionaries hold nodes
by their `Node.box`, a tuple of nothing but the node. Where a dictionary is changed more rarely, `put` untracks it each
time.

The alternatives that lost: `gc.freeze()` is one call, but freezes the garbage of the whole process with the tree, which
is not ours to do inside an engine; nodes as rows of arrays need no objects, but a match then builds one for each node
that it names, and costs several times as much.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def _find() -> Callable[[object], None]:
    if sys.implementation.name != "cpython":
        return lambda _: None  # other collectors do not stop the world in proportion to what is alive
    import ctypes

    function = ctypes.pythonapi.PyObject_GC_UnTrack  # part of the stable interface; safe on what is untracked already
    function.argtypes = (ctypes.py_object,)
    function.restype = None
    return function


untrack: Callable[[object], None] = _find()
"""Take a container object out of the cyclic collector's sight. Whoever calls it sees to it that it ends without."""


def put(dictionary: dict[K, V], key: K, value: V) -> None:
    """Put something into a dictionary that is to stay untracked."""
    dictionary[key] = value
    untrack(dictionary)


@contextmanager
def paused() -> Iterator[None]:
    """No collections while the block runs, which makes many objects that stay: they would bring on one after the other,
    and every full one visits all that the process has imported.

    For work that is over in a few seconds: cycles that others leave meanwhile wait for its end. Blocks may be nested;
    the collector runs again after the outermost, and only if it ran before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
