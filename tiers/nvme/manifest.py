"""The manifest: which format version a directory has, and the sizes. `tiers/FORMAT.md` describes it.

Three lines of text: the version, the fields as JSON, and the CRC32C of the two. The first line and the last keep their
form in all versions, so that every program can tell a version that it does not know from damage.
"""

import json
import re
from dataclasses import dataclass
from typing import Final

from hicache.errors import BadRequest
from hicache.tiers.codecs.registry import NONE
from hicache.tiers.nvme.geometry import MAX_SEGMENTS, Coding, Geometry, PageShape
from hicache.tiers.nvme.header import FORMAT_VERSION, STORE_ID_BYTES, checksum

MANIFEST_NAME: Final = "hicache-nvme"
"""First word of a manifest."""
MAX_MANIFEST_BYTES: Final = 64 << 10
MAX_VERSION: Final = 10**18
"""Format versions from here on are not told apart."""
MAX_SEGMENT_NUMBER: Final = 999_999
"""Segments' numbers have six digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest of this version says."""

    store: bytes
    """Random id of this life of the directory, 16 bytes."""
    geometry: Geometry
    segments: tuple[int, ...]
    """Number of each segment file, in the order in which they hold slots."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as a file's content."""
    geometry, shape = manifest.geometry, manifest.geometry.shape
    body = {
        "store": manifest.store.hex(),
        "page_size": shape.page_size,
        "page_bytes": shape.page_bytes,
        "header_bytes": shape.header_bytes,
        "slot_bytes": shape.slot_bytes,
        "slots_per_segment": geometry.slots_per_segment,
        "num_slots": geometry.num_slots,
        "layer_bytes": list(shape.layer_bytes),
        "codec": shape.codec_text,
        "stored_bytes": shape.room_bytes,
        "segments": list(manifest.segments),
    }
    text = f"{MANIFEST_NAME} {FORMAT_VERSION}\n{json.dumps(body, separators=(',', ':'))}\n".encode()
    return text + f"crc32c {checksum(text):08x}\n".encode()


def manifest_version(data: bytes) -> int | None:
    """Format version of a manifest, of any version; None if it is damaged or not one."""
    text, _, last = data.rstrip(b"\n").rpartition(b"\n")
    text += b"\n"
    first = text.partition(b"\n")[0].split(b" ")
    if last != f"crc32c {checksum(text):08x}".encode() or first[0] != MANIFEST_NAME.encode():
        return None
    if len(first) != 2 or not re.fullmatch(rb"0|[1-9][0-9]*", first[1]):
        return None
    # Python takes no number of thousands of digits; a version that nobody knows is one all the same.
    return int(first[1]) if len(first[1]) < len(str(MAX_VERSION)) else MAX_VERSION


def decode_manifest(data: bytes) -> Manifest | None:
    """The manifest, or None where it is damaged, of another version, or says what no program of this version writes."""
    if manifest_version(data) != FORMAT_VERSION:
        return None
    try:
        body = json.loads(data.split(b"\n")[1])
        codec, stored_bytes = body["codec"], body["stored_bytes"]
        coding = None if codec == NONE else Coding.parse(codec, stored_bytes)
        shape = PageShape(tuple(body["layer_bytes"]), body["page_size"], coding)
        geometry = Geometry(shape, body["slots_per_segment"], body["num_slots"])
        manifest = Manifest(bytes.fromhex(body["store"]), geometry, tuple(body["segments"]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, BadRequest):
        return None
    return manifest if _is_sound(manifest) and encode_manifest(manifest) == data else None


def _is_sound(manifest: Manifest) -> bool:
    geometry, numbers = manifest.geometry, manifest.segments
    shape = geometry.shape
    sizes = (shape.page_size, shape.room_bytes, geometry.slots_per_segment, geometry.num_slots)
    counts = (*shape.layer_bytes, *sizes)
    return (
        all(type(number) is int for number in (*counts, *numbers))
        and len(manifest.store) == STORE_ID_BYTES
        and 1 <= geometry.num_slots < 1 << 31
        and geometry.slots_per_segment >= 1
        and 1 <= geometry.num_segments <= MAX_SEGMENTS
        and len(numbers) == len(set(numbers)) == geometry.num_segments
        and all(0 <= number <= MAX_SEGMENT_NUMBER for number in numbers)
    )
