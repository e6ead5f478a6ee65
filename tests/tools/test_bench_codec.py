"""`hicache bench codec`: every row is there, on an excerpt of real KV; the model itself takes half a minute."""

import json
from pathlib import Path

import numpy as np
import pytest

from hicache.tools.bench import demo_kv
from hicache.tools.bench.demo_kv import Recorded
from hicache.tools.cli import main
from tests.tiers.real_kv import real_pages

CODECS = ("exponent_zstd", "lz4", "int8")
ROWS = {"lossless", "int8_error", "int8_error_bfloat16", "int8_shrinks"} | {
    f"{row}_{codec}"
    for row in ("encode", "decode", "read_pays_below", "write_pays_below", "read_page")
    for codec in CODECS
}


def excerpt(num_tokens: int) -> Recorded:
    """The excerpt as float32 numbers between those of bfloat16, twice over, and queries that look like its keys."""
    assert num_tokens == 128
    rng = np.random.default_rng(1)
    bits = real_pages(64)[0].astype(np.uint32) << 16 | rng.integers(0, 1 << 15, real_pages(64)[0].shape, np.uint32)
    kv = np.concatenate([bits.view(np.float32)] * 2, axis=2)
    keys = kv[:, 0].repeat(3, axis=2)
    return Recorded(kv, (keys * rng.uniform(0.5, 1.5, keys.shape)).astype(np.float32))


def test_bench_codec_measures_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_kv, "demo_kv", excerpt)
    target = tmp_path / "codec.json"
    assert main(["bench", "codec", "--scale", "100", "--json", str(target)]) == 0
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    assert set(rows) == ROWS | {f"{name}_p64" for name in ROWS}
    assert all(row["value"] > 0 for row in rows.values())
    for suffix in ("", "_p64"):
        lossless, error = rows[f"lossless{suffix}"], rows[f"int8_error{suffix}"]
        assert lossless["goal"] == 1.45
        assert lossless["ok"]
        assert lossless["baseline"]["value"] < lossless["value"] < lossless["bound"]
        assert error["goal"] == 1.3
        assert 1e-4 < error["baseline"]["value"] < error["value"] < 0.05
        assert error["value"] < rows[f"int8_error_bfloat16{suffix}"]["value"]
        for codec in CODECS:
            for direction in ("encode", "decode"):
                row = rows[f"{direction}_{codec}{suffix}"]
                assert row["baseline"]["name"] == "memcpy"
                assert row["value"] < row["bound"]
            page = rows[f"read_page_{codec}{suffix}"]
            assert page["value"] > page["bound"]
            # A page is sooner read with the codec on just the devices below that bandwidth.
            pays = page["value"] < page["baseline"]["value"]
            assert pays == (rows[f"read_pays_below_{codec}{suffix}"]["value"] > 1)
    assert "codec" in capsys.readouterr().out
