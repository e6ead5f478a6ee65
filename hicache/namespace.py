"""Everything beside the tokens that KV depends on.

Two prompts may share pages only if their whole `Namespace` is equal. The record is encoded field by field, each with
a tag and a length, so that no two different records encode alike (an adapter named like a salt is not that salt), and
hashed with SHA-256. Digests say which weights were used; names do not, because names are reused.

Encoding (all integers little-endian):

    record := "hicache-namespace" u16:format_version  field*
    field  := u8:tag  u32:length  value                 fields in ascending tag order, each exactly once
    value  := UTF-8 text | raw bytes | u64 | list       by the type of the field
    list   := ( u32:length  value )*
"""

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from hicache.arguments import real
from hicache.errors import BadRequest
from hicache.layout import MAX_LAYERS, AttentionKind, KVDtype, KVLayout, LayerGroup, PageOrder

FORMAT_VERSION: Final = 1
"""Counts changes of this encoding; part of every record, so that versions never share pages."""
MAX_FIELD_BYTES: Final = 4096
"""Longest text or digest of one field."""
MAX_RECORD_BYTES: Final = 1 << 17
"""No record is longer: eight texts of `MAX_FIELD_BYTES`, `MAX_LAYERS` layer groups and pipeline ranges, the rest."""
_MAGIC: Final = b"hicache-namespace" + struct.pack("<H", FORMAT_VERSION)


def _encode_list(values: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def _require(field: str, value: object, kind: type) -> None:
    """Two records that are equal must encode alike, and the other way round: so every field has exactly its type."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequest(field, f"{type(value).__name__} is not {kind.__name__}")


def _text(field: str, value: str) -> bytes:
    _require(field, value, str)
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(field, f"cannot be written as UTF-8: {error.reason}") from error
    if len(encoded) > MAX_FIELD_BYTES:
        raise BadRequest(field, f"{len(encoded)} bytes are more than {MAX_FIELD_BYTES}")
    return encoded


class KeyEncoding(Enum):
    """Whether stored keys already carry their rotary position."""

    ROTATED = "rotated"
    """K is stored after RoPE: a page is right at exactly the positions it was computed for."""
    UNROTATED = "unrotated"
    """K is stored before RoPE and rotated when read."""


@dataclass(frozen=True, slots=True)
class PositionScheme:
    """How positions enter the keys. Raises `BadRequest` naming the field that is out of its bounds."""

    kind: str = "rope"
    """Name of the scheme: "rope", "alibi", "learned", "none"."""
    base: float = 10_000.0
    """Rope base (theta), finite and above 0; another number is kept as the float next to it."""
    scaling: str = ""
    """Canonical description of the scaling rule with its factors, empty for none."""
    keys: KeyEncoding = KeyEncoding.ROTATED

    def __post_init__(self) -> None:
        _text("PositionScheme.kind", self.kind)
        _text("PositionScheme.scaling", self.scaling)
        _require("PositionScheme.keys", self.keys, KeyEncoding)
        # What is encoded is a float of 64 bits, so that is what is compared, too.
        object.__setattr__(self, "base", real("PositionScheme.base", self.base))
        # Also keeps out what equals without encoding alike (0.0 and -0.0) and what does not even equal itself (NaN).
        if not 0.0 < self.base < math.inf:
            raise BadRequest("PositionScheme.base", f"{self.base} is not a finite number above 0")

    def encode(self) -> bytes:
        """The scheme as a list in the form that this module's docstring gives."""
        return _encode_list([
            self.kind.encode(), struct.pack("<d", self.base), self.scaling.encode(), self.keys.value.encode(),
        ])


class _Memo:
    """A place for what is computed once. No field: it takes no part in equality, hashing, copying or the encoding."""

    __slots__ = ("_digest", "_scope")

    _digest: bytes
    _scope: bytes


@dataclass(frozen=True, slots=True)
class Namespace(_Memo):
    """The identity record: what must agree, beside tokens, before a page may be served.

    Raises `BadRequest` naming the field when one has another type than its own, a text or digest is too long, a count
    is below 1, or a required field is empty. Equal records have equal `digest`s and different records never encode
    alike.

    >>> from hicache.layout import KVDtype
    >>> layout = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=8, dtype=KVDtype.FLOAT32, page_size=16)
    >>> base = Namespace(model="sha256:ab", layout=layout)
    >>> salted = Namespace(model="sha256:ab", layout=layout, salt=b"x")
    >>> base.digest == salted.digest
    False
    """

    model: str
    """Digest of the model's weights, or the revision id it was declared with."""
    layout: KVLayout
    """KV dtype, layer groups, heads, head sizes, K/V order and page size."""
    tenant: str = ""
    """Who owns the pages. Behind a sidecar it comes from the authenticated session, never from a request."""
    tokenizer: str = ""
    """Digest of the tokenizer."""
    adapter: str = ""
    """Digest of the adapter (LoRA), empty for none."""
    adapter_generation: int = 0
    """Counts reloads of an adapter under the same digest source."""
    positions: PositionScheme = PositionScheme()
    num_ranks: int = 1
    """Tensor-parallel ranks that each hold part of every page."""
    pipeline_ranges: tuple[tuple[int, int], ...] = ()
    """Half-open layer range of each pipeline stage; empty for one stage."""
    codec: str = ""
    """Lossy codec that pages may have passed through; empty when every tier is lossless."""
    salt: bytes = b""
    """Extra separation a caller asked for."""

    def __post_init__(self) -> None:
        for name in ("tenant", "model", "tokenizer", "adapter", "codec"):
            _text(f"Namespace.{name}", getattr(self, name))
        if not self.model:
            raise BadRequest("Namespace.model", "is empty; give the weights' digest or a revision id")
        _check_layout(self.layout)
        _require("Namespace.positions", self.positions, PositionScheme)
        _require("Namespace.salt", self.salt, bytes)
        _require("Namespace.adapter_generation", self.adapter_generation, int)
        _require("Namespace.num_ranks", self.num_ranks, int)
        _require("Namespace.pipeline_ranges", self.pipeline_ranges, tuple)
        if len(self.salt) > MAX_FIELD_BYTES:
            raise BadRequest("Namespace.salt", f"{len(self.salt)} bytes are more than {MAX_FIELD_BYTES}")
        if not 0 <= self.adapter_generation < 1 << 64:
            raise BadRequest("Namespace.adapter_generation", f"{self.adapter_generation} is not within 0 to 2**64 - 1")
        if not 1 <= self.num_ranks <= 1 << 16:
            raise BadRequest("Namespace.num_ranks", f"{self.num_ranks} is not within 1 to {1 << 16}")
        if len(self.pipeline_ranges) > MAX_LAYERS:
            raise BadRequest("Namespace.pipeline_ranges", f"{len(self.pipeline_ranges)} are more than {MAX_LAYERS}")
        for each in self.pipeline_ranges:
            _require("Namespace.pipeline_ranges", each, tuple)
            if len(each) != 2:
                raise BadRequest("Namespace.pipeline_ranges", f"{len(each)} numbers are not a first layer and an end")
            start, stop = each
            for border in each:
                _require("Namespace.pipeline_ranges", border, int)
            if not 0 <= start < stop <= MAX_LAYERS:
                raise BadRequest(
                    "Namespace.pipeline_ranges",
                    f"({start}, {stop}) is not a half-open range of layers within 0 to {MAX_LAYERS}",
                )

    def encode(self) -> bytes:
        """The record as bytes, in the form this module's docstring gives."""
        record = bytearray(_MAGIC)
        for tag, value in enumerate(self._fields(), start=1):
            record += struct.pack("<BI", tag, len(value)) + value
        return bytes(record)

    @classmethod
    def decode(cls, record: bytes) -> "Namespace":
        """The namespace whose `encode` gives exactly these bytes. They may come from anywhere, a disk say.

        Raises `BadRequest`, naming `record` or the field of a namespace that is out of its bounds, for all other bytes.
        """
        _require("record", record, bytes)
        if len(record) > MAX_RECORD_BYTES:
            raise BadRequest("record", f"{len(record)} bytes are more than {MAX_RECORD_BYTES}")
        try:
            namespace = _decode(record)
        except (ValueError, struct.error) as error:
            if isinstance(error, BadRequest):
                raise
            raise BadRequest("record", f"cannot be read: {error}") from None
        if namespace.encode() != record:
            raise BadRequest("record", "is not in the one form of the namespace that it names")
        return namespace

    @property
    def digest(self) -> bytes:
        """SHA-256 of the encoded record, 32 bytes."""
        try:
            return self._digest
        except AttributeError:
            # Asked for on every lookup, so computed once; what it depends on is frozen.
            object.__setattr__(self, "_digest", hashlib.sha256(self.encode()).digest())
            return self._digest

    @property
    def scope(self) -> bytes:
        """What this record shares with those that differ from it in the tenant alone, 32 bytes: two records have equal
        scopes exactly when all their other fields are equal. Decides who may read a published prefix; never names a
        page."""
        try:
            return self._scope
        except AttributeError:
            object.__setattr__(self, "_scope", replace(self, tenant="").digest)
            return self._scope

    def _fields(self) -> Iterator[bytes]:
        # The order is the tag order: append only, never reorder.
        layout = self.layout
        yield self.tenant.encode()
        yield self.model.encode()
        yield self.tokenizer.encode()
        yield self.adapter.encode()
        yield struct.pack("<Q", self.adapter_generation)
        yield layout.dtype.value.encode()
        yield _encode_list([
            _encode_list([group.kind.value.encode(),
                          struct.pack("<4Q", group.num_layers, group.num_kv_heads, group.head_dim, group.window or 0)])
            for group in layout.groups
        ])
        yield layout.order.value.encode()
        yield struct.pack("<Q", layout.page_size)
        yield struct.pack("<Q", self.num_ranks)
        yield _encode_list([struct.pack("<2Q", start, stop) for start, stop in self.pipeline_ranges])
        yield self.positions.encode()
        yield self.codec.encode()
        yield self.salt


def _check_layout(layout: KVLayout) -> None:
    _require("Namespace.layout", layout, KVLayout)
    _require("KVLayout.groups", layout.groups, tuple)
    for group in layout.groups:
        _require("KVLayout.groups", group, LayerGroup)
        _require("LayerGroup.kind", group.kind, AttentionKind)
    _require("KVLayout.dtype", layout.dtype, KVDtype)
    _require("KVLayout.order", layout.order, PageOrder)


def _decode(record: bytes) -> Namespace:
    """Read a record. Raises `ValueError` (also as `BadRequest`) and `struct.error` for what is none."""
    if not record.startswith(_MAGIC):
        raise ValueError(f"it does not begin as a record of format version {FORMAT_VERSION} does")
    fields: list[bytes] = []
    at = len(_MAGIC)
    while at < len(record):
        tag, length = struct.unpack_from("<BI", record, at)
        at += struct.calcsize("<BI")
        if tag != len(fields) + 1 or length > len(record) - at:
            raise ValueError(f"field {len(fields) + 1} is not there, or longer than the record")
        fields.append(record[at : at + length])
        at += length
    (
        tenant, model, tokenizer, adapter, generation, dtype, groups, order, page_size, num_ranks, ranges, positions,
        codec, salt,
    ) = fields
    kind, base, scaling, keys = _decode_list(positions)
    return Namespace(
        model=model.decode(),
        layout=KVLayout(
            groups=tuple([_decode_group(*_decode_list(group)) for group in _decode_list(groups)]),
            dtype=KVDtype(dtype.decode()),
            page_size=_decode_count(page_size),
            order=PageOrder(order.decode()),
        ),
        tenant=tenant.decode(),
        tokenizer=tokenizer.decode(),
        adapter=adapter.decode(),
        adapter_generation=_decode_count(generation),
        positions=PositionScheme(
            kind.decode(), struct.unpack("<d", base)[0], scaling.decode(), KeyEncoding(keys.decode())
        ),
        num_ranks=_decode_count(num_ranks),
        pipeline_ranges=tuple([_decode_range(each) for each in _decode_list(ranges)]),
        codec=codec.decode(),
        salt=salt,
    )


def _decode_group(kind: bytes, numbers: bytes) -> LayerGroup:
    num_layers, num_kv_heads, head_dim, window = struct.unpack("<4Q", numbers)
    return LayerGroup(AttentionKind(kind.decode()), num_layers, num_kv_heads, head_dim, window or None)


def _decode_range(numbers: bytes) -> tuple[int, int]:
    start, stop = struct.unpack("<2Q", numbers)
    return start, stop


def _decode_count(value: bytes) -> int:
    (count,) = struct.unpack("<Q", value)
    return int(count)


def _decode_list(value: bytes) -> list[bytes]:
    items: list[bytes] = []
    at = 0
    while at < len(value):
        (length,) = struct.unpack_from("<I", value, at)
        at += struct.calcsize("<I")
        if length > len(value) - at:
            raise ValueError("an item of a list is longer than the list")
        items.append(value[at : at + length])
        at += length
    return items
