"""What both ends of the wire know beside its messages: names of calls, metadata, packing of ids, the hello's frame.

Loads neither torch nor numpy: clients use it.
"""

import struct
import sys
from array import array
from collections.abc import Iterable
from functools import cache
from typing import Final, TypeVar

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from hicache.errors import BadRequest
from hicache.service.proto import hicache_pb2 as pb

PROTOCOL: Final = 1
"""Version of the wire that this code speaks. When it rises is said in the proto ("Versions")."""
CACHE: Final[ServiceDescriptor] = pb.DESCRIPTOR.services_by_name["Cache"]
"""What engines call, on the data socket."""
ADMIN: Final[ServiceDescriptor] = pb.DESCRIPTOR.services_by_name["Admin"]
"""What the owner calls, on the admin socket."""
DOOR: Final[ServiceDescriptor] = pb.DESCRIPTOR.services_by_name["Door"]
"""Where sessions begin at the TCP port."""

HELLO_SOCKET: Final = "hello.sock"
DATA_SOCKET: Final = "data.sock"
ADMIN_SOCKET: Final = "admin.sock"
HEALTH_SOCKET: Final = "health.sock"

TOKEN_METADATA: Final = "hicache-token-bin"  # noqa: S105  # the name, not a token
"""Metadata that carries the session's token."""
ACCESS_METADATA: Final = "hicache-access-bin"
"""Metadata that carries the server's access token, over TCP."""
ERROR_METADATA: Final = "hicache-error-bin"
"""Trailing metadata that carries a packed `Error`."""
TOKEN_BYTES: Final = 32
"""Bytes of a session's token."""

MAX_HELLO_BYTES: Final = 4096
"""Longest message on the hello socket."""
MAX_SECRET_BYTES: Final = 256
MAX_NAME_CHARS: Final = 64
PIECE_BYTES: Final = 1 << 20
"""Longest piece of a page in a message."""
OVERHEAD_BYTES: Final = 256 << 10
"""What a message may have beside its token ids; an identity record is the longest of that."""
SHORT_BYTES: Final = 64 << 10
"""Longest look-up that a client sends on its session's stream."""
MAX_BEAT_BYTES: Final = 128 << 10
"""Longest message of a session's stream: one waits in the server for as long as its client does not read answers."""
MAX_REPLY_BYTES: Final = 64 << 20
"""Longest reply that a client takes: slots and generations of five million pages."""

_LENGTH: Final = struct.Struct("<I")
_NUMBER: Final = struct.Struct("<Q")
_M = TypeVar("_M", bound=Message)


def longest_request(max_tokens: int) -> int:
    """Bytes of the longest request that a server takes whose prompts have so many tokens at most."""
    return max(4 * max_tokens, PIECE_BYTES) + OVERHEAD_BYTES


def path_of(method: MethodDescriptor) -> str:
    """The method's name on the wire, "/hicache.v1.Cache/Lookup" say."""
    return f"/{method.containing_service.full_name}/{method.name}"


def address(socket_path: str) -> str:
    """What gRPC calls a Unix socket with this path, which is absolute."""
    return f"unix:{socket_path}"


def parse(kind: type[_M], data: bytes) -> _M:
    """The message that `data` is. Raises `BadRequest` for what is none, and for fields and enum values that this
    version does not know: what they ask for would be left out in silence. A hello of another protocol may have any, as
    it is refused for its protocol."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        raise BadRequest("message", f"is no {kind.DESCRIPTOR.name}") from None
    if not (isinstance(message, pb.Hello) and message.protocol != PROTOCOL):
        _check_known(message)
    return message


def _check_known(message: Message) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise BadRequest("message", f"{message.DESCRIPTOR.name} has no field {unknown[0].field_number}")
    within, named = _to_check(message.DESCRIPTOR.full_name)
    for name in within:
        if message.HasField(name):
            _check_known(getattr(message, name))
    for name, kind, numbers in named:
        if (value := getattr(message, name)) not in numbers:
            raise BadRequest(name, f"{value} is no {kind}")


@cache
def _to_check(full_name: str) -> tuple[tuple[str, ...], tuple[tuple[str, str, frozenset[int]], ...]]:
    """The fields of a kind of message that hold one message; and those that hold an enum's value, with the enum's name
    and numbers. Asked of the message itself, all its fields would be made into objects, its token ids too."""
    fields = [field for field in pb.DESCRIPTOR.pool.FindMessageTypeByName(full_name).fields if not field.is_repeated]
    within = tuple([field.name for field in fields if field.message_type is not None])
    enums = [(field.name, field.enum_type) for field in fields if field.enum_type is not None]
    return within, tuple([(name, enum.name, frozenset(enum.values_by_number)) for name, enum in enums])


def pack_int32(values: Iterable[int]) -> bytes:
    """Ids as packed little-endian int32. An `array('i')`, and any buffer of int32, is taken as it is.

    Raises `BadRequest` for what holds other than integers of 32 bits.
    """
    try:
        view = memoryview(values)  # type: ignore[arg-type]  # what is no buffer raises, and is tried as integers
    except TypeError:
        pass
    else:
        if view.format in ("i", "<i", "l", "<l") and view.itemsize == 4 and view.ndim == 1:
            return view.tobytes()
    try:
        packed = array("i", values)
    except (TypeError, OverflowError) as error:
        raise BadRequest("tokens", f"is not a sequence of int32 ids ({error})") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_int32(data: bytes) -> "array[int]":
    """What `pack_int32` packed."""
    return _unpack("i", data)


def unpack_int64(data: bytes) -> "array[int]":
    """Packed little-endian int64."""
    return _unpack("q", data)


def _unpack(code: str, data: bytes) -> "array[int]":
    values: array[int] = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def with_tokens(message: bytes, tokens: "bytes | memoryview") -> bytes:
    """A packed request whose prefix has packed token ids as well.

    A request's field 1 is its prefix, whose field 3 are the tokens; and a field that holds a message and comes twice is
    merged into one. So the ids, half a megabyte of a long prompt, are copied once instead of into a message, out of it
    and into bytes.
    """
    if not len(tokens):
        return message
    head = b"\x1a" + _varint(len(tokens))
    return b"".join((message, b"\x0a", _varint(len(head) + len(tokens)), head, tokens))


def asking(lookup: bytes, number: int) -> bytes:
    """A packed `Beat` that asks a packed `LookupRequest` under a number above 0."""
    return b"".join((b"\x21", _NUMBER.pack(number), b"\x1a", _varint(len(lookup)), lookup))


def _varint(number: int) -> bytes:
    """A length as protobuf writes it."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


def frame(message: Message) -> bytes:
    """A message as it stands on the hello socket."""
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


def framed_length(head: bytes) -> int:
    """Bytes of the message behind the first four. Raises `BadRequest` for more than `MAX_HELLO_BYTES`."""
    (length,) = _LENGTH.unpack(head)
    if length > MAX_HELLO_BYTES:
        raise BadRequest("message", f"{length} bytes are more than {MAX_HELLO_BYTES}")
    return int(length)


FRAME_HEAD: Final = _LENGTH.size
"""Bytes before a message on the hello socket."""
