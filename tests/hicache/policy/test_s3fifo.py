"""S3-FIFO keeps what the algorithm as it is published keeps."""

from collections import OrderedDict
from pathlib import Path

import pytest

from hicache.policy.s3fifo import FREQUENCY_MAX, S3FifoPolicy
from hicache.tools.replay.blocks import BlockCache
from hicache.tools.replay.readers import Trace

EXCERPTS = Path(__file__).parents[2] / "tools" / "traces"


class Textbook:
    """Objects of one size in two queues and a queue of ghosts, without prefixes or pins."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: OrderedDict[int, int] = OrderedDict()
        self.main: OrderedDict[int, int] = OrderedDict()
        self.ghosts: OrderedDict[int, None] = OrderedDict()

    def request(self, wanted: int) -> bool:
        for queue in (self.small, self.main):
            if wanted in queue:
                queue[wanted] = min(FREQUENCY_MAX, queue[wanted] + 1)
                return True
        if wanted in self.ghosts:
            del self.ghosts[wanted]
            self.main[wanted] = 0
        else:
            self.small[wanted] = 0
        while len(self.small) + len(self.main) > self.capacity:
            self._evict()
        return False

    def _evict(self) -> None:
        if self.small and (len(self.small) > max(1, self.capacity // 10) or not self.main):
            oldest, frequency = self.small.popitem(last=False)
            if frequency:
                self.main[oldest] = 0
                return
            self.ghosts[oldest] = None
            if len(self.ghosts) > self.capacity:
                self.ghosts.popitem(last=False)
        else:
            oldest, frequency = self.main.popitem(last=False)
            if frequency:
                self.main[oldest] = frequency - 1


@pytest.mark.parametrize("name", ["mooncake", "agent_tools", "ragpulse"])
@pytest.mark.parametrize("share", [2, 5, 10, 20])
def test_a_replay_finds_what_the_textbook_finds(name: str, share: int) -> None:
    """Every block of the excerpt as a prompt of its own. Ours keeps a ghost that came back among its ghosts, which may
    cost it a few."""
    blocks = [block for request in Trace(EXCERPTS / f"{name}.jsonl") for block in request.blocks.tolist()]
    capacity = len(set(blocks)) * share // 100
    cache, textbook = BlockCache(S3FifoPolicy(capacity_pages=capacity), capacity), Textbook(capacity)
    ours = sum(cache.request([block], now) for now, block in enumerate(blocks))
    assert ours == pytest.approx(sum(map(textbook.request, blocks)), rel=0.04)
