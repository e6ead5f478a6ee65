"""Decoding on the CPU at the speed of its memory: one query token over pages where they lie, by compiled loops.

The loops (`decode_cpu_kernel.py`) are compiled by Numba for the machine that they run on, and kept on disk: seconds the
first time, a fraction of one in later processes. `prepare` does that; until it has, and where there is no Numba, a head
or a type that the loops do not take, the torch path does the work (`attend_torch.py`). So nobody waits for a compiler
who has not asked for it.

A part is cut into as many runs of tokens as torch has threads, which take one each, in whatever order. Each run goes on
with a state of its own from part to part, and the states are merged in order of the runs: the same bits every time, for
the same number of threads.
"""

import logging
import math
import threading
from typing import Any, Final

import numpy as np
import torch

from hicache.kernels.decode_job import Job
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
_LANES: Final = 16
"""Heads are a multiple of it."""
_BLOCK: Final = 256
"""Tokens whose scores the loops hold at once; a multiple of 4."""
_ALONE_BYTES: Final = 1 << 19
"""Up to so many keys and values for each thread, waking another one costs more than it gains."""

_AHEAD_BYTES: Final = 1 << 13
"""So far ahead data is fetched, as was measured to be best: what memory delivers in twice the time that it takes to
answer, and a sixth of the first cache."""

_loading: Final = threading.Lock()
_ready: Final[dict[torch.dtype, Any]] = {}
"""The loops, by the types for which they are compiled: functions of C at `address`, gone with the object."""
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
            from hicache.kernels.decode_cpu_kernel import compiled

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


class Decoding:
    """The state of one query token over all that it was given so far. For one thread."""

    def __init__(self, query: torch.Tensor, num_kv_heads: int, scale: float, soft_cap: float | None) -> None:
        """query [1, HQ, D]; soft_cap as in `Scoring`."""
        _, self._num_heads, head_dim = query.shape
        self._group: Final = self._num_heads // num_kv_heads
        by_head = query.float().view(num_kv_heads, self._group, head_dim)
        blocks_a_head, num_vectors = ceil_div(self._group, 4), head_dim // _LANES
        num_blocks, self._most_runs = num_kv_heads * blocks_a_head, torch.get_num_threads()
        # Memory of torch's begins with a cache line, as vectors that are not to be spread over two have to.
        rows = torch.zeros(num_kv_heads, blocks_a_head * 4, head_dim)
        rows[:, : self._group] = by_head * (scale * LOG2_E if soft_cap is None else scale / soft_cap)
        # Four rows together, a vector of each after the other.
        by_four = rows.view(num_kv_heads, blocks_a_head, 4, num_vectors, _LANES)
        self._query: Final = by_four.transpose(2, 3).contiguous()
        self._tops: Final = torch.full((self._most_runs, num_blocks, 1, 4, 1), -torch.inf)
        self._sums: Final = torch.zeros_like(self._tops)
        self._total: Final = torch.zeros(self._most_runs, num_blocks, num_vectors, 4, _LANES)
        self._scores: Final = torch.empty(self._most_runs, num_blocks, _BLOCK // 4, 16)
        self._addresses: Final = torch.empty(self._most_runs, _BLOCK + 4, dtype=torch.int64)
        self._job: Final = Job(
            num_heads=num_kv_heads,
            blocks_a_head=blocks_a_head,
            num_vectors=num_vectors,
            query_at=self._query.data_ptr(),
            tops_at=self._tops.data_ptr(),
            sums_at=self._sums.data_ptr(),
            total_at=self._total.data_ptr(),
            tokens_at_once=_BLOCK,
            scores_at=self._scores.data_ptr(),
            addresses_at=self._addresses.data_ptr(),
            cap=0.0 if soft_cap is None else soft_cap * LOG2_E,
        )

    def add(self, pages: torch.Tensor, block_table: torch.Tensor, first: int, last: int) -> None:
        """Attend to tokens `first` to `last`, at least one, of pages [num_slots, 2, page_size, H, D], any stride but in
        D, that `takes` was asked about; block_table int32, of slots that are there."""
        _, _, page_size, num_kv_heads, head_dim = pages.shape
        element = pages.element_size()
        table = block_table.cpu().contiguous()
        alone = (last - first) * 2 * num_kv_heads * head_dim * element < self._most_runs * _ALONE_BYTES
        job = self._job
        job.next_run, job.num_runs = 0, 1 if alone else self._most_runs
        job.pages_at = pages.data_ptr()
        strides = [element * stride for stride in pages.stride()]
        job.slot_stride, job.plane_stride, job.token_stride, job.head_stride, _ = strides
        job.page_size, job.table_at = page_size, table.data_ptr()
        job.first, job.last = first, last
        job.heads_ahead = min(num_kv_heads, ceil_div(_AHEAD_BYTES, 4 * head_dim * element))
        in_threads(_ready[pages.dtype].address, job, job.num_runs)

    def result(self) -> AttentionState | None:
        """Output [1, HQ, D] and LSE [1, HQ], float32; None over no token."""
        if not self._job.num_runs:
            return None
        top = self._tops.amax(0)
        weights = torch.exp2(self._tops - top)
        whole = (weights * self._sums).sum(0)
        output = (weights * self._total).sum(0) / whole
        # In float64: rounded once, as a sum of two numbers in other units would not be.
        lse = ((whole.double().log2() + top.double()) * math.log(2.0)).float()
        return AttentionState(self._of_heads(output.transpose(1, 2)), self._of_heads(lse)[..., 0])

    def _of_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """[1, HQ, *] of all rows' [*]: without those that fill up a group."""
        by_head = rows.reshape(self._query.shape[0], 4 * self._query.shape[1], -1)
        return by_head[:, : self._group].reshape(1, self._num_heads, -1)
