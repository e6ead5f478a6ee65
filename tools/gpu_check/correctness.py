"""Every kernel against its definition in float64: on a GPU, or interpreted, with smaller sizes, where there is none."""

from collections.abc import Callable
from typing import Any, Final

import torch

from hicache.kernels.attend import PagedPart, attend
from hicache.kernels.cascade import cascade_decode, cascade_decode_reference
from hicache.kernels.decode import paged_decode, paged_decode_reference
from hicache.kernels.extend import paged_extend, paged_extend_reference
from hicache.kernels.gather import (
    LayerPages,
    gather_pages,
    gather_pages_reference,
    scatter_pages,
    scatter_pages_reference,
)
from hicache.kernels.launch import Path
from hicache.kernels.merge import merge_states, merge_states_reference
from hicache.kernels.mla import mla_decode, mla_decode_reference
from hicache.kernels.quant import STORED_MAX, KVLayers, gather_quantized, quantized_reference, scatter_quantized
from hicache.kernels.rope import Pairing, Rope, rotate_pages, rotate_pages_reference
from hicache.kernels.score import ball_of, min_max_of, page_scores, page_scores_reference
from hicache.kernels.splits import workspace_elements
from hicache.kernels.state import AttentionState, attention_reference
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.gpu_check.parts import Place, relative_rms

ERROR_RATIO: Final = 1.2
"""How much more error than plain torch in the same dtype a kernel may have."""
ERROR_LEAST: Final = 2.0**-20
"""Relative RMS error that is allowed in any case: 8 units of the last place of float32."""
DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)

Report = Callable[[Row], None]


def check_kernels(place: Place, report: Report) -> None:
    """Attention, its merging, copies, conversions, turning and scoring."""
    random = _Random(place)
    for dtype in DTYPES:
        _attention(random, report, dtype)
    _decode_float8(random, report)
    _merge(random, report)
    _copies(random, report)
    _conversions(random, report)
    _rotation(random, report)
    _scores(random, report)
    if place.has_gpu:
        _streamed(random, report)
        _graph(random, report)


class _Random:
    """Tensors that depend on a seed alone, the same on every machine."""

    def __init__(self, place: Place) -> None:
        self.device = place.device
        self.large = place.has_gpu
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype).to(self.device)

    def ids(self, count: int, below: int) -> torch.Tensor:
        """Different numbers, int32."""
        return torch.randperm(below, generator=self._generator)[:count].int().to(self.device)

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _cpu(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _row(
    name: str, actual: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor | None, dtype: torch.dtype
) -> Row:
    """The error of `actual` beside that of plain torch, or, without it, of rounding once to `dtype`."""
    rounded = expected.to(dtype) if plain is None else plain
    baseline = max(relative_rms(rounded, expected), ERROR_LEAST / ERROR_RATIO)
    label = "rounding once" if plain is None else "plain torch"
    error = relative_rms(actual, expected)
    return Row(name, error, "", Baseline(label, baseline), goal=ERROR_RATIO, goal_is_ratio=True)


def _attention(random: _Random, report: Report, dtype: torch.dtype) -> None:
    """Decode, extend and cascade over pages that lie scattered, of which some are not there."""
    heads, group, dim, page = 2, 4, 128, 16
    lengths = [0, 1, page - 1, 4 * page + 1, 4000] if random.large else [0, 1, 33]
    tables_width = -(-max(lengths) // page)
    num_slots = tables_width * len(lengths) + 3
    pages = random.normal(num_slots, 3, 2, page, heads, dim, dtype=dtype)[:, 1]
    tables = random.ids(tables_width * len(lengths), num_slots).view(len(lengths), tables_width)
    tables[-1, 1] = -1
    name = str(dtype).removeprefix("torch.")
    query = random.normal(len(lengths), heads * group, dim, dtype=dtype)
    state = paged_decode(query, pages, tables, random.int32(lengths), scale=dim**-0.5, output=_nan(query))
    how: dict[str, Any] = {"query": query, "pages": pages, "block_tables": tables, "seq_lens": random.int32(lengths)}
    expected = paged_decode_reference(**_cpu(how), scale=dim**-0.5)
    plain = paged_decode_reference(**_cpu(how), scale=dim**-0.5, dtype=dtype).output
    report(_row(f"decode_{name}", state.output, expected.output, plain, dtype))

    new = [3, 1, 0, 20, 130] if random.large else [3, 0, 5]
    offsets = random.int32([sum(new[:i]) for i in range(len(new) + 1)])
    query = random.normal(sum(new), heads * group, dim, dtype=dtype)
    key, value = (random.normal(sum(new), heads, dim, dtype=dtype) for _ in range(2))
    rest: dict[str, Any] = {
        "pages": pages, "block_tables": tables, "prefix_lens": random.int32(lengths), "key": key, "value": value
    }  # fmt: skip
    state = paged_extend(query, offsets, scale=dim**-0.5, output=_nan(query), **rest)
    expected = paged_extend_reference(query.cpu(), offsets.cpu(), scale=dim**-0.5, **_cpu(rest))
    plain = paged_extend_reference(query.cpu(), offsets.cpu(), scale=dim**-0.5, dtype=dtype, **_cpu(rest)).output
    report(_row(f"extend_{name}", state.output, expected.output, plain, dtype))

    shared: dict[str, Any] = {
        "group_indptr": random.int32([0, len(lengths)]), "shared_tables": tables[-1:].contiguous(),
        "shared_lens": random.int32([max(lengths)]),
    }  # fmt: skip
    how["query"] = random.normal(len(lengths), heads * group, dim, dtype=dtype)
    state = cascade_decode(**how, **shared, scale=dim**-0.5, output=_nan(how["query"]))
    expected = cascade_decode_reference(**_cpu(how), **_cpu(shared), scale=dim**-0.5)
    plain = cascade_decode_reference(**_cpu(how), **_cpu(shared), scale=dim**-0.5, dtype=dtype).output
    report(_row(f"cascade_{name}", state.output, expected.output, plain, dtype))

    latent, rotary = (512, 64) if random.large else (64, 16)
    how = {
        "query": random.normal(len(lengths), 16, latent + rotary, dtype=dtype),
        "pages": random.normal(num_slots, page, latent + rotary, dtype=dtype),
        "block_tables": tables,
        "seq_lens": random.int32(lengths),
    }
    output = _nan(how["query"])[..., :latent].contiguous()
    state = mla_decode(**how, latent_dim=latent, scale=latent**-0.5, output=output)
    expected = mla_decode_reference(**_cpu(how), latent_dim=latent, scale=latent**-0.5)
    plain = mla_decode_reference(**_cpu(how), latent_dim=latent, scale=latent**-0.5, dtype=dtype).output
    report(_row(f"mla_{name}", state.output, expected.output, plain, dtype))


def _nan(like: torch.Tensor) -> torch.Tensor:
    """An output in which whatever is not written shows."""
    return torch.full_like(like, torch.nan)


def _decode_float8(random: _Random, report: Report) -> None:
    """Stored in float8 with a scale for each head of each page."""
    query = random.normal(2, 8, 128, dtype=torch.bfloat16)
    pages = (random.normal(9, 2, 16, 2, 128) * 20).to(torch.float8_e4m3fn)
    how: dict[str, Any] = {
        "query": query, "pages": pages, "block_tables": random.ids(8, 9).view(2, 4),
        "seq_lens": random.int32([64, 37]), "page_scales": random.normal(9, 2, 2).abs() + 0.1,
    }  # fmt: skip
    state = paged_decode(**how, scale=0.01, output=_nan(query))
    expected = paged_decode_reference(**_cpu(how), scale=0.01)
    plain = paged_decode_reference(**_cpu(how), scale=0.01, dtype=torch.bfloat16).output
    report(_row("decode_float8_e4m3fn", state.output, expected.output, plain, torch.bfloat16))


def _merge(random: _Random, report: Report) -> None:
    outputs, lses = random.normal(5, 33, 8, 128), random.normal(5, 33, 8) * 5
    lses[1, ::2] = -torch.inf
    outputs[1, ::2] = torch.nan
    merged = merge_states(outputs, lses, dtype=torch.bfloat16)
    expected = merge_states_reference(outputs.cpu(), lses.cpu()).output
    report(_row("merge_bfloat16", merged.output, expected, None, torch.bfloat16))


def _copies(random: _Random, report: Report) -> None:
    """Gather and scatter, bit by bit, with slots on the device and, on a GPU, in pinned memory."""
    wrong = compared = 0
    for pinned in (False, True) if random.large else (False,):
        layers = [random.normal(40, 2, 16, 3, 64, dtype=torch.bfloat16) for _ in range(5)]
        slots = torch.zeros(30, 5, 2, 16, 3, 64, dtype=torch.bfloat16)
        slots = slots.pin_memory() if pinned else slots.to(random.device)
        page_ids, slot_ids = random.ids(20, 40), random.ids(20, 30)
        pages = LayerPages.of(layers)
        gather_pages(pages, page_ids, slots, slot_ids, path=Path.TRITON)
        targets = [torch.zeros_like(layer) for layer in layers]
        scatter_pages(slots, slot_ids, LayerPages.of(targets), page_ids, path=Path.TRITON)
        _wait(random)
        there = torch.zeros(30, 5, 2, 16, 3, 64, dtype=torch.bfloat16)
        on_cpu = LayerPages.of([layer.cpu() for layer in layers])
        gather_pages_reference(on_cpu, page_ids.cpu(), there, slot_ids.cpu())
        back = [torch.zeros_like(layer, device="cpu") for layer in layers]
        scatter_pages_reference(there, slot_ids.cpu(), LayerPages.of(back), page_ids.cpu())
        for actual, expected in zip([slots, *targets], [there, *back], strict=True):
            wrong += int((actual.cpu().view(torch.int16) != expected.view(torch.int16)).sum())
            compared += expected.numel()
    report(Row("gather_scatter_wrong", wrong, "elements", Baseline("compared", compared), goal=0.0))


def _conversions(random: _Random, report: Report) -> None:
    layer = random.normal(12, 2, 16, 3, 128, dtype=torch.bfloat16)
    ids = random.ids(12, 12)
    for stored in STORED_MAX:
        slots = torch.zeros(12, 1, 2, 16, 3, 128, device=random.device).to(stored)
        scales = torch.zeros(12, 1, 2, 3, device=random.device)
        back = torch.zeros_like(layer)
        gather_quantized(KVLayers.of([layer]), ids, slots, ids, scales, path=Path.TRITON)
        scatter_quantized(slots, ids, scales, KVLayers.of([back]), ids, path=Path.TRITON)
        expected, _ = quantized_reference(layer.cpu(), stored)
        baseline = Baseline("definition", relative_rms(expected.bfloat16(), layer))
        name = f"convert_{str(stored).removeprefix('torch.')}"
        report(Row(name, relative_rms(back, layer), "", baseline, goal=1.02, goal_is_ratio=True))


def _rotation(random: _Random, report: Report) -> None:
    for pairing in Pairing:
        pages = random.normal(12, 2, 16, 3, 128, dtype=torch.bfloat16)
        ids, deltas = random.ids(12, 12), random.ids(12, 100_000) - 50_000
        rope = Rope.plain(128, pairing=pairing)
        expected = rotate_pages_reference(pages.cpu(), ids.cpu(), deltas.cpu(), rope)
        rotate_pages(pages, ids, deltas, rope, path=Path.TRITON)
        report(_row(f"rotate_{pairing.value}", pages[:, 0], expected, None, torch.bfloat16))


def _scores(random: _Random, report: Report) -> None:
    """How far the lowest bound lies above what it bounds; below 0 it would be none."""
    pages, query = random.normal(40, 2, 16, 2, 128, dtype=torch.bfloat16), random.normal(8, 128, dtype=torch.bfloat16)
    ids = random.ids(40, 40)
    exact = page_scores_reference(query.cpu(), pages[ids.long(), 0].cpu())
    for name, summary in (("box", min_max_of(pages, ids, 640)), ("ball", ball_of(pages, ids, 640))):
        over = page_scores(query, summary, path=Path.TRITON).cpu().double() - exact
        report(Row(f"score_{name}_over_least", float(over.min()), "", goal=0.0, higher_is_better=True))


def _streamed(random: _Random, report: Report) -> None:
    """`attend` over parts on the device, in pinned and in ordinary memory, by launches of many tokens and of one."""
    heads, group, dim, page, count = 2, 4, 128, 16, 700
    pages = [random.normal(count, 4, 2, page, heads, dim, dtype=torch.bfloat16) for _ in range(3)]
    memories = [pages[0][:, 1], pages[1].cpu().pin_memory()[:, 2], pages[2].cpu()[:, 0]]
    tables = [random.ids(count, count).to(memory.device) for memory in memories]
    lengths = [count * page, count * page - 5, count * page - 9]
    parts = [PagedPart(*part) for part in zip(memories, tables, lengths, strict=True)]
    for num_new in (1, 40):
        query = random.normal(num_new, heads * group, dim, dtype=torch.bfloat16)
        key, value = (random.normal(num_new, heads, dim, dtype=torch.bfloat16) for _ in range(2))
        state = attend(query, parts, key=key, value=value, scale=dim**-0.5)
        seen = _all_keys(parts, key, value)
        visible = torch.ones(num_new, seen[0].shape[0], dtype=torch.bool).tril(seen[0].shape[0] - num_new)
        expected = attention_reference(query.cpu(), *seen, visible, scale=dim**-0.5).output
        plain = attention_reference(query.cpu(), *seen, visible, scale=dim**-0.5, dtype=torch.bfloat16).output
        report(_row(f"attend_streamed_{num_new}", state.output, expected, plain, torch.bfloat16))


def _all_keys(parts: list[PagedPart], key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all parts and of the new tokens, on the CPU."""
    planes: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for part in parts:
        pages = part.pages[part.block_table.long()].cpu()
        for plane, found in enumerate(planes):
            found.append(pages[:, plane].flatten(0, 1)[: part.num_tokens])
    return torch.cat([*planes[0], key.cpu()]), torch.cat([*planes[1], value.cpu()])


def _graph(random: _Random, report: Report) -> None:
    """Decode captured in a CUDA graph and replayed over other pages gives what it gives without."""
    query = random.normal(4, 8, 128, dtype=torch.bfloat16)
    pages = random.normal(64, 2, 16, 2, 128, dtype=torch.bfloat16)
    tables, lengths = random.ids(60, 64).view(4, 15), random.int32([240, 1, 77, 0])
    output, lse = torch.empty_like(query), torch.empty(4, 8, device=random.device)
    workspace = torch.empty(workspace_elements(4, 8, 128), device=random.device)

    def decode() -> AttentionState:
        return paged_decode(
            query, pages, tables, lengths, scale=0.1, output=output, lse=lse, workspace=workspace
        )

    decode()
    _wait(random)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    pages.copy_(random.normal(64, 2, 16, 2, 128, dtype=torch.bfloat16))
    graph.replay()
    replayed = output.clone()
    decode()
    differing = int((replayed != output).sum())
    report(Row("decode_graph_differs", differing, "elements", Baseline("compared", output.numel()), goal=0.0))


def _wait(random: _Random) -> None:
    if random.device.type == "cuda":
        torch.cuda.synchronize(random.device)
