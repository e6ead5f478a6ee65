"""When a page is written to NVMe: as it leaves the faster tiers, at once, or when it has proved itself.

    demote-on-evict           when it leaves the host, and not before: the fewest writes (default)
    write-through             as soon as it is published: what a restart finds is what was computed, and a page that
                              leaves the host leaves for nothing
    write-through-selective   when a second request uses it: like write-through for what is shared, without the writes
                              for what nobody asks for again

What NVMe admission refuses (`hicache.policy.admission`) is not written through either; it is asked about again when it
is used, and when it leaves the host.

Writing through takes nothing from the faster tiers and nobody waits for it. At most `BATCH_PAGES` pages and those above
them are under way; what comes meanwhile waits as a list of nodes. Whatever is not written through, because the disk is
slow or has no room, is written when it is demoted, as by default.
"""

from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache.errors import BadRequest, Closed
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.residency import Residency
from hicache.tier import NVME

if TYPE_CHECKING:
    from hicache.cache import Cache

BATCH_PAGES: Final = 64
"""Nodes are written through together until they have so many pages."""
MAX_WAITING_NODES: Final = 4096
"""Nodes that wait to be written through; of more, those that came first are left to their demotion."""


class WritePolicy(Enum):
    """When pages of a namespace are written to NVMe; the values are the names that callers give."""

    DEMOTE = "demote-on-evict"
    THROUGH = "write-through"
    SELECTIVE = "write-through-selective"

    @classmethod
    def named(cls, name: object) -> "WritePolicy":
        """The policy of a name, or the policy itself. Raises `BadRequest` naming those there are."""
        for policy in cls:
            if name is policy or name == policy.value:
                return policy
        raise BadRequest("write_policy", f"{name!r:.80} is none of {', '.join(each.value for each in cls)}")


class WritingThrough:
    """Which nodes are written before they have to be, and the writing. Lives on the cache's loop."""

    def __init__(self, cache: "Cache", default: WritePolicy) -> None:
        self._cache: Final = cache
        self._default: Final = default
        self._of_namespace: Final[dict[bytes, WritePolicy]] = {}
        self._waiting: Final[dict[Node, None]] = {}
        self.is_running = False
        """Whether something is being written through."""

    def set(self, namespace: Namespace, policy: WritePolicy) -> None:
        """Choose the policy of a namespace, for what is published or used from now on."""
        if policy is self._default:
            self._of_namespace.pop(namespace.digest, None)
        else:
            self._of_namespace[namespace.digest] = policy

    def published(self, node: Node) -> None:
        """Pages up to the end of `node` were computed. Said again when the policies know of the prompt: before that,
        some admission cannot judge them."""
        if self._policy(node) is WritePolicy.THROUGH:
            self._add(node)

    def used(self, node: Node) -> None:
        """A request found pages up to the end of `node`, which an earlier one had computed."""
        if self._policy(node) is not WritePolicy.DEMOTE:
            self._add(node)

    def _policy(self, node: Node) -> WritePolicy:
        return self._of_namespace.get(node.namespace, self._default)

    def _add(self, node: Node) -> None:
        cache = self._cache
        if NVME not in cache.tiers or cache.is_closing or node.residency(NVME) is not Residency.ABSENT:
            return
        if node in self._waiting or not cache.writer.admits(node):
            return
        self._waiting[node] = None
        if len(self._waiting) > MAX_WAITING_NODES:
            del self._waiting[next(iter(self._waiting))]
        if not self.is_running:
            self.is_running = True
            cache.start(self._write(), name="write through")

    async def _write(self) -> None:
        cache = self._cache
        try:
            while batch := self._take():
                await cache.write_behind(partial(_living, cache, batch))
        except Closed:
            self._waiting.clear()
        finally:
            self.is_running = False

    def _take(self) -> list[Node]:
        """The next nodes to write, in the order in which they came."""
        batch: list[Node] = []
        num_pages = 0
        while self._waiting and num_pages < BATCH_PAGES:
            first = next(iter(self._waiting))
            del self._waiting[first]
            for node in _living(self._cache, [first]):
                if node.residency(NVME) is not Residency.RESIDENT:
                    batch.append(node)
                    num_pages += node.num_pages
        return batch


def _living(cache: "Cache", nodes: list[Node]) -> list[Node]:
    """The nodes that are in the tree, or what they were joined to."""
    return [node for node in map(cache.tree.current, nodes) if node is not None]
