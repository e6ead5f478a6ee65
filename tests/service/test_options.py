"""Arguments of `HiCache.open` that cannot be right are refused by name, before anything is made."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache
from hicache.errors import BadRequest
from hicache.layout import KVDtype, KVLayout
from hicache.quotas import TenantQuota

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype=KVDtype.FLOAT32, page_size=4)
PAGE = LAYOUT.page_bytes

WRONG: dict[str, list[Any]] = {
    "device_bytes": ["1", None, 1.5, True, [], PAGE - 1, -1],
    "host_bytes": ["1", None, 1.5, True, [], PAGE - 1, -1],
    "nvme_bytes": ["1G", 1.5e6, True, [], b"1", -1, 0, float("nan"), PAGE - 1, PAGE, 10**30],
    "nvme_min_free_bytes": ["1", 1.5, True, None, -1],
    "nvme_write_bytes_per_day": ["1", 1.5, True, -1, 0, PAGE - 1, PAGE],
    "nvme_codec": [None, "zip", "", 5, [], b"lz4"],
    "nvme_dir": [5, True, b"/tmp", [], "", ["", "x"], ["x", "x"], ["x", 5], [None], "a\0b"],
    "device": [5, None, []],
    "progress": [5, "x"],
    "layout": [None, "llama"],
    "policy": ["fifo", None],
    "admission": ["never", None, 1, []],
    "tenant_quotas": [
        5, ["a"], {1: 0.5}, {"a": 0.6, "b": 0.6}, {"a": TenantQuota(nvme=(1 << 20) + 1)},
        {"a": TenantQuota(nvme=1 << 19), "b": TenantQuota(nvme=0.51)}, {"a": TenantQuota(host=17 * PAGE)},
    ],
    "write_policy": ["through", None],
    "exclusive": [1, "yes"],
    "prefill": [1.5, "auto"],
}


def open_with(directory: Path, **changed: Any) -> hicache.HiCache:
    options: dict[str, Any] = {
        "device_bytes": 16 * PAGE,
        "host_bytes": 16 * PAGE,
        "nvme_dir": directory / "store",
        "nvme_bytes": 1 << 20,
    }
    options |= changed
    return hicache.HiCache.open(options.pop("layout", LAYOUT), **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=lambda each: repr(each)[:30],
)
def test_a_wrong_argument_is_named_and_nothing_is_made(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequest) as refused:
        open_with(tmp_path, **{name: value})
    assert refused.value.field == name
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nvme_min_free_bytes", 5), ("nvme_write_bytes_per_day", 1 << 30), ("nvme_codec", "lz4"),
        ("admission", "predicted"), ("exclusive", True), ("write_policy", "write-through"),
        ("write_policy", "write-through-selective"),
    ],
)
def test_what_is_for_nvme_needs_a_directory(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="together with nvme_dir") as refused:
        open_with(tmp_path, nvme_dir=None, nvme_bytes=None, **{name: value})
    assert refused.value.field == name
    for changed in ({"nvme_dir": None}, {"nvme_bytes": None}):
        with pytest.raises(BadRequest, match="nvme_bytes"):
            open_with(tmp_path, **changed)


def test_a_quota_may_be_all_bytes_of_a_budget(tmp_path: Path) -> None:
    """A page takes more than its bytes on disk, and in host memory too if it is small: the tiers have fewer pages than
    fit into their budgets by these."""
    quotas = {"a": TenantQuota(nvme=3 << 18), "b": TenantQuota(host=16 * PAGE, nvme=1 << 18)}
    with open_with(tmp_path, tenant_quotas=quotas) as cache:
        tiers = cache.stats()["tiers"]
        assert tiers["nvme"]["capacity_pages"] < (3 << 18) // PAGE
        assert tiers["host"]["capacity_pages"] < 16


def test_numbers_may_be_of_numpy(tmp_path: Path) -> None:
    with open_with(tmp_path, nvme_bytes=np.int64(1 << 20), device_bytes=np.int32(16 * PAGE)) as cache:
        assert cache.device_pages == 16
