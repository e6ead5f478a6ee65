"""Logs and manifests that say, with right checksums, what no program writes: they may cost pages, and never what is
accepted later, nor an error without words."""

import itertools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import TierUnavailable
from hicache.tiers.nvme import inspect_directory
from hicache.tiers.nvme.filling import MANIFEST
from hicache.tiers.nvme.header import checksum
from hicache.tiers.nvme.io import FileIO
from hicache.tiers.nvme.log import LOG_NAMES
from hicache.tiers.nvme.manifest import decode_manifest
from hicache.tiers.nvme.records import LOG_HEADER_BYTES, RecordType
from tests.cases.client import Client, P, check_at_rest, opened, seam, sequence

LENGTH = 4 * P
LETTERS = "abcdef"

HEAD_BYTES, LENGTH_AT, TYPE_AT, SEQUENCE_AT, EPOCH_AT = 40, 4, 8, 16, 24
NUMBER_AT = 48
"""Of a log's number in its header."""
PAGE_GENERATION_AT = FREED_GENERATION_AT = 8
"""In the first row."""

Forgery = Callable[[bytearray], None]


def frames(log: bytearray) -> list[tuple[int, int, int]]:
    """Where each frame of a log begins and ends, and its type."""
    found, at, epoch = [], LOG_HEADER_BYTES, bytes(log[32:48])
    while bytes(log[at + EPOCH_AT : at + HEAD_BYTES]) == epoch:
        end = at + HEAD_BYTES - -struct.unpack_from("<I", log, at + LENGTH_AT)[0] // 8 * 8
        found.append((at, end, struct.unpack_from("<H", log, at + TYPE_AT)[0]))
        at = end
    return found


def in_frames(kind: RecordType | None, change: Callable[[bytearray, int], None], *, last: bool = False) -> Forgery:
    """Alter frames of one type, or of all types, or only the last of these."""

    def forge(log: bytearray) -> None:
        chosen = [frame for frame in frames(log) if kind is None or frame[2] == kind]
        for at, end, _ in chosen[-1:] if last else chosen:
            change(log, at)
            struct.pack_into("<I", log, at, checksum(bytes(log[at + 4 : end])))

    return forge


def in_header(number: int) -> Forgery:
    def forge(log: bytearray) -> None:
        struct.pack_into("<Q", log, NUMBER_AT, number)
        crc_at = LOG_HEADER_BYTES - 4
        struct.pack_into("<I", log, crc_at, checksum(bytes(log[:crc_at])))

    return forge


def put(code: str, offset: int, value: int) -> Callable[[bytearray, int], None]:
    return lambda log, at: struct.pack_into(code, log, at + offset, value)


def flip(offset: int) -> Callable[[bytearray, int], None]:
    def change(log: bytearray, at: int) -> None:
        log[at + offset] ^= 1

    return change


def name_other_number(log: bytearray, at: int) -> None:
    """Namespaces and pages by the last number that there is."""
    kind = struct.unpack_from("<H", log, at + TYPE_AT)[0]
    if kind in (RecordType.NAMESPACE, RecordType.PAGES):
        struct.pack_into("<I", log, at + HEAD_BYTES + (0 if kind == RecordType.NAMESPACE else 4), 2**32 - 1)


NEAR_THE_END = [2**61 - 1, 2**61, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
FORGERIES: dict[str, Forgery] = {
    "record": in_frames(RecordType.NAMESPACE, flip(HEAD_BYTES + 40 + 9)),
    "digest": in_frames(RecordType.NAMESPACE, flip(HEAD_BYTES + 8)),
    "namespace number": in_frames(None, name_other_number),
    "budget": in_frames(RecordType.BUDGET, put("<q", HEAD_BYTES, -(2**63))),
}
for value in NEAR_THE_END:
    FORGERIES |= {
        f"last sequence {value}": in_frames(None, put("<Q", SEQUENCE_AT, value), last=True),
        f"sequence {value}": in_frames(None, put("<Q", SEQUENCE_AT, value)),
        f"log number {value}": in_header(value),
        f"page generation {value}": in_frames(RecordType.PAGES, put("<Q", HEAD_BYTES + PAGE_GENERATION_AT, value)),
        f"freed generation {value}": in_frames(RecordType.FREED, put("<Q", HEAD_BYTES + FREED_GENERATION_AT, value)),
    }


@pytest.mark.parametrize("name", FORGERIES)
def test_what_is_accepted_after_a_forged_log_survives(name: str, tmp_path: Path) -> None:
    budget: dict[str, Any] = {"nvme_write_bytes_per_day": 1 << 40} if name == "budget" else {}
    with opened(tmp_path, nvme=16, **budget) as cache:
        client = Client(cache)
        for letter in LETTERS:  # more than there is room for: slots are freed, too
            client.insert(sequence(ord(letter), LENGTH))
            client.persist(sequence(ord(letter), LENGTH))
    num_forged = 0
    for each in LOG_NAMES:
        log = bytearray((tmp_path / each).read_bytes())
        if frames(log):
            before = bytes(log)
            FORGERIES[name](log)
            num_forged += bytes(log) != before
            (tmp_path / each).write_bytes(log)
    assert num_forged, "nothing was forged"
    for letter in "xy":
        # Twice: what the first opening makes of a forged number must be something that the second one believes.
        with opened(tmp_path, nvme=16, **budget) as cache:
            client = Client(cache)
            client.read(sequence(ord("f"), LENGTH))
            client.insert(sequence(ord("e"), LENGTH))
            client.insert(sequence(ord(letter), LENGTH))
            promised = {document: client.persist(sequence(ord(document), LENGTH)) for document in "e" + letter}
            check_at_rest(cache)
        with opened(tmp_path, nvme=16, **budget) as cache:
            for document, num_tokens in promised.items():
                assert Client(cache).read_there(sequence(ord(document), LENGTH)) >= num_tokens
    assert promised == {"e": LENGTH, "y": LENGTH}, "forged numbers wear a store out for one opening at most"


class BrokenSync(FileIO):
    """Raises what no device raises when a segment is synced, while `is_broken`."""

    def __init__(self) -> None:
        self.is_broken = False

    def fdatasync(self, fd: int) -> None:
        if self.is_broken and os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
            raise ValueError("injected")
        super().fdatasync(fd)


def test_rounds_that_fail_for_whatever_reason_are_tried_again_at_leisure(tmp_path: Path) -> None:
    files = BrokenSync()
    with seam(files), opened(tmp_path) as cache:
        client = Client(cache)
        client.insert(sequence(ord("a"), LENGTH))
        assert client.persist(sequence(ord("a"), LENGTH)) == LENGTH
        files.is_broken = True
        client.insert(sequence(ord("b"), LENGTH))
        for _ in range(2):
            with pytest.raises(TierUnavailable, match="injected"):
                client.persist(sequence(ord("b"), LENGTH))
        assert cache.stats()["tiers"]["nvme"]["counters"]["commit.logs"] < 10
        files.is_broken = False
        assert client.persist(sequence(ord("b"), LENGTH)) == LENGTH
    with opened(tmp_path) as cache:
        for letter in "ab":
            assert Client(cache).read_there(sequence(ord(letter), LENGTH)) == LENGTH


# ---- manifests


def manifest_of(version: str, fields: str) -> bytes:
    """A manifest with right checksum that says this."""
    text = f"hicache-nvme {version}\n{fields}\n".encode()
    return text + f"crc32c {checksum(text):08x}\n".encode()


def small_store(directory: Path) -> dict[str, Any]:
    """A new store; the fields of its manifest."""
    with opened(directory, nvme=16):
        pass
    fields: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes().split(b"\n")[1])
    return fields


@pytest.mark.parametrize("version", ["9", "1" * 18, "1" * 19, "1" * 4301, "9" * 60_000])
def test_a_format_version_of_any_length_is_refused_in_words(version: str, tmp_path: Path) -> None:
    fields = json.dumps(small_store(tmp_path), separators=(",", ":"))
    (tmp_path / MANIFEST).write_bytes(manifest_of(version, fields))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TierUnavailable, match="format version"):
        opened(tmp_path, nvme=16)
    assert any("format version" in problem for problem in inspect_directory(tmp_path).problems)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("version", ["", "+3", "-3", "03", "3.0", "³", "3 3", "three"])
def test_what_is_no_format_version_is_a_damaged_manifest(version: str, tmp_path: Path) -> None:
    fields = json.dumps(small_store(tmp_path), separators=(",", ":"))
    (tmp_path / MANIFEST).write_bytes(manifest_of(version, fields))
    assert not inspect_directory(tmp_path).is_healthy
    with opened(tmp_path, nvme=16) as cache:
        assert cache.recovery.pages == 0
    assert inspect_directory(tmp_path).is_healthy


NONSENSE = [
    "null", "true", "0", "-1", "0.5", "1e400", "NaN", '"x"', '"lz4"', "[]", "{}", "[null]", "[0]", "[[1]]", "[1e400]",
    "9" * 4299, "9" * 5000, f"[{'9' * 4299}]", str(2**63), '"\\ud800"', "[" * 5000 + "]" * 5000,
]  # fmt: skip


def test_fields_that_make_no_sense_are_a_damaged_manifest(tmp_path: Path) -> None:
    fields = {name: json.dumps(value, separators=(",", ":")) for name, value in small_store(tmp_path).items()}
    right = (tmp_path / MANIFEST).read_bytes()
    assert decode_manifest(right) is not None

    def forged(changed: dict[str, str]) -> bytes:
        return manifest_of("3", "{" + ",".join(f'"{name}":{value}' for name, value in (fields | changed).items()) + "}")

    assert forged({}) == right
    for name, first in itertools.product(fields, NONSENSE):
        for other, second in itertools.product(("codec", "stored_bytes"), NONSENSE):
            assert decode_manifest(forged({name: first, other: second})) is None
    for text in NONSENSE:
        assert decode_manifest(manifest_of("3", text)) is None
