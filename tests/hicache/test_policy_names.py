"""A cache is told by name what leaves first, and tells its eviction policies of each prompt once."""

from typing import ClassVar

import pytest

from hicache.cache import Cache
from hicache.errors import BadRequest
from hicache.node import Node
from hicache.policies import NAMES, policies_named
from hicache.policy.base import Use
from hicache.policy.lrfu import LrfuPolicy
from hicache.tier import DEVICE, HOST
from tests.hicache.worlds import LAYOUT, opened, prompt
from tests.simulation import World, run_simulated


# Not "value", which has to learn first that what comes once does not come back.
@pytest.mark.parametrize(("policy", "is_kept"), [("lru", False), ("slru", True), ("s3-fifo", True), ("lrfu", True)])
def test_what_was_used_often_outlives_a_scan_where_uses_count(policy: str, is_kept: bool) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=80, host_pages=80, nvme_pages=None, policy=policy) as setup:
            for _ in range(6):
                await setup.request().run(prompt(1, 17))
            for document in range(2, 60):
                await setup.request().run(prompt(document, 17))
            found = await setup.request().run(prompt(1, 17))
            assert (found == 16) == is_kept
            setup.check_quiet()

    run_simulated(main, 0)


class Hearing(LrfuPolicy):
    """Notes the uses that it is told of, in tokens."""

    made: ClassVar[list["Hearing"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)
        self.heard: list[int] = []

    def used(self, use: Use) -> None:
        nodes: list[Node] = list(use.path)
        assert all(node.is_live and node.last_access <= use.now for node in nodes)
        self.heard.append(sum(node.num_pages for node in nodes) * LAYOUT.page_size)
        super().used(use)


def test_each_prompt_is_told_once_when_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "lrfu", lambda capacity_pages: Hearing())

    async def main(world: World) -> None:
        async with opened(world, device_pages=20, policy="lrfu") as setup:
            request = setup.request()
            sequence = await request.open(prompt(1, 30))
            for start in range(0, 30, 10):
                assert all(each.heard == [] for each in Hearing.made)
                await request.step(prompt(1, 30)[start : start + 10])
            heard = [each.heard for each in Hearing.made]
            assert heard == [[28]] * 3
            fork = sequence.fork()
            for token in range(4):
                await request.step([7_000_000 + token])
            sequence.close()
            fork.close()
            assert heard == [[28]] * 3, "what is decoded afterwards is no use of its own, nor is a fork"
            other = await setup.request().open(prompt(1, 60, branch=1, shared=20))
            other.close()
            assert heard == [[28, 20]] * 3, "what was found is used, also where nothing was computed"
            (await setup.request().open(prompt(2, 3))).close()
            assert heard == [[28, 20]] * 3

    run_simulated(main, 0)


def test_unknown_names_are_refused_with_those_there_are() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            for name in ("lfu", "", None, "S3-FIFO"):
                with pytest.raises(BadRequest, match=r"policy: .* is none of lru, slru, s3-fifo, lrfu, value"):
                    Cache(LAYOUT, setup.cache.tiers, clock=world, policy=name)  # type: ignore[arg-type]  # a mistake

    run_simulated(main, 0)
    made = policies_named("value", {DEVICE: 4, HOST: 8})
    assert len({id(each) for each in made.values()}) == 2
    assert list(NAMES) == ["lru", "slru", "s3-fifo", "lrfu", "value"]
