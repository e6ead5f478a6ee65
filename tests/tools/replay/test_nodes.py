"""Several nodes behind one router: what each prompt costs where, and what that does to the hits of all together."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import pytest

from hicache.tools.replay.generators import WORKLOADS, generate
from hicache.tools.replay.machine import Machine
from hicache.tools.replay.router import PrefixAware, RoundRobin, Router
from hicache.tools.replay.run import replay

CHAT: Final = list(generate(WORKLOADS["chat"], seed=2, num_requests=200, block_tokens=64))


def machine(nodes: int) -> Machine:
    return Machine(
        block_tokens=64, token_bytes=4096, device_pages=150, host_pages=150, nvme_pages=300, nodes=nodes, concurrency=8
    )


def sent(router: Router, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """Where prompts go, each served before the next one comes."""
    nodes = []
    for number, (num_tokens, known) in enumerate(prompts):
        nodes.append(router.route(number, num_tokens, lambda known=known: known))  # type: ignore[misc]  # of the loop
        router.served(number, nodes[-1])
    return nodes


def test_one_after_the_other() -> None:
    assert sent(RoundRobin(3), [(100, [0, 0, 90])] * 5) == [0, 1, 2, 0, 1]


def test_a_prompt_follows_its_prefix_and_a_new_one_goes_where_least_was_given() -> None:
    assert sent(PrefixAware(3), [(1000, [0, 0, 0])] * 3) == [0, 1, 2]
    assert sent(PrefixAware(3), [(1000, [0, 0, 900]), (1000, [950, 0, 0]), (1000, [0, 990, 0])]) == [2, 0, 1]


def test_what_all_know_tells_none_from_the_others() -> None:
    assert Counter(sent(PrefixAware(4), [(1000, [900] * 4)] * 40)) == dict.fromkeys(range(4), 10)


def test_a_shared_prefix_does_not_draw_everybody_to_one_node() -> None:
    """Instructions of 900 tokens that node 0 alone knows are computed elsewhere once that pays."""
    router, knows, nodes = PrefixAware(3), [900, 0, 0], Counter[int]()
    for number in range(60):
        node = router.route(number, 1000, lambda: knows)
        router.served(number, node)
        knows[node] = 900
        nodes[node] += 1
    assert knows == [900] * 3
    assert min(nodes.values()) >= 10


def test_prompts_that_wait_count_as_a_burden() -> None:
    router = PrefixAware(2)
    assert router.route(0, 10_000, lambda: [0, 0]) == 0
    # Node 0 has computed nothing yet; its prefix is worth less than what waits before it.
    assert router.route(1, 3000, lambda: [2000, 0]) == 1
    router.served(0, 0)
    router.served(1, 1)


@pytest.mark.parametrize("router", ["prefix", "round-robin"])
def test_nodes_add_up(router: str) -> None:
    found = replay(CHAT, machine(3), "lru", router=router)
    assert len(found.nodes) == 3
    assert sum(node.num_requests for node in found.nodes) == len(CHAT) == len(found.ttft_s)
    assert sum(node.tokens for node in found.nodes) == found.tokens
    assert sum(node.tokens_found for node in found.nodes) == sum(found.tokens_found.values())
    assert found == replay(CHAT, machine(3), "lru", router=router), "the same twice"


def test_one_node_needs_no_router() -> None:
    assert replay(CHAT, machine(1), "lru", router="prefix") == replay(CHAT, machine(1), "lru", router="round-robin")


def test_knowing_prefixes_finds_more_than_taking_turns() -> None:
    aware, blind = (replay(CHAT, machine(4), "lru", router=router) for router in ("prefix", "round-robin"))
    assert aware.hit_rate > blind.hit_rate + 0.03
    assert max(node.num_requests for node in aware.nodes) < 0.5 * len(CHAT)
    assert aware.ttft(0.5) <= blind.ttft(0.5)
