"""Memory of copies: it is used again, and never while anybody has a view of it."""

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hicache.service.client.buffers import SMALL_BYTES, Buffers

SIZE = 3 * SMALL_BYTES
REGION = 4 * SMALL_BYTES
"""What the memory of `SIZE` bytes is rounded up to."""


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_memory_is_used_again_once_its_copy_is_dropped() -> None:
    buffers = Buffers()
    first = buffers.take(SIZE)
    where = address(first)
    assert (len(first), first.format, first.readonly) == (SIZE, "B", False)
    assert address(buffers.take(SIZE)) != where, "the first is in use"
    del first
    held = [buffers.take(SIZE), buffers.take(SIZE - 1)]
    assert where in [address(each) for each in held], "another length of the same order of size will do"
    assert buffers.num_bytes == 2 * REGION


MADE: dict[str, Callable[[memoryview], memoryview | npt.NDArray[Any] | torch.Tensor]] = {
    "view of a view": lambda copy: copy[10:-10][5:-5],
    "cast": lambda copy: copy.cast("I")[3:-3],
    "numpy": lambda copy: np.frombuffer(copy, np.uint8),
    "slice of numpy": lambda copy: np.frombuffer(copy, np.float32).reshape(2, -1)[1, ::2],
    "torch": lambda copy: torch.frombuffer(copy, dtype=torch.uint8),
    "view of torch": lambda copy: torch.frombuffer(copy, dtype=torch.float32).view(2, -1)[1, ::2],
    "numpy of torch": lambda copy: torch.frombuffer(copy, dtype=torch.uint8)[7:].numpy(),
}


@pytest.mark.parametrize("made", MADE)
def test_memory_stays_taken_while_anything_made_of_it_lives(made: str) -> None:
    buffers = Buffers()
    copy = buffers.take(SIZE)
    copy[:] = bytes([7]) * SIZE
    where, made_of_it = address(copy), MADE[made](copy)
    before = np.asarray(made_of_it).tobytes()
    del copy
    gc.collect()
    others = [buffers.take(SIZE) for _ in range(3)]
    for other in others:
        other[:] = bytes([9]) * SIZE
    assert np.asarray(made_of_it).tobytes() == before, "another copy was put into its memory"
    del made_of_it
    gc.collect()
    assert address(buffers.take(SIZE)) == where


def test_garbage_looks_at_its_copy_until_it_has_ended() -> None:
    """A collection asks the `__del__` of what it has found, which may look at a copy, or bring itself back."""
    buffers, seen, back = Buffers(), list[bytes](), list[object]()

    class Batch:
        def __init__(self, is_back: bool) -> None:
            self.copy = buffers.take(SIZE)
            self.copy[:2] = b"me"
            self.itself, self.is_back = self, is_back

        def __del__(self) -> None:
            buffers.take(SIZE)[:2] = b"no"
            seen.append(self.copy[:2].tobytes())
            if self.is_back:
                back.append(self)

    for is_back in (False, True):
        Batch(is_back)
        gc.collect()
    buffers.take(SIZE)[:2] = b"no"
    (batch,) = back
    assert isinstance(batch, Batch)
    assert seen == [b"me", b"me"]
    assert batch.copy[:2].tobytes() == b"me"


def test_no_more_is_remembered_than_the_bound() -> None:
    buffers = Buffers(kept_bytes=2 * REGION)
    held = [buffers.take(SIZE) for _ in range(5)]
    assert buffers.num_bytes == 2 * REGION
    assert len({address(each) for each in held}) == 5
    newest = address(held[-1])
    held.clear()
    assert newest in [address(buffers.take(SIZE)) for _ in range(2)], "the last are remembered"
    assert len(buffers.take(2 * REGION + 1)) == 2 * REGION + 1
    assert buffers.num_bytes == 0, "it is larger than all that may be remembered"


def test_small_copies_and_empty_ones_are_not_remembered() -> None:
    buffers = Buffers()
    assert [len(buffers.take(size)) for size in (0, 1, SMALL_BYTES - 1)] == [0, 1, SMALL_BYTES - 1]
    assert buffers.num_bytes == 0


def test_a_copy_outlives_the_close() -> None:
    buffers = Buffers()
    copy = buffers.take(SIZE)
    copy[:] = bytes([3]) * SIZE
    buffers.close()
    buffers.close()
    buffers.take(SIZE)[:] = bytes([4]) * SIZE
    assert copy == bytes([3]) * SIZE
    assert buffers.num_bytes == 0


def test_threads_never_have_the_same_memory() -> None:
    buffers, wrong = Buffers(kept_bytes=8 * REGION), list[int]()

    def work(number: int) -> None:
        rng, held = random.Random(number), list[tuple[memoryview, int]]()
        for turn in range(300):
            copy, mark = buffers.take(SMALL_BYTES * rng.choice([1, 2, 3, 4])), number << 32 | turn
            words = copy.cast("Q")
            words[0] = words[-1] = mark
            held.append((copy, mark))
            if len(held) > rng.randrange(6):
                kept, expected = held.pop(rng.randrange(len(held)))
                words = kept.cast("Q")
                if {words[0], words[-1]} != {expected}:
                    wrong.append(expected)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert buffers.num_bytes <= 8 * REGION
