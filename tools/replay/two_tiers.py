"""Host over NVMe for blocks of a trace: the fast way to ask what an admission policy keeps, and what it writes.

Both tiers evict what was used longest ago, of one prompt its end first. A block that leaves the host without a copy on
NVMe is asked about; one that is admitted is written with whatever is missing above it. What is found on NVMe comes to
the host and keeps its copy. It drives the very policy objects that a cache uses; it leaves out bytes and time.
"""

from collections import OrderedDict
from collections.abc import Sequence

from hicache.node import Node
from hicache.policy.admission import AdmissionPolicy, Verdict
from hicache.policy.base import HearsHints, Hint, Use
from hicache.tools.replay.blocks import block_node, block_root


class TwoTiers:
    """At most so many blocks in each tier. Ids are chained: equal id means equal whole prefix."""

    def __init__(self, admission: AdmissionPolicy, *, host_blocks: int, nvme_blocks: int) -> None:
        self.num_written = 0
        """Blocks written to NVMe."""
        self._admission = admission
        self._hints = admission if isinstance(admission, HearsHints) else None
        self._host_blocks, self._nvme_blocks = host_blocks, nvme_blocks
        self._root = block_root()
        self._host: OrderedDict[int, Node] = OrderedDict()  # by recency, as are those on NVMe
        self._nvme: OrderedDict[int, Node] = OrderedDict()

    def request(self, blocks: Sequence[int], now: float, *, returns: bool | None = None) -> int:
        """Look a prompt up and keep it; returns how many of its blocks, from the first on, were there. `returns` is
        what its caller knows: whether it goes on."""
        path: list[Node] = []
        num_found = 0
        for place, block in enumerate(blocks):
            node = self._host.get(block) or self._nvme.get(block)
            if node is not None and num_found == place:
                num_found += 1
            path.append(node or block_node(self._root, path[-1] if path else self._root, block))
        if not path:
            return 0
        self._admission.used(Use(path, now))
        if self._hints is not None and returns is not None:
            self._hints.hinted(path, Hint(returns=returns), now)
        for block, node in zip(reversed(blocks), reversed(path), strict=True):
            self._host[block] = node
            self._host.move_to_end(block)
            if block in self._nvme:
                self._nvme.move_to_end(block)
        while len(self._host) > self._host_blocks:
            block, node = self._host.popitem(last=False)
            if block not in self._nvme and self._admission.admits(node, now) is Verdict.ADMITTED:
                self._write(node, now)
        return num_found

    def _write(self, node: Node, now: float) -> None:
        """Write a block and what is missing above it."""
        step: Node | None = node
        while step is not None and (block := int.from_bytes(step._key, "little")) not in self._nvme:
            self._nvme[block] = step
            self.num_written += 1
            self._admission.written(step, now)
            step = step.parent
        while len(self._nvme) > self._nvme_blocks:
            self._nvme.popitem(last=False)


class OracleAdmission:
    """Admits what is used again, which it knows: the fewest writes that lose nothing."""

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self._uses_left: dict[int, int] = {}
        for path in paths:
            for block in path:
                self._uses_left[block] = self._uses_left.get(block, 0) + 1

    def used(self, use: Use) -> None:
        for node in use.path:
            self._uses_left[int.from_bytes(node._key, "little")] -= 1

    def admits(self, node: Node, now: float) -> Verdict:
        is_used_again = self._uses_left[int.from_bytes(node._key, "little")] > 0
        return Verdict.ADMITTED if is_used_again else Verdict.UNLIKELY

    def written(self, node: Node, now: float) -> None:
        pass
