"""Decoding on the CPU at the speed of its memory: one query token over pages where they lie, by compiled loops.

The loops (`decode_cpu_kernel.py`) are compiled by Numba for the machine that they run on, and kept on disk: seconds the
first time, a fraction of one in later processes. `prepare` does that; until it has, and where there is no Numba, a head
or a type that the loops do not take, the torch path does the work (`attend_torch.py`). So nobody waits for a compiler
who has not asked for it.

A part is cut into as many runs of tokens as torch has threads. Each run goes on with a state of its own from part to
part, and the states are merged in order of the runs: the same bits every time, for the same number of threads.
"""

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hicache.kernels.crew import Crew
from hicache.kernels.launch import LOG2_E, ceil_div
from hicache.kernels.state import AttentionState

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

_crew: Final = Crew("hicache-decode")
_loading: Final = threading.Lock()
_ready: Final[dict[torch.dtype, Callable[..., None]]] = {}
"""The loops, by the types for which they are compiled."""
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
            from hicache.kernels.decode_cpu_kernel import decode_block

            run = _Run(np.zeros((1, 1, 1, 4, _LANES), np.float32), 0.0)
            run.take(decode_block, torch.zeros(1, 2, 1, 1, _LANES, dtype=dtype), np.zeros(1, np.int32), 0, 1)
        except Exception as error:
            # Whatever a compiler runs into on somebody's machine, decoding works without it.
            _log.warning("attention to a single token is not compiled and stays several times slower: %r", error)
            _failed.add(dtype)
            return False
        _ready[dtype] = decode_block
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
        _, self._num_heads, self._head_dim = query.shape
        self._group: Final = self._num_heads // num_kv_heads
        by_head = query.float().view(num_kv_heads, self._group, self._head_dim)
        rows = np.zeros((num_kv_heads, ceil_div(self._group, 4) * 4, self._head_dim), np.float32)
        rows[:, : self._group] = (by_head * (scale * LOG2_E if soft_cap is None else scale / soft_cap)).numpy()
        # Four rows together, a vector of each after the other.
        by_four = rows.reshape(num_kv_heads, -1, 4, self._head_dim // _LANES, _LANES)
        self._query: Final = np.ascontiguousarray(by_four.swapaxes(2, 3))
        self._cap: Final = 0.0 if soft_cap is None else soft_cap * LOG2_E
        self._runs: Final[list[_Run]] = []

    def add(self, pages: torch.Tensor, block_table: torch.Tensor, first: int, last: int) -> None:
        """Attend to tokens `first` to `last`, at least one, of pages [num_slots, 2, page_size, H, D], any stride but in
        D, that `takes` was asked about; block_table int32, of slots that are there."""
        num_bytes = (last - first) * 2 * pages.shape[3:].numel() * pages.element_size()
        num_runs = max(1, min(torch.get_num_threads(), num_bytes // _ALONE_BYTES))
        while len(self._runs) < num_runs:
            self._runs.append(_Run(self._query, self._cap))
        cuts = [first + (last - first) * i // num_runs for i in range(num_runs + 1)]
        table = np.ascontiguousarray(block_table.cpu().numpy())
        loops = _ready[pages.dtype]
        _crew.run([partial(self._runs[i].take, loops, pages, table, cuts[i], cuts[i + 1]) for i in range(num_runs)])

    def result(self) -> AttentionState | None:
        """Output [1, HQ, D] and LSE [1, HQ], float32; None over no token."""
        if not self._runs:
            return None
        top = self._runs[0].tops
        for run in self._runs[1:]:
            top = np.maximum(top, run.tops)
        whole, output = np.zeros_like(top), np.zeros_like(self._runs[0].total)
        # NaN in keys or values is the caller's to see, in the output.
        with np.errstate(invalid="ignore"):
            for run in self._runs:
                weights = np.exp2(run.tops - top)
                whole += weights * run.sums
                output += weights.reshape(-1, 1, 4, 1) * run.total
            output /= whole.reshape(-1, 1, 4, 1)
            lse = (np.log2(whole) + top) * np.float32(math.log(2.0))
        return AttentionState(self._of_heads(output.swapaxes(1, 2)), self._of_heads(lse)[..., 0])

    def _of_heads(self, rows: npt.NDArray[np.float32]) -> torch.Tensor:
        """[1, HQ, *] of all rows' [*]: without those that fill up a group."""
        by_head = np.ascontiguousarray(rows).reshape(self._query.shape[0], 4 * self._query.shape[1], -1)
        return torch.from_numpy(by_head[:, : self._group].reshape(1, self._num_heads, -1))


class _Run:
    """The state of the queries over the tokens of one run."""

    def __init__(self, query: npt.NDArray[np.float32], cap: float) -> None:
        """query [H, R, D / 16, 4, 16] and cap, as the loops want them."""
        num_blocks = query.shape[0] * query.shape[1]
        self._query: Final = query
        self._cap: Final = np.float32(cap)
        self._scores: Final = np.empty((num_blocks, _BLOCK // 4, 16), np.float32)
        self._addresses: Final = np.empty(_BLOCK + 4, np.int64)
        self.tops: Final = np.full(4 * num_blocks, -np.inf, np.float32)
        """Of every row the greatest score, in units of log2."""
        self.sums: Final = np.zeros(4 * num_blocks, np.float32)
        """Sum of the weights, relative to it; likewise `total` [H * R, D / 16, 4, 16], of the weighted values."""
        self.total: Final = np.zeros((num_blocks, *query.shape[2:]), np.float32)

    def take(
        self,
        loops: Callable[..., None],
        pages: torch.Tensor,
        table: npt.NDArray[np.int32],
        first: int,
        last: int,
    ) -> None:
        """Attend to tokens `first` to `last` of the pages [num_slots, 2, page_size, H, D] that `table` names. Releases
        the interpreter meanwhile."""
        strides = np.array(pages.stride()[:4], np.int64) * pages.element_size()
        loops(
            _STORED_AS[pages.dtype], self._query, pages.data_ptr(), strides, table, pages.shape[2], first, last,
            self._cap, self.tops, self.sums, self.total, self._scores, self._addresses,
        )  # fmt: skip
