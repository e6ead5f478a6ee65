"""Makes events of what becomes of the tree's copies."""

from collections.abc import Callable
from typing import Final

from hicache.node import Node
from hicache.service.events.form import MEDIUMS, Event, removed, stored
from hicache.tier import TierId
from hicache.tree import HiRadixTree


class CopyEvents:
    """Hears of copies (`hicache.policy.base.HearsCopies`), and tells of those that routers may know.

    Only pages that belong to no tenant are told of: an index elsewhere knows no tenants, so it would credit one with
    another's pages, and whoever reads the events reads prompts. Hashing a node's pages takes about a microsecond each.
    """

    def __init__(self, tell: Callable[[Event], None]) -> None:
        """`tell`: is given each event, in order; does not wait and does not raise."""
        self.tree: HiRadixTree | None = None
        """What is listened to: set before anything is put into it."""
        self._tell: Final = tell

    def copied(self, node: Node, tier: TierId, is_there: bool) -> None:
        """A copy can be served from now on, or cannot any longer."""
        assert self.tree is not None, "the tree is known before it holds anything"
        if tier not in MEDIUMS or node.tenant:
            return
        pages = self.tree.identities(node)
        self._tell(stored(pages, tier, self.tree.page_size) if is_there else removed(pages, tier))
