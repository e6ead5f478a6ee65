"""What the commands ask of a running server, as its owner, over the admin socket.

`reached` says in one line why a server cannot be asked: `CommandFailed` where none runs, where one has ended and left
its socket, where something else listens there, or where it speaks another version. gRPC is loaded when a call is made.
"""

import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import DeadlineExceeded
from hicache.tools.exits import CommandFailed
from hicache.tools.terminal import printable

if TYPE_CHECKING:
    import grpc

    from hicache.service.proto import hicache_pb2 as pb

ANSWER_S: Final = 5.0
"""How long a server may take to answer a call that waits for nothing."""
STEP_S: Final = 50.0
"""How long a call may take that waits for disks or room; the server ends it before its own limit for calls."""
_SAID: Final = frozenset({
    "counters", "draining", "lanes", "layout", "namespaces", "num_leases", "num_nodes", "sessions", "tiers", "time",
    "work",
})  # fmt: skip
"""What a server says of itself that the commands rest on."""
BROWSE_NODES: Final = 2_000
"""Prefixes that are asked for at a time."""
MAX_BRANCHES: Final = 10_000
"""Most branches of an outline."""


class OtherVersion(CommandFailed):
    """Somebody answers, who is of another version or another kind of server."""


class Owner:
    """A server that answers, and the calls of the service `Admin`. Every call raises `CommandFailed` for what the
    server refused, and where it does not answer any more."""

    def __init__(self, directory: Path, channel: "grpc.Channel") -> None:
        self.directory: Final = directory
        self._channel: Final = channel
        self.stats = self.inspect()
        """What it said as it was reached; `inspect` asks anew."""

    def inspect(self) -> dict[str, Any]:
        """Tiers, lanes, counters, sessions and the server itself, in the form of `hicache.service.snapshot` and
        `Sessions.stats`."""
        from hicache.service import wire
        from hicache.service.proto import hicache_pb2 as pb

        request = pb.InspectRequest(view=pb.VIEW_STATS)
        with self._told():
            call = self._channel.unary_stream(_path("Inspect"), _packed, pb.InspectPiece.FromString)
            text = b"".join([piece.json for piece in call(request, timeout=ANSWER_S)])
        unknown = OtherVersion(f"{self._shown} answers in a form that this hicache does not know")
        try:
            inspected: dict[str, Any] = json.loads(text)
            protocol = inspected["server"]["protocol"]
        except (ValueError, KeyError, TypeError):
            raise unknown from None
        if protocol != wire.PROTOCOL:
            version = printable(str(protocol), 20)
            raise OtherVersion(f"{self._shown} speaks protocol {version}, this hicache protocol {wire.PROTOCOL}")
        if not inspected.keys() >= _SAID:
            raise unknown
        return inspected

    def browse(self) -> "Iterator[pb.BrowseReply]":
        """All prefixes without their tokens, parents before what lies below them, in steps; the last one has no
        `walk`."""
        from hicache.service.proto import hicache_pb2 as pb

        walk = 0
        while True:
            request = pb.BrowseRequest(walk=walk, max_nodes=BROWSE_NODES)
            reply: pb.BrowseReply = self._call("Browse", request, pb.BrowseReply)
            yield reply
            walk = reply.walk
            if not walk:
                return

    def outline(self, *, limit: int, depth: int | None, num_tokens: int, until: float) -> "Iterator[pb.OutlineReply]":
        """The largest branches of what is cached: how far the server has come, moment by moment, and as the last one
        the outline, of all that was seen by `until` (seconds of `time.monotonic`).

        Args:
            limit: branches, namespaces and prefixes together, up to `MAX_BRANCHES`.
            depth: levels of each namespace; None for all.
            num_tokens: first token ids of each prefix.
        """
        from hicache.service.proto import hicache_pb2 as pb

        request = pb.OutlineRequest(max_branches=limit, max_depth=depth or 0, max_tokens=num_tokens)
        while True:
            reply: pb.OutlineReply = self._call("Outline", request, pb.OutlineReply)
            yield reply
            if not reply.walk:
                return
            request = pb.OutlineRequest(walk=reply.walk, end=time.monotonic() >= until)

    def rank(self, request: "pb.RankRequest") -> "pb.RankReply":
        """The prefixes that come first in an order."""
        from hicache.service.proto import hicache_pb2 as pb

        reply: pb.RankReply = self._call("Rank", request, pb.RankReply)
        return reply

    def explain(self, prefix: "pb.NamedPrefix") -> "pb.ExplainReply":
        """What would be found of a prompt."""
        from hicache.service.proto import hicache_pb2 as pb

        reply: pb.ExplainReply = self._call("Explain", prefix, pb.ExplainReply)
        return reply

    def pin(self, prefix: "pb.NamedPrefix") -> int:
        """Keep a prefix in the cache; the tokens that are kept."""
        from hicache.service.proto import hicache_pb2 as pb

        return int(self._call("PinPrefix", prefix, pb.PinPrefixReply).num_tokens)

    def unpin(self, prefix: "pb.NamedPrefix") -> bool:
        """End what `pin` began with the same tokens; whether there was such a pin."""
        from hicache.service.proto import hicache_pb2 as pb

        return bool(self._call("UnpinPrefix", prefix, pb.UnpinPrefixReply).was_pinned)

    def prefetch(self, prefix: "pb.NamedPrefix", *, within_s: float, max_pages: int) -> "pb.PrefetchReply":
        """Begin to bring a prefix to host memory; `max_pages` 0 for the server's own bound."""
        from hicache.service.proto import hicache_pb2 as pb

        request = pb.PrefetchPrefixRequest(prefix=prefix, within_ms=int(within_s * 1000), max_pages=max_pages)
        reply: pb.PrefetchReply = self._call("PrefetchPrefix", request, pb.PrefetchReply)
        return reply

    def evict(self, tier: str, num_pages: int) -> int:
        """Make `num_pages` pages of a tier free, which waits for what has to be written first; the pages free now."""
        from hicache.service.proto import hicache_pb2 as pb

        request = pb.EvictRequest(tier=tiers()[tier], num_pages=num_pages)
        return int(self._call("Evict", request, pb.EvictReply, STEP_S).pages_free)

    def flush(self, tenant: str) -> "pb.FlushReply":
        """Forget all pages, or those of one tenant."""
        from hicache.service.proto import hicache_pb2 as pb

        reply: pb.FlushReply = self._call("Flush", pb.FlushRequest(tenant=tenant), pb.FlushReply, STEP_S)
        return reply

    def verify(self, *, pages_a_step: int, one_in: int) -> "Iterator[pb.VerifyReply]":
        """Verify copies, in steps: what each step found."""
        from hicache.service.proto import hicache_pb2 as pb

        walk = 0
        while True:
            request = pb.VerifyRequest(walk=walk, max_pages=pages_a_step, one_in=0 if walk else one_in)
            reply: pb.VerifyReply = self._call("Verify", request, pb.VerifyReply, STEP_S)
            yield reply
            walk = reply.walk
            if not walk:
                return

    def record(self, walk: int, *, wait_s: float, end: bool = False) -> "pb.RecordReply":
        """What is asked next, of a recording that `walk` 0 begins; waits `wait_s` where nothing is asked."""
        from hicache.service.proto import hicache_pb2 as pb

        request = pb.RecordRequest(walk=walk, wait_ms=int(wait_s * 1000), end=end)
        reply: pb.RecordReply = self._call("Record", request, pb.RecordReply, wait_s + ANSWER_S)
        return reply

    def _call(self, method: str, request: Any, reply: Any, timeout_s: float = ANSWER_S) -> Any:
        with self._told():
            return self._channel.unary_unary(_path(method), _packed, reply.FromString)(request, timeout=timeout_s)

    @property
    def _shown(self) -> str:
        return f"the server at {printable(os.fspath(self.directory))}"

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of a call in words."""
        import grpc

        from hicache.service.errors import Unreachable, VersionMismatch, error_of

        try:
            yield
        except grpc.RpcError as problem:
            error = error_of(problem)
            if isinstance(error, VersionMismatch):
                raise OtherVersion(
                    f"{self._shown} does not know this call: it is of another version, or another kind of server"
                ) from None
            if isinstance(error, Unreachable):
                shown = printable(os.fspath(self.directory))
                text = f"what listens at {shown} hung up: it is no hicache server, or has ended"
            elif isinstance(error, DeadlineExceeded):
                text = f"{self._shown} does not answer in time"
            else:
                text = f"refused: {printable(str(error))}"
            raise CommandFailed(text) from None


@contextmanager
def reached(directory: Path | None) -> Iterator[Owner]:
    """The server whose sockets are in `directory`; None for where `hicache serve` puts them by default."""
    from hicache.service import wire

    if directory is None:
        from hicache.service.sockets import default_directory

        directory = default_directory()
    path = directory.absolute() / wire.ADMIN_SOCKET
    _check_socket(directory, path)
    import grpc

    options = (("grpc.max_receive_message_length", wire.MAX_REPLY_BYTES), ("grpc.enable_retries", 0))
    with grpc.insecure_channel(wire.address(os.fspath(path)), options) as channel:
        yield Owner(directory, channel)


def tiers() -> "dict[str, pb.Tier]":
    """The tiers of a server by name, fast to slow."""
    from hicache.service.proto import hicache_pb2 as pb

    return {"host": pb.TIER_HOST, "nvme": pb.TIER_NVME}


def tier_names() -> dict[int, str]:
    """The names of tiers as they travel."""
    return {number: name for name, number in tiers().items()}


def _check_socket(directory: Path, path: Path) -> None:
    """Raise `CommandFailed` unless somebody listens at a socket; gRPC would say less, and later."""
    shown = printable(os.fspath(directory))
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:  # gRPC knows no other names
        raise CommandFailed(f"the server at {shown} cannot be asked: its path is not UTF-8") from None
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise CommandFailed(f"{printable(os.fspath(path))} is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(ANSWER_S)
            probe.connect(os.fspath(path))
    except (FileNotFoundError, NotADirectoryError):
        raise CommandFailed(f"no server runs at {shown}; name its directory with --socket-dir") from None
    except ConnectionRefusedError:
        raise CommandFailed(f"the server at {shown} has ended and left its socket behind: start it again") from None
    except OSError as error:
        raise CommandFailed(f"the server at {shown} cannot be asked: {error.strerror or error}") from None


def _path(method: str) -> str:
    from hicache.service import wire

    return wire.path_of(wire.ADMIN.methods_by_name[method])


def _packed(request: Any) -> bytes:
    data: bytes = request.SerializeToString()
    return data
