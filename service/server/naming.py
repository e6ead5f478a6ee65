"""What the names in a session's calls mean: namespaces, and prefixes by handle and tokens.

Pages of an engine with several parallel ranks have a part a rank. Each rank's parts are stored under a namespace of
their own, which nobody can register; a prompt counts as cached as far as all ranks have it, which is decided here.
"""

import struct
from dataclasses import replace
from typing import Final

import numpy as np

from hicache.cache import Cache
from hicache.errors import BadRequest
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.service.config import Limits
from hicache.service.errors import LayoutMismatch, LimitReached, UnknownHandle
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.boot import Boot
from hicache.service.server.session import Handle, Registered, Session, Tokens
from hicache.tree import Match

MAX_RANKS: Final = 64
"""Most parallel ranks of one engine."""
MAX_RECORDS_BYTES: Final = 2 << 20
"""Records of one session's namespaces, each counted once a rank. In memory they are a few times as long."""
_RANK: Final = b"hicache-rank\0"
_INT32: Final = np.dtype("<i4")


class Names:
    """Namespaces and handles of all sessions of a server. Belongs to its loop."""

    def __init__(self, cache: Cache, limits: Limits, boot: Boot) -> None:
        self._cache: Final = cache
        self._limits: Final = limits
        self._boot: Final = boot

    # -- namespaces ---------------------------------------------------------------------------------------------------

    def register(self, session: Session, request: pb.RegisterRequest) -> int:
        """The number of a namespace in the session's calls, from 1. Those that were used longest ago make room for it:
        what is lent or being written holds its namespace itself. Raises `BadRequest`, `LayoutMismatch`,
        `LimitReached`."""
        named = Namespace.decode(request.record)
        if named.tenant:
            raise BadRequest("record", "names a tenant; that is the session's")
        if named.layout != self._cache.layout:
            raise LayoutMismatch(
                f"pages of {named.layout.page_bytes} bytes and {named.layout.page_size} tokens are not those of this "
                f"server, or are laid out otherwise", field="record",
            )  # fmt: skip
        if named.num_ranks > MAX_RANKS:
            raise LimitReached(f"{named.num_ranks} parallel ranks are more than {MAX_RANKS}", field="record")
        if request.rank >= named.num_ranks:
            raise BadRequest("rank", f"{request.rank} is not within 0 to {named.num_ranks - 1}")
        named = replace(named, tenant=session.tenant, layout=self._cache.layout)  # an equal one, which all share
        known = session.namespace_numbers.get((named, request.rank))
        if known is not None:
            session.namespaces.move_to_end(known)
            return known
        num_bytes = len(request.record) * named.num_ranks
        if num_bytes > MAX_RECORDS_BYTES:
            problem = f"{num_bytes} bytes, counted once a rank, are more than {MAX_RECORDS_BYTES}"
            raise LimitReached(problem, field="record")
        registered = Registered(named, request.rank, _ranks_of(named), num_bytes)
        while (
            len(session.namespaces) >= self._limits.max_namespaces
            or session.namespace_bytes + num_bytes > MAX_RECORDS_BYTES
        ):
            _, gone = session.namespaces.popitem(last=False)
            del session.namespace_numbers[gone.named, gone.rank]
            session.namespace_bytes -= gone.num_bytes
        session.num_registered += 1
        session.namespaces[session.num_registered] = registered
        session.namespace_numbers[named, request.rank] = session.num_registered
        session.namespace_bytes += num_bytes
        return session.num_registered

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def resolve(self, session: Session, prefix: pb.Prefix) -> tuple[Namespace, Tokens]:
        """What a prefix means: the namespace of the session's rank, and all token ids. Raises `BadRequest`,
        `UnknownNamespace`, `UnknownHandle`, `LimitReached`."""
        registered, node, num_known, tokens = self._parts(session, prefix)
        return registered.own, self._joined(node, num_known, tokens)

    def match(self, session: Session, prefix: pb.Prefix) -> Match:
        """What is cached of a prefix, in all ranks; of one rank, only what lies behind its handle is compared. Raises
        as `resolve` does."""
        registered, node, num_known, tokens = self._parts(session, prefix)
        if len(registered.ranks) > 1:
            return self._match_all(registered, self._joined(node, num_known, tokens))[registered.rank]
        if node is None:
            return self._cache.tree.match(registered.own, tokens, published=False)
        return self._cache.tree.match_after(node, num_known // self._cache.layout.page_size, tokens)

    def match_each(self, session: Session, prefix: pb.Prefix) -> list[Match]:
        """`match` for each rank: all of one length."""
        registered, node, num_known, tokens = self._parts(session, prefix)
        if len(registered.ranks) > 1:
            return self._match_all(registered, self._joined(node, num_known, tokens))
        return [self.match(session, prefix)]

    def _match_all(self, registered: Registered, tokens: Tokens) -> list[Match]:
        tree = self._cache.tree
        matches = [tree.match(each, tokens, published=False) for each in registered.ranks]
        num_tokens = min([match.num_tokens for match in matches])
        # What a rank alone shares beyond that is of no use.
        return [
            (
                match if match.num_tokens == num_tokens else tree.match(each, tokens[:num_tokens], published=False)
            )._replace(partial=None)
            for each, match in zip(registered.ranks, matches, strict=True)
        ]

    def _joined(self, node: Node | None, num_known: int, tokens: Tokens) -> Tokens:
        return tokens if node is None else np.concatenate([self._cache.tree.tokens_of(node)[:num_known], tokens])

    def _parts(self, session: Session, prefix: pb.Prefix) -> tuple[Registered, Node | None, int, Tokens]:
        """A prefix as its namespace, the node that its handle names, how many tokens that stands for, and those behind
        them."""
        registered, packed = session.registered(prefix.namespace_id), prefix.tokens
        if len(packed) % 4:
            raise BadRequest("prefix.tokens", f"{len(packed)} bytes are no whole ids of 4")
        tokens = np.frombuffer(packed, _INT32)
        num_known, node = 0, None
        if prefix.handle:
            handle = session.handles.get(prefix.handle)
            node = self._cache.tree.current(handle.node) if handle is not None else None
            if handle is None or node is None:
                session.handles.pop(prefix.handle, None)
                raise UnknownHandle("its prefix has left the cache, or it is not this session's", field="prefix.handle")
            if handle.namespace_id != prefix.namespace_id:
                raise BadRequest("prefix.handle", "is about another namespace")
            session.handles.move_to_end(prefix.handle)
            num_known = handle.num_pages * self._cache.layout.page_size
        if num_known + len(tokens) > self._limits.max_tokens:
            problem = f"{num_known + len(tokens)} tokens are more than {self._limits.max_tokens}"
            raise LimitReached(problem, field="max_tokens")
        return registered, node, num_known, tokens

    # -- handles ------------------------------------------------------------------------------------------------------

    def handle(self, session: Session, namespace_id: int, node: Node, num_pages: int) -> int:
        """Name the first `num_pages` pages on the path to a node, which reaches as far, to the session; 0 where the
        namespace was let go while the call waited."""
        if namespace_id not in session.namespaces:
            return 0
        last = next(reversed(session.handles), None)
        if last is not None and session.handles[last] == Handle(namespace_id, node, num_pages):
            return last
        number = self._boot.next_id()
        session.handles[number] = Handle(namespace_id, node, num_pages)
        if len(session.handles) > self._limits.max_handles:
            session.handles.popitem(last=False)
        return number

    def forget(self, session: Session) -> None:
        """Let go of nodes that have left the tree, as they keep memory for as long as something names them, and of
        handles whose namespace has gone."""
        for number, handle in list(session.handles.items()):
            if handle.namespace_id not in session.namespaces:
                del session.handles[number]
                continue
            if handle.node.is_live:
                continue
            node = self._cache.tree.current(handle.node)
            if node is None:
                del session.handles[number]
            else:
                session.handles[number] = Handle(handle.namespace_id, node, handle.num_pages)


def _ranks_of(named: Namespace) -> tuple[Namespace, ...]:
    """What each rank's pages are stored under. One that is alone stores under the namespace itself; of several, none
    does, and the salts of two ranks, or of two namespaces, never agree."""
    if named.num_ranks == 1:
        return (named,)
    return tuple([
        replace(named, salt=_RANK + struct.pack("<I", rank) + named.salt) for rank in range(named.num_ranks)
    ])
