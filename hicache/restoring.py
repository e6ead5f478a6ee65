"""How pages come back that a tier has kept over a restart: run by run from the root down, each as one node."""

from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.arguments import moment
from hicache.errors import BadRequest, NoRoom
from hicache.metadata import NODE_BYTES, ORDER_BYTES, ROOT_BYTES
from hicache.namespace import Namespace
from hicache.node import Node, Root, tier_index
from hicache.structure import SLOT_BYTES, Structure, digest_of
from hicache.tier import TierId
from hicache.tokens import INT32, TOKEN_BYTES, check_ids, pack_slots, raw_bytes, view_tokens

DIGEST_BYTES: Final = 32


class Restoring(Structure):
    """Puts back what survived."""

    def restorer(self, namespace: Namespace, *, tier: TierId, now: float) -> "Restorer":
        """Who puts runs of one namespace back, with slots in `tier`. `now`: when they were last used.

        Raises `BadRequest` naming the field.
        """
        return Restorer(self, namespace, tier, now)

    def _require_budget(self, budget: int, is_first: bool, num_pages: int) -> None:
        growth = NODE_BYTES + 2 * ORDER_BYTES + num_pages * (self._page_bytes + SLOT_BYTES) + is_first * ROOT_BYTES
        if self.metadata_bytes + growth > budget:
            raise NoRoom("metadata", pages_asked=num_pages, pages_free=0, problem=(
                f"{growth} bytes asked of a budget of {budget}, of which {self.metadata_bytes} are used"
            ))


class Restorer:
    """Puts runs of one namespace back, as `Restoring.restorer` makes it: what is the same for all of them is checked
    once, since there may be as many as pages."""

    __slots__ = ("_digest", "_index", "_namespace", "_tree")

    def __init__(self, tree: Restoring, namespace: Namespace, tier: TierId, now: float) -> None:
        self._tree: Final = tree
        self._namespace: Final = namespace
        self._index: Final = tier_index(tree._tier_index, tier)
        self._digest: Final = digest_of(namespace)
        tree._require_page_size(namespace)
        tree._advance(moment("now", now))

    def restore(self, parent: Node | None, tokens: npt.ArrayLike, *, slots: npt.ArrayLike, chain: bytes) -> Node:
        """Hang a run of pages below a node, as one new node, without comparing anything above it.

        Args:
            parent: the node that ends where the run begins; None where a prompt begins.
            tokens: the run's own ids, one or more whole pages; bytes hold them packed, little-endian int32. The parent
                has no child that begins with the same page.
            slots: `[num_pages]`, the run's slots, from here on the tree's.
            chain: chain digest of everything up to and including the run's last page (`PageIdentity.chain`), 32 bytes.
                It is kept as it is given: one that is wrong makes tiers refuse the pages.

        Everything above was last used no earlier than the run. Runs are not joined: whoever restores hands over as long
        ones as it has. Nothing leaves for them.

        Raises `BadRequest` naming the field, `NotResident` for a parent that left the tree, and `NoRoom` naming
        "metadata" where the budget would be passed.
        """
        tree = self._tree
        page_bytes = tree._page_bytes
        raw = tokens if type(tokens) is bytes else bytes(raw_bytes(view_tokens(tokens)))
        num_pages, odd = divmod(len(raw), page_bytes)
        if odd or not num_pages:
            problem = f"{len(raw) / TOKEN_BYTES:g} tokens are not one or more whole pages of {tree.page_size}"
            raise BadRequest("tokens", problem)
        # An id is negative when the highest bit of its last byte is set, which no byte of ASCII has.
        if not raw[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
            check_ids("tokens", np.frombuffer(raw, INT32))
        key, rest = raw[:page_bytes], raw[page_bytes:]
        new_slots = pack_slots(slots, num_pages).tobytes()
        check_chain(chain)
        root = tree._roots.get(self._digest)
        above = root if parent is None else parent
        if above is not None:
            if parent is not None and (type(parent) is not Node or parent._root is not root or parent._parent is None):
                self._require_below(parent)
            if above._children and key in above._children:
                raise BadRequest("tokens", "a child of the parent begins with the same page")
        if tree.metadata_budget is not None:
            tree._require_budget(tree.metadata_budget, above is None, num_pages)

        # From here on nothing fails.
        if above is None:
            above = tree._roots[self._digest] = Root(self._namespace, tree._tier_index)
        node = tree._attach(above, key, rest, self._index, new_slots, chain)
        # What is above was used no earlier than what is below it: the first that is up to date ends the walk.
        while above._parent is not None and above._last_access < tree._now:
            tree._use(above)
            above = above._parent
        return node

    def _require_below(self, parent: Node) -> None:
        self._tree._require_live(parent)
        if parent._root.digest != self._digest:
            raise BadRequest("parent", "belongs to another namespace")


def check_chain(chain: object) -> None:
    """Raise `BadRequest` for what cannot be a digest of a chain."""
    if type(chain) is not bytes or len(chain) != DIGEST_BYTES:
        raise BadRequest("chain", f"{chain!r:.80} is not {DIGEST_BYTES} bytes")
