"""`hicache doctor`: says what is there and what is wrong, alters nothing, and repairs only with a copy aside."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.tier import Outcome, PageIdentity, PageRead
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.filling import MANIFEST
from hicache.tiers.nvme.header import checksum
from hicache.tiers.nvme.log import LOG_NAMES
from hicache.tiers.nvme.recovery import NO_FILES, NO_LOG
from hicache.tools.cli import main
from hicache.tools.terminal import printable
from tests.stamps import identity_chain, stamp
from tests.tiers.contract import run, store
from tests.tiers.nvme import SMALL, capacity_for, small_tier

SEGMENT = "hicache-000001.seg"
NUM_PAGES = 7


def make_store(directory: Path) -> list[PageIdentity]:
    """Ten slots in three segments, the first seven with pages of one prompt."""
    identities = identity_chain(NUM_PAGES)

    async def fill() -> None:
        async with small_tier(SMALL, 10, directory=directory) as tier:
            tier.remember(identities[0].namespace, b"namespace" + bytes(8))
            await store(tier, tier.allocate(NUM_PAGES), identities)

    run(fill())
    return identities


def picture(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Every entry with its size, its time and what it holds."""
    found = {".": (0, directory.stat().st_mtime_ns, 0)}
    for path in directory.rglob("*"):
        status = path.lstat()
        content = checksum(path.read_bytes()) if path.is_file() else 0
        found[os.fspath(path.relative_to(directory))] = (status.st_size, status.st_mtime_ns, content)
    return found


def doctor(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a look at a directory, which was not altered."""
    before = picture(directory)
    status = main(["doctor", str(directory), "--json", *options])
    assert picture(directory) == before
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["version"], report["path"]) == ("hicache-doctor", 1, str(directory))
    assert status == (0 if report["healthy"] else 1)
    return status, report


def checks_of(report: dict[str, Any], verdict: str) -> dict[str, str]:
    """What is said with that verdict, by subject."""
    return {check["subject"]: check["says"] for check in report["checks"] if check["verdict"] == verdict}


def damage_page(directory: Path, slot: int) -> None:
    """Flip a bit in the middle of a page."""
    path = directory / f"hicache-{slot // 4:06d}.seg"
    data = bytearray(path.read_bytes())
    data[4096 + slot % 4 * SMALL.slot_bytes + SMALL.header_bytes + 5000] ^= 1
    path.write_bytes(data)


def test_a_healthy_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(tmp_path / "store")
    status, report = doctor(capsys, tmp_path / "store", "--verify")
    assert status == 0
    said = checks_of(report, "ok")
    assert "format version 3; 10 slots" in said["manifest"]
    assert "3 files whole" in said["segments"]
    assert "closed properly" in said[LOG_NAMES[0]]
    assert said["recovery"] == "7 pages would be there after a start"
    assert said["pages"].startswith("7 pages read")
    assert not checks_of(report, "warn")

    assert main(["doctor", str(tmp_path / "store")]) == 0
    printed = capsys.readouterr().out
    assert "7 pages would be there after a start" in printed
    assert "read" not in printed.replace("already", "")


def test_one_in_use_is_shown_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def look() -> None:
        async with small_tier(SMALL, 10, directory=tmp_path / "store"):
            status, report = doctor(capsys, tmp_path / "store")
            assert status == 0
            assert f"in use by process {os.getpid()}" in checks_of(report, "warn")["lock"]
            assert "logs" not in checks_of(report, "warn"), "a new store has an empty log"
            assert main(["doctor", str(tmp_path / "store"), "--repair", "--copy", str(tmp_path / "copy")]) == 2
            assert f"in use by process {os.getpid()}" in capsys.readouterr().err
            assert not (tmp_path / "copy").exists()

    run(look())


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _of_version(path: Path, version: int) -> None:
    text = path.read_bytes().splitlines(keepends=True)
    _with_checksum(path, text[0].replace(b" 3\n", b" %d\n" % version) + text[1])


def _with_checksum(path: Path, body: bytes) -> None:
    path.write_bytes(body + f"crc32c {checksum(body):08x}\n".encode())


@pytest.mark.parametrize(
    ("harm", "subject", "says"),
    [
        (lambda path: _flip(path / MANIFEST), "manifest", "damaged"),
        (lambda path: (path / MANIFEST).unlink(), "manifest", "missing"),
        (lambda path: _of_version(path / MANIFEST, 9), "manifest", "format version 9"),
        (lambda path: (path / SEGMENT).unlink(), SEGMENT, "missing"),
        (lambda path: os.truncate(path / SEGMENT, 8192), SEGMENT, "short"),
        (lambda path: (path / LOG_NAMES[0]).unlink(), LOG_NAMES[0], "missing"),
        (lambda path: os.truncate(path / LOG_NAMES[0], 0), LOG_NAMES[0], "cut off"),
        (lambda path: path.chmod(0o777), "directory", "others may write to it (mode 0777)"),
    ],
)
def test_damage_is_named(
    harm: Callable[[Path], object], subject: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_store(tmp_path / "store")
    harm(tmp_path / "store")
    status, report = doctor(capsys, tmp_path / "store", "--verify")
    assert status == 1
    assert says in checks_of(report, "fail")[subject]


def test_logs_that_are_lost_are_no_new_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(tmp_path / "store")
    for name in LOG_NAMES:
        path = tmp_path / "store" / name
        path.write_bytes(bytes(path.stat().st_size))
    status, report = doctor(capsys, tmp_path / "store")
    assert status == 1
    assert checks_of(report, "fail") == {"logs": NO_LOG}
    # Nothing was ever written to this one.
    for path in (tmp_path / "store").glob("*.seg"):
        path.write_bytes(path.read_bytes()[:4096] + bytes(path.stat().st_size - 4096))
    status, report = doctor(capsys, tmp_path / "store")
    assert status == 0
    assert "nothing is durable yet" in checks_of(report, "warn")["logs"]


def test_a_manifest_alone_is_one_problem_for_the_doctor_and_one_line_for_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "store"
    make_store(directory)
    for path in directory.iterdir():
        if path.name != "hicache.manifest":
            path.unlink()
    status, report = doctor(capsys, directory)
    assert status == 1
    assert checks_of(report, "fail") == {"files": NO_FILES}
    assert not checks_of(report, "warn")

    async def start() -> None:
        async with small_tier(SMALL, 10, directory=directory) as tier:
            assert tier.num_free == 10

    with caplog.at_level("INFO"):
        run(start())
    said = [record.getMessage() for record in caplog.records if record.name.startswith("hicache.")]
    assert said == [f"{directory}: {NO_FILES}"]
    status, _ = doctor(capsys, directory)
    assert status == 0


@pytest.mark.parametrize("manifest", ["gone", "damaged", "senseless", "version 1", "version 9"])
def test_segments_without_a_manifest_are_not_said_to_be_nothing(
    manifest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "store"
    make_store(directory)
    match manifest:
        case "gone":
            (directory / MANIFEST).unlink()
        case "damaged":
            _flip(directory / MANIFEST)
        case "senseless":
            _with_checksum(directory / MANIFEST, b"hicache-nvme 3\n{}\n")
        case _:
            _of_version(directory / MANIFEST, int(manifest[-1]))
    status, report = doctor(capsys, directory)
    assert status == 1
    said = checks_of(report, "ok" if manifest == "version 9" else "warn")
    assert said["segments"].startswith("3 files of a store, ")
    assert {
        "gone": "no manifest names them",
        "damaged": "no manifest names them",
        "senseless": "no manifest names them",
        "version 1": "the next opening replaces them",
        "version 9": "left alone, as the cache refuses the directory",
    }[manifest] in said["segments"]
    mends = " ".join(check["mend"] for check in report["checks"])
    assert "nothing: the next opening removes it" not in mends
    if manifest == "version 1":
        assert "the cache begins empty" in checks_of(report, "fail")["manifest"]
    if "version" not in manifest:
        assert "put the manifest back before the cache is opened here" in mends


def test_one_of_several_directories_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identities = identity_chain(NUM_PAGES)

    async def fill() -> None:
        async with small_tier(SMALL, 10, directory=tmp_path / "store", is_whole=False) as tier:
            tier.remember(identities[0].namespace, b"namespace" + bytes(8))
            await store(tier, tier.allocate(5), [*identities[:2], *identities[4:]])

    run(fill())
    status, report = doctor(capsys, tmp_path / "store", "--verify")
    assert status == 0
    said = checks_of(report, "ok")
    assert said["recovery"] == "2 pages would be there after a start"
    assert said["pages"].startswith("5 pages read")
    [continuing] = checks_of(report, "warn").items()
    assert continuing[0] == "continuations"
    assert continuing[1].startswith("3 pages more, whose beginnings do not lie here")
    assert continuing[1].endswith("they are not lost")


def test_a_damaged_page_is_found_by_reading_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(tmp_path / "store")
    damage_page(tmp_path / "store", 5)
    assert doctor(capsys, tmp_path / "store")[0] == 0
    status, report = doctor(capsys, tmp_path / "store", "--verify")
    assert status == 1
    failed = checks_of(report, "fail")
    assert "1 do not verify: 1 bad payload" in failed["pages"]
    assert failed[SEGMENT].startswith("slot 5, byte ")
    assert main(["doctor", str(tmp_path / "store"), "--verify"]) == 1
    assert "--repair --copy DIR" in capsys.readouterr().out


def test_a_directory_without_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "photo\x1b[2J.jpg"
    (tmp_path / name).write_bytes(b"not ours")
    status, report = doctor(capsys, tmp_path)
    assert status == 1
    assert checks_of(report, "fail")["store"] == "nothing here is a store's"
    make_store(tmp_path)
    status, report = doctor(capsys, tmp_path)
    assert status == 1 if tmp_path.stat().st_mode & 0o022 else status == 0
    assert printable(name) in checks_of(report, "ok")["other files"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--verify"], "name DIR"),
        (["store", "--config", "file"], "leave DIR out"),
        (["missing"], "missing is not a directory"),
        (["file"], "file is not a directory"),
        (["store", "--repair"], "--repair and --copy DIR go together"),
        (["store", "--copy", "copy"], "--repair and --copy DIR go together"),
        (["store", "--repair", "--copy", "file"], "--copy: file must not exist yet"),
        (["store", "--repair", "--copy", "nowhere/copy"], "--copy: nowhere/copy must not exist yet"),
        (["store", "--repair", "--copy", "store/copy"], "cannot lie in the directory that is repaired"),
        (["empty", "--repair", "--copy", "copy"], "there is nothing to go by"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_store(tmp_path / "store")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    before = picture(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *arguments]) == 2
    assert picture(tmp_path) == before
    printed = capsys.readouterr()
    assert printed.out == ""
    assert problem in printed.err
    assert printed.err.count("\n") == 1


def test_a_repair_copies_first_and_frees_what_does_not_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, copy = tmp_path / "store", tmp_path / "copy"
    identities = make_store(directory)
    damage_page(directory, 5)
    before = {name: (size, content) for name, (size, _, content) in picture(directory).items()}
    # What is damaged does not come back, nor does what continues it.
    assert main(["doctor", str(directory), "--repair", "--copy", str(copy)]) == 0
    printed = capsys.readouterr()
    assert "1 slots freed" in printed.err
    assert "5 pages would be there after a start" in printed.out
    assert {name: (size, content) for name, (size, _, content) in picture(copy).items()} == before

    async def look() -> None:
        capacity_bytes, segment_bytes = capacity_for(SMALL, 10, slots_per_segment=4)
        tier = NvmeTier.open(directory, layout=SMALL, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes)
        try:
            (recovered,) = tier.recovered()
            assert recovered.slots.tolist() == [0, 1, 2, 3, 4]
            for slot, identity in zip(recovered.slots.tolist(), identities, strict=False):
                into = np.zeros(tier.page_bytes, np.uint8)
                read = PageRead(slot, tier.generation(slot), identity, into.data)
                assert await tier.read([read]) == [Outcome.OK]
                assert np.array_equal(into, stamp(identity, tier.page_bytes))
        finally:
            await tier.close()

    run(look())


def test_a_copy_that_differs_stops_the_repair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "store"
    make_store(directory)
    damage_page(directory, 5)
    before = picture(directory)

    def copy_badly(source: Path, target: Path) -> None:
        data = bytearray(source.read_bytes())
        data[-1] ^= 1
        target.write_bytes(data)

    monkeypatch.setattr(shutil, "copy2", copy_badly)
    assert main(["doctor", str(directory), "--repair", "--copy", str(tmp_path / "copy")]) == 1
    assert "nothing was altered" in capsys.readouterr().err
    assert picture(directory) == before
