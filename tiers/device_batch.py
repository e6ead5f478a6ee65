"""The driver's copy of many fragments in one call, `cuMemcpyBatchAsync`.

Looked up in the driver itself, which every process that uses a GPU has loaded: cupy (14.2) knows no function for it.
The driver is asked for the form of CUDA 12.8, where the call first appeared; later ones answer to it as well.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.uint64]

BatchCall = Callable[..., int]
"""The driver's function or one that does the same: `(targets, sources, sizes, count, attributes, first of each
attribute, number of attributes, where to put the index that failed, stream)`, the first three and the fifth to eighth
addresses of arrays, and returns 0 or what went wrong."""

PROTOTYPE: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip
"""The same in C: addresses and streams are void pointers, counts `size_t`."""
_VERSION: Final = 12080
_IN_STREAM_ORDER: Final = 1


class Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`. Locations are hints for managed memory, which ours is not."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def copy_batch(call: BatchCall, targets: Addresses, sources: Addresses, num_bytes: int, stream: int) -> None:
    """Queue a copy of `num_bytes` from each of `sources` to the same place in `targets`, at least one, on `stream`, a
    handle of the driver's and not the default stream's. Sources are read in the order of the stream. Returns once they
    are queued; the arrays may then go. Raises `RuntimeError` when the driver refuses."""
    sizes = np.full(len(targets), num_bytes, np.uint64)
    attributes = Attributes(source_order=_IN_STREAM_ORDER)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    status = call(
        targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(targets), ctypes.addressof(attributes),
        ctypes.addressof(first), 1, ctypes.addressof(failed), stream,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"cuMemcpyBatchAsync failed with error {status} at copy {failed.value} of {len(targets)}")


def driver_call() -> BatchCall | None:
    """The driver's function, None where there is no driver or it has none."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
        find = driver.cuGetProcAddress_v2
    except (OSError, AttributeError):  # no driver; one from before CUDA 12
        return None
    address, found = ctypes.c_void_p(), ctypes.c_int()
    find.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
    status = find(b"cuMemcpyBatchAsync", ctypes.addressof(address), _VERSION, 0, ctypes.addressof(found))
    if status or not address.value:
        return None
    function: BatchCall = PROTOTYPE(address.value)
    return function


def stream_of(device: torch.device) -> int:
    """The handle of `device`'s current stream."""
    return int(torch.cuda.current_stream(device).cuda_stream)
