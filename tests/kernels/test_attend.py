"""The law, on the torch path: attention over any split of the keys, merged, equals attention over all of them."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels import attend_torch, decode_cpu
from hicache.kernels.attend import PagedPart, attend
from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path
from tests.kernels.contexts import (
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    Context,
    Memory,
    assert_close,
    causal,
    empty_pages,
    scatter_context,
    tensor,
    truth,
)
from tests.repository import ROOT


@pytest.fixture(autouse=True, scope="module")
def compiled_loops() -> None:
    """Unless torch is asked for, compiled loops do a single token; compiling them is no test's time."""
    assert all(decode_cpu.prepare(dtype) for dtype in DTYPES)


def run(context: Context, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Attend over the context's parts, in both ways, and compare with all keys at once."""
    for path in (None, Path.TORCH) if query.shape[0] == 1 else (None,):
        run_by(path, context, query, key, value)


def run_by(
    path: Path | None, context: Context, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    scale = query.shape[2] ** -0.5
    actual = attend(query, iter(context.parts), key=key, value=value, scale=scale, path=path)
    assert actual.output.dtype == query.dtype
    keys, values = torch.cat([context.key, key]), torch.cat([context.value, value])
    num_prefix = context.key.shape[0]
    visible = causal(num_prefix, query.shape[0])[:, : keys.shape[0]]
    assert_close(actual, query, keys, values, visible, scale)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=6)
@given(
    random=st.randoms(use_true_random=False),
    num_prefix=st.integers(0, 300),
    num_new=st.one_of(st.just(1), st.integers(2, 70)),
    num_kv_heads=st.integers(1, 3),
    scratch_tokens=st.sampled_from([20, 50, 100, 10_000]),
)
def test_any_split_over_memories_equals_the_whole(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    random: Random,
    num_prefix: int,
    num_new: int,
    num_kv_heads: int,
    scratch_tokens: int,
) -> None:
    context = scatter_context(random, num_prefix, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    query = tensor(random, num_new, num_kv_heads * group, head_dim, dtype=dtype)
    key = tensor(random, num_new, num_kv_heads, head_dim, dtype=dtype)
    value = tensor(random, num_new, num_kv_heads, head_dim, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        # A small buffer is filled and attended to many times, and cuts parts anywhere.
        patch.setattr(attend_torch, "SCRATCH_BYTES", scratch_tokens * 2 * num_kv_heads * head_dim * 4)
        patch.setattr(attend_torch, "_NARROW_BYTES", scratch_tokens * num_kv_heads * head_dim)
        run(context, query, key, value)


@pytest.mark.parametrize("num_new", [1, 2, 63, 64, 65, 300])
@pytest.mark.parametrize("num_prefix", [0, 1, 15, 16, 17, 111])
def test_sizes_around_pages_and_around_the_folding_of_groups(num_new: int, num_prefix: int) -> None:
    random = Random(num_new * 1000 + num_prefix)
    context = scatter_context(random, num_prefix, num_kv_heads=3, head_dim=64, dtype=torch.float32, page_sizes=(16,))
    query = tensor(random, num_new, 9, 64, dtype=torch.float32)
    key, value = (tensor(random, num_new, 3, 64, dtype=torch.float32) for _ in range(2))
    run(context, query, key, value)


@pytest.mark.parametrize("num_new", [1, 5, 100])
def test_without_new_keys_the_queries_see_the_parts_only(num_new: int) -> None:
    random = Random(num_new)
    context = scatter_context(random, 50, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    query = tensor(random, num_new, 4, 64, dtype=torch.float32)
    none = torch.empty(0, 2, 64)
    run(context, query, none, none)


def test_queries_without_any_key_have_output_0_and_lse_minus_infinity() -> None:
    random = Random(0)
    query = tensor(random, 3, 4, 64, dtype=torch.bfloat16)
    none = torch.empty(0, 2, 64, dtype=torch.bfloat16)
    pages = empty_pages(Memory.LAYER_FIRST, 2, 16, 2, 64, torch.bfloat16)
    parts = [PagedPart(pages, torch.empty(0, dtype=torch.int32), 0), PagedPart(pages, torch.tensor([1]).int(), 0)]
    output, lse = attend(query, parts, key=none, value=none, scale=0.125)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, torch.zeros_like(query))
    assert torch.equal(lse, torch.full((3, 4), -torch.inf))


def test_without_queries_no_part_is_asked_for() -> None:
    def parts() -> Iterator[PagedPart]:
        raise AssertionError("asked for a part")
        yield

    none = torch.empty(0, 2, 64)
    output, lse = attend(torch.empty(0, 4, 64), parts(), key=none, value=none, scale=0.125)
    assert output.shape == (0, 4, 64)
    assert lse.shape == (0, 4)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("num_new", [1, 7])
def test_a_part_is_used_up_when_the_next_is_asked_for(num_new: int) -> None:
    """One buffer serves all parts, as it does when pages are streamed."""
    random = Random(num_new)
    key, value = (tensor(random, 90, 2, 64, dtype=torch.float32) for _ in range(2))
    query = tensor(random, num_new, 4, 64, dtype=torch.float32)
    new_key, new_value = (tensor(random, num_new, 2, 64, dtype=torch.float32) for _ in range(2))
    asked = []

    def parts() -> Iterator[PagedPart]:
        buffer = torch.empty(2, 2, 16, 2, 64)
        for start in range(0, 90, 30):
            buffer.fill_(torch.nan)
            for slot, (first, last) in enumerate(((start, start + 16), (start + 16, start + 30))):
                buffer[slot, 0, : last - first] = key[first:last]
                buffer[slot, 1, : last - first] = value[first:last]
            asked.append(start)
            yield PagedPart(buffer, torch.tensor([0, 1], dtype=torch.int32), 30)
        buffer.fill_(torch.nan)

    actual = attend(query, parts(), key=new_key, value=new_value, scale=0.125)
    assert asked == [0, 30, 60]
    visible = causal(90, num_new)
    assert_close(actual, query, torch.cat([key, new_key]), torch.cat([value, new_value]), visible, 0.125)


def test_results_stay_when_the_buffer_is_used_again() -> None:
    random = Random(0)
    context = scatter_context(random, 40, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    query = tensor(random, 1, 4, 64, dtype=torch.float32)
    key, value = (tensor(random, 1, 2, 64, dtype=torch.float32) for _ in range(2))
    first = attend(query, context.parts, key=key, value=value, scale=0.125)
    kept = first.output.clone(), first.lse.clone()
    attend(-query, context.parts, key=-key, value=-value, scale=0.125)
    assert torch.equal(first.output, kept[0])
    assert torch.equal(first.lse, kept[1])


def test_threads_do_not_share_their_buffers() -> None:
    """Two threads attend in turns: the second starts in the middle of the first one's parts."""
    random = Random(0)
    contexts = [scatter_context(random, 60, num_kv_heads=2, head_dim=64, dtype=torch.float32) for _ in range(2)]
    query = tensor(random, 4, 4, 64, dtype=torch.float32)
    key, value = (tensor(random, 4, 2, 64, dtype=torch.float32) for _ in range(2))
    other_done = threading.Event()

    def other() -> None:
        run(contexts[1], query, key, value)
        other_done.set()

    def interrupted() -> Iterator[PagedPart]:
        yield from contexts[0].parts
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=60)

    actual = attend(query, interrupted(), key=key, value=value, scale=0.125)
    assert other_done.is_set()
    keys, values = torch.cat([contexts[0].key, key]), torch.cat([contexts[0].value, value])
    assert_close(actual, query, keys, values, causal(60, 4), 0.125)


def test_inference_mode_and_gradients_leave_no_trace_in_the_buffer() -> None:
    """In a thread of its own, so that the buffer is made in inference mode."""
    random = Random(0)
    context = scatter_context(random, 40, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    query, key, value = (tensor(random, 1, heads, 64, dtype=torch.float32) for heads in (4, 2, 2))
    outputs = []

    def work() -> None:
        with torch.inference_mode():
            outputs.append(attend(query, context.parts, key=key, value=value, scale=0.125).output)
        learning = key.clone().requires_grad_()
        outputs.append(attend(query.requires_grad_(), context.parts, key=learning, value=value, scale=0.125).output)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    with_inference, with_gradients = outputs
    assert torch.equal(with_inference, with_gradients)
    assert not with_gradients.requires_grad


def test_inputs_may_have_any_stride_but_in_the_last_dimension() -> None:
    random = Random(0)
    context = scatter_context(random, 70, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    for num_new in (1, 5, 80):
        query = tensor(random, 6, num_new, 70, dtype=torch.float32).transpose(0, 1)[..., :64]
        key, value = (tensor(random, num_new, 5, 64, dtype=torch.float32)[:, 1:5:3] for _ in range(2))
        run(context, query, key, value)


def test_float64_is_exact_to_its_own_precision() -> None:
    random = Random(0)
    context = scatter_context(random, 200, num_kv_heads=2, head_dim=64, dtype=torch.float64)
    query = tensor(random, 9, 4, 64, dtype=torch.float64)
    key, value = (tensor(random, 9, 2, 64, dtype=torch.float64) for _ in range(2))
    output, lse = attend(query, context.parts, key=key, value=value, scale=0.125)
    expected = truth(query, torch.cat([context.key, key]), torch.cat([context.value, value]), causal(200, 9), 0.125)
    assert output.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(output, expected.output, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-12, atol=1e-13)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    """Parts whose greatest scores differ by far more than the exponent range: the weaker part counts for nothing."""
    pages = torch.zeros(2, 2, 16, 1, 64)
    pages[0, 0], pages[0, 1] = 30.0, 1.0
    pages[1, 0], pages[1, 1] = -30.0, 2.0
    query = torch.full((2, 1, 64), 1.0)
    parts = [PagedPart(pages, torch.tensor([slot], dtype=torch.int32), 16) for slot in (1, 0, 1)]
    none = torch.empty(0, 1, 64)
    output, lse = attend(query, parts, key=none, value=none, scale=1.0)
    torch.testing.assert_close(output, torch.ones(2, 1, 64))
    torch.testing.assert_close(lse, torch.full((2, 1), 30.0 * 64 + torch.tensor(16.0).log().item()))


def test_a_context_far_beyond_the_buffer_needs_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages named over and over, many times what the buffer holds; the result is that of one page."""
    monkeypatch.setattr(attend_torch, "_scratch", attend_torch._Scratch())
    random = Random(0)
    pages = tensor(random, 4, 2, 16, 1, 64, dtype=torch.float32)
    pages[1:] = pages[0]
    query = tensor(random, 1, 2, 64, dtype=torch.float32)
    none = torch.empty(0, 1, 64)
    table = torch.arange(4, dtype=torch.int32).repeat(1200)
    parts = [PagedPart(pages, table, table.numel() * 16)]
    output, lse = attend(query, parts, key=none, value=none, scale=0.125, path=Path.TORCH)
    expected = attend(query, [PagedPart(pages, table[:1], 16)], key=none, value=none, scale=0.125, path=Path.TORCH)
    assert attend_torch._scratch._buffer.numel() <= attend_torch.SCRATCH_BYTES
    torch.testing.assert_close(output, expected.output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected.lse + torch.tensor(4800.0).log())


def valid(num_new: int = 2) -> tuple[torch.Tensor, PagedPart, torch.Tensor, torch.Tensor]:
    """A query, a part, a key and a value that fit each other."""
    random = Random(0)
    pages = tensor(random, 4, 2, 16, 2, 64, dtype=torch.float32)
    part = PagedPart(pages, torch.tensor([3, 0], dtype=torch.int32), 20)
    key, value = (tensor(random, num_new, 2, 64, dtype=torch.float32) for _ in range(2))
    return tensor(random, num_new, 4, 64, dtype=torch.float32), part, key, value


QUERY, PART, KEY, VALUE = valid()
BAD = [
    ("query", QUERY[0], PART, KEY, VALUE),
    ("query", QUERY.to(torch.int32), PART, KEY, VALUE),
    ("query", QUERY[:, :0], PART, KEY, VALUE),
    ("query", QUERY.transpose(1, 2).contiguous().transpose(1, 2), PART, KEY, VALUE),
    ("key", QUERY[:, :3], PART, KEY, VALUE),
    ("key", QUERY, PART, KEY[:1], VALUE),
    ("key", QUERY, PART, KEY.half(), VALUE),
    ("key", QUERY, PART, KEY[..., :32], VALUE),
    ("key", QUERY, PART, torch.tensor(1.0), VALUE),
    ("value", QUERY, PART, KEY, VALUE[:1]),
    ("value", QUERY, PART, KEY, VALUE[:, :1]),
    ("part.pages", QUERY, PagedPart(PART.pages[:, :1], PART.block_table, 20), KEY, VALUE),
    ("part.pages", QUERY, PagedPart(PART.pages.bfloat16(), PART.block_table, 20), KEY, VALUE),
    ("part.pages", QUERY, PagedPart(PART.pages[..., :32], PART.block_table, 20), KEY, VALUE),
    ("part.pages", QUERY, PagedPart(PART.pages[:, :, :, :1], PART.block_table, 20), KEY, VALUE),
    ("part.pages", QUERY, PagedPart(PART.pages[:, :, :0], PART.block_table, 0), KEY, VALUE),
    ("part.block_table", QUERY, PagedPart(PART.pages, PART.block_table.long(), 20), KEY, VALUE),
    ("part.block_table", QUERY, PagedPart(PART.pages, PART.block_table[None], 20), KEY, VALUE),
    ("part.block_table", QUERY, PagedPart(PART.pages, torch.tensor([0, 4], dtype=torch.int32), 20), KEY, VALUE),
    ("part.block_table", QUERY, PagedPart(PART.pages, torch.tensor([-1, 0], dtype=torch.int32), 20), KEY, VALUE),
    ("part.num_tokens", QUERY, PagedPart(PART.pages, PART.block_table, 33), KEY, VALUE),
    ("part.num_tokens", QUERY, PagedPart(PART.pages, PART.block_table, -1), KEY, VALUE),
]


@pytest.mark.parametrize(("argument", "query", "part", "key", "value"), BAD)
def test_what_does_not_fit_is_refused_by_name(
    argument: str, query: torch.Tensor, part: PagedPart, key: torch.Tensor, value: torch.Tensor
) -> None:
    with pytest.raises(BadArgument) as raised:
        attend(query, [PART, part], key=key, value=value, scale=0.125)
    assert raised.value.argument == argument
    assert str(raised.value).startswith(f"{argument}: ")
    assert isinstance(raised.value, ValueError)
    # What was refused leaves nothing behind.
    good = attend(QUERY, [PART], key=KEY, value=VALUE, scale=0.125)
    assert torch.equal(good.output, attend(QUERY, [PART], key=KEY, value=VALUE, scale=0.125).output)


def test_unused_slots_of_a_table_are_not_looked_at() -> None:
    part = PagedPart(PART.pages, torch.tensor([3, 0, 99, -1], dtype=torch.int32), 20)
    expected = attend(QUERY, [PART], key=KEY, value=VALUE, scale=0.125)
    assert torch.equal(attend(QUERY, [part], key=KEY, value=VALUE, scale=0.125).output, expected.output)


def test_the_torch_path_loads_no_triton() -> None:
    script = """if True:
        import sys, torch
        from hicache.kernels.attend import PagedPart, attend
        key, query = torch.ones(1, 2, 64), torch.ones(1, 4, 64)
        part = PagedPart(torch.ones(1, 2, 16, 2, 64), torch.tensor([0], dtype=torch.int32), 16)
        attend(query, [part], key=key, value=key, scale=0.125)
        sys.exit("triton" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=280).returncode == 0


def test_kernels_are_refused_on_a_cpu_that_does_not_interpret_them() -> None:
    with pytest.raises(BadArgument, match="TRITON_INTERPRET"):
        attend(QUERY, [PART], key=KEY, value=VALUE, scale=0.125, path=Path.TRITON)
