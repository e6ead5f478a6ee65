"""The namespaces whose pages a store holds: their records, and the numbers that stand for them in a log."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import fields
from enum import Enum

from hicache.errors import BadRequest, NoRoom
from hicache.layout import KVLayout
from hicache.namespace import MAX_RECORD_BYTES, Namespace
from hicache.tiers.nvme.header import DIGEST_BYTES
from hicache.tiers.nvme.records import Record, decode_namespace, namespace_record


class Namespaces:
    """Numbers for digests, and the record of each that was given, as many as logs have room for. The event loop alone
    calls.

    A number stands for one digest as long as a page has it. Records that no page needs leave when others want their
    room, those that were not asked for longest first.
    """

    def __init__(self, tier: str, room_bytes: int) -> None:
        self._tier = tier
        self._room_bytes = room_bytes
        self._numbers: dict[bytes, int] = {}
        self._records: dict[bytes, Record] = {}
        """By digest, in the order of the last `remember`."""
        self._codecs: dict[bytes, str | None] = {}
        """What `codec_of` found out, of namespaces whose record is kept."""
        self._num_bytes = 0
        self._next = 0

    def number_of(self, digest: bytes) -> int:
        """The digest's number, a new one if it has none."""
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = self._next
            self._next += 1
        return number

    def adopt(self, number: int, digest: bytes, record: bytes) -> None:
        """A namespace as an earlier life of the store numbered it."""
        self._numbers[digest] = number
        self._next = max(self._next, number + 1)
        self._records[digest] = namespace_record(number, digest, record)
        self._num_bytes += self._records[digest].num_bytes

    def remember(self, digest: bytes, record: bytes, in_use: Collection[int] | None = None) -> bool:
        """Keep a namespace's record. False, and nothing done, when there is no room without dropping records of
        namespaces that have no pages: ask again with `in_use`, the numbers that pages have.

        Raises `BadRequest` for a record that is too long or has another digest, which no later opening would believe,
        and `NoRoom` when there is no room even so.
        """
        if len(digest) != DIGEST_BYTES:
            raise BadRequest("digest", f"{len(digest)} bytes are not {DIGEST_BYTES}")
        if len(record) > MAX_RECORD_BYTES:
            raise BadRequest("record", f"{len(record)} bytes are more than {MAX_RECORD_BYTES}")
        if digest in self._records:
            self._records[digest] = self._records.pop(digest)
            return True
        if hashlib.sha256(record).digest() != digest:
            raise BadRequest("record", "its SHA-256 is not the digest")
        kept = namespace_record(self.number_of(digest), digest, record)
        missing = self._num_bytes + kept.num_bytes - self._room_bytes
        if missing > 0:
            if in_use is None:
                return False
            self._drop(missing, in_use)
            if self._num_bytes + kept.num_bytes > self._room_bytes:
                problem = f"{self._num_bytes} bytes of namespaces' records leave no room for {kept.num_bytes} more"
                raise NoRoom(self._tier, pages_asked=0, pages_free=0, problem=problem)
        self._records[digest] = kept
        self._num_bytes += kept.num_bytes
        return True

    def codec_of(self, digest: bytes) -> str | None:
        """The lossy codec that the namespace's pages may pass through, empty for none; None when no record was given
        that has this digest."""
        if (kept := self._records.get(digest)) is None:
            return None
        if digest not in self._codecs:
            self._codecs[digest] = _codec_in(kept, digest)
        return self._codecs[digest]

    def records(self, numbers: Iterable[int]) -> dict[int, Record]:
        """What a log must hold before it holds pages of these namespaces, by number; nothing for records never
        given."""
        wanted = set(numbers)
        return {
            number: self._records[digest]
            for digest, number in self._numbers.items()
            if number in wanted and digest in self._records
        }

    def forget_numbers(self, in_use: Collection[int]) -> None:
        """Take back the numbers of digests without record that no page has."""
        kept = {digest: n for digest, n in self._numbers.items() if n in in_use or digest in self._records}
        self._numbers = kept

    def _drop(self, num_bytes: int, in_use: Collection[int]) -> None:
        for digest in list(self._records):
            if num_bytes <= 0:
                return
            if self._numbers[digest] not in in_use:
                dropped = self._records.pop(digest)
                self._codecs.pop(digest, None)
                del self._numbers[digest]
                self._num_bytes -= dropped.num_bytes
                num_bytes -= dropped.num_bytes


def other_layout(found: Iterable[tuple[bytes, bytes]], layout: KVLayout) -> str | None:
    """How the layout of a namespace differs from `layout`, of the first that does; None if none does. `found` are
    digests and records. A record that this version cannot read says nothing of its layout."""
    for digest, record in found:
        namespace = _decoded(digest, record)
        if namespace is not None and namespace.layout != layout:
            names = [each.name for each in fields(layout)]
            theirs, ours = ({name: getattr(of, name) for name in names} for of in (namespace.layout, layout))
            differing = [name for name in names if theirs[name] != ours[name]]
            return ", ".join(f"{name} {_shown(theirs[name])}, not {_shown(ours[name])}" for name in differing)
    return None


def _shown(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _codec_in(kept: Record, digest: bytes) -> str | None:
    decoded = decode_namespace(memoryview(kept.body))
    assert decoded is not None, "a record of ours cannot be read"
    namespace = _decoded(digest, decoded[2])
    return None if namespace is None else namespace.codec


def _decoded(digest: bytes, record: bytes) -> Namespace | None:
    try:
        namespace = Namespace.decode(record)
    except BadRequest:
        return None
    return namespace if namespace.digest == digest else None
