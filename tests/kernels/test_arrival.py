"""For a fixed partition the bits are the same whatever arrives first: states are merged in order of the partition."""

import threading
from collections.abc import Callable, Iterator
from random import Random

import torch

from hicache.kernels.attend import PagedPart, attend
from hicache.kernels.merge import merge_states_reference
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import causal, relative_rms, tensor, truth

NUM_PARTS, PAGE_SIZE, HEADS, GROUP, DIM = 7, 16, 2, 2, 64
NUM_TOKENS = [5, 40, 16, 63, 1, 90, 33]
NONE = torch.empty(0, HEADS, DIM)


class Slow:
    """A context whose parts are in slow memory: threads bring them, one after the other, in some order."""

    def __init__(self) -> None:
        random = Random(0)
        self.query = tensor(random, 1, HEADS * GROUP, DIM, dtype=torch.float32)
        self.key, self.value = (tensor(random, sum(NUM_TOKENS), HEADS, DIM, dtype=torch.float32) for _ in range(2))
        self._there = []
        start = 0
        for count in NUM_TOKENS:
            num_pages = -(-count // PAGE_SIZE)
            pages = torch.full((num_pages, 2, PAGE_SIZE, HEADS, DIM), torch.nan)
            for plane, held in enumerate((self.key, self.value)):
                rows = torch.full((num_pages * PAGE_SIZE, HEADS, DIM), torch.nan)
                rows[:count] = held[start : start + count]
                pages[:, plane] = rows.view(num_pages, PAGE_SIZE, HEADS, DIM)
            self._there.append(pages)
            start += count

    def bring(self, order: list[int], then: Callable[[int, PagedPart], None]) -> list[threading.Thread]:
        """Start a thread for each part, which copies it and hands it on, after those before it in `order` have."""
        done = [threading.Event() for _ in order]

        def work(place: int) -> None:
            if place:
                assert done[place - 1].wait(60)
            i = order[place]
            pages = self._there[i].clone()
            then(i, PagedPart(pages, torch.arange(len(pages), dtype=torch.int32), NUM_TOKENS[i]))
            done[place].set()

        threads = [threading.Thread(target=work, args=(place,)) for place in range(len(order))]
        for thread in Random(len(order)).sample(threads, len(threads)):
            thread.start()
        return threads

    def state(self, part: PagedPart) -> AttentionState:
        return attend(self.query, [part], key=NONE, value=NONE, scale=0.125)


def orders() -> list[list[int]]:
    random = Random(1)
    return [random.sample(range(NUM_PARTS), NUM_PARTS) for _ in range(30)]


def merged(states: list[AttentionState]) -> torch.Tensor:
    outputs, lses = (torch.stack(tensors) for tensors in zip(*states, strict=True))
    return merge_states_reference(outputs, lses, dtype=torch.float32).output


def test_states_that_are_kept_at_their_place_give_the_same_bits_whatever_arrives_first() -> None:
    slow = Slow()
    by_place, by_arrival = [], []
    for order in orders():
        places: dict[int, AttentionState] = {}

        def keep(i: int, part: PagedPart, places: dict[int, AttentionState] = places) -> None:
            places[i] = slow.state(part)

        for thread in slow.bring(order, keep):
            thread.join(60)
        assert list(places) == order, "they arrived as they were meant to"
        by_place.append(merged([places[i] for i in range(NUM_PARTS)]))
        by_arrival.append(merged(list(places.values())))
    assert all(torch.equal(output, by_place[0]) for output in by_place)
    # What would be seen if the order of arrival were the order of summing.
    assert any(not torch.equal(output, by_place[0]) for output in by_arrival)
    expected = truth(slow.query, slow.key, slow.value, causal(sum(NUM_TOKENS) - 1, 1), 0.125).output
    assert all(relative_rms(output, expected) < 1e-6 for output in by_place + by_arrival)


def test_attend_sums_in_order_of_the_parts_whenever_they_arrive() -> None:
    """A source that reads ahead: parts are given in order, each once it is there."""
    slow = Slow()

    def in_order(order: list[int]) -> Iterator[PagedPart]:
        parts: list[PagedPart | None] = [None] * NUM_PARTS
        there = [threading.Event() for _ in range(NUM_PARTS)]

        def keep(i: int, part: PagedPart) -> None:
            parts[i] = part
            there[i].set()

        threads = slow.bring(order, keep)
        for i in range(NUM_PARTS):
            assert there[i].wait(60)
            part = parts[i]
            assert part is not None
            yield part
        for thread in threads:
            thread.join(60)

    def as_they_come(order: list[int]) -> Iterator[PagedPart]:
        arrived: list[PagedPart] = []
        for thread in slow.bring(order, lambda _, part: arrived.append(part)):
            thread.join(60)
        return iter(arrived)

    def attended(parts: Iterator[PagedPart]) -> AttentionState:
        return attend(slow.query, parts, key=NONE, value=NONE, scale=0.125)

    expected = attended(in_order(list(range(NUM_PARTS))))
    for order in orders():
        state = attended(in_order(order))
        assert torch.equal(state.output, expected.output)
        assert torch.equal(state.lse, expected.lse)
    assert any(not torch.equal(attended(as_they_come(order)).output, expected.output) for order in orders())
