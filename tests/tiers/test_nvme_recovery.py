"""What is read from damaged logs: a state that the store once had, or nothing; never a page in a wrong place."""

import functools
import hashlib
import random
import struct
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.tier import PageIdentity
from hicache.tiers.nvme.geometry import Geometry, PageShape
from hicache.tiers.nvme.index import Index
from hicache.tiers.nvme.io import FileIO
from hicache.tiers.nvme.log import LogFile
from hicache.tiers.nvme.reading import read_log
from hicache.tiers.nvme.records import (
    Record,
    RecordType,
    Rows,
    freed_records,
    log_bytes,
    namespace_record,
    pages_records,
    row_dtype,
)
from hicache.tiers.nvme.recovery import Recovered, connect, recover
from tests.stamps import identity_chain

STORE = bytes(range(16))
SHAPE = PageShape((8, 4), 4)
NUM_SLOTS = 12
GEOMETRY = Geometry(SHAPE, slots_per_segment=5, num_slots=NUM_SLOTS)
PRESENT = np.array([5, 5, 2])
RECORD = b"namespace" + bytes(8)
"""The record whose digest the namespace of `identity_chain` is."""

State = frozenset[tuple[int, int, bytes, bytes]]
"""Slot, generation, prefix and tokens of every page that is offered."""


class MemoryFiles(FileIO):
    """Files whose descriptors are places in a list of bytes."""

    def __init__(self, contents: Sequence[bytes] = ()) -> None:
        self.contents = [bytearray(content) for content in contents]

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = 0
        for buffer in buffers:
            piece = self.contents[fd][offset + done : offset + done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        for buffer in buffers:
            self.contents[fd][offset : offset + len(buffer)] = buffer
            offset += len(buffer)
        return sum(map(len, buffers))

    def fdatasync(self, fd: int) -> None:
        pass


def state_of(recovered: Recovered) -> State:
    return frozenset(
        (int(row["slot"]), int(row["generation"]), row["prefix"].tobytes(), row["tokens"].tobytes())
        for row in recovered.rows
    )


def recovered_from(*logs: bytes) -> Recovered:
    return recover(MemoryFiles(logs), list(range(len(logs))), STORE, GEOMETRY, PRESENT, lambda _done, _total: None)


@functools.cache
def history() -> tuple[bytes, list[int], list[State]]:
    """A log of thirty random rounds of frees and pages; where each record ends, and what the log says up to there."""
    chance = random.Random(3)
    files = MemoryFiles([bytes(log_bytes(GEOMETRY))])
    log = LogFile(files, 0, store=STORE, num_bytes=log_bytes(GEOMETRY))
    log.begin(1)
    log.append([namespace_record(0, identity_chain(1)[0].namespace, RECORD)], 0)
    log.end_checkpoint(0)
    index = Index(SHAPE, NUM_SLOTS)
    chains = [identity_chain(6, seed=seed) for seed in range(4)]
    generations, held = [0] * NUM_SLOTS, dict[int, PageIdentity]()
    ends, states = [log.position], [frozenset[tuple[int, int, bytes, bytes]]()]
    for number in range(1, 31):
        emptied = [slot for slot in held if chance.random() < 0.2]
        for slot in emptied:
            del held[slot]
            generations[slot] += 1
        if emptied:
            log.append(freed_records(np.array(emptied), np.array([generations[slot] for slot in emptied])), number)
            ends.append(log.position)
            states.append(_closed(held, generations))
        written = []
        for slot in chance.sample(range(NUM_SLOTS), 4):
            chain = chance.choice(chains)
            free = [identity for identity in chain if identity not in held.values()]
            if slot not in held and slot not in emptied and free:
                held[slot] = free[0]
                index.record(slot, generations[slot], 0, free[0], (1, number, 2))
                written.append(slot)
        if written:
            log.append(pages_records(index.rows(np.array(written, np.int64))), number)
            ends.append(log.position)
            states.append(_closed(held, generations))
    return bytes(files.contents[0]), ends, states


def _closed(held: dict[int, PageIdentity], generations: Sequence[int]) -> State:
    """The pages that have their whole path, by comparing tokens, not digests."""
    found = set()
    for seed in range(4):
        for identity in identity_chain(6, seed=seed):
            slot = next((slot for slot, other in held.items() if other == identity), None)
            if slot is None:
                break
            found.add((slot, generations[slot], identity.prefix, identity.tokens))
    return frozenset(found)


def test_the_history_has_what_the_tests_need() -> None:
    _, _, states = history()
    assert len(set(states)) > 15
    assert any(len(state) > 6 for state in states)


def test_every_round_comes_back_as_it_was() -> None:
    log, ends, states = history()
    for end, state in zip(ends, states, strict=True):
        recovered = recovered_from(log[:end] + bytes(len(log) - end))
        assert state_of(recovered) == state
        assert recovered.damage == []
        assert [run.namespace for run in recovered.runs] == [RECORD] * len(recovered.runs)


@pytest.mark.parametrize("tail", ["nothing", "zeros", "ones", "random", "an older log"])
def test_c24_a_log_cut_at_any_byte_gives_the_rounds_before(tail: str) -> None:
    """C24: for every byte of the last records, and what a file may hold behind a tear."""
    log, ends, states = history()
    rest = {
        "nothing": b"",
        "zeros": bytes(4096),
        "ones": b"\xff" * 4096,
        "random": random.Random(1).randbytes(4096),
        "an older log": _other_epoch(log[4096 : ends[-1]]),
    }[tail]
    positions = {*range(ends[-3], ends[-1], 3), *(end + more for end in ends for more in (-1, 0, 1))}
    for position in sorted(positions):
        if 4096 <= position <= ends[-1]:
            data = log[:position] + rest
            # What was cut off and what took its place may begin alike.
            same = next((at for at in range(position, ends[-1]) if data[at : at + 1] != log[at : at + 1]), ends[-1])
            last = sum(end <= same for end in ends) - 1
            assert state_of(recovered_from(data)) == (states[last] if last >= 0 else frozenset()), position


def _other_epoch(frames: bytes) -> bytes:
    """The same frames in another life of the file: none of them parses."""
    return frames.replace(history()[0][32:48], b"\xee" * 16)


@given(bits=st.lists(st.integers(0, 2**31), min_size=1, max_size=8))
@settings(max_examples=400, deadline=None)
def test_c24_flipped_bits_give_a_state_that_was_or_nothing(bits: list[int]) -> None:
    log, ends, states = history()
    damaged = bytearray(log[: ends[-1]])
    places = [bit % (8 * len(damaged)) for bit in bits]
    for place in places:
        damaged[place // 8] ^= 1 << place % 8
    recovered = recovered_from(bytes(damaged))
    first = min((place // 8 for place in places if damaged[place // 8] != log[place // 8]), default=ends[-1])
    if first < 4096:
        assert state_of(recovered) == frozenset()
        return
    # What lies before the damage is as it was; nothing else is offered than what was there then.
    last = sum(end <= first for end in ends) - 1
    assert state_of(recovered) == (states[last] if last >= 0 else frozenset())
    if first < ends[-2]:
        assert recovered.damage, "damage in the middle is stated"


def test_the_whole_log_with_the_higher_number_counts() -> None:
    log, _, states = history()
    files = MemoryFiles([bytes(log_bytes(GEOMETRY))])
    newer = LogFile(files, 0, store=STORE, num_bytes=log_bytes(GEOMETRY))
    newer.begin(2)
    unfinished = bytes(files.contents[0])
    newer.end_checkpoint(99)
    whole = bytes(files.contents[0])
    for logs in ((log, unfinished), (unfinished, log)):
        recovered = recovered_from(*logs)
        assert state_of(recovered) == states[-1]
        assert (recovered.log, recovered.is_contested) == (logs.index(log), False)
    for logs in ((log, whole), (whole, log)):
        recovered = recovered_from(*logs)
        assert state_of(recovered) == frozenset()
        assert (recovered.log, recovered.sequence, recovered.is_contested) == (logs.index(whole), 99, True)
    newer.retire()
    recovered = recovered_from(bytes(files.contents[0]), log)
    assert state_of(recovered) == states[-1]
    assert recovered_from(unfinished, b"").damage == ["no log is whole: the store starts cold"]
    assert recovered_from(b"", b"").damage == []


def test_a_log_of_another_store_is_none_of_ours() -> None:
    log, _, _ = history()
    other = recover(MemoryFiles([log]), [0], b"x" * 16, GEOMETRY, PRESENT, lambda _done, _total: None)
    assert state_of(other) == frozenset()


def test_a_log_is_read_in_pieces_as_it_is_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log, ends, _ = history()
    at_once = read_log(MemoryFiles([log]), 0, SHAPE)
    assert at_once is not None
    for size in (4096, 5000, 8191, 20_000):
        monkeypatch.setattr("hicache.tiers.nvme.reading.READ_BYTES", size)
        monkeypatch.setattr("hicache.tiers.nvme.reading._LONGEST_FRAME", 2000)
        in_pieces = read_log(MemoryFiles([log]), 0, SHAPE)
        assert in_pieces is not None
        assert (in_pieces.num_frames, in_pieces.num_bytes) == (at_once.num_frames, ends[-1])
        assert np.concatenate(in_pieces.pages).tobytes() == np.concatenate(at_once.pages).tobytes()
        assert np.concatenate(in_pieces.freed_positions).tolist() == np.concatenate(at_once.freed_positions).tolist()


# ---- records that no program writes, with right checksums


def log_with(*records: Record) -> bytes:
    """A whole log with these records."""
    files = MemoryFiles([bytes(log_bytes(GEOMETRY))])
    log = LogFile(files, 0, store=STORE, num_bytes=log_bytes(GEOMETRY))
    log.begin(1)
    log.append([namespace_record(0, identity_chain(1)[0].namespace, RECORD)], 0)
    log.end_checkpoint(0)
    log.append(list(records), 1)
    return bytes(files.contents[0])


def one_page(**fields: int) -> Rows:
    index = Index(SHAPE, NUM_SLOTS)
    index.record(3, 7, 0, identity_chain(1)[0], (1, 2, 3))
    rows = index.rows(np.array([3]))
    for name, value in fields.items():
        rows[name] = value
    return rows


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"slot": NUM_SLOTS}, "out_of_range"),
        ({"slot": 2**32 - 1}, "out_of_range"),
        ({"generation": 1 << 62}, "out_of_range"),
        ({"generation": 2**64 - 1}, "out_of_range"),
        ({"namespace": 1}, "unknown_namespace"),
        ({"namespace": 2**32 - 1}, "unknown_namespace"),
        ({"codec": 9}, "unknown_codec"),
        ({"zero": 1}, "unknown_codec"),
        ({"stored_bytes": 13}, "wrong_length"),
        ({"stored_bytes": 2**32 - 1}, "wrong_length"),
        ({"tokens": -1}, "no_tokens"),
        ({"prefix": 0}, "orphan"),
    ],
)
def test_rows_that_make_no_sense_are_dropped_and_counted(fields: dict[str, int], reason: str) -> None:
    recovered = recovered_from(log_with(*pages_records(one_page(**fields))))
    assert state_of(recovered) == frozenset()
    assert {name for name, count in recovered.dropped.items() if count} == {reason}
    if reason != "out_of_range":
        assert recovered.dropped_slots.tolist() == [3]
        assert recovered.generations[3] == 8


def test_a_page_beyond_the_end_of_its_segment_is_dropped() -> None:
    log = log_with(*pages_records(one_page()))
    for present, offered in ((4, 1), (3, 0), (0, 0)):
        files = MemoryFiles([log])
        recovered = recover(files, [0], STORE, GEOMETRY, np.array([present, 5, 2]), lambda _done, _total: None)
        assert len(state_of(recovered)) == offered
        assert recovered.dropped["segment_missing"] == 1 - offered


def test_an_older_generation_never_comes_back() -> None:
    page = pages_records(one_page())
    freed = freed_records(np.array([3]), np.array([8]))
    assert state_of(recovered_from(log_with(*page, *freed))) == frozenset()
    recovered = recovered_from(log_with(*freed, *page))
    assert state_of(recovered) == frozenset()
    assert recovered.dropped["older_generation"] == 1
    assert recovered.generations[3] == 9


@pytest.mark.parametrize(
    "record",
    [
        Record(RecordType.PAGES, b""),
        Record(RecordType.PAGES, bytes(row_dtype(SHAPE).itemsize - 1)),
        Record(RecordType.FREED, bytes(15)),
        Record(RecordType.NAMESPACE, bytes(39)),
        Record(RecordType.NAMESPACE, struct.pack("<II", 5, 2**32 - 1) + bytes(32)),
        Record(RecordType.BUDGET, bytes(7)),
        Record(RecordType.END, b"x"),
        Record(RecordType.CLEAN, b"x"),
    ],
)
def test_records_that_make_no_sense_are_stated_and_passed_over(record: Record) -> None:
    recovered = recovered_from(log_with(record, *pages_records(one_page())))
    assert len(state_of(recovered)) == 1
    assert len(recovered.damage) == 1
    assert "1 records" in recovered.damage[0]


# ---- paths


@given(
    parents=st.lists(st.integers(-1, 40), min_size=1, max_size=40),
    missing=st.sets(st.integers(0, 39)),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_what_is_offered_is_a_forest_of_whole_paths(
    parents: list[int], missing: set[int], order: random.Random
) -> None:
    """Against a tree kept as a list of parents: the same pages, parents before children, runs that fit together."""
    namespace = hashlib.sha256(b"n").digest()
    pages: list[PageIdentity] = []
    for number, parent in enumerate(parents):
        prefix = namespace if parent < 0 or parent >= number else pages[parent].chain
        pages.append(PageIdentity(namespace, prefix, struct.pack("<4i", number, 0, 0, 0)))
    there = [number for number in range(len(pages)) if number not in missing]
    order.shuffle(there)
    rows = np.zeros(len(there), row_dtype(SHAPE))
    for place, number in enumerate(there):
        rows[place]["slot"] = number
        rows[place]["prefix"] = np.frombuffer(pages[number].prefix, np.uint8)
        rows[place]["tokens"] = np.frombuffer(pages[number].tokens, "<i4")
    dropped: Counter[str] = Counter()
    kept, runs = connect(rows, {0: (namespace, RECORD)}, dropped)

    def is_whole(number: int) -> bool:
        if number not in there:
            return False
        parent = parents[number]
        return parent < 0 or parent >= number or is_whole(parent)

    expected = {number for number in there if is_whole(number)}
    assert {there[place] for place in kept} == expected
    assert dropped["orphan"] == len(there) - len(expected)
    seen: dict[bytes, None] = {namespace: None}
    found = []
    for run in runs:
        assert run.prefix in seen, "a run hangs on an earlier one"
        prefix = run.prefix
        for place, slot in enumerate(run.slots.tolist()):
            assert prefix == pages[slot].prefix
            assert run.tokens[16 * place : 16 * place + 16] == pages[slot].tokens
            prefix = pages[slot].chain
            found.append(slot)
        assert run.chain == prefix
        seen[prefix] = None
    assert sorted(found) == sorted(expected)


def test_logs_survive_on_a_real_file() -> None:
    """The same through the operating system, over what the file held before."""
    files = FileIO()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        path.write_bytes(b"\xff" * log_bytes(GEOMETRY))
        fd = files.open(str(path), 2)
        try:
            log = LogFile(files, fd, store=STORE, num_bytes=log_bytes(GEOMETRY))
            for number in (1, 2):
                log.begin(number)
                log.end_checkpoint(number)
                log.append(pages_records(one_page()), number + 1)
                log.sync()
                log.write_again(log.position)
                contents = read_log(files, fd, SHAPE)
                assert contents is not None
                assert (contents.header.number, contents.sequence, contents.is_whole) == (number, number + 1, True)
                assert contents.num_bytes == log.position
            log.retire()
            assert read_log(files, fd, SHAPE) is None
        finally:
            files.close(fd)
