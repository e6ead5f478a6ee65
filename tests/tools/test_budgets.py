"""How much each tier gets."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.layout import KVDtype, KVLayout
from hicache.tools.demo.budgets import MIN_DEVICE_PAGES, Budgets, check_disk, check_memory, choose_budgets
from hicache.tools.exits import UsageProblem

LAYOUT = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_dim=64, dtype=KVDtype.FLOAT32, page_size=16)
TINY = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, dtype=KVDtype.FLOAT32, page_size=16)


def test_the_default_working_set_is_eight_times_the_device_and_more_than_the_host() -> None:
    tokens = 20_060
    budgets = choose_budgets(
        LAYOUT, working_set_tokens=tokens, largest_tokens=1_900, max_context=8_000, other_tokens=7_000
    )
    working_set = tokens * LAYOUT.token_bytes
    assert working_set / budgets.device_bytes == pytest.approx(8, rel=0.1)
    assert 1.5 <= working_set / budgets.host_bytes < 1.8
    assert budgets.nvme_bytes >= 1.2 * working_set


@given(st.integers(1, 200_000), st.integers(0, 50_000), st.sampled_from([LAYOUT, TINY]), st.data())
def test_budgets_are_ordered_and_hold_whole_pages(
    tokens: int, other: int, layout: KVLayout, data: st.DataObject
) -> None:
    largest = data.draw(st.integers(1, tokens))
    budgets = choose_budgets(
        layout, working_set_tokens=tokens, largest_tokens=largest, max_context=8_000, other_tokens=other
    )
    assert budgets.device_bytes // layout.page_bytes >= MIN_DEVICE_PAGES
    assert budgets.device_bytes % layout.page_bytes == 0
    assert budgets.device_bytes <= max(layout.pages_for(tokens) / 3, MIN_DEVICE_PAGES) * layout.page_bytes
    assert budgets.nvme_bytes // layout.page_bytes > layout.pages_for(tokens + other)


def test_one_request_can_always_be_larger_than_the_device() -> None:
    budgets = choose_budgets(
        LAYOUT, working_set_tokens=130_000, largest_tokens=8_000, max_context=8_000, other_tokens=0
    )
    assert budgets.device_bytes * 1.6 < 8_000 * LAYOUT.token_bytes


def test_few_documents_get_a_device_that_holds_one_of_them() -> None:
    budgets = choose_budgets(
        LAYOUT, working_set_tokens=5 * 1_700, largest_tokens=1_700, max_context=8_000, other_tokens=0
    )
    assert budgets.device_bytes >= 1_700 * 1.2 * LAYOUT.token_bytes


def test_given_budgets_are_kept() -> None:
    budgets = choose_budgets(
        LAYOUT,
        working_set_tokens=20_000,
        largest_tokens=1_900,
        max_context=8_000,
        other_tokens=0,
        device_bytes=99 << 20,
        host_bytes=1 << 30,
    )
    assert (budgets.device_bytes, budgets.host_bytes) == (99 << 20, 1 << 30)


@pytest.mark.parametrize(
    ("device_bytes", "host_bytes", "message"),
    [
        (1, None, "--device-bytes: 1 B is smaller than one page of 16 tokens (720 KiB)"),
        (LAYOUT.page_bytes - 1, None, "--device-bytes: 720 KiB is smaller than one page of 16 tokens (720 KiB)"),
        (LAYOUT.page_bytes * 7, None, "--device-bytes: 4.92 MiB is less than 8 times one page of 16 tokens (720 KiB)"),
        (None, LAYOUT.page_bytes - 1, "--host-bytes: 720 KiB is smaller than one page of 16 tokens (720 KiB)"),
    ],
)
def test_a_budget_below_what_can_work_is_refused(
    device_bytes: int | None, host_bytes: int | None, message: str
) -> None:
    with pytest.raises(UsageProblem) as caught:
        choose_budgets(
            LAYOUT, working_set_tokens=9_999, largest_tokens=99, max_context=8_000, other_tokens=0,
            device_bytes=device_bytes, host_bytes=host_bytes,
        )  # fmt: skip
    assert str(caught.value) == message


def test_the_smallest_budgets_that_work_are_taken() -> None:
    choose_budgets(
        LAYOUT, working_set_tokens=9_999, largest_tokens=99, max_context=8_000, other_tokens=0,
        device_bytes=MIN_DEVICE_PAGES * LAYOUT.page_bytes, host_bytes=LAYOUT.page_bytes,
    )  # fmt: skip


def test_more_memory_than_there_is_is_refused() -> None:
    budgets = Budgets(device_bytes=3 << 30, host_bytes=6 << 30, nvme_bytes=1)
    check_memory(budgets, None, device_is_cpu=True)
    check_memory(budgets, 16 << 30, device_is_cpu=True)
    check_memory(budgets, 10 << 30, device_is_cpu=False)  # the device's memory is its own
    with pytest.raises(UsageProblem, match=r"need 9\.00 GiB of 10\.0 GiB available"):
        check_memory(budgets, 10 << 30, device_is_cpu=True)


def test_more_disk_than_there_is_is_refused(tmp_path: Path) -> None:
    check_disk(tmp_path, 4096)
    with pytest.raises(UsageProblem, match=r"free and the NVMe tier needs 1\.00 EiB"):
        check_disk(tmp_path, 1 << 60)
