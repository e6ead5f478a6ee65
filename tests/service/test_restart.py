"""The embedded cache over real restarts: closed, killed, opened with other budgets. Bytes are checked by attention."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.errors import BadRequest, TierUnavailable
from hicache.service.compose import HiCache
from hicache.tier import NVME
from hicache.tiers.nvme import NvmeTier
from hicache.writing import Flushed
from tests.service.test_compose import LAYOUT, MODEL, PAGE, Model, assert_close, open_cache, prompt
from tests.tiers.faulty_files import Fault, FaultyFiles

OTHER = replace(MODEL, tenant="another")


def compute(cache: HiCache, document: int, length: int) -> int:
    """Run a prompt and compare what its last step attends to; returns the tokens that were found."""
    model, tokens = Model(), prompt(document, length)
    with cache.sequence(MODEL, tokens) as sequence:
        found = sequence.num_cached
        outputs = model.run(sequence, tokens)
    assert_close(outputs, model.expected(tokens, (len(tokens) - found - 1) % 64 + 1))
    return found


def test_a_restart_finds_what_was_persisted(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with open_cache(tmp_path) as cache:
        assert cache.recovery.pages == 0
        assert compute(cache, 1, 150) == 0
        persisted = cache.persist(MODEL, prompt(1, 150))
        assert persisted.num_tokens == 144
        assert cache.durability is not None
        assert cache.durability.durable >= persisted.number
        assert cache.persist(OTHER, prompt(1, 150)).num_tokens == 0
    with HiCache.open(
        LAYOUT, device_bytes=16 * LAYOUT.page_bytes, host_bytes=32 * LAYOUT.page_bytes,
        nvme_dir=tmp_path / "nvme", nvme_bytes=256 * 2 * 49152, progress=lambda *told: seen.append(told),
    ) as cache:
        assert cache.recovery.pages == 9
        assert cache.stats()["recovery"]["pages"] == 9
        assert cache.match(MODEL, prompt(1, 150)).by_tier == {NVME: 144}
        assert compute(cache, 1, 150) == 144
        assert ("pages", 9, 9) in seen


def test_what_was_flushed_does_not_come_back(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        for document in (1, 2):
            compute(cache, document, 100)
            cache.persist(MODEL, prompt(document, 100))
        assert cache.flush(MODEL) == Flushed(num_held=0, is_durable=True)
        assert cache.match(MODEL, prompt(1, 100)).num_tokens == 0
        compute(cache, 3, 100)
        assert cache.persist(MODEL, prompt(3, 100)).num_tokens == 96
    with open_cache(tmp_path) as cache:
        assert cache.recovery.pages == 6
        assert compute(cache, 1, 100) == 0
        assert compute(cache, 3, 100) == 96


def test_another_budget_keeps_what_fits(tmp_path: Path) -> None:
    """Case C21: the smaller cap holds from the first moment, and what is left is right."""
    with open_cache(tmp_path, nvme_pages=64) as cache:
        for document in range(4):
            compute(cache, document, 150)
            assert cache.persist(MODEL, prompt(document, 150)).num_tokens == 144
    with open_cache(tmp_path, nvme_pages=16) as cache:
        tier = cache.stats()["tiers"]["nvme"]
        assert tier["used_pages"] == cache.recovery.pages <= tier["capacity_pages"] <= 32
        for document in range(4):
            compute(cache, document, 150)
    with open_cache(tmp_path, nvme_pages=64) as cache:
        for document in range(4):
            compute(cache, document, 150)


def test_a_codec_of_the_disk_changes_no_byte(tmp_path: Path) -> None:
    def opened() -> HiCache:
        return HiCache.open(
            LAYOUT, device_bytes=16 * LAYOUT.page_bytes, host_bytes=32 * LAYOUT.page_bytes,
            nvme_dir=tmp_path / "nvme", nvme_bytes=256 * 2 * 49152, nvme_codec="lz4",
        )

    with opened() as cache:
        compute(cache, 1, 150)
        assert cache.persist(MODEL, prompt(1, 150)).num_tokens == 144
    with opened() as cache:
        assert compute(cache, 1, 150) == 144
    with pytest.raises(TierUnavailable, match="codec"):
        open_cache(tmp_path)


def test_several_directories_are_one_tier_over_a_restart(tmp_path: Path) -> None:
    def opened() -> HiCache:
        return HiCache.open(
            LAYOUT, device_bytes=16 * LAYOUT.page_bytes, host_bytes=32 * LAYOUT.page_bytes,
            nvme_dir=[tmp_path / "one", tmp_path / "two"], nvme_bytes=256 * 2 * 49152,
        )

    with opened() as cache:
        for document in range(4):
            compute(cache, document, 150)
            assert cache.persist(MODEL, prompt(document, 150)).num_tokens == 144
        assert cache.flush(OTHER) == Flushed(0, is_durable=True)
    assert all(any((tmp_path / name).iterdir()) for name in ("one", "two"))
    with opened() as cache:
        assert cache.recovery.pages == 36
        for document in range(4):
            assert compute(cache, document, 150) == 144


@pytest.mark.parametrize("directories", [[], [""], ["store", "store"], ["store", "./store"], ["store"] * 65])
def test_directories_that_cannot_be_are_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directories: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadRequest, match="nvme_dir"):
        HiCache.open(LAYOUT, device_bytes=1 << 20, host_bytes=1 << 20, nvme_dir=directories, nvme_bytes=1 << 30)
    assert not any(tmp_path.iterdir())


def test_who_has_no_nvme_is_told(tmp_path: Path) -> None:
    with open_cache(tmp_path, nvme_pages=None) as cache:
        compute(cache, 1, 40)
        with pytest.raises(TierUnavailable, match="survives"):
            cache.persist(MODEL, prompt(1, 40))
        assert cache.durability is None
        assert cache.stats()["durability"] is None
        assert cache.flush() == Flushed(0, is_durable=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("nvme_min_free_bytes", -1),
        ("nvme_min_free_bytes", 1.5),
        ("nvme_write_bytes_per_day", 0),
        ("nvme_write_bytes_per_day", LAYOUT.page_bytes - 1),
        ("nvme_codec", "zip"),
        ("nvme_codec", "exponent-zstd"),
    ],
)
def test_budgets_out_of_bounds_are_refused_before_anything_is_made(tmp_path: Path, option: str, value: object) -> None:
    with pytest.raises(BadRequest, match=option):
        HiCache.open(
            LAYOUT, device_bytes=1 << 20, host_bytes=1 << 20, nvme_dir=tmp_path / "nvme", nvme_bytes=1 << 30,
            **{option: value},  # type: ignore[arg-type]  # what is wrong about it is the point
        )
    assert not (tmp_path / "nvme").exists()


CHILD = """
import json, sys
from pathlib import Path
from tests.service.test_restart import compute, open_cache
from tests.service.test_compose import MODEL, prompt
number = int(sys.argv[2])
with open_cache(Path(sys.argv[1])) as cache:
    for document in range(100 * number, 100 * number + 10):
        compute(cache, document, 100)
        persisted = cache.persist(MODEL, prompt(document, 100))
        print(json.dumps([document, persisted.num_tokens]), flush=True)
    sys.stdin.read()
"""
"""Makes prompts durable, fewer in three rounds than the tier has room for, and then waits to be killed."""


def test_a_killed_process_loses_nothing_that_was_durable(tmp_path: Path) -> None:
    durable: dict[int, int] = {}
    for number in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdout is not None
        with child:
            for _ in range(4 + number):
                document, num_tokens = json.loads(child.stdout.readline())
                durable[document] = num_tokens
            os.kill(child.pid, signal.SIGKILL)
        with open_cache(tmp_path) as cache:
            for document, num_tokens in durable.items():
                assert num_tokens == 96
                assert cache.match(MODEL, prompt(document, 100)).num_tokens == num_tokens
            assert cache.recovery.orphan_pages == cache.recovery.foreign_pages == 0
            # Beyond what was said there may be more; whatever it is, it is right.
            for document in [*durable][-3:]:
                assert compute(cache, document, 100) >= PAGE


def test_a_disk_that_fails_costs_hits_and_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FaultyFiles(counts=lambda name: name == "preadv")
    opening = NvmeTier.open
    monkeypatch.setattr(NvmeTier, "open", lambda directory, **options: opening(directory, files=files, **options))
    with open_cache(tmp_path) as cache:
        for document in range(7):
            compute(cache, document, 150)
        assert cache.match(MODEL, prompt(0, 150)).by_tier == {NVME: 144}
        files.arm(Fault.EIO, 1, lasting=True)
        assert compute(cache, 0, 150) == 0
        assert cache.stats()["counters"]["corrupt_pages"] == {}
        files.heal()
        assert cache.match(MODEL, prompt(1, 150)).by_tier == {NVME: 144}
        assert compute(cache, 1, 150) == 144


def test_a_disk_that_fails_under_a_step_fails_the_step_and_takes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context streams from NVMe, as nothing else can hold it."""
    files = FaultyFiles(counts=lambda name: name == "preadv")
    opening = NvmeTier.open
    monkeypatch.setattr(NvmeTier, "open", lambda directory, **options: opening(directory, files=files, **options))
    tokens, model = [*prompt(3, 800), 1], Model()
    with open_cache(tmp_path, device_pages=8, host_pages=12) as cache:
        compute(cache, 3, 800)
        with cache.sequence(MODEL, tokens) as sequence:
            files.arm(Fault.EIO, 1, lasting=True)
            with pytest.raises(TierUnavailable, match="could not be read"):
                model.run(sequence, tokens)
            with cache.sequence(MODEL, tokens) as again:
                assert again.num_cached < 800
            files.heal()
            assert_close(model.run(sequence, tokens), model.expected(tokens, 1))
        assert cache.stats()["counters"]["corrupt_pages"] == {}
