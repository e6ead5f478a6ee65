"""The bench of attention: its rows, and what it compares them with."""

from pathlib import Path

import numpy as np
import pytest

from hicache.kernels import attend_torch
from hicache.tools.bench import attention
from hicache.tools.bench.attention import Scale
from hicache.tools.bench.demo_kv import Recorded
from hicache.tools.bench.results import Peak, Row


@pytest.mark.slow
def test_a_context_over_three_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ROUNDS", 1)
    # Buffers of a small context's size, and none that this thread had before.
    monkeypatch.setattr(attend_torch, "SCRATCH_BYTES", 128 << 10)
    monkeypatch.setattr(attend_torch, "_scratch", attend_torch._Scratch())
    rows: dict[str, Row] = {}
    attention.measure_dense(lambda row: rows.update({row.name: row}), tmp_path, Scale(32))
    assert list(rows) == ["prefill_q16", "decode_q1", "decode_q1_sdpa", "decode_q1_with_nvme"]
    for name in ("prefill_q16", "decode_q1", "decode_q1_with_nvme"):
        peak = rows[name].peak
        assert peak is not None
        assert attend_torch.SCRATCH_BYTES < peak.value <= peak.budget
        assert rows[name].to_json()["peak"] == {"name": "device", "value": peak.value, "budget": peak.budget}
    assert rows["prefill_q16"].baseline is not None
    assert rows["decode_q1"].bound == rows["decode_q1"].baseline.value  # type: ignore[union-attr]  # it has one
    assert all(row.value > 0 for row in rows.values())
    assert not list(tmp_path.glob("*bench*"))


def test_a_row_beyond_its_budget_is_missed() -> None:
    assert Row("decode", 1.0, "ms", goal=2.0, peak=Peak("device", 10, 10)).ok
    assert Row("decode", 1.0, "ms", goal=2.0, peak=Peak("device", 11, 10)).ok is False


@pytest.mark.parametrize("num_tokens", [256, 512])
def test_sparse_decode_of_keys_with_a_place_worth_looking_at(num_tokens: int) -> None:
    """Few keys matter to each query: they are found, and nothing is missed that was proved not to be."""
    random = np.random.default_rng(0)
    layers, heads, group, dim = 2, 1, 2, 64
    kv = random.standard_normal((layers, 2, num_tokens, heads, dim)).astype(np.float32)
    wanted = random.integers(0, num_tokens - 64, (layers, num_tokens, heads * group))
    queries = np.stack([8 * kv[layer, 0, wanted[layer], 0] for layer in range(layers)])
    rows: dict[str, Row] = {}
    attention.measure_sparse(lambda row: rows.update({row.name: row}), Recorded(kv, queries))
    assert list(rows) == ["sparse_error", "sparse_violations", "sparse_metadata", "sparse_certified"]
    assert all(row.ok is not False for row in rows.values())
    assert rows["sparse_certified"].value > 0
