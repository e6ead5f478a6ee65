"""The arena: allocated, aligned, sealed, and mapped for as long as somebody looks at it."""

import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from hicache.errors import TierUnavailable
from hicache.tier import HOST
from hicache.tiers.arena import COLLAPSE_CHUNK, HUGE_PAGE, Arena

SIZE = 3 * HUGE_PAGE + 8_192


def mapping_of(arena_address: int) -> dict[str, str]:
    """What the kernel says of the mapping that begins there; empty when there is none."""
    found: dict[str, str] = {}
    inside = False
    with open("/proc/self/smaps") as table:
        for line in table:
            name, _, value = line.partition(":")
            if " " in name:  # the head of a mapping
                inside = name.split("-")[0] == f"{arena_address:x}"
            elif inside:
                found[name] = value.strip()
    return found


def test_memory_is_zero_aligned_and_allocated() -> None:
    arena = Arena(HOST, SIZE)
    try:
        assert (len(arena.memory), arena.memory.format, arena.memory.readonly) == (SIZE, "B", False)
        assert arena.address % HUGE_PAGE == 0
        assert np.frombuffer(arena.memory, np.uint8).ctypes.data == arena.address
        assert not np.frombuffer(arena.memory, np.uint8).any()
        status = os.fstat(arena.fd)
        assert status.st_size == SIZE
        assert status.st_blocks * 512 >= SIZE
    finally:
        arena.close()


def test_a_forked_child_does_not_inherit_it() -> None:
    arena = Arena(HOST, SIZE)
    try:
        assert "dc" in mapping_of(arena.address)["VmFlags"].split()  # "do not copy"
    finally:
        arena.close()


def test_the_descriptor_is_sealed_against_everything_but_reading() -> None:
    arena = Arena(HOST, SIZE)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, SIZE - 4_096)
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, SIZE + 4_096)
        with pytest.raises(PermissionError):
            os.pwrite(arena.fd, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(arena.fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with open(f"/proc/self/fd/{arena.fd}", "r+b", buffering=0) as again, pytest.raises(PermissionError):
            again.write(b"x")
        assert fcntl.fcntl(arena.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        with mmap.mmap(arena.fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as reader:
            arena.memory[SIZE - 1] = 77
            assert reader[SIZE - 1] == 77
    finally:
        arena.close()


def test_views_outlive_closing_and_the_last_of_them_unmaps() -> None:
    arena = Arena(HOST, SIZE)
    address, fd = arena.address, arena.fd
    array = np.frombuffer(arena.memory, np.uint8)[100:200]
    arena.memory[100] = 5
    arena.close()
    arena.close()
    with pytest.raises(OSError) as caught:
        os.fstat(fd)
    assert caught.value.errno == errno.EBADF
    for name in ("memory", "fd"):
        with pytest.raises(TierUnavailable, match="is closed"):
            getattr(arena, name)
    assert array[0] == 5
    array[0] = 6
    assert mapping_of(address)
    del array, arena
    gc.collect()
    assert not mapping_of(address)


def test_collapsing_changes_no_byte() -> None:
    arena = Arena(HOST, COLLAPSE_CHUNK + SIZE)
    try:
        contents = np.frombuffer(arena.memory, np.uint8)
        contents[:] = np.random.default_rng(0).integers(0, 256, contents.size)
        expected = contents.copy()
        refusal = arena.collapse(threading.Event())
        assert np.array_equal(contents, expected)
        if refusal is None:
            assert arena.collapsed_bytes == COLLAPSE_CHUNK + 3 * HUGE_PAGE
            assert int(mapping_of(arena.address)["ShmemPmdMapped"].split()[0]) * 1_024 == arena.collapsed_bytes
        else:
            assert arena.collapsed_bytes < COLLAPSE_CHUNK + 3 * HUGE_PAGE
        del contents
    finally:
        arena.close()


def test_collapsing_stops_when_told_to() -> None:
    arena = Arena(HOST, SIZE)
    try:
        stop = threading.Event()
        stop.set()
        assert arena.collapse(stop) is None
        assert arena.collapsed_bytes == 0
    finally:
        arena.close()


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    with pytest.raises(TierUnavailable, match=r"host: needs 1125899906842624 bytes of memory, \d+ are available"):
        Arena(HOST, 1 << 50)


LIMITED = """
import os, resource, sys
from hicache.errors import TierUnavailable
from hicache.tier import HOST
from hicache.tiers.arena import Arena

name, limit = getattr(resource, sys.argv[1]), int(sys.argv[2])
before = sorted(os.listdir("/proc/self/fd"))
hard = resource.getrlimit(name)[1]
if name == resource.RLIMIT_AS:
    with open("/proc/self/statm") as table:
        limit += int(table.read().split()[0]) * resource.getpagesize()
resource.setrlimit(name, (limit, hard))
try:
    Arena(HOST, 64 << 20)
except TierUnavailable as error:
    print(error)
resource.setrlimit(name, (hard, hard))
assert sorted(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"
Arena(HOST, 64 << 20).close()
"""


@pytest.mark.parametrize(
    ("limit", "value", "problem"),
    [
        ("RLIMIT_FSIZE", 1 << 20, os.strerror(errno.EFBIG)),  # the allocation fails
        ("RLIMIT_AS", 8 << 20, os.strerror(errno.ENOMEM)),  # the map fails
        ("RLIMIT_NOFILE", 3, os.strerror(errno.EMFILE)),  # not even a descriptor
    ],
)
def test_a_refusal_of_the_kernel_is_typed_and_leaves_nothing(limit: str, value: int, problem: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, limit, str(value)], capture_output=True, text=True, timeout=60
    )
    assert (result.stderr, result.returncode) == ("", 0)
    assert result.stdout == f"host: cannot have 67108864 bytes of shared memory: {problem}\n"
