"""`hicache bench attention`: attention over a context that is larger than its device tier, and what leaving out costs.

A context of four times what is allowed on the device, half of it in host memory and the rest on NVMe; float32, as the
CPU path computes, 8 key/value heads of 128 and 32 query heads, pages of 16 tokens. Sides are measured in turn. The rows
of dense attention say what was in use on the device at most, which is asserted to be within a quarter of the context:
slots of the tier that hold something, and the buffers of attention, looked at after every step of filling and at every
part that is attended to. Rows:

- `prefill_q512`: 512 new tokens over the whole context, beside torch's attention over the same keys held contiguous.
- `decode_q1`: one new token over what of the context is in memory, by compiled loops (`kernels/decode_cpu.py`), beside
  its bytes over the bandwidth at which torch reads a larger buffer, in huge pages too; `decode_q1_sdpa` beside torch's
  attention over the same keys held contiguous; `decode_q1_with_nvme` over all of it, beside what reading its part on
  NVMe and its bytes in memory take.
- `sparse_error`: certified sparse decode at a quarter of the 16-token pages of real keys (the demo's model, bfloat16):
  mean relative error of the output over heads and tokens, beside that of the same pages chosen by the box around their
  keys (Quest). `sparse_violations`: heads and tokens that missed more than was proved; `sparse_metadata`: bytes that
  are kept beside the keys, as a share of theirs; `sparse_certified`: heads and tokens proved to miss at most 5 %.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from hicache.kernels import attend_torch, decode_cpu
from hicache.kernels.attend import PagedPart, attend
from hicache.kernels.score import MinMax, min_max_of, page_scores
from hicache.kernels.sparse import PAGE_SIZE, KeyPlanes, attend_sparse, choose_pages, planes_of
from hicache.kernels.state import attention_reference
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service.compose import HiCache, Step
from hicache.tools.bench.results import Baseline, Note, Peak, Report, Row
from hicache.tools.exits import CommandFailed, UsageProblem

if TYPE_CHECKING:
    from hicache.tools.bench.demo_kv import Recorded

HEADS, GROUP, DIM, LAYERS = 8, 4, 128, 2
NUM_TOKENS: Final = 8192
"""Tokens of the context; the device tier holds a quarter, the host tier half."""
NVME_BYTES: Final = 4 * NUM_TOKENS * LAYERS * 2 * HEADS * DIM * 4
"""Of the NVMe tier, which is larger than what it has to hold."""
NUM_NEW: Final = 512
ROUNDS: Final = 9
STEPS: Final = 16
"""Of decode, one after the other, for which a time is taken: a model has many layers, and a request many tokens."""
BUFFERS: Final = 4
"""How many times as large as what is in memory the buffer is by which the bandwidth is measured."""
PREFILL_GOAL, DECODE_GOAL = 1.15, 1.25
SPARSE_TOKENS: Final = 2048
SPARSE_CUTS: Final = 4
"""Places in the last eighth of the document up to which it is the context, and"""
SPARSE_QUERIES: Final = 2
"""tokens right behind each, which attend to it sparsely."""
SHARE: Final = 0.25
CERTIFIED_MASS: Final = 0.05


class _Measured(Exception):
    """Leaves a step whose tokens are not to be kept."""


@dataclass(frozen=True)
class Scale:
    """How large the loads are: counts are divided by it, 1 for figures, more for trying the code."""

    divisor: int = 1

    @property
    def num_tokens(self) -> int:
        return max(16 * 16, NUM_TOKENS // self.divisor // 64 * 64)

    @property
    def num_new(self) -> int:
        return max(16, NUM_NEW // self.divisor)


def run(report: Report, note: Note, directory: Path, scale: Scale) -> None:
    """Measure every row; NVMe files are made in `directory` and removed."""
    note("filling a context over three tiers")
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=directory) as scratch:
        measure_dense(report, Path(scratch), scale)
    note("running a document through the demo's model")
    from hicache.tools.bench.demo_kv import demo_kv

    try:
        recorded = demo_kv(max(256, SPARSE_TOKENS // scale.divisor // 64 * 64))
    except (UsageProblem, CommandFailed) as problem:
        note(f"the rows of sparse decode are left out: {problem}")
        return
    note("attending sparsely")
    measure_sparse(report, recorded)


# ---- a context over three tiers


def measure_dense(report: Report, directory: Path, scale: Scale) -> None:
    """The rows of a context over three tiers; the NVMe tier is in `directory`."""
    layout = KVLayout.uniform(
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=KVDtype.FLOAT32, page_size=PAGE_SIZE
    )
    generator = torch.Generator().manual_seed(0)
    total = scale.num_tokens + scale.num_new
    kv = torch.randn(LAYERS, 2, total, HEADS, DIM, generator=generator)
    query = torch.randn(LAYERS, total, HEADS * GROUP, DIM, generator=generator)
    num_pages = scale.num_tokens // PAGE_SIZE
    budget = num_pages // 4 * layout.page_bytes
    decode_cpu.prepare(torch.float32)
    with HiCache.open(
        layout,
        device_bytes=budget - attend_torch.SCRATCH_BYTES,
        host_bytes=num_pages // 2 * layout.page_bytes,
        nvme_dir=directory / "nvme",
        nvme_bytes=NVME_BYTES,
    ) as cache:
        in_use = _InUse(cache, budget)
        with cache.sequence(Namespace(model="random", layout=layout), list(range(total))) as sequence:
            while sequence.length < scale.num_tokens:
                start = sequence.length
                stop = min(start + num_pages // 8 * PAGE_SIZE, scale.num_tokens)
                with sequence.step(list(range(start, stop))) as step:
                    for layer in range(LAYERS):
                        step.write(layer, *kv[layer, :, start:stop])
                    in_use.sample()
            context = _Context(kv, query, scale.num_tokens, in_use)
            with _unkept(sequence.step(list(range(scale.num_tokens, total)))) as step:
                _prefill(report, context, step, total)
            with _unkept(sequence.step([scale.num_tokens])) as step:
                _decode(report, context, step)


@contextmanager
def _unkept(step: Step) -> Iterator[Step]:
    """A step whose tokens are forgotten: the context stays as it was."""
    try:
        with step:
            yield step
            raise _Measured
    except _Measured:
        pass


class _InUse:
    """The most that was in use on the device."""

    def __init__(self, cache: HiCache, budget: int) -> None:
        self._cache = cache
        self._budget = budget
        self._most = 0

    def sample(self) -> None:
        used = self._cache.stats()["tiers"]["device"]["used_bytes"] + attend_torch.scratch_bytes()
        self._most = max(self._most, used)

    def sampled(self, parts: Iterator[PagedPart]) -> Iterator[PagedPart]:
        """The parts, with a look at each, and one behind the last."""
        for part in parts:
            self.sample()
            yield part
        self.sample()

    @property
    def peak(self) -> Peak:
        assert 0 < self._most <= self._budget, f"{self._most} bytes in use, allowed {self._budget}"
        return Peak("device", self._most, self._budget)


@dataclass(frozen=True)
class _Context:
    """Keys and values `[layers, 2, tokens, heads, dim]` and queries, of which the first `num_tokens` are cached."""

    kv: torch.Tensor
    query: torch.Tensor
    num_tokens: int
    in_use: _InUse

    def attend(self, layer: int, parts: Iterator[PagedPart], num_new: int) -> torch.Tensor:
        new = slice(self.num_tokens, self.num_tokens + num_new)
        key, value = self.kv[layer, :, new]
        return attend(self.query[layer, new], parts, key=key, value=value, scale=DIM**-0.5).output

    def contiguous(self, num_keys: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values `[1, heads, num_keys, dim]`, as torch likes them best."""
        by_head = [self.kv[layer, :, :num_keys].transpose(1, 2).contiguous() for layer in range(LAYERS)]
        return [(keys[None], values[None]) for keys, values in by_head]


def _prefill(report: Report, context: _Context, step: Step, total: int) -> None:
    num_new = total - context.num_tokens
    whole = context.contiguous(total)
    # Every key of the context, and of the new ones those up to the query's own.
    mask = torch.full((num_new, total), -torch.inf).triu(1 + context.num_tokens)
    rows = context.query[:, None, context.num_tokens :].transpose(2, 3).contiguous()

    def ours() -> list[torch.Tensor]:
        return [context.attend(layer, step.parts(layer), num_new) for layer in range(LAYERS)]

    def theirs() -> list[torch.Tensor]:
        return [
            torch.nn.functional.scaled_dot_product_attention(
                rows[layer], *whole[layer], attn_mask=mask, scale=DIM**-0.5, enable_gqa=True
            )
            for layer in range(LAYERS)
        ]

    looked_at = [
        context.attend(layer, context.in_use.sampled(step.parts(layer)), num_new) for layer in range(LAYERS)
    ]
    for output, expected in zip(looked_at, theirs(), strict=True):
        torch.testing.assert_close(output, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-4)
    attending, plain = _alternated_ms(ours, theirs)
    report(Row(
        f"prefill_q{num_new}", attending, "ms", Baseline("torch SDPA, contiguous", plain), goal=PREFILL_GOAL,
        goal_is_ratio=True, peak=context.in_use.peak,
    ))  # fmt: skip


def _decode(report: Report, context: _Context, step: Step) -> None:
    def in_memory(layer: int) -> list[PagedPart]:
        """The parts that need not be read from NVMe, which come first, as if nothing came behind them."""
        found = []
        for part in step.parts(layer):
            found.append(replace(part, stays=True))
            if len(found) == 2:
                break
        return found

    parts = [in_memory(layer) for layer in range(LAYERS)]
    num_keys = sum(part.num_tokens for part in parts[0])
    num_bytes = LAYERS * num_keys * 2 * HEADS * DIM * 4
    # So large that the cores' shared cache serves little of it; and numpy's, which lies in huge pages, as that of the
    # tiers does: it is read a tenth faster than torch's own.
    buffer = torch.from_numpy(np.empty((BUFFERS, num_bytes // 4), np.float32)).normal_()
    # Some keys held contiguous, as many as the parts have: which ones does not matter to the time.
    whole = context.contiguous(num_keys)
    row = context.query[:, None, context.num_tokens].view(LAYERS, 1, HEADS, GROUP, DIM)

    new = slice(context.num_tokens, context.num_tokens + 1)
    # What a model has at hand when it attends.
    given = [(context.query[layer, new], *context.kv[layer, :, new], parts[layer]) for layer in range(LAYERS)]

    def ours() -> None:
        for query, key, value, some in given:
            attend(query, some, key=key, value=value, scale=DIM**-0.5)

    def theirs() -> None:
        # The heads of a group as rows of one: what suits torch best for a single token.
        for layer in range(LAYERS):
            torch.nn.functional.scaled_dot_product_attention(row[layer], *whole[layer], scale=DIM**-0.5)

    def read() -> None:
        for part in buffer:
            part.sum()

    def all_of_it() -> None:
        for layer in range(LAYERS):
            context.attend(layer, step.parts(layer), 1)

    def nvme() -> None:
        for layer in range(LAYERS):
            for _ in step.parts(layer):
                pass

    for layer in range(LAYERS):
        context.attend(layer, context.in_use.sampled(step.parts(layer)), 1)

    def steps(work: Callable[[], None]) -> Callable[[], None]:
        def several() -> None:
            for _ in range(STEPS):
                work()

        return several

    times = _alternated_ms(steps(ours), steps(theirs), steps(read), all_of_it, nvme)
    attending, plain, reading = (time / STEPS for time in times[:3])
    everything, streaming = times[3:]
    reading /= BUFFERS
    report(Row(
        "decode_q1", attending, "ms", Baseline("bytes ÷ bandwidth", reading), bound=reading, goal=DECODE_GOAL,
        goal_is_ratio=True, peak=context.in_use.peak,
    ))  # fmt: skip
    report(Row("decode_q1_sdpa", attending, "ms", Baseline("torch SDPA, contiguous", plain)))
    report(Row(
        "decode_q1_with_nvme", everything, "ms", Baseline("reading it", streaming + reading), peak=context.in_use.peak
    ))  # fmt: skip


def _alternated_ms(*sides: Callable[[], object]) -> list[float]:
    """Median time of each side, on all cores, in turn, so that all meet the same moments of the machine."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS):
        for side, work in zip(times, sides, strict=True):
            began = perf_counter()
            work()
            side.append((perf_counter() - began) * 1e3)
    return [median(side) for side in times]


# ---- certified sparse decode


def measure_sparse(report: Report, recorded: "Recorded") -> None:
    """The rows of sparse decode on what attention saw."""
    num_layers, _, num_tokens, num_kv_heads, head_dim = recorded.kv.shape
    kv = torch.from_numpy(recorded.kv).bfloat16()
    queries = torch.from_numpy(recorded.queries).bfloat16()
    first = num_tokens - max(num_tokens // 8, SPARSE_CUTS * PAGE_SIZE)
    step = (num_tokens - first) // SPARSE_CUTS // PAGE_SIZE * PAGE_SIZE
    ours, box = _Errors(), _Errors()
    metadata = key_bytes = 0
    # The first two layers attend everywhere: they are left dense, as others do too.
    for layer in range(min(2, num_layers - 1), num_layers):
        for cut in range(first, first + SPARSE_CUTS * step, step):
            table = torch.arange(cut // PAGE_SIZE, dtype=torch.int32)
            shape = (2, len(table), PAGE_SIZE, num_kv_heads, head_dim)
            pages = kv[layer, :, :cut].reshape(shape).transpose(0, 1).contiguous()
            part = PagedPart(pages, table, cut)
            seen = queries[layer, :cut].float().view(cut, num_kv_heads, -1, head_dim)
            weights = seen.square().mean(dim=(0, 2)).sqrt().clamp_min(1e-6)
            planes = planes_of(pages, table, cut, weights=weights)
            metadata += planes.num_bytes
            key_bytes += pages[:, 0].numel() * 2
            summary = min_max_of(pages, table, cut)
            for token in range(cut, cut + SPARSE_QUERIES):
                new = kv[layer, :, token : token + 1]
                _sparsely(queries[layer, token : token + 1], new, part, planes, summary, ours, box)
    report(Row(
        "sparse_error", ours.mean, "", Baseline("pages chosen by box", box.mean), goal=0.05
    ))  # fmt: skip
    report(Row("sparse_violations", ours.num_violations, "", Baseline("compared", ours.num_compared), goal=0.0))
    report(Row("sparse_metadata", metadata, "B", Baseline("keys", key_bytes), goal=1 / 8, goal_is_ratio=True))
    report(Row("sparse_certified", ours.num_certified, "", Baseline("compared", ours.num_compared)))


def _sparsely(
    query: torch.Tensor, new: torch.Tensor, part: PagedPart, planes: KeyPlanes, summary: MinMax, ours: "_Errors",
    box: "_Errors",
) -> None:  # fmt: skip
    """One token, query [1, HQ, D] and `new` [2, 1, H, D], over the part and itself: the two choices of pages."""
    (key, value), scale = new, query.shape[2] ** -0.5
    state = attend_sparse(query, part, planes, key=key, value=value, scale=scale, share=SHARE)
    keys, values = (torch.cat([part.pages[:, plane].flatten(0, 1), new[plane]]) for plane in (0, 1))
    exact = attention_reference(query, keys, values, torch.ones(1, len(keys), dtype=torch.bool), scale=scale)
    missed = 1.0 - torch.exp(state.lse[0].double() - exact.lse[0])
    ours.add(state.output, exact.output, missed, state.missed)
    # As many pages for each head, chosen by the bound of their best key.
    scores = page_scores(query[0], summary) * scale
    chosen = torch.cat([choose_pages(head[None, :, None], SHARE) for head in scores])
    hidden = ~torch.nn.functional.pad(chosen.repeat_interleave(PAGE_SIZE, dim=1), (0, 1), value=True)
    group = query.shape[1] // key.shape[1]
    logits = torch.einsum("hd,thd->ht", query[0].double(), keys.double().repeat_interleave(group, dim=1)) * scale
    weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=1)
    output = torch.einsum("ht,thd->hd", weights, values.double().repeat_interleave(group, dim=1))
    box.add(output[None], exact.output, missed, state.missed)


class _Errors:
    """What sparse attention was off by, over heads and tokens."""

    def __init__(self) -> None:
        self._errors: list[torch.Tensor] = []
        self.num_violations = 0
        self.num_certified = 0

    def add(self, output: torch.Tensor, exact: torch.Tensor, missed: torch.Tensor, bound: torch.Tensor) -> None:
        """Outputs [1, HQ, D]; missed mass and its bound [HQ]."""
        self._errors.append((output.double() - exact).norm(dim=-1) / exact.norm(dim=-1))
        # Both LSEs are rounded to float32.
        self.num_violations += int((missed > bound.double() + 1e-6).sum())
        self.num_certified += int((bound <= CERTIFIED_MASS).sum())

    @property
    def num_compared(self) -> int:
        return sum(errors.numel() for errors in self._errors)

    @property
    def mean(self) -> float:
        return float(torch.cat(self._errors).mean())
