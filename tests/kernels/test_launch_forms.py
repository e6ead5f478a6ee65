"""What the wrappers hand to the launcher, up to the last step before a GPU: names, types, options, the compiled form.

Triton's launcher is told that there is a GPU. It then binds the arguments, finds out their alignment and compiles, as
it would; only the launch itself is left out. Nothing else shows without a GPU that wrapper and kernel agree, because
the interpreter takes arguments and options that the launcher does not.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hicache.kernels import launch
from hicache.kernels.attend import PagedPart, attend
from hicache.kernels.cascade import cascade_decode
from hicache.kernels.compile_report import compile_case
from hicache.kernels.decode import paged_decode
from hicache.kernels.extend import paged_extend
from hicache.kernels.forms import Case
from hicache.kernels.gather import LayerPages, gather_pages, scatter_pages
from hicache.kernels.merge import merge_states
from hicache.kernels.mla import mla_decode
from hicache.kernels.quant import KVLayers, gather_quantized, scatter_quantized
from hicache.kernels.rope import Rope, rotate_pages
from hicache.kernels.score import MinMax, ball_of, min_max_of, page_scores
from hicache.kernels.scoring import Scoring
from hicache.kernels.splits import workspace_elements
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import scatter_context, tensor


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not say
    """The operators of torch that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


class Gpu:
    """As much of a driver as binding and compiling ask for: one Hopper GPU, on which nothing can be launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Compiled kernels that would have been launched, in order; tensors in CPU memory stand for those of the GPU."""
    kernels: list[Any] = []
    touched: set[int] = set()

    def bind(function: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        if id(function) not in touched:
            # What is compiled for the GPU that is not there must not be launched on one that is.
            touched.add(id(function))
            monkeypatch.setattr(function, "device_caches", defaultdict(function.create_binder))

        def compile_only(**arguments: Any) -> None:
            assert 1 <= len(grid) <= 3
            assert all(1 <= size < (2**31 if axis == 0 else 2**16) for axis, size in enumerate(grid))
            kernels.append(function.run(grid=grid, warmup=True, **arguments))

        return compile_only

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Gpu())
    monkeypatch.setattr(JITFunction, "__getitem__", bind)
    monkeypatch.setattr(launch, "require_launchable", lambda argument, device: None)
    return kernels


def test_decode_in_splits(launched: list[Any]) -> None:
    pages = torch.empty(40, 3, 2, 16, 2, 64, dtype=torch.bfloat16)[:, 1]
    tables, lengths = torch.zeros(3, 7, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    query = torch.empty(3, 8, 64, dtype=torch.bfloat16)
    paged_decode(query, pages, tables, lengths, scale=0.125, num_splits=4)
    decode, merge = launched
    assert (decode.name, merge.name) == ("_paged_decode_kernel", "_merge_states_kernel")
    # The report speaks of the kernels that are launched: same code, so the same needs.
    reported = compile_case(Case("decode", "bfloat16", 64, 16), 90)
    assert decode.metadata.shared == reported.shared_bytes
    assert decode.asm["ptx"].count("cp.async.cg.shared.global") > 0
    assert (decode.metadata.num_warps, decode.metadata.enable_fp_fusion) == (4, True)


@pytest.mark.parametrize(("prefix", "new"), [(True, True), (True, False), (False, True)])
def test_extend_with_and_without_prefix_and_new_keys(launched: list[Any], prefix: bool, new: bool) -> None:
    paged: dict[str, Any] = {
        "pages": torch.empty(40, 2, 16, 1, 64, dtype=torch.float16),
        "block_tables": torch.zeros(2, 7, dtype=torch.int32),
        "prefix_lens": torch.ones(2, dtype=torch.int32),
    }
    keys: dict[str, Any] = {name: torch.empty(9, 1, 64, dtype=torch.float16) for name in ("key", "value")}
    query, indptr = torch.empty(9, 4, 64, dtype=torch.float16), torch.tensor([0, 5, 9], dtype=torch.int32)
    paged_extend(query, indptr, scale=0.125, **(paged if prefix else {}), **(keys if new else {}))
    (extend,) = launched
    kernel = {(True, True): "extend", (True, False): "extend-prefix", (False, True): "extend-new"}[prefix, new]
    assert extend.metadata.shared == compile_case(Case(kernel, "float16", 64, 16), 90).shared_bytes


def test_gather_and_scatter_move_wide_words(launched: list[Any]) -> None:
    pages = LayerPages.of([torch.empty(9, 2, 16, 3, 64, dtype=torch.bfloat16) for _ in range(3)])
    slots, ids = torch.empty(5, 4, 2, 16, 3, 64, dtype=torch.bfloat16), torch.tensor([1, 3])
    gather_pages(pages, ids, slots, ids, first_layer=1, path=launch.Path.TRITON)
    scatter_pages(slots, ids, pages, ids, first_layer=1, path=launch.Path.TRITON)
    for kernel in launched:
        assert "ld.global.v4.b32" in kernel.asm["ptx"]
        assert "st.global.v4.b32" in kernel.asm["ptx"]
    assert len(launched) == 2


def test_merge(launched: list[Any]) -> None:
    merge_states(torch.empty(3, 5, 2, 64), torch.empty(3, 5, 2), dtype=torch.bfloat16)
    assert [kernel.name for kernel in launched] == ["_merge_states_kernel"]


@pytest.mark.parametrize("num_new", [1, 7])
def test_attend_launches_once_a_part_once_for_the_new_keys_and_merges(launched: list[Any], num_new: int) -> None:
    random = Random(1)
    context = scatter_context(random, 60, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    query = tensor(random, num_new, 3, 64, dtype=torch.bfloat16)
    key, value = (tensor(random, num_new, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    parts = [*context.parts, PagedPart(context.parts[0].pages, torch.zeros(0, dtype=torch.int32), 0)]
    attend(query, parts, key=key, value=value, scale=0.125, path=launch.Path.TRITON)
    per_part = "_paged_decode_kernel" if num_new == 1 else "_paged_extend_kernel"
    with_tokens = sum(part.num_tokens > 0 for part in parts)
    names = [kernel.name for kernel in launched]
    assert names == [per_part] * with_tokens + ["_paged_extend_kernel", "_merge_states_kernel"]


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_converting_there_and_back(launched: list[Any], stored: torch.dtype) -> None:
    pages = KVLayers.of([torch.empty(9, 2, 16, 3, 64, dtype=torch.bfloat16) for _ in range(3)])
    slots, scales = torch.empty(5, 3, 2, 16, 3, 64, dtype=stored), torch.empty(5, 3, 2, 3)
    ids = torch.tensor([1, 3])
    gather_quantized(pages, ids, slots, ids, scales, path=launch.Path.TRITON)
    scatter_quantized(slots, ids, scales, pages, ids, path=launch.Path.TRITON)
    assert [kernel.name for kernel in launched] == ["_gather_quantized_kernel", "_scatter_quantized_kernel"]
    assert "ld.global.v4.b32" in launched[0].asm["ptx"]
    assert "st.global.v4.b32" in launched[1].asm["ptx"]


def test_turning(launched: list[Any]) -> None:
    pages, ids = torch.empty(9, 2, 16, 3, 64, dtype=torch.bfloat16), torch.tensor([1, 3], dtype=torch.int32)
    rotate_pages(pages, ids, torch.tensor([5, -5]), Rope.plain(64), path=launch.Path.TRITON)
    assert [kernel.name for kernel in launched] == ["_rotate_pages_kernel"]
    assert "ld.global.v4.b32" in launched[0].asm["ptx"]


def test_scoring(launched: list[Any]) -> None:
    pages, ids = torch.zeros(9, 2, 16, 3, 64, dtype=torch.bfloat16), torch.arange(9, dtype=torch.int32)
    query = torch.empty(12, 64, dtype=torch.bfloat16)
    for summary in (min_max_of(pages, ids, 130), ball_of(pages, ids, 130)):
        page_scores(query, summary, path=launch.Path.TRITON)
    assert [kernel.name for kernel in launched] == ["_page_scores_kernel"] * 2


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that has no values: whoever asks for one, as a host that waits for its GPU does, meets an error."""
    return torch.empty(shape, dtype=dtype, device="meta")


STATE = AttentionState(on_meta(6, 8, 64, dtype=torch.float32), on_meta(6, 8, dtype=torch.float32))
GIVEN: dict[str, Any] = {
    "scale": 0.125, "output": on_meta(6, 8, 64), "lse": on_meta(6, 8, dtype=torch.float32),
    "workspace": on_meta(workspace_elements(6, 8, 64, 5), dtype=torch.float32),
}  # fmt: skip
PAGES: dict[str, Any] = {
    "pages": on_meta(40, 2, 16, 2, 64, dtype=torch.float8_e4m3fn),
    "page_scales": on_meta(40, 2, 2, dtype=torch.float32),
    "block_tables": on_meta(6, 7, dtype=torch.int32),
}
IDS = on_meta(3, dtype=torch.int32)
COPY: dict[str, Any] = {
    "pages": LayerPages.of([on_meta(9, 2, 16, 3, 64) for _ in range(3)]), "page_ids": IDS, "slot_ids": IDS,
    "slots": on_meta(5, 3, 2, 16, 3, 64),
}  # fmt: skip
CONVERT: dict[str, Any] = COPY | {
    "pages": KVLayers.of([on_meta(9, 2, 16, 3, 64) for _ in range(3)]),
    "slots": on_meta(5, 3, 2, 16, 3, 64, dtype=torch.int8), "scales": on_meta(5, 3, 2, 3, dtype=torch.float32),
}  # fmt: skip
LENGTHS = on_meta(6, dtype=torch.int32)
SINKS = on_meta(8, dtype=torch.float32)
DECODE, EXTEND = "_paged_decode_kernel", "_paged_extend_kernel"
MLA, MERGE = "_mla_decode_kernel", "_merge_states_kernel"


@pytest.mark.parametrize(
    ("wrapper", "arguments", "kernels"),
    [
        (
            paged_decode,
            GIVEN | PAGES | {
                "query": on_meta(6, 8, 64), "seq_lens": LENGTHS, "query_positions": LENGTHS, "num_splits": 4,
                "scoring": Scoring(soft_cap=9.0, window=99, keep_first=4, sinks=SINKS), "initial": STATE,
            },
            [DECODE, MERGE],
        ),
        (
            cascade_decode,
            GIVEN | PAGES | {
                "query": on_meta(6, 8, 64), "seq_lens": LENGTHS, "group_indptr": on_meta(3, dtype=torch.int32),
                "shared_tables": on_meta(2, 9, dtype=torch.int32), "shared_lens": on_meta(2, dtype=torch.int32),
                "num_shared_splits": 3, "num_splits": 2, "scoring": Scoring(soft_cap=9.0, sinks=SINKS),
            },
            [DECODE, DECODE, MERGE],
        ),
        (
            mla_decode,
            GIVEN | {
                "query": on_meta(6, 8, 80), "pages": on_meta(40, 16, 80), "latent_dim": 64, "seq_lens": LENGTHS,
                "block_tables": PAGES["block_tables"], "num_splits": 5, "initial": STATE,
                "scoring": Scoring(soft_cap=9.0, sinks=SINKS),
            },
            [MLA, MERGE],
        ),
        (
            paged_extend,
            {name: GIVEN[name] for name in ("scale", "output", "lse")} | PAGES | {
                "query": on_meta(6, 8, 64), "indptr": on_meta(7, dtype=torch.int32), "prefix_lens": LENGTHS,
                "key": on_meta(6, 2, 64), "value": on_meta(6, 2, 64), "first_positions": LENGTHS,
                "scoring": Scoring(soft_cap=9.0, window=99, keep_first=4, sinks=SINKS),
            },
            [EXTEND],
        ),
        (
            merge_states,
            {
                "outputs": on_meta(3, 6, 8, 64, dtype=torch.float32), "lses": on_meta(3, 6, 8, dtype=torch.float32),
                "initial": STATE, "output": GIVEN["output"], "lse": GIVEN["lse"],
            },
            [MERGE],
        ),
        (gather_pages, COPY, ["_gather_pages_kernel"]),
        (scatter_pages, COPY, ["_gather_pages_kernel"]),
        (gather_quantized, CONVERT, ["_gather_quantized_kernel"]),
        (scatter_quantized, CONVERT, ["_scatter_quantized_kernel"]),
        (
            page_scores,
            {
                "query": on_meta(8, 64), "summary": MinMax(on_meta(9, 2, 64), on_meta(9, 2, 64)),
                "out": on_meta(8, 9, dtype=torch.float32),
            },
            ["_page_scores_kernel"],
        ),
    ],
    ids=["decode", "cascade", "mla", "extend", "merge", "gather", "scatter", "to-int8", "from-int8", "score"],
)  # fmt: skip
def test_a_cuda_graph_can_capture_it(
    launched: list[Any], wrapper: Callable[..., Any], arguments: dict[str, Any], kernels: list[str]
) -> None:
    """With all buffers given nothing is allocated and no value on the device is looked at: tensors are only viewed."""
    with Recorder() as recorder:
        result = wrapper(**arguments)
    if isinstance(result, AttentionState):
        assert result.output is arguments["output"]
        assert result.lse is arguments["lse"]
    assert all(operator.is_view for operator in recorder.operators), recorder.operators
    assert [kernel.name for kernel in launched] == kernels


def test_numbers_that_the_launcher_makes_constants(launched: list[Any]) -> None:
    """Triton compiles a form of its own where an integer is 1, in which it is no tensor any more."""
    scoring = Scoring(window=1, keep_first=1)
    query, pages = on_meta(1, 2, 64), on_meta(9, 2, 16, 2, 64)
    tables, lengths = on_meta(1, 1, dtype=torch.int32), on_meta(1, dtype=torch.int32)
    paged_decode(query, pages, tables, lengths, scale=1.0, scoring=scoring, num_splits=1)
    key = on_meta(1, 2, 64)
    indptr = on_meta(2, dtype=torch.int32)
    paged_extend(query, indptr, scale=1.0, scoring=scoring, key=key, value=key)
    mla_decode(on_meta(1, 1, 80), on_meta(9, 1, 80), tables, lengths, latent_dim=64, scale=1.0, num_splits=1)
    assert [kernel.name for kernel in launched] == [DECODE, EXTEND, MLA]


def test_a_recorder_would_see_an_allocation() -> None:
    with Recorder() as recorder:
        on_meta(3)
    assert not all(operator.is_view for operator in recorder.operators)
