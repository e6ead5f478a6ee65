"""What `hicache doctor` says of a store's directory, and the repair. `inspect_directory` reads, this judges."""

import asyncio
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from hicache.tier import Outcome, PageIdentity, PageRead
from hicache.tiers.nvme import DirectoryReport, NvmeTier
from hicache.tiers.nvme.findings import Finding
from hicache.tiers.nvme.geometry import BLOCK
from hicache.tiers.nvme.header import FORGETFUL_VERSION, FORMAT_VERSION
from hicache.tiers.nvme.inspection import FileReport, FileState
from hicache.tiers.nvme.recovery import NO_FILES, NO_LOG
from hicache.tools.checks import Check, Verdict, is_healthy
from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.terminal import printable
from hicache.tools.units import format_bytes, plural

Progress = Callable[[str, int, int], None]
"""Told what is under way, how much of it is done, and of how much in all."""

MAX_READ_BYTES: Final = 16 << 20
"""Pages that a repair reads at once."""
_HASH_BYTES: Final = 4 << 20


# ---- what is said


def diagnose(report: DirectoryReport, status: os.stat_result) -> list[Check]:
    """Every line about a directory; `status` is that of the directory itself."""
    checks = [_directory(status), _lock(report)]
    if not report.is_store:
        checks.append(Check(Verdict.FAIL, "store", "nothing here is a store's", "name the directory of an NVMe tier"))
        return checks
    checks += [_manifest(report), _space(report)]
    if report.is_bare:
        mend = "put the files of a copy back, if anything was there; a start makes new ones, and begins empty"
        checks.append(Check(Verdict.FAIL, "files", NO_FILES, mend))
        return checks
    checks += _segments(report)
    if report.manifest is not None:
        checks += _logs(report)
    if report.recovery is not None and not report.is_refused:
        checks += _recovery(report)
    if report.verified is not None:
        checks += _verified(report)
    if report.others:
        shown = ", ".join(printable(name, 40) for name in report.others[:5])
        more = f" and {len(report.others) - 5:,} more" if len(report.others) > 5 else ""
        checks.append(Check(Verdict.OK, "other files", f"{shown}{more}: not the store's, left alone"))
    if report.problems and is_healthy(checks):
        checks += [Check(Verdict.FAIL, "files", printable(problem)) for problem in report.problems]
    return checks


def _directory(status: os.stat_result) -> Check:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        says = f"belongs to user {status.st_uid}, you are user {os.geteuid()}: the cache refuses it"
        return Check(Verdict.FAIL, "directory", says, f"run as user {status.st_uid}")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        says = f"others may write to it (mode {mode:04o}): the cache refuses it"
        return Check(Verdict.FAIL, "directory", says, "chmod 700, if you trust what lies there")
    return Check(Verdict.OK, "directory", f"yours, mode {mode:04o}")


def _lock(report: DirectoryReport) -> Check:
    if report.holder is None:
        return Check(Verdict.OK, "lock", "not in use")
    says = f"in use by process {report.holder}: the log may have been read while it was written"
    return Check(Verdict.WARN, "lock", says, "look again when it has ended, if something is said to be damaged")


def _manifest(report: DirectoryReport) -> Check:
    file = report.manifest_file
    if report.manifest is not None:
        geometry, shape = report.manifest.geometry, report.manifest.geometry.shape
        return Check(Verdict.OK, "manifest", (
            f"format version {report.version}; {plural(geometry.num_slots, 'slot')} for pages of "
            f"{shape.page_size} tokens, {format_bytes(shape.page_bytes)} in {plural(shape.num_layers, 'layer')}, "
            f"codec {printable(shape.codec_text, 60)}"
        ))  # fmt: skip
    if file is None:
        mend = "put the manifest of a copy back; else the cache begins with an empty store here"
        return Check(Verdict.FAIL, "manifest", "missing", mend)
    if file.state is FileState.FORGETFUL:
        says = f"format version {report.version}, which kept nothing over a restart: the cache begins empty"
        mend = "use another directory, if what lies here is still wanted: the next opening replaces it"
        return Check(Verdict.FAIL, "manifest", says, mend)
    if file.state is FileState.OTHER_VERSION:
        says = f"format version {report.version}, this program knows {FORMAT_VERSION}: the cache refuses the directory"
        return Check(Verdict.FAIL, "manifest", says, "use the program that wrote it, or another directory")
    if file.state is FileState.NOT_OURS:
        says = "not a regular file of yours with one name: the cache sets it aside and begins empty"
        return Check(Verdict.FAIL, "manifest", says, "see who put it there")
    mend = "put the manifest of a copy back; else the cache sets this one aside and begins empty"
    return Check(Verdict.FAIL, "manifest", "damaged", mend)


def _space(report: DirectoryReport) -> Check:
    says = f"the store takes {format_bytes(report.num_bytes)}, {format_bytes(report.free_bytes)} are free"
    if report.manifest is not None:
        missing = report.manifest.geometry.total_bytes - sum(each.allocated_bytes for each in report.segments)
        if missing > max(report.free_bytes, 1 << 20):
            return Check(Verdict.WARN, "space", f"{says}; its files are {format_bytes(missing)} short of their size",
                         "free some space before it is written to")  # fmt: skip
    return Check(Verdict.OK, "space", says)


_MENDS: Final = {
    FileState.MISSING: "opening the store makes a fresh one; its pages are gone",
    FileState.SHORT: "opening the store makes it whole; pages beyond its end are gone",
    FileState.DAMAGED: "opening the store writes its header again",
    FileState.OTHER: "put the right file back; opening the store makes a fresh one",
    FileState.OTHER_VERSION: "use the program that wrote it, or another directory: the cache refuses this one",
    FileState.NOT_OURS: "move it away: it is left alone, and the store makes do without",
}


def _segments(report: DirectoryReport) -> Iterator[Check]:
    sound = [each for each in report.segments if each.state is FileState.WHOLE]
    if sound:
        size = sum(each.num_bytes for each in sound)
        yield Check(Verdict.OK, "segments", f"{plural(len(sound), 'file')} whole, {format_bytes(size)}")
    surplus = [each for each in report.segments if each.state is FileState.SURPLUS]
    if surplus and report.manifest is None:
        says = f"{plural(len(surplus), 'file')} of a store, {format_bytes(sum(each.num_bytes for each in surplus))}"
        if report.is_refused:
            yield Check(Verdict.OK, "segments", f"{says}: left alone, as the cache refuses the directory")
        elif report.version == FORGETFUL_VERSION:
            yield Check(Verdict.WARN, "segments", f"{says}: the next opening replaces them")
        else:
            mend = "put the manifest back before the cache is opened here: it removes them"
            yield Check(Verdict.WARN, "segments", f"{says}: no manifest names them", mend)
    for each in report.segments:
        if each.state is FileState.SURPLUS:
            if report.manifest is not None:
                mend = "nothing: the next opening removes it" if not report.is_refused else ""
                yield Check(Verdict.WARN, printable(each.name), "not one that the manifest names", mend)
        elif each.state is FileState.UNCLEAR:
            yield Check(Verdict.WARN, printable(each.name), "does not begin like a segment: left alone")
        elif each.state is not FileState.WHOLE:
            yield Check(Verdict.FAIL, printable(each.name), _state(each), _MENDS.get(each.state, ""))


def _logs(report: DirectoryReport) -> Iterator[Check]:
    for log in report.logs:
        name, state = printable(log.file.name), log.file.state
        if state is FileState.COUNTS:
            end = "closed properly" if log.is_clean else "not closed: a crash, or still in use"
            says = (
                f"the log that counts: {plural(log.num_frames, 'record')}, {format_bytes(log.used_bytes)} of "
                f"{format_bytes(log.file.num_bytes)}, up to change {log.sequence:,}; {end}"
            )
            yield Check(Verdict.OK, name, says)
            if log.damage:
                yield Check(Verdict.WARN, name, log.damage, "what comes before it is used")
        elif state is FileState.RETIRED and log.file.num_bytes < BLOCK:
            yield Check(Verdict.FAIL, name, "cut off", "put it back from a copy; opening the store makes a fresh one")
        elif state in (FileState.RETIRED, FileState.OLDER):
            yield Check(Verdict.OK, name, "waits for its next turn")
        elif state is FileState.UNFINISHED:
            yield Check(Verdict.OK, name, "begun and not finished, as a crash leaves it; the other one counts")
        else:
            yield Check(Verdict.FAIL, name, _state(log.file), "opening the store makes a fresh one")
    if all(log.file.state is not FileState.COUNTS for log in report.logs):
        mend = "put the logs of a copy back, if anything was there"
        if NO_LOG in report.problems:
            yield Check(Verdict.FAIL, "logs", NO_LOG, mend)
        else:
            says = "none is whole: nothing is durable yet, or both are lost; a start begins with an empty store"
            yield Check(Verdict.WARN, "logs", says, mend)


def _recovery(report: DirectoryReport) -> Iterator[Check]:
    recovery = report.recovery
    assert recovery is not None, "there is a manifest"
    says = f"{plural(recovery.num_pages, 'page')} would be there after a start"
    dropped = {reason: count for reason, count in recovery.dropped.items() if count}
    if dropped:
        reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in dropped.items())
        mend = "nothing: they are computed again when they are asked for"
        yield Check(Verdict.WARN, "recovery", f"{says}; dropped: {reasons}", mend)
    else:
        yield Check(Verdict.OK, "recovery", says)
    if report.num_continuing:
        says = (
            f"{plural(report.num_continuing, 'page')} more, whose beginnings do not lie here: if this is one of "
            "several directories of a tier, they are not lost"
        )
        mend = "open all of them together; opened alone, this one drops these pages"
        yield Check(Verdict.WARN, "continuations", says, mend)
    for sentence in recovery.damage:
        yield Check(Verdict.FAIL, "recovery", printable(sentence), "put the files of a copy back, or start with less")
    if report.write_budget_bytes is not None:
        yield Check(Verdict.OK, "write budget", f"{format_bytes(report.write_budget_bytes)} left")


def _verified(report: DirectoryReport) -> Iterator[Check]:
    verified = report.verified
    assert verified is not None, "pages were read"
    says = f"{plural(verified.num_pages, 'page')} read, {format_bytes(verified.num_bytes)}"
    bad = {finding: count for finding, count in verified.findings.items() if finding is not Finding.OK and count}
    if not bad:
        yield Check(Verdict.OK, "pages", f"{says}; every one verifies")
        return
    reasons = ", ".join(f"{count:,} {finding.value.replace('_', ' ')}" for finding, count in bad.items())
    mend = "they are never served; --repair --copy DIR frees their slots"
    yield Check(Verdict.FAIL, "pages", f"{says}; {sum(bad.values()):,} do not verify: {reasons}", mend)
    for page in verified.examples:
        says = f"slot {page.slot:,}, byte {page.offset:,}: {page.finding.value.replace('_', ' ')}"
        yield Check(Verdict.FAIL, printable(page.segment), says)


def _state(file: FileReport) -> str:
    return printable(file.state.value.replace("_", " ") + file.detail)


# ---- repair


def check_repair(report: DirectoryReport, copy: Path) -> None:
    """Raises `UsageProblem` where a repair cannot be made, or its copy. Creates nothing."""
    directory = Path(report.path).resolve()
    if report.holder is not None:
        raise UsageProblem(f"--repair: {printable(report.path)} is in use by process {report.holder}")
    if report.manifest is None:
        raise UsageProblem("--repair: without a whole manifest of this program's version there is nothing to go by")
    if copy.exists() or not copy.resolve().parent.is_dir():
        raise UsageProblem(f"--copy: {printable(os.fspath(copy))} must not exist yet, in a directory that does")
    if copy.resolve().is_relative_to(directory):
        raise UsageProblem("--copy: the copy cannot lie in the directory that is repaired")
    needed, free = _size_of(directory), shutil.disk_usage(copy.resolve().parent).free
    if needed > free:
        raise UsageProblem(f"--copy: the copy takes {format_bytes(needed)}, {format_bytes(free)} are free")


def copy_aside(directory: Path, copy: Path, progress: Progress) -> None:
    """Copy every file, compare what was copied, and make it durable. Raises `CommandFailed` for a copy that differs."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file() and not path.is_symlink())
    copy.mkdir(mode=0o700)
    for done, name in enumerate(names):
        progress("copying", done, len(names))
        shutil.copy2(directory / name, copy / name)
        with open(copy / name, "rb") as file:
            os.fsync(file.fileno())
        if _digest(directory / name) != _digest(copy / name):
            raise CommandFailed(f"{printable(name)} was not copied right; nothing was altered")
    descriptor = os.open(copy, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    progress("copying", len(names), len(names))


def repair(report: DirectoryReport, progress: Progress) -> int:
    """Open the store, which mends its files, and free the slots of all pages that do not verify. Returns how many.

    Raises `TierUnavailable` and `BadRequest` as opening does.
    """
    return asyncio.run(_repair(report, progress))


async def _repair(report: DirectoryReport, progress: Progress) -> int:
    assert report.manifest is not None, "checked before"
    geometry = report.manifest.geometry
    # As part of a whole: pages whose beginnings lie in another directory of the same cache are not to be dropped.
    tier = NvmeTier.open(
        report.path, layout=geometry.shape, capacity_bytes=geometry.total_bytes, is_whole=False
    )
    num_freed = 0
    try:
        rows, namespaces = tier.unconnected()
        count = max(1, MAX_READ_BYTES // tier.page_bytes)
        buffers = [memoryview(bytearray(tier.page_bytes)) for _ in range(min(count, rows.size))]
        for start in range(0, rows.size, count):
            progress("reading pages", start, rows.size)
            part = rows[start : start + count]
            identities = [
                PageIdentity(namespaces[int(row["namespace"])][0], row["prefix"].tobytes(), row["tokens"].tobytes())
                for row in part
            ]
            reads = [
                PageRead(int(row["slot"]), int(row["generation"]), identity, into)
                for row, identity, into in zip(part, identities, buffers)
            ]
            outcomes = await tier.read(reads)
            if Outcome.ERROR in outcomes:
                raise CommandFailed("the device fails while pages are read; what was freed until now stays freed")
            bad = [outcome is not Outcome.OK for outcome in outcomes]
            if any(bad):
                tier.free(part["slot"][bad].astype("int32"))
                num_freed += sum(bad)
        progress("reading pages", rows.size, rows.size)
    finally:
        await tier.close()
    return num_freed


def _size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file() and not path.is_symlink())


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
    return digest.digest()
