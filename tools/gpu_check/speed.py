"""How fast the card, its link and the kernels are, each beside the best the machine gives for that work."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Final

import torch
import triton
import triton.language as tl

from hicache.kernels.attend import PagedPart, attend
from hicache.kernels.cascade import cascade_decode
from hicache.kernels.decode import paged_decode
from hicache.kernels.extend import paged_extend
from hicache.kernels.merge import merge_states
from hicache.kernels.remote import RemoteSpeeds
from hicache.kernels.splits import workspace_elements
from hicache.tiers.device_copy import CudaQueue, PageCopier, StagedCopier
from hicache.tiers.device_ways import EngineCopier, KernelCopier, engine_copies
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.gpu_check.parts import Place, gpu_ms, report_difference

Report = Callable[[Row], None]

HEADS, GROUP, DIM, PAGE = 8, 4, 128, 16
"""A model of 8 billion parameters, and its pages."""
TOKEN_BYTES: Final = 2 * HEADS * DIM * 2
"""Keys and values of one token in one layer, bfloat16."""
GB: Final = 1e9


def check_memory(place: Place, report: Report) -> None:
    """Reading, copying, and pinned copies both ways: what the other rows are measured by."""
    place.require_gpu()
    device = place.device
    report(Row("device_read", read_gb_s(device), "GB/s", higher_is_better=True))
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / gpu_ms(lambda: target.copy_(source)) / 1e6
    report(Row("device_copy", copied, "GB/s", higher_is_better=True))
    for name, gb_s in zip(("pinned_in", "pinned_out"), pinned_gb_s(device), strict=True):
        report(Row(name, gb_s, "GB/s", higher_is_better=True))


def read_gb_s(device: torch.device) -> float:
    """GB/s at which a kernel reads memory that is in no cache and does nothing else."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device).view(torch.int32)
    block, programs = 4096, 16 * torch.cuda.get_device_properties(device).multi_processor_count
    sums = torch.empty(programs, dtype=torch.int32, device=device)
    each = source.numel() // programs // block * block

    def read() -> None:
        _read_kernel[(programs,)](source, sums, each, BLOCK=block, num_warps=8)

    return 4 * each * programs / gpu_ms(read) / 1e6


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _read_kernel(p_source: tl.tensor, p_sums: tl.tensor, each: tl.tensor, BLOCK: tl.constexpr) -> None:
    i_program = tl.program_id(0).to(tl.int64)
    b_sum = tl.zeros([BLOCK], tl.int32)
    p_block = p_source + i_program * each + tl.arange(0, BLOCK)
    for i in range(0, each, BLOCK):
        b_sum += tl.load(p_block + i)
    tl.store(p_sums + i_program, tl.sum(b_sum, 0))


def pinned_gb_s(device: torch.device) -> tuple[float, float]:
    """GB/s of one large copy from pinned memory to the device, and back."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    into = host.numel() / gpu_ms(lambda: there.copy_(host, non_blocking=True)) / 1e6
    out = host.numel() / gpu_ms(lambda: host.copy_(there, non_blocking=True)) / 1e6
    return into, out


def check_fragments(place: Place, report: Report) -> None:
    """Pages of scattered fragments, by each way there is, and the best of them beside the contiguous pinned copy."""
    place.require_gpu()
    baselines = pinned_gb_s(place.device)
    for label, fragment_bytes, num_layers, goal in (
        ("4k", 4 << 10, 64, 0.40), ("32k", 32 << 10, 64, 0.85), ("2m", 2 << 20, 16, 0.85),
    ):  # fmt: skip
        _fragments(place, report, f"fragments_{label}", fragment_bytes, num_layers, goal, baselines)


def _fragments(
    place: Place, report: Report, label: str, fragment_bytes: int, num_layers: int, goal: float,
    baselines: tuple[float, float],
) -> None:  # fmt: skip
    page_bytes = num_layers * fragment_bytes
    count = max(4, (128 << 20) // page_bytes)
    pool = torch.zeros(num_layers, 2 * count, fragment_bytes, dtype=torch.uint8, device=place.device)
    inward, outward = (CudaQueue(place.device, max(1, (8 << 20) // page_bytes), page_bytes) for _ in range(2))
    ways: dict[str, PageCopier] = {
        "staged": StagedCopier(pool, inward, outward), "kernel": KernelCopier(pool, inward, outward),
    }  # fmt: skip
    copies = engine_copies(pool)
    if copies is not None:
        ways["engine"] = EngineCopier(pool, inward, outward, copies)
    memory = torch.zeros(count, page_bytes, dtype=torch.uint8, pin_memory=True)
    slots = torch.randperm(2 * count)[:count].tolist()
    pages = [(slot, row.numpy().data) for slot, row in zip(slots, memory, strict=True)]
    for direction, baseline in zip(("in", "out"), baselines, strict=True):
        best = 0.0
        for name, way in ways.items():
            copy = partial(way.copy_in if direction == "in" else way.copy_out, pages)
            gb_s = count * page_bytes / _host_s(copy) / GB
            best = max(best, gb_s)
            report(Row(f"{label}_{direction}_{name}", gb_s, "GB/s", higher_is_better=True))
        report(Row(
            f"{label}_{direction}", best, "GB/s", Baseline("pinned copy", baseline), goal=goal,
            goal_is_ratio=True, higher_is_better=True,
        ))  # fmt: skip


def _host_s(work: Callable[[], object], rounds: int = 5) -> float:
    """Median time of work that returns when it has ended, after one round that does not count."""
    work()
    times = []
    for _ in range(rounds):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return sorted(times)[rounds // 2]


class _Pool:
    """Sequences over random pages of one layer, in bfloat16."""

    def __init__(self, device: torch.device, num_seqs: int, num_tokens: int, *, page_size: int = PAGE) -> None:
        self.num_pages = num_tokens // page_size
        count = num_seqs * self.num_pages
        shape = (count, 2, page_size, HEADS, DIM)
        self.pages = torch.randn(shape, dtype=torch.bfloat16, device=device)
        self.tables = torch.randperm(count, device=device).int().view(num_seqs, self.num_pages)
        self.lengths = torch.full((num_seqs,), num_tokens, dtype=torch.int32, device=device)
        self.num_bytes = num_seqs * num_tokens * TOKEN_BYTES

    def decode_gb_s(self) -> float:
        """GB/s at which one query token of each sequence passes over its keys and values."""
        shape = (len(self.lengths), HEADS * GROUP)
        query = torch.randn(*shape, DIM, dtype=torch.bfloat16, device=self.pages.device)
        output, lse = torch.empty_like(query), torch.empty(shape, device=query.device)
        workspace = torch.empty(workspace_elements(*shape, DIM), device=query.device)

        def decode() -> None:
            paged_decode(
                query, self.pages, self.tables, self.lengths, scale=DIM**-0.5, output=output, lse=lse,
                workspace=workspace,
            )  # fmt: skip

        return self.num_bytes / gpu_ms(decode, 20) / 1e6


def check_decode(place: Place, report: Report) -> None:
    """Bytes of keys and values a second, beside a kernel that only reads; and what merging 8 states adds."""
    place.require_gpu()
    read = Baseline("reading alone", read_gb_s(place.device))
    for num_seqs, num_tokens, page_size in ((16, 32_768, 16), (16, 32_768, 64), (4, 131_072, 16), (1, 131_072, 16)):
        gb_s = _Pool(place.device, num_seqs, num_tokens, page_size=page_size).decode_gb_s()
        report(Row(
            f"decode_{num_tokens >> 10}k_batch{num_seqs}_page{page_size}", gb_s, "GB/s", read, goal=0.85,
            goal_is_ratio=True, higher_is_better=True,
        ))  # fmt: skip
    outputs = torch.randn(8, 16, HEADS * GROUP, DIM, device=place.device)
    lses = torch.randn(8, 16, HEADS * GROUP, device=place.device)
    merging = gpu_ms(lambda: merge_states(outputs, lses))
    pool = _Pool(place.device, 16, 32_768)
    whole = Baseline("decode of 32k, 16 requests", pool.num_bytes / pool.decode_gb_s() / 1e6)
    report(Row("merge_of_8", merging, "ms", whole, goal=0.02, goal_is_ratio=True))


def check_extend(place: Place, report: Report) -> None:
    """2,304 new tokens over a cached prefix, beside torch's attention over as many keys held contiguous."""
    place.require_gpu()
    for num_prefix in (8192, 32_768):
        _extend(place, report, num_prefix)


def _extend(place: Place, report: Report, num_prefix: int) -> None:
    device, num_new, prefix = place.device, 2304, _Pool(place.device, 1, num_prefix)
    query = torch.randn(num_new, HEADS * GROUP, DIM, dtype=torch.bfloat16, device=device)
    key, value = (torch.randn(num_new, HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    indptr = torch.tensor([0, num_new], dtype=torch.int32, device=device)

    def extend() -> None:
        paged_extend(
            query, indptr, scale=DIM**-0.5, pages=prefix.pages, block_tables=prefix.tables,
            prefix_lens=prefix.lengths, key=key, value=value,
        )  # fmt: skip

    keys, values = torch.randn(2, 1, HEADS, num_prefix + num_new, DIM, dtype=torch.bfloat16, device=device)
    rows = query.transpose(0, 1)[None]

    def sdpa() -> None:
        # Without a mask: the same keys, and of the new ones twice as many pairs.
        torch.nn.functional.scaled_dot_product_attention(rows, keys, values, scale=DIM**-0.5, enable_gqa=True)

    ours, theirs = gpu_ms(extend, 5), gpu_ms(sdpa, 5)
    name = f"extend_2304_over_{num_prefix >> 10}k"
    report(Row(name, ours, "ms", Baseline("torch SDPA", theirs)))
    flops = 4 * num_new * (num_prefix + num_new / 2) * HEADS * GROUP * DIM
    report(Row(f"{name}_rate", flops / ours / 1e9, "TFLOP/s", higher_is_better=True))


def check_beyond(place: Place, report: Report) -> None:
    """Prefill of 2,304 tokens over 128k of which 75 % are in pinned host memory, beside all of it on the device."""
    place.require_gpu()
    device, num_prefix, num_new = place.device, 131_072, 2304
    pool = _Pool(device, 1, num_prefix)
    query = torch.randn(num_new, HEADS * GROUP, DIM, dtype=torch.bfloat16, device=device)
    key, value = (torch.randn(num_new, HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    cut = pool.num_pages // 4
    table = pool.tables[0].cpu()
    # Page-first, as the host tier has them, of which this is one layer of four.
    host = torch.zeros(pool.num_pages - cut, 4, 2, PAGE, HEADS, DIM, dtype=torch.bfloat16, pin_memory=True)
    host[:, 1] = pool.pages[table[cut:].long().to(device)].cpu()
    resident = [PagedPart(pool.pages, pool.tables[0], num_prefix)]
    split = [
        PagedPart(pool.pages, pool.tables[0, :cut].contiguous(), cut * PAGE),
        PagedPart(host[:, 1], torch.randperm(len(host)).int(), len(host) * PAGE),
    ]

    def layers(parts: list[PagedPart]) -> None:
        # Several layers, as a model has: the first copy of a layer may begin while the one before is attended to.
        for _ in range(4):
            attend(query, parts, key=key, value=value, scale=DIM**-0.5)

    whole, apart = gpu_ms(lambda: layers(resident), 3), gpu_ms(lambda: layers(split), 3)
    report(Row(
        "prefill_beyond_hbm", apart, "ms", Baseline("all resident", whole), goal=1.15, goal_is_ratio=True
    ))  # fmt: skip
    one = attend(query, resident, key=key, value=value, scale=DIM**-0.5).output
    split[1] = PagedPart(host[:, 1], torch.arange(len(host), dtype=torch.int32), len(host) * PAGE)
    other = attend(query, split, key=key, value=value, scale=DIM**-0.5).output
    report_difference(report, "prefill_beyond_hbm_differs", other, one, 2.0**-7)


def check_decode_beyond(place: Place, report: Report) -> None:
    """One token over 32k of which 25 % are in pinned host memory: streamed, and shared out with the CPU by what the
    link, the CPU and the way between them were measured to be."""
    place.require_gpu()
    device, num_tokens = place.device, 32_768
    pool = _Pool(device, 1, num_tokens)
    query = torch.randn(1, HEADS * GROUP, DIM, dtype=torch.bfloat16, device=device)
    key, value = (torch.randn(1, HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    cut = pool.num_pages // 4 * 3
    host = torch.zeros(pool.num_pages - cut, 4, 2, PAGE, HEADS, DIM, dtype=torch.bfloat16, pin_memory=True)
    host[:, 1] = pool.pages[pool.tables[0, cut:].long()].cpu()
    there = PagedPart(host[:, 1], torch.arange(len(host), dtype=torch.int32), len(host) * PAGE)
    split = [PagedPart(pool.pages, pool.tables[0, :cut].contiguous(), cut * PAGE), there]

    def decode(parts: list[PagedPart], remote: RemoteSpeeds | None = None) -> torch.Tensor:
        return attend(query, parts, key=key, value=value, scale=DIM**-0.5, remote=remote).output

    on_cpu = [tensor.cpu() for tensor in (query, key, value)]
    host_s = _host_s(lambda: attend(on_cpu[0], [there], key=on_cpu[1], value=on_cpu[2], scale=DIM**-0.5))
    small = torch.zeros_like(query, device="cpu")
    round_trip_s = _host_s(lambda: query.copy_(small.copy_(query)))
    link, _ = pinned_gb_s(device)
    num_bytes = len(host) * PAGE * TOKEN_BYTES
    speeds = RemoteSpeeds(link * GB, num_bytes / host_s, round_trip_s)
    report(Row("host_decode", speeds.host_bytes_per_s / GB, "GB/s", higher_is_better=True))
    report(Row("round_trip", 1e6 * round_trip_s, "µs"))
    resident = [PagedPart(pool.pages, pool.tables[0], num_tokens)]
    whole = Baseline("all resident", gpu_ms(lambda: decode(resident)))
    bound = num_bytes / link / 1e6
    report(Row("decode_beyond_streamed", gpu_ms(lambda: decode(split)), "ms", whole, bound=bound))
    report(Row("decode_beyond_shared_out", gpu_ms(lambda: decode(split, speeds)), "ms", whole))
    report_difference(report, "decode_beyond_differs", decode(split, speeds), decode(resident), 2.0**-7)


def check_cascade(place: Place, report: Report) -> None:
    """32 requests over one document of 32k tokens and 256 of their own each, beside attending to each by itself."""
    place.require_gpu()
    device, num_seqs, num_shared, num_own = place.device, 32, 32_768, 256
    shared_pages, own_pages = num_shared // PAGE, num_own // PAGE
    count = shared_pages + num_seqs * own_pages
    pages = torch.randn(count, 2, PAGE, HEADS, DIM, dtype=torch.bfloat16, device=device)
    order = torch.randperm(count, device=device).int()
    shared, own = order[:shared_pages][None], order[shared_pages:].view(num_seqs, own_pages)
    query = torch.randn(num_seqs, HEADS * GROUP, DIM, dtype=torch.bfloat16, device=device)
    whole = torch.cat([shared.expand(num_seqs, -1), own], dim=1).contiguous()
    lengths = torch.full((num_seqs,), num_shared + num_own, dtype=torch.int32, device=device)
    own_lengths = torch.full_like(lengths, num_own)
    indptr = torch.tensor([0, num_seqs], dtype=torch.int32, device=device)
    shared_lengths = torch.tensor([num_shared], dtype=torch.int32, device=device)
    each = gpu_ms(lambda: paged_decode(query, pages, whole, lengths, scale=DIM**-0.5))
    together = gpu_ms(lambda: cascade_decode(
        query, pages, own, own_lengths, group_indptr=indptr, shared_tables=shared, shared_lens=shared_lengths,
        scale=DIM**-0.5,
    ))  # fmt: skip
    bound = num_seqs * (num_shared + num_own) / (num_shared + num_seqs * num_own)
    report(Row("cascade_gain", each / together, "x", bound=bound, goal=15.0, higher_is_better=True))
    report(Row("cascade", together, "ms", Baseline("each by itself", each)))
