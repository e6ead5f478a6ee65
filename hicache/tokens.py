"""Token ids and slot ids as packed int32: what comes in is converted once, checked, and compared as bytes.

Tokens are compared with `memcmp` (through `bytes.startswith`), which runs at memory speed and stops at the first
difference; a hash never decides whether two pages are the same.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.errors import BadRequest

INT32: Final = np.dtype("<i4")
"""Packed form of token and slot ids: little-endian, as page identities carry them."""
TOKEN_BYTES: Final = 4
TOKEN_MAX: Final = 2**31 - 1
"""Largest token id."""

_FEW_TOKENS: Final = 1024
"""Up to so many ids are checked as bytes."""
_FEW_SLOTS: Final = 64
"""Up to so many slots are checked as Python integers."""
_COMPARE_BYTES: Final = 256
"""Runs up to this length are compared as one integer."""
_GALLOP_BYTES: Final = 4096
"""First stride of the search for a difference; every further one is four times as long."""


def pack_tokens(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """`tokens` as a contiguous little-endian int32 array `[num_tokens]`; the same object when it already is one.

    Raises `BadRequest` for other than integers, other than one dimension, and ids outside 0 to `TOKEN_MAX`.
    """
    packed = _pack("tokens", tokens)
    check_ids("tokens", packed)
    return packed


def view_tokens(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """`pack_tokens`, but int32 ids are not checked for being negative: those that a match finds in the tree were
    checked when they were inserted, and the caller checks the rest with `check_ids`."""
    return _view("tokens", tokens)


def pack_slots(slots: npt.ArrayLike, num_pages: int) -> npt.NDArray[np.int32]:
    """`slots` as a contiguous int32 array `[num_pages]`: one slot a page, none negative, none twice.

    Raises `BadRequest` naming the bound that does not hold.
    """
    packed = _view("slots", slots)
    if len(packed) != num_pages:
        raise BadRequest("slots", f"{len(packed)} slots do not match {num_pages} pages")
    if num_pages == 1:  # a cache of short runs comes back one by one
        (slot,) = packed.tolist()
        if slot < 0:
            raise BadRequest("slots", f"{slot} is below 0")
        return packed
    # Slots mostly come in ascending runs, which numpy sees quickly in long ones; only others are worth a set.
    if num_pages <= _FEW_SLOTS or not (packed[1:] > packed[:-1]).all():
        each = packed.tolist()
        if len(set(each)) != num_pages:
            raise BadRequest("slots", "the same slot is given for two pages")
        if each and min(each) < 0:
            raise BadRequest("slots", f"{min(each)} is below 0")
    elif packed[0] < 0:
        raise BadRequest("slots", f"{packed[0]} is below 0")
    return packed


def check_ids(field: str, packed: npt.NDArray[np.int32]) -> None:
    """Raise `BadRequest` when an id is negative."""
    # An id is negative when the highest bit of its last byte is set. For few ids a call into numpy costs more.
    if len(packed) <= _FEW_TOKENS and packed.tobytes()[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
        return
    if len(packed) and np.minimum.reduce(packed) < 0:
        at = int(np.argmax(packed < 0))
        raise BadRequest(field, f"id {packed[at]} at index {at} is not within 0 to {TOKEN_MAX}")


def _view(field: str, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    if isinstance(ids, np.ndarray) and ids.dtype == INT32 and ids.ndim == 1 and ids.flags.c_contiguous:
        return ids
    return _pack(field, ids)


def _pack(field: str, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise BadRequest(field, f"is not a one-dimensional array of integers ({error})") from None
    if array.ndim != 1:
        raise BadRequest(field, f"has {array.ndim} dimensions, must have 1")
    if array.size == 0 and not isinstance(ids, np.ndarray):
        return np.empty(0, INT32)
    if array.dtype.kind not in "iu":
        if array.dtype.kind == "O" and all(type(value) is int for value in array):
            raise BadRequest(field, f"holds an id that is not within 0 to {TOKEN_MAX}")
        raise BadRequest(field, f"dtype {array.dtype} is not an integer type")
    if array.dtype == INT32:
        return np.ascontiguousarray(array, INT32)
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > TOKEN_MAX:
            raise BadRequest(field, f"id {low if low < 0 else high} is not within 0 to {TOKEN_MAX}")
    return array.astype(INT32)


def raw_bytes(packed: npt.NDArray[np.int32]) -> memoryview | bytes:
    """The array's bytes, without copying them where that pays."""
    if packed.nbytes <= _GALLOP_BYTES:
        return packed.tobytes()
    return packed.data.cast("B")


def most_shared(
    pages: Iterable[bytes | None], raw: memoryview | bytes, at: int, limit: int
) -> tuple[bytes | None, int]:
    """Which of `pages` shares most tokens with `raw[at : at + limit]`, and how many; the first of equals, None for 0.

    >>> most_shared([b"abcdxxxx", None, b"abcdefgh"], b"abcdefghijkl", 0, 12)
    (b'abcdefgh', 2)
    """
    best, most = None, 0
    for page in pages:
        if page is not None and (shared := common_bytes(page, 0, raw, at, limit) // TOKEN_BYTES) > most:
            best, most = page, shared
    return best, most


def common_bytes(buffer: bytes, start: int, raw: memoryview | bytes, at: int, limit: int) -> int:
    """Bytes of whole tokens that `buffer[start:]` and `raw[at:]` share from their beginnings, at most `limit`.

    Doubles its stride while runs agree and halves it once they do not, so a difference near the front is found
    without reading what lies behind it.

    >>> common_bytes(b"....abcdefgh", 4, b"abcdefgX", 0, 8)
    4
    """
    done = 0
    stride = _GALLOP_BYTES
    while done < limit:
        stride = min(stride, limit - done)
        if stride > _COMPARE_BYTES and buffer.startswith(raw[at + done : at + done + stride], start + done):
            done += stride
            stride *= 4
            continue
        while stride > _COMPARE_BYTES:
            half = stride // 2 & -TOKEN_BYTES
            if buffer.startswith(raw[at + done : at + done + half], start + done):
                done += half
                stride -= half
            else:
                stride = half
        difference = int.from_bytes(buffer[start + done : start + done + stride], "little") ^ int.from_bytes(
            raw[at + done : at + done + stride], "little"
        )
        if difference:
            lowest_bit = (difference & -difference).bit_length() - 1
            return done + lowest_bit // (8 * TOKEN_BYTES) * TOKEN_BYTES
        done += stride
    return done
