"""The compiled loops of decoding: what they take, on how many threads, and what happens without them."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from hicache.kernels import decode_cpu, threads
from hicache.kernels import launch as launching
from hicache.kernels.attend import PagedPart, attend
from hicache.kernels.errors import BadArgument
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import DTYPES, Context, scatter_context, tensor
from tests.repository import ROOT

NONE = torch.empty(0, 2, 64)


@pytest.fixture(autouse=True, scope="module")
def compiled_loops() -> None:
    """Compiling is no test's time."""
    assert all(decode_cpu.prepare(dtype) for dtype in DTYPES)


def run(context: Context, query: torch.Tensor, path: launching.Path | None = None) -> AttentionState:
    return attend(query, context.parts, key=NONE, value=NONE, scale=0.125, path=path)


def test_a_part_is_shared_out_to_threads_and_the_bits_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads, each with a share of every part but the smallest."""
    monkeypatch.setattr(decode_cpu, "_ALONE_BYTES", 20 * 2 * 2 * 64 * 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    context = scatter_context(Random(2), 300, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    query = tensor(Random(1), 1, 4, 64, dtype=torch.float32)
    expected = run(context, query, launching.Path.TORCH)
    first = run(context, query)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    for _ in range(20):
        again = run(context, query)
        assert torch.equal(again.output, first.output)
        assert torch.equal(again.lse, first.lse)


def test_torch_has_threads_to_be_had_and_without_them_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cpu, "_ALONE_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    context = scatter_context(Random(2), 300, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    query = tensor(Random(1), 1, 4, 64, dtype=torch.float32)
    together = run(context, query)
    assert (threads._parallel() is not None) == sys.platform.startswith("linux")
    monkeypatch.setattr(threads, "_parallel", lambda: None)
    alone = run(context, query)
    assert torch.equal(alone.output, together.output)
    assert torch.equal(alone.lse, together.lse)


def test_parts_that_stay_and_parts_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts, of which those that do not stay are gone as soon as the next is asked for."""
    monkeypatch.setattr(decode_cpu, "_ALONE_BYTES", 20 * 2 * 2 * 64 * 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    random = Random(2)
    whole = [scatter_context(random, 9, num_kv_heads=2, head_dim=64, dtype=torch.float32).parts for _ in range(60)]
    parts = [part for some in whole for part in some]
    query = tensor(random, 1, 4, 64, dtype=torch.float32)
    key, value = tensor(random, 2, 1, 2, 64, dtype=torch.float32)
    expected = attend(query, parts, key=key, value=value, scale=0.125, path=launching.Path.TORCH)

    def leaving(share: float) -> Iterator[PagedPart]:
        for part in parts:
            pages, stays = part.pages.clone(), random.random() < share
            yield replace(part, pages=pages, stays=stays)
            if not stays:
                pages.fill_(torch.nan)

    for share in (0.0, 0.5, 0.95, 1.0):
        state = attend(query, leaving(share), key=key, value=value, scale=0.125)
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, 7])
def test_pages_that_are_not_there_are_refused_by_the_loops(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """In one of three parts; what stands in a table behind the part's tokens is not looked at."""
    monkeypatch.setattr(decode_cpu, "_ALONE_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    pages = tensor(Random(0), 7, 2, 16, 2, 64, dtype=torch.float32)
    query = tensor(Random(1), 1, 4, 64, dtype=torch.float32)
    table = torch.tensor([6, 0, 3, 5, wrong], dtype=torch.int32)
    for stays in (True, False):
        good = PagedPart(pages, table, 64, stays=stays)
        expected = attend(query, [good] * 3, key=NONE, value=NONE, scale=0.125)
        with pytest.raises(BadArgument, match=f"part.block_table: names page {wrong}, expected 0 to 6"):
            attend(query, [good, replace(good, num_tokens=65), good], key=NONE, value=NONE, scale=0.125)
        again = attend(query, [good] * 3, key=NONE, value=NONE, scale=0.125)
        assert torch.equal(again.output, expected.output)


def test_several_threads_attend_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cpu, "_ALONE_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    context = scatter_context(Random(2), 100, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    query = tensor(Random(1), 1, 4, 64, dtype=torch.float32)
    expected = run(context, query)
    differing: list[int] = []

    def work() -> None:
        differing.extend(i for i in range(20) if not torch.equal(run(context, query).output, expected.output))

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not differing


def test_what_the_loops_do_not_take_is_left_to_torch() -> None:
    """A head of 72, and float64; and in the middle of others, float8."""
    for head_dim, dtype in ((72, torch.float32), (64, torch.float64)):
        context = scatter_context(Random(0), 40, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
        query = tensor(Random(1), 1, 4, head_dim, dtype=dtype)
        none = torch.empty(0, 2, head_dim, dtype=dtype)
        states = [
            attend(query, context.parts, key=none, value=none, scale=0.125, path=path)
            for path in (None, launching.Path.TORCH)
        ]
        assert torch.equal(states[0].output, states[1].output)
    pages = tensor(Random(0), 3, 2, 16, 2, 64, dtype=torch.float16)
    narrow, table = pages.to(torch.float8_e5m2), torch.arange(3, dtype=torch.int32)
    parts = [PagedPart(pages, table, 40), PagedPart(narrow, table, 48), PagedPart(pages, table[:1], 3)]
    query = tensor(Random(1), 1, 4, 64, dtype=torch.float16)
    mixed, plain = (
        attend(query, parts, key=NONE.half(), value=NONE.half(), scale=0.125, path=path)
        for path in (None, launching.Path.TORCH)
    )
    torch.testing.assert_close(mixed, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_damage_stays_visible(dtype: torch.dtype) -> None:
    pages = torch.ones(1, 2, 16, 2, 64, dtype=dtype)
    none, query = NONE.to(dtype), torch.ones(1, 4, 64, dtype=dtype)
    for plane, token, damage in ((0, 3, torch.nan), (1, 15, torch.nan), (1, 0, torch.inf), (0, 5, torch.inf)):
        damaged = pages.clone()
        damaged[0, plane, token, 1, 7] = damage
        part = PagedPart(damaged, torch.tensor([0], dtype=torch.int32), 16)
        output, _ = attend(query, [part], key=none, value=none, scale=0.125)
        assert output[0, :2].isfinite().all()
        assert not output[0, 2:, 7].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 1), (3, 2), (5, 3), (300, 3), (301, 5)])
def test_heads_may_come_before_tokens(dtype: torch.dtype, num_tokens: int, num_heads: int) -> None:
    """In pages, whose memory is then gone through head by head; and in the new token, whose key alone is spread out."""
    num_pages = -(-num_tokens // 16)
    by_head = tensor(Random(3), num_pages, 2, num_heads, 16, 64, dtype=dtype)
    pages, query = by_head.transpose(2, 3), tensor(Random(1), 1, 2 * num_heads, 64, dtype=dtype)
    key = tensor(Random(4), 1, num_heads, 2, 64, dtype=dtype)[:, :, 0]
    value = tensor(Random(5), 1, num_heads, 64, dtype=dtype)
    states = [
        attend(query, [PagedPart(some, torch.arange(num_pages, dtype=torch.int32), num_tokens)], key=key, value=value,
               scale=0.125, path=path)
        for some, path in ((pages, None), (pages.contiguous(), None), (pages, launching.Path.TORCH))
    ]  # fmt: skip
    assert torch.equal(states[0].output, states[1].output)
    assert torch.equal(states[0].lse, states[1].lse)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(states[0], states[2], rtol=tolerance, atol=tolerance)


def test_a_thread_has_room_for_one_shape_after_the_other() -> None:
    """It is kept: what the smaller one leaves, and what the larger one needs more, is not the other's."""
    for num_kv_heads, head_dim in ((1, 16), (4, 128), (1, 16), (2, 64)):
        context = scatter_context(
            Random(2), 40, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.float32
        )
        query = tensor(Random(1), 1, 6 * num_kv_heads, head_dim, dtype=torch.float32)
        none = torch.empty(0, num_kv_heads, head_dim)
        states = [
            attend(query, context.parts, key=none, value=none, scale=0.125, path=path)
            for path in (None, launching.Path.TORCH)
        ]
        torch.testing.assert_close(states[0], states[1], rtol=1e-5, atol=1e-6)


def test_a_page_far_away_is_addressed_in_64_bits() -> None:
    """4 GiB behind the first; the memory between is never touched."""
    far = (4 << 30) // (2 * 1 * 1 * 64 * 2) + 1
    pages = torch.empty(far + 1, 2, 1, 1, 64, dtype=torch.bfloat16)
    pages[far, 0], pages[far, 1], pages[0] = 1.0, 3.0, 0.0
    part = PagedPart(pages, torch.tensor([far], dtype=torch.int32), 1)
    none = torch.empty(0, 1, 64, dtype=torch.bfloat16)
    output, lse = attend(torch.ones(1, 1, 64).bfloat16(), [part], key=none, value=none, scale=0.125)
    assert torch.equal(output, torch.full((1, 1, 64), 3.0).bfloat16())
    torch.testing.assert_close(lse, torch.full((1, 1), 8.0))


SCRIPT = """if True:
    import logging, sys, torch
    logging.basicConfig()
    from hicache.kernels import decode_cpu
    from hicache.kernels.attend import attend
    print(decode_cpu.prepare(torch.float32), decode_cpu.prepare(torch.float32), decode_cpu.prepare(torch.int8))
    one = torch.ones(1, 1, 64)
    assert torch.equal(attend(one, [], key=one, value=one, scale=1.0).output, one)
"""


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=280
    )


def test_without_numba_torch_does_it_and_the_log_says_so_once() -> None:
    done = python(f"import sys; sys.modules['numba'] = None\n{SCRIPT}")
    assert done.stdout == "False False False\n", done.stderr
    assert done.stderr.count("is not compiled") == 1


def test_nothing_of_numba_is_loaded_unless_it_is_prepared() -> None:
    script = "import sys, hicache.kernels.attend; sys.exit('numba' in sys.modules)"
    assert python(script).returncode == 0


def test_where_nothing_can_be_kept_on_disk_it_is_compiled_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = python(SCRIPT, NUMBA_CACHE_DIR=str(tmp_path / "file"))
    assert done.stdout == "True True False\n", done.stderr
