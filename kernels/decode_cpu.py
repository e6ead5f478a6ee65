"""Decoding on the CPU at the speed of its memory: one query token over pages where they lie, by compiled loops.

The loops (`decode_cpu_kernel.py`) are compiled by Numba for the machine that they run on, and kept on disk: seconds the
first time, a fraction of one in later processes. `prepare` does that; until it has, and where there is no Numba, a head
or a type that the loops do not take, the torch path does the work (`attend_torch.py`). So nobody waits for a compiler
who has not asked for it.

Parts that are there at the same time are one piece of work, cut into a few runs of tokens for each of torch's threads,
which take one after the other, in whatever order: a thread that is held up leaves more of them to the others. Each run
goes on with a state of its own from work to work, and the states are merged in order of the runs: the same bits every
time, for the same number of threads.
"""

import ctypes
import logging
import threading
from typing import Any, Final, NoReturn

import numpy as np
import torch

from hicache.kernels.checks import check_page_ids
from hicache.kernels.decode_job import Job, Segment
from hicache.kernels.launch import LOG2_E, ceil_div
from hicache.kernels.state import AttentionState
from hicache.kernels.threads import in_threads

_log = logging.getLogger(__name__)

_STORED_AS: Final[dict[torch.dtype, Any]] = {
    torch.float32: np.float32(0),
    torch.float16: np.int16(0),
    torch.bfloat16: np.uint16(0),
}
"""Numbers by whose type the loops know how pages are stored: Numba has no half precision."""
_AT_ONCE: Final = {4: 2, 2: 4}
"""Tokens that the loops compute with together, by bytes of an element."""
_LANES: Final = 16
"""Heads are a multiple of it."""
_BLOCK: Final = 256
"""Tokens whose scores the loops hold at once; a multiple of 4."""
_LEAD: Final = 64
"""Tokens that the loops look ahead, at most."""
_APART_BYTES: Final = 1 << 16
"""Between what threads write to, so that none loads what another one writes: what is asked for ahead reaches so far."""
_RUNS_A_THREAD: Final = 2
"""More of them share out better what there is to do, and have more states to be merged."""
_MOST_SEGMENTS: Final = 16
"""That are worked on together."""
_ALONE_BYTES: Final = 1 << 19
"""Up to so many keys and values for each thread, waking another one costs more than it gains."""

_AHEAD_BYTES: Final = {4: (16 << 10, 4 << 10), 2: (18 << 10, 4 << 10)}
"""How far ahead data is asked for, by bytes of an element, and how much nearer each time that it is asked for again: as
was measured to be best, and little enough for the first cache."""
_LATELY: Final = 64
"""Requests that the loops look back at, at most."""
_EARLY_BYTES: Final = 64 << 10
"""How far ahead one line of every 4 KiB is asked for, for the sake of its address, where a token has that much."""

_FIRST_SLOT: Final = torch.zeros(1, dtype=torch.int32)
_loading: Final = threading.Lock()
_ready: Final[dict[torch.dtype, Any]] = {}
"""The loops, by the types for which they are compiled: functions of C at `address`, gone with the object."""
_merging: Final[list[Any]] = []
"""Likewise, what merges what they have left, whatever the type."""
_failed: Final[set[torch.dtype]] = set()


def prepare(dtype: torch.dtype) -> bool:
    """Have the loops ready for pages of `dtype` from now on, and say whether they are.

    Loads them, or compiles them if no process of this user has (some seconds). False for a dtype they do not take, and
    where Numba is missing or does not work, which is said in the log, once for each. Callable from any thread; waits
    for another one that is at it.
    """
    if dtype not in _STORED_AS:
        return False
    with _loading:
        if dtype in _ready or dtype in _failed:
            return dtype in _ready
        try:
            from hicache.kernels.decode_cpu_kernel import compiled, compiled_merge

            if not _merging:
                _merging.append(compiled_merge())
            _ready[dtype] = compiled(_STORED_AS[dtype])
        except Exception as error:
            # Whatever a compiler runs into on somebody's machine, decoding works without it.
            _log.warning("attention to a single token is not compiled and stays several times slower: %r", error)
            _failed.add(dtype)
            return False
        return True


def takes(query: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None) -> bool:
    """Whether the loops are ready for a query [T, HQ, D] over pages of `dtype` on `device`, that of the query if
    None."""
    return (
        query.shape[0] == 1
        and query.shape[2] % _LANES == 0
        and dtype in _ready
        and (device or query.device).type == query.device.type == "cpu"
    )


class _Room(threading.local):
    """The job of one thread, and the room it works in: kept, as a step of a model attends in every layer."""

    def __init__(self) -> None:
        self._shape = (0, 0, 0, 0)
        self._room = torch.empty(0)
        self._job = Job()
        self.segments: Final = (Segment * _MOST_SEGMENTS)()
        self._job.segments_at = ctypes.addressof(self.segments)

    def job(self, num_kv_heads: int, group: int, head_dim: int, num_threads: int) -> Job:
        """A job of that shape, whose other fields hold anything. Of this thread alone, until it asks for the next."""
        shape = (num_kv_heads, group, head_dim, num_threads)
        if shape != self._shape:
            self._shape, job = shape, self._job
            job.num_heads, job.group, job.blocks_a_head = num_kv_heads, group, ceil_div(group, 4)
            job.num_vectors, job.tokens_at_once = head_dim // _LANES, _BLOCK
            job.most_runs = num_threads * _RUNS_A_THREAD if num_threads > 1 else 1
            num_blocks = num_kv_heads * job.blocks_a_head
            rows_bytes = num_blocks * head_dim * 16
            run_bytes = rows_bytes + num_blocks * (32 + 128 + _BLOCK // 4 * 64) + 16 * (_BLOCK + _LEAD) + 8 * _LATELY
            # Apart from each other, as a core also loads what lies behind its own.
            job.run_bytes = ceil_div(run_bytes, 64) * 64 + _APART_BYTES
            states_bytes = job.most_runs * job.run_bytes
            with torch.inference_mode(False):
                self._room = torch.empty(num_threads * rows_bytes + states_bytes + 64, dtype=torch.uint8)
            # From a cache line on, as vectors that are not to be spread over two have to be.
            job.rows_at = ceil_div(self._room.data_ptr(), 64) * 64
            job.states_at = job.rows_at + num_threads * rows_bytes
        return self._job


_room: Final = _Room()


class Decoding:
    """The state of one query token over all that it was given so far. For one thread, which has one at a time.

    What is added is attended to by `run`, and in any case by `result`; until then pages and tables stay as they are.
    """

    def __init__(self, query: torch.Tensor, num_kv_heads: int, scale: float, soft_cap: float | None) -> None:
        """query [1, HQ, D], D contiguous; soft_cap as in `Scoring`."""
        _, self._num_heads, self._head_dim = query.shape
        self._query: Final = query.float()
        self._dtype = query.dtype
        """Of the segments, all of which have the same."""
        self._added: list[tuple[torch.Tensor, ...]] = []
        """What each segment has addresses of, the table last."""
        self._num_threads: Final = torch.get_num_threads()
        group = self._num_heads // num_kv_heads
        job = self._job = _room.job(num_kv_heads, group, self._head_dim, self._num_threads)
        job.begun_runs = job.num_segments = job.num_tokens = job.output_at = job.is_wrong = 0
        job.query_at, job.query_stride = self._query.data_ptr(), 4 * self._query.stride(1)
        job.scale = scale * LOG2_E if soft_cap is None else scale / soft_cap
        job.cap = 0.0 if soft_cap is None else soft_cap * LOG2_E

    def add(self, pages: torch.Tensor, block_table: torch.Tensor, first: int, last: int) -> None:
        """Have tokens `first` to `last`, at least one, attended to of pages [num_slots, 2, page_size, H, D], any stride
        but in D, that `takes` was asked about; block_table int32."""
        slot, plane, token, head, _ = pages.stride()
        element, table = pages.element_size(), block_table.cpu().contiguous()
        segment = self._segment(pages.dtype, first, last)
        self._added.append((pages, table))
        segment.table_at, segment.pages_at = table.data_ptr(), pages.data_ptr()
        segment.num_slots, segment.page_size = pages.shape[0], pages.shape[2]
        segment.slot_stride, segment.plane_stride = element * slot, element * plane
        segment.token_stride, segment.head_stride = element * token, element * head
        token_bytes = element * self._job.num_heads * self._head_dim
        segment.early = _EARLY_BYTES // token_bytes if 1 << 12 <= token_bytes <= segment.token_stride else 0

    def add_token(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Have one token attended to, key and value [1, H, D], any stride but in D, of a type that `takes` was asked
        about."""
        if key.stride() != value.stride():
            key, value = key.contiguous(), value.contiguous()
        segment = self._segment(key.dtype, 0, 1)
        self._added.append((key, value, _FIRST_SLOT))
        segment.table_at, segment.pages_at = _FIRST_SLOT.data_ptr(), key.data_ptr()
        segment.num_slots, segment.page_size = 1, 1
        segment.slot_stride, segment.plane_stride, segment.token_stride = 0, value.data_ptr() - key.data_ptr(), 0
        segment.head_stride, segment.early = key.element_size() * key.stride(1), 0

    def _segment(self, dtype: torch.dtype, first: int, last: int) -> Segment:
        """One more, of those tokens, whose other fields hold anything."""
        job = self._job
        if job.num_segments == _MOST_SEGMENTS or (job.num_segments and dtype != self._dtype):
            self.run()
        self._dtype = dtype
        segment: Segment = _room.segments[job.num_segments]
        segment.first, segment.last = first, last
        job.num_segments += 1
        job.num_tokens += last - first
        return segment

    def run(self) -> None:
        """Attend to all that was added since, by this thread and others of torch's. Returns when it is done. Raises
        `BadArgument` if a table names slots that are not there."""
        job = self._job
        if not job.num_segments:
            return
        element = self._dtype.itemsize
        head_bytes, (far_bytes, nearer_bytes) = self._head_dim * element, _AHEAD_BYTES[element]
        alone = job.num_tokens * 2 * job.num_heads * head_bytes < self._num_threads * _ALONE_BYTES
        job.next_thread = job.next_run = job.done_runs = 0
        job.num_runs = 1 if alone else job.most_runs
        job.far = ceil_div(far_bytes, head_bytes)
        job.again = min(ceil_div(nearer_bytes, head_bytes * _AT_ONCE[element]), (_LATELY - 1) // 3)
        in_threads(_ready[self._dtype].address, job, 1 if alone else self._num_threads)
        if job.is_wrong:
            self._refuse()
        job.begun_runs = max(job.begun_runs, job.num_runs)
        job.num_segments = job.num_tokens = 0
        self._added.clear()

    def _refuse(self) -> NoReturn:
        """Say which slot is not there."""
        for (*_, table), segment in zip(self._added, _room.segments, strict=False):
            used = table[segment.first // segment.page_size : ceil_div(segment.last, segment.page_size)]
            check_page_ids("part.block_table", used, segment.num_slots, negative=False)
        raise AssertionError("a table was changed while it was in use")

    def result(self) -> AttentionState | None:
        """Output [1, HQ, D] and LSE [1, HQ], float32; None over no token. Raises what `run` raises."""
        job = self._job
        if not job.num_segments and not job.begun_runs:
            return None
        output = torch.empty(1, self._num_heads, self._head_dim)
        lse = torch.empty(1, self._num_heads)
        job.output_at, job.lse_at = output.data_ptr(), lse.data_ptr()
        if job.num_segments:
            self.run()
        else:
            in_threads(_merging[0].address, job, 1)
        return AttentionState(output, lse)
