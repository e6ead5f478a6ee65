"""Memory that can be shared by descriptor: allocated up front, sealed, in 2 MiB pages where the kernel gives them.

The order of the steps binds: the descriptor is made, its memory allocated (so that a lack of it is an error here and
not a SIGBUS later), mapped writable once, and only then sealed. From then on nobody, this process included, can shrink,
grow or punch the file or map it writable again; whoever is given the descriptor can map it for reading.

The mapping is not inherited by forked children, and it outlives `close` for as long as a view of it exists: closing
under a reader can never turn its reads into a crash.
"""

import ctypes
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final

from hicache.errors import TierUnavailable
from hicache.tier import TierId
from hicache.tiers.memory_limits import available_bytes

HUGE_PAGE: Final = 2 << 20
"""Bytes of a huge page. The map begins at a multiple of it, without which none is given."""
COLLAPSE_CHUNK: Final = 16 << 20
"""Bytes that one collapsing call covers: some tens of milliseconds, after which a request to stop is seen."""

_PROT_NONE: Final = 0
_PROT_READ_WRITE: Final = 1 | 2
_MAP_SHARED: Final = 0x01
_MAP_FIXED: Final = 0x10
_MAP_PRIVATE_ANONYMOUS_NORESERVE: Final = 0x02 | 0x20 | 0x4000
_MADV_REMOVE: Final = 9
_MADV_DONTFORK: Final = 10
_MADV_COLLAPSE: Final = 25
_F_SEAL_FUTURE_WRITE: Final = 0x10  # has no name in `fcntl` before Python 3.13
_FIXED_SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_CUDA_HOST_REGISTER_PORTABLE: Final = 0x01  # pinned for every GPU, not only for the current one

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """`num_bytes` bytes of shared memory, zero at first.

    With `outlives`, the memory may be handed on to a later process, as `whole_fd`, which makes an arena of it as `fd`.
    It is not sealed against new writable mappings then. Others are given a descriptor that was opened for reading;
    whoever runs as the same user, or as root, could open it anew for writing.

    Raises `TierUnavailable` when the memory cannot be had, or what was handed on is not such memory; nothing is left
    allocated then, and `fd` is the caller's still.
    """

    def __init__(self, tier_id: TierId, num_bytes: int, *, outlives: bool = False, fd: int | None = None) -> None:
        self.tier_id: Final = tier_id
        self.num_bytes: Final = num_bytes
        self._readable_fd = -1
        self.collapsed_bytes = 0
        """How much lies in 2 MiB pages, as far as `collapse` has come."""
        own = self._make() if fd is None else self._take_over(fd)
        try:
            self.address, root, self._mapping = map_shared(own, num_bytes)
            if fd is None:
                seals = _FIXED_SIZE if outlives else _FIXED_SIZE | _F_SEAL_FUTURE_WRITE
                fcntl.fcntl(own, fcntl.F_ADD_SEALS, seals)
                fcntl.fcntl(own, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
            if outlives:
                os.fchmod(own, 0o600)
                self._readable_fd = os.open(f"/proc/self/fd/{own}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(own)
            raise _refusal(tier_id, num_bytes, error) from error
        self._fd = own
        self._memory: memoryview | None = memoryview(root).cast("B")

    def _make(self) -> int:
        """New memory, all of it allocated."""
        available = available_bytes()
        if available is not None and self.num_bytes > available:
            raise TierUnavailable(self.tier_id, f"needs {self.num_bytes} bytes of memory, {available} are available")
        try:
            fd = os.memfd_create(f"hicache-{self.tier_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _refusal(self.tier_id, self.num_bytes, error) from error
        try:
            os.posix_fallocate(fd, 0, self.num_bytes)
        except OSError as error:
            os.close(fd)
            raise _refusal(self.tier_id, self.num_bytes, error) from error
        return fd

    def _take_over(self, fd: int) -> int:
        """Memory that an earlier process has left, as a descriptor of this arena's own."""
        try:
            num_bytes, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if num_bytes != self.num_bytes or seals & _FIXED_SIZE != _FIXED_SIZE or seals & _F_SEAL_FUTURE_WRITE:
                problem = f"what was kept has {num_bytes} bytes and seals {seals:#x}, not {self.num_bytes} and its own"
                raise TierUnavailable(self.tier_id, problem)
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError as error:
            raise _refusal(self.tier_id, self.num_bytes, error) from error

    @property
    def fd(self) -> int:
        """The descriptor to give to others, who can map it for reading only. Raises `TierUnavailable` once closed."""
        return self.whole_fd if self._readable_fd < 0 else self._readable_fd

    @property
    def whole_fd(self) -> int:
        """The memory itself, to be handed on to a later process. Raises `TierUnavailable` once closed."""
        if self._memory is None:
            raise TierUnavailable(self.tier_id, "is closed")
        return self._fd

    @property
    def memory(self) -> memoryview:
        """All bytes, writable. Every view made of it keeps the mapping alive. Raises `TierUnavailable` once closed."""
        if self._memory is None:
            raise TierUnavailable(self.tier_id, "is closed")
        return self._memory

    def collapse(self, stop: threading.Event) -> str | None:
        """Gather the memory into 2 MiB pages, until done or told to stop: some 3 s a GiB, for a thread of its own. The
        memory may be used meanwhile, by the CPU alone.

        Returns why not all of it could be, None otherwise. Contents and addresses stay.
        """
        refusal = None
        for length, problem in collapsing(self.address, self.num_bytes, stop):
            self.collapsed_bytes += length
            refusal = problem or refusal
        return refusal

    def register(self) -> str | None:
        """Pin the memory and make it known to CUDA, for all GPUs, until it is unmapped. Whole or not at all: returns
        why not, None when it was done. To be called after `collapse`, and at most once."""
        try:
            from cupy.cuda import runtime

            runtime.hostRegister(self.address, self.num_bytes, _CUDA_HOST_REGISTER_PORTABLE)
        except (ImportError, RuntimeError) as error:  # no cupy; no GPU, or no more memory may be pinned
            return str(error)
        self._mapping.unregister = runtime.hostUnregister
        return None

    def close(self) -> None:
        """Close the descriptor and let go of the mapping. Idempotent."""
        if self._memory is not None:
            self._memory = None
            os.close(self._fd)
            if self._readable_fd >= 0:
                os.close(self._readable_fd)


def collapsing(address: int, num_bytes: int, stop: threading.Event) -> Iterator[tuple[int, str | None]]:
    """Gather memory that `map_shared` mapped into 2 MiB pages, piece by piece, until done or told to stop: how many
    bytes of each piece could be, and why not the others."""
    end = num_bytes - num_bytes % HUGE_PAGE
    for start in range(0, end, COLLAPSE_CHUNK):
        if stop.is_set():
            return
        length = min(COLLAPSE_CHUNK, end - start)
        if _libc.madvise(address + start, length, _MADV_COLLAPSE) == 0:
            yield length, None
            continue
        number = ctypes.get_errno()
        yield 0, os.strerror(number)
        if number != errno.EAGAIN:  # which is about these pages alone; anything else would be said of all
            return


def remove(address: int, num_bytes: int) -> None:
    """Give back what memory that `map_shared` mapped holds, for all who have it mapped: it reads as zeros then. Raises
    `OSError`."""
    if _libc.madvise(address, num_bytes, _MADV_REMOVE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Mapping:
    """A reserved range of addresses, given back when the last view of it is gone."""

    def __init__(self, start: int, num_bytes: int, address: int) -> None:
        self.start = start
        self.num_bytes = num_bytes
        self.address = address
        self.unregister: Callable[[int], None] | None = None
        """What CUDA must be told before the range is unmapped."""

    def undo(self) -> None:
        if self.unregister is not None:
            self.unregister(self.address)
        _libc.munmap(self.start, self.num_bytes)


def map_shared(fd: int, num_bytes: int) -> tuple[int, "ctypes.Array[ctypes.c_ubyte]", Mapping]:
    """Map `fd` writable at a multiple of `HUGE_PAGE`: the address, the bytes there, and what undoes it, which happens
    when the last view of them is gone. Raises `OSError`."""
    start = _mmap(None, num_bytes + HUGE_PAGE, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1)
    address = -(-start // HUGE_PAGE) * HUGE_PAGE
    mapping = Mapping(start, num_bytes + HUGE_PAGE, address)
    try:
        _mmap(address, num_bytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, fd)
        if _libc.madvise(address, num_bytes, _MADV_DONTFORK) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError:
        mapping.undo()
        raise
    root = (ctypes.c_ubyte * num_bytes).from_address(address)
    # Not at exit: threads may still read then, and the process gives everything back by ending.
    weakref.finalize(root, mapping.undo).atexit = False
    return address, root, mapping


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    got = _libc.mmap(address, num_bytes, protection, flags, fd, 0)
    if got == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(got)


def _refusal(tier_id: TierId, num_bytes: int, error: OSError) -> TierUnavailable:
    return TierUnavailable(tier_id, f"cannot have {num_bytes} bytes of shared memory: {error.strerror}")
