"""Compiled work in the threads that torch itself computes in."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Final

import torch

_WORK: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """What runs a function in all threads, of the OpenMP that torch has loaded; None if that has another way to do so,
    as outside of Linux."""
    try:
        return _PARALLEL(("GOMP_parallel", ctypes.CDLL(torch._C.__file__)))
    except (OSError, AttributeError):
        return None


def in_threads(work: int, argument: ctypes.Structure, num_threads: int) -> None:
    """Have a function of C, whose address `work` is, called with the address of `argument`, by this thread and at the
    same time by others of torch's, at most `num_threads` in all, and wait for all.

    The function is to share out by itself what there is to do, because it may be called fewer times: once where torch
    has no threads that can be had. They are those of torch's operators, so there are no more threads than before, and
    for a while they wait awake for the next work: a call takes some microseconds. Other Python threads run meanwhile.
    Callable from several threads.
    """
    address = ctypes.addressof(argument)
    parallel = _parallel() if num_threads > 1 else None
    if parallel is None:
        _WORK(work)(address)
    else:
        parallel(work, address, num_threads, 0)
