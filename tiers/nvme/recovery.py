"""What a store still holds after a restart: the state of every slot from its log, and the pages that may be offered.

Two steps, both in memory; nothing is written:

1. `settle`: the last record about a slot counts. Rows that name a slot, a namespace or a place that does not exist, or
   an older generation than another record, are dropped and counted.
2. `connect`: a page is offered only if its whole path from the root is: pages are linked by their prefix digests, which
   are computed here from the token ids, and those without a way to the root are dropped.

Pages are not read: a read verifies header, payload and identity anyway, so an index that is wrong about a slot costs a
miss.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.collector import paused
from hicache.tier import RecoveredRun, chain_digest
from hicache.tiers.nvme.geometry import Geometry
from hicache.tiers.nvme.header import DIGEST_BYTES, decode_page_header
from hicache.tiers.nvme.io import FileIO, read_fully
from hicache.tiers.nvme.reading import LogContents, read_log
from hicache.tiers.nvme.records import FREED_DTYPE, MAX_SEQUENCE, Rows, row_dtype

Progress = Callable[[int, int], None]
"""Told how much is done, of how much in all; the second stays the same."""

NO_LOG: Final = "no log can be read, though the segments hold pages: the store starts cold"
NO_FILES: Final = "there is only a manifest: making the store was interrupted, or its other files were deleted"
LOOKED_AT_SLOTS: Final = 64
"""Of each segment, where there is no log: whether one of them was ever written."""
MAX_GENERATION: Final = 1 << 62
"""Recovery takes lower ones only, and no page is written to a slot that has reached it. The next opening begins again
with 0 there."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came back when a store was opened."""

    num_pages: int
    """Pages that are offered."""
    seconds: float
    """From the beginning of recovery to its end."""
    clean_stop: bool
    """Whether the store had been closed; then nothing that was accepted is missing."""
    dropped: Mapping[str, int]
    """Pages that the log names and that are not offered, by reason."""
    damage: tuple[str, ...]
    """What was found damaged, one sentence each; a torn end after a crash is none."""


@dataclass
class Recovered:
    """The state that a store goes on from."""

    generations: npt.NDArray[np.int64]
    """Of all slots."""
    rows: Rows
    """Pages that are offered, or may be."""
    digests: npt.NDArray[np.uint8]
    """`[num_pages, 32]`, the namespace of each."""
    runs: list[RecoveredRun]
    dropped_slots: npt.NDArray[np.int64]
    """Slots that the log says hold a page, and that are free now."""
    namespaces: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    sequence: int = 0
    """The last change that is in the log."""
    log: int | None = None
    """Which of the two files holds the log that counts."""
    log_number: int = 0
    log_bytes: int = 0
    """How far that log was read."""
    is_contested: bool = False
    """Whether the other file holds a whole log, too: the newer may be in the page cache alone, after a sync that
    failed."""
    budget: int | None = None
    is_unconnected: bool = False
    """Whether the rows were not linked: the store holds only some pages of each path."""
    clean: bool = False
    dropped: Counter[str] = field(default_factory=Counter)
    damage: list[str] = field(default_factory=list)

    def summary(self, seconds: float) -> Recovery:
        """In short."""
        dropped = {reason: count for reason, count in self.dropped.items() if count}
        return Recovery(int(self.rows.size), seconds, self.clean, dropped, tuple(self.damage))

    def cut_to(self, geometry: Geometry) -> "Recovered":
        """The same in a store of another number of slots; no page lies beyond them."""
        assert not self.rows.size or int(self.rows["slot"].max()) < geometry.num_slots
        if geometry.num_slots == self.generations.size:
            return self
        generations = np.zeros(geometry.num_slots, np.int64)
        count = min(generations.size, self.generations.size)
        generations[:count] = self.generations[:count]
        dropped_slots = self.dropped_slots[self.dropped_slots < geometry.num_slots]
        return replace(self, generations=generations, dropped_slots=dropped_slots)


def nothing_recovered(geometry: Geometry) -> Recovered:
    """The state of a store that begins empty."""
    return Recovered(
        generations=np.zeros(geometry.num_slots, np.int64),
        rows=np.zeros(0, row_dtype(geometry.shape)),
        digests=np.zeros((0, DIGEST_BYTES), np.uint8),
        runs=[],
        dropped_slots=np.zeros(0, np.int64),
        clean=True,
    )


def recover(
    files: FileIO,
    logs: Sequence[int | None],
    store: bytes,
    geometry: Geometry,
    num_present: npt.NDArray[np.int64],
    progress: Progress,
    *,
    num_kept: npt.NDArray[np.int64] | None = None,
    is_whole: bool = True,
) -> Recovered:
    """Read the logs and put the state together.

    `logs` are the two files' descriptors, None for one that is missing; `num_present[i]` says how many slots of segment
    `i` its file reaches, 0 if there is none of this store; `num_kept[i]` how many of them the store is to have from now
    on, by default all. A store that is not whole is one of several
    that hold pages of the same paths: its rows are kept as they are. Alters nothing. Raises `OSError` where the device
    does.
    """
    total = 2 * geometry.num_slots
    progress(0, total)

    most_read = 0

    def read_so_far(num_pages: int) -> None:
        # Of the two logs, the longer counts.
        nonlocal most_read
        most_read = max(most_read, min(num_pages, geometry.num_slots))
        progress(most_read, total)

    which, contents, is_contested, damage = _choose(files, logs, store, geometry, read_so_far)
    if contents is None or which is None:
        state = nothing_recovered(geometry)
        state.damage, state.clean = damage, not damage
        progress(total, total)
        return state
    if contents.damage:
        damage.append(f"log {which}: {contents.damage}")
    if contents.num_bad_records:
        damage.append(f"log {which}: {contents.num_bad_records} records that no program of this version writes")
    dropped: Counter[str] = Counter()
    generations, rows, recorded = settle(contents, geometry, dropped)
    rows = _present(rows, geometry, num_present, dropped, damage)
    if num_kept is not None:
        is_kept = _reached(rows, geometry, num_kept)[1]
        dropped["beyond_capacity"] += int(rows.size - is_kept.sum())
        rows = _those(rows, is_kept)
    namespaces = _renumber(contents.namespaces, rows)
    digests = _digests(namespaces, rows)
    runs: list[RecoveredRun] = []
    if is_whole:
        kept, runs = connect(
            rows, namespaces, dropped,
            lambda done, of: progress(geometry.num_slots + geometry.num_slots * done // max(of, 1), total),
        )  # fmt: skip
        if kept.size < rows.size:
            rows, digests = rows[kept], digests[kept]
    is_gone = np.zeros(geometry.num_slots, np.bool_)
    is_gone[recorded] = True
    is_gone[rows["slot"]] = False
    gone = np.flatnonzero(is_gone)
    generations[gone] += 1
    progress(total, total)
    return Recovered(
        generations=generations,
        rows=rows,
        digests=digests,
        runs=runs,
        dropped_slots=gone,
        namespaces=namespaces,
        # Numbers mean something within one log only, and a fresh one comes next: none is carried on near the last.
        sequence=contents.sequence if contents.sequence < MAX_SEQUENCE // 2 else 0,
        log=which,
        log_number=contents.header.number,
        log_bytes=contents.num_bytes,
        is_contested=is_contested,
        budget=contents.budget,
        is_unconnected=not is_whole,
        clean=contents.is_clean and not damage,
        dropped=dropped,
        damage=damage,
    )


def _choose(
    files: FileIO,
    logs: Sequence[int | None],
    store: bytes,
    geometry: Geometry,
    progress: Callable[[int], None],
) -> tuple[int | None, LogContents | None, bool, list[str]]:
    """The log that counts: of those that are whole, the one with the highest number. Whether there is another; and what
    is wrong."""
    found: list[tuple[int, LogContents]] = []
    unfinished = 0
    for which, fd in enumerate(logs):
        contents = None if fd is None else read_log(files, fd, geometry.shape, progress)
        if contents is None or contents.header.store != store:
            continue
        if contents.is_whole:
            found.append((which, contents))
        else:
            unfinished += contents.header.number > 1 or bool(contents.damage)
    if not found:
        # The first log of all may have been cut off by a crash; a later one leaves an earlier one behind, and whole
        # frames behind a bad one are no crash's doing.
        return None, None, False, ["no log is whole: the store starts cold"] if unfinished else []
    which, contents = found[0]
    if len(found) > 1 and is_newer(found[1][1].header.number, contents.header.number):
        which, contents = found[1]
    return which, contents, len(found) > 1, []


def is_newer(number: int, other: int) -> bool:
    """Whether a log has a higher number than another one. Numbers begin again after 2^64 - 1: whatever the file says,
    there is a next one."""
    return 0 < (number - other) % (1 << 64) < 1 << 63


def settle(
    contents: LogContents, geometry: Geometry, dropped: Counter[str]
) -> tuple[npt.NDArray[np.int64], Rows, npt.NDArray[np.int64]]:
    """The state of all slots: generations, the pages that lie in them, and every slot that the log says holds one."""
    row = row_dtype(geometry.shape)
    rows = np.concatenate(contents.pages) if contents.pages else np.zeros(0, row)
    page_at = np.concatenate(contents.page_positions) if contents.pages else np.zeros(0, np.int64)
    freed = np.concatenate(contents.freed) if contents.freed else np.zeros(0, FREED_DTYPE)
    freed_at = np.concatenate(contents.freed_positions) if contents.freed else np.zeros(0, np.int64)

    sound = (rows["slot"] < geometry.num_slots) & (rows["generation"] < MAX_GENERATION)
    dropped["out_of_range"] += int(rows.size - sound.sum())
    rows, page_at = _those(rows, sound), page_at[sound]
    sound = (freed["slot"] < geometry.num_slots) & (freed["generation"] < MAX_GENERATION)
    freed, freed_at = freed[sound], freed_at[sound]

    page_slots, freed_slots = rows["slot"].astype(np.int64), freed["slot"].astype(np.int64)
    generations = np.zeros(geometry.num_slots, np.int64)
    np.maximum.at(generations, page_slots, rows["generation"].astype(np.int64))
    np.maximum.at(generations, freed_slots, freed["generation"].astype(np.int64))
    last_row = np.full(geometry.num_slots, -1, np.int64)
    last_page = np.full(geometry.num_slots, -1, np.int64)
    last_freed = np.full(geometry.num_slots, -1, np.int64)
    # Where a slot is named more than once, the last assignment stays: the order of the log.
    last_row[page_slots] = np.arange(rows.size)
    last_page[page_slots] = page_at
    last_freed[freed_slots] = freed_at
    recorded = np.flatnonzero(last_page > last_freed)
    # Oldest record first: within a checkpoint that is the order of the slots.
    recorded = recorded[np.argsort(last_page[recorded], kind="stable")]
    rows = rows[last_row[recorded]]

    def keep(sound: npt.NDArray[np.bool_], reason: str) -> None:
        nonlocal rows
        dropped[reason] += int(rows.size - sound.sum())
        rows = _those(rows, sound)

    keep(rows["generation"] == generations[rows["slot"]], "older_generation")
    shape = geometry.shape
    keep((rows["codec"] == shape.codec_id) & (rows["zero"] == 0), "unknown_codec")
    stored = rows["words"][:, -1] if shape.coding is not None else np.full(rows.size, shape.page_bytes)
    keep((rows["stored_bytes"] == stored) & (stored <= shape.room_bytes), "wrong_length")
    if shape.coding is not None:
        ends = rows["words"][:, shape.num_layers + 1 :]
        keep(np.asarray((ends[:, 1:] >= ends[:, :-1]).all(axis=1)), "wrong_length")
    keep(np.asarray((rows["tokens"] >= 0).all(axis=1)), "no_tokens")
    keep(np.isin(rows["namespace"], np.array(sorted(contents.namespaces), np.uint32)), "unknown_namespace")
    return generations, rows, recorded


def _present(
    rows: Rows, geometry: Geometry, num_present: npt.NDArray[np.int64], dropped: Counter[str], damage: list[str]
) -> Rows:
    """The rows whose pages lie in files that are there; says of the others in which they lay."""
    ordinals, is_there = _reached(rows, geometry, num_present)
    dropped["segment_missing"] += int(rows.size - is_there.sum())
    for ordinal, count in Counter(ordinals[~is_there].tolist()).items():
        damage.append(f"segment {ordinal} is missing, too short or not of this store: {count} pages in it are lost")
    return _those(rows, is_there)


def _those(rows: Rows, are_meant: npt.NDArray[np.bool_]) -> Rows:
    """Those of the rows; the array itself where it is all of them, as nearly always: not a copy for each question."""
    return rows if are_meant.all() else rows[are_meant]


def _reached(
    rows: Rows, geometry: Geometry, num_slots: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The ordinal of each row's segment, and whether the slot is among that segment's first, of which `num_slots` says
    how many."""
    ordinals, indices = np.divmod(rows["slot"].astype(np.int64), geometry.slots_per_segment)
    return ordinals, indices < num_slots[ordinals]


def holds_pages(files: FileIO, fd: int, store: bytes, geometry: Geometry) -> bool:
    """Whether a page of the store was ever written to one of a segment's first slots, which are used first. For a store
    without a log: a first log is written before the first page. Raises `OSError` where the device does."""
    block = memoryview(bytearray(geometry.shape.header_bytes))
    for index in range(min(LOOKED_AT_SLOTS, geometry.slots_per_segment)):
        if read_fully(files, fd, [block], geometry.slot_offset(index)) < len(block):
            return False
        header = decode_page_header(block)
        if header is not None and header.store == store:
            return True
    return False


def _renumber(namespaces: Mapping[int, tuple[bytes, bytes]], rows: Rows) -> dict[int, tuple[bytes, bytes]]:
    """Count the namespaces from 0, each digest once, in `rows` too: whatever numbers a log has, there are more."""
    numbers = sorted(namespaces)
    places: dict[bytes, int] = {}
    for number in numbers:
        places.setdefault(namespaces[number][0], len(places))
    if rows.size:
        place_of = np.array([places[namespaces[number][0]] for number in numbers], np.uint32)
        rows["namespace"] = place_of[np.searchsorted(np.array(numbers, np.uint32), rows["namespace"])]
    return {places[names[0]]: names for names in namespaces.values()}


def _digests(namespaces: Mapping[int, tuple[bytes, bytes]], rows: Rows) -> npt.NDArray[np.uint8]:
    """The namespace digest of each row, `[num_pages, 32]`, of namespaces that are counted from 0."""
    table = np.frombuffer(b"".join(namespaces[number][0] for number in range(len(namespaces))), np.uint8)
    return np.take(table.reshape(-1, DIGEST_BYTES), rows["namespace"], axis=0)


@paused()
def connect(
    rows: Rows,
    namespaces: Mapping[int, tuple[bytes, bytes]],
    dropped: Counter[str],
    progress: Progress = lambda _done, _total: None,
) -> tuple[npt.NDArray[np.int64], list[RecoveredRun]]:
    """Which rows have a whole path to the root, and these as runs, parents before children."""
    prefixes = _cut(rows["prefix"].tobytes(), DIGEST_BYTES)
    tokens = _cut(np.ascontiguousarray(rows["tokens"]).tobytes(), rows.dtype["tokens"].itemsize)
    numbers = rows["namespace"].tolist()
    roots = [namespaces[number][0] for number in numbers]
    chains: list[bytes] = []
    for start in range(0, len(prefixes), 1 << 14):
        progress(start, len(prefixes))
        stop = start + (1 << 14)
        chains += map(chain_digest, prefixes[start:stop], tokens[start:stop])

    # Of two equal pages the first is kept; its place stands for both.
    by_chain = dict(zip(reversed(chains), range(len(chains) - 1, -1, -1)))
    parents = list(map(by_chain.get, prefixes))
    num_duplicates = len(chains) - len(by_chain)
    dropped["duplicate"] += num_duplicates
    children: dict[int, list[int]] = {}
    heads = []
    for place, (prefix, root, parent) in enumerate(zip(prefixes, roots, parents)):
        if num_duplicates and by_chain[chains[place]] != place:
            continue
        if prefix == root:
            heads.append(place)
        elif parent is not None and roots[parent] == root:
            children.setdefault(parent, []).append(place)

    records = {number: record for number, (_, record) in namespaces.items()}
    slots = rows["slot"].astype(np.int32)
    kept: list[int] = []
    runs: list[RecoveredRun] = []
    waiting = heads[::-1]
    while waiting:
        first = last = waiting.pop()
        below = children.get(first)
        if below is None:
            kept.append(first)
            run_tokens, run_slots = tokens[first], slots[first : first + 1]
        else:
            run = [first]
            while below is not None and len(below) == 1:
                last = below[0]
                run.append(last)
                below = children.get(last)
            if below is not None:
                waiting += reversed(below)
            kept += run
            run_tokens, run_slots = b"".join([tokens[place] for place in run]), slots[run]
        runs.append(RecoveredRun(records[numbers[first]], prefixes[first], chains[last], run_tokens, run_slots))
    dropped["orphan"] += len(chains) - len(kept) - dropped["duplicate"]
    return np.array(kept, np.int64), runs


def _cut(data: bytes, num_bytes: int) -> list[bytes]:
    """The bytes in pieces of one length."""
    pieces: list[bytes] = np.frombuffer(data, f"V{num_bytes}").tolist()
    return pieces
