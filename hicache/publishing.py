"""Publishing a prefix to other tenants, and taking that back."""

import numpy.typing as npt

from hicache.errors import BadRequest, NoRoom, NotResident
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.results import PublicationInfo
from hicache.structure import Structure, digest_of
from hicache.tier import chain_digest
from hicache.tokens import TOKEN_BYTES, check_ids, raw_bytes, view_tokens


class Publishing(Structure):
    """The publications of a tree. What is published stands in `hicache.published`; who may ask, the caller decides."""

    def publish(self, namespace: Namespace, tokens: npt.ArrayLike) -> Node:
        """Let every other tenant read a prefix: `tokens` are whole pages, all in the tree. Again changes nothing.

        Whoever's namespace is equal in everything but the tenant matches these pages from now on, after its own. They
        stay the publisher's: under its namespace digest, with its recency, evicted as before. A page is published until
        it leaves the tree, is removed (then also if a lease keeps it), or `unpublish`; the pages before it stay so.
        What comes back later has to be published again.

        Splits a node where the prefix ends inside it; returns the node that ends there. Raises `BadRequest` for tokens
        that are not one or more whole pages, `NotResident` when not all of them are in the tree, `NoRoom` naming
        "publications" when the tree has `max_publications` already.
        """
        raw = self._whole_pages(tokens)
        root = self._roots.get(digest_of(namespace))
        path, position, inside = self._descend(root, raw, len(raw)) if root is not None else ([], 0, 0)
        if position < len(raw):
            raise NotResident("the tree", f"page {position // self._page_bytes} of the prefix to publish")
        key, most = self._key(namespace, raw), self.max_publications
        if key not in self._published.publications and len(self._published.publications) >= most:
            problem = f"{most} are all that may be published at a time"
            raise NoRoom("publications", pages_asked=len(raw) // self._page_bytes, pages_free=0, problem=problem)
        if inside < path[-1]._num_pages:
            path[-1] = self._split(path[-1], inside)
        self._published.publish(key, namespace.scope, path, raw)
        return path[-1]

    def unpublish(self, namespace: Namespace, tokens: npt.ArrayLike) -> bool:
        """End the publication of exactly this prefix; True when there was one.

        No page that is not part of another publication is matched by other tenants from now on. Who leased one before
        keeps the lease.
        """
        node = self._published.unpublish(self._key(namespace, self._whole_pages(tokens)))
        if node is not None:
            self._heal(node)
        return node is not None

    @property
    def num_publications(self) -> int:
        """How many prefixes are published now, over all tenants."""
        return len(self._published.publications)

    def publications(self) -> list[PublicationInfo]:
        """What is published now, over all tenants, in the order of publishing."""
        return [
            PublicationInfo(
                node=each.node,
                namespace=each.node._root.digest,
                tenant=each.node._root.owner,
                num_pages=each.num_pages,
                readers=dict(each.readers),
            )
            for each in self._published.publications.values()
        ]

    def _whole_pages(self, tokens: npt.ArrayLike) -> bytes:
        packed = view_tokens(tokens)
        check_ids("tokens", packed)
        if not len(packed) or len(packed) % self.page_size:
            raise BadRequest("tokens", f"{len(packed)} tokens are not one or more whole pages of {self.page_size}")
        return bytes(raw_bytes(packed))

    def _key(self, namespace: Namespace, raw: bytes) -> bytes:
        chain = digest_of(namespace)
        for at in range(0, len(raw), self.page_size * TOKEN_BYTES):
            chain = chain_digest(chain, raw[at : at + self.page_size * TOKEN_BYTES])
        return chain
