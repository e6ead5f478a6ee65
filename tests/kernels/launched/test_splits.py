"""The law, for random splits: attention over parts of a context in several memories, merged, is that over all of it."""

from itertools import combinations, pairwise
from random import Random

import pytest
import torch

from hicache.kernels.decode import paged_decode
from hicache.kernels.merge import merge_states
from hicache.kernels.splits import NUM_SPLITS_MAX, SPLIT_TOKENS_MIN, choose_num_splits
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import (
    DTYPES,
    ERROR_RATIO_MAX,
    FLOAT32_ERROR_MAX,
    LSE_ERROR_MAX,
    Memory,
    empty_pages,
    plain_torch,
    relative_rms,
    tensor,
    truth,
)
from tests.kernels.launched.batches import nans
from tests.kernels.launched.device import DEVICE

NUM_TOKENS, PAGE_SIZE, NUM_PAGES = 46, 6, 8
PARTS_MAX = 6
HEADS, HEAD_DIM, SCALE = 3, 64, 0.125

Run = tuple[int, int]
"""Pages from the first to the second, exclusive; none if they are equal."""
RUNS: list[Run] = [*combinations(range(NUM_PAGES + 1), 2), (0, 0)]


class Context:
    """One sequence, all of whose pages are in each of three memories, in other slots and lying in another way."""

    def __init__(self, random: Random, dtype: torch.dtype) -> None:
        self.key, self.value = (tensor(random, NUM_TOKENS, 1, HEAD_DIM, dtype=dtype) for _ in range(2))
        self.query = tensor(random, 1, HEADS, HEAD_DIM, dtype=dtype)
        self.memories: list[tuple[torch.Tensor, list[int]]] = []
        for memory in Memory:
            pages = empty_pages(memory, NUM_PAGES + 5, PAGE_SIZE, 1, HEAD_DIM, dtype)
            slots = random.sample(range(NUM_PAGES + 5), NUM_PAGES)
            for i, slot in enumerate(slots):
                tokens = slice(i * PAGE_SIZE, min((i + 1) * PAGE_SIZE, NUM_TOKENS))
                for plane, held in enumerate((self.key, self.value)):
                    pages[slot, plane, : tokens.stop - tokens.start] = held[tokens]
            self.memories.append((pages.to(DEVICE), slots))

    def attend(self, memory: int, runs: list[Run]) -> AttentionState:
        """The state over each run of pages, as one memory has them: output [runs, HQ, D], LSE [runs, HQ]."""
        pages, slots = self.memories[memory]
        tables = torch.full((len(runs), NUM_PAGES), -1, dtype=torch.int32)
        for row, (begin, end) in enumerate(runs):
            tables[row, begin:end] = torch.tensor(slots[begin:end], dtype=torch.int32)
        return paged_decode(
            self.query.expand(len(runs), -1, -1).to(DEVICE), pages, tables.to(DEVICE),
            torch.full((len(runs),), NUM_TOKENS, dtype=torch.int32, device=DEVICE),
            scale=SCALE, num_splits=1, output=nans(len(runs), HEADS, HEAD_DIM).to(DEVICE),
        )  # fmt: skip


def random_split(random: Random) -> list[tuple[Run, int]]:
    """The context cut into up to `PARTS_MAX` runs of pages, some empty, each in one of the memories; not in order."""
    cuts = sorted(random.randint(0, NUM_PAGES) for _ in range(random.randint(0, PARTS_MAX - 1)))
    runs = list(pairwise([0, *cuts, NUM_PAGES]))
    random.shuffle(runs)
    return [(run if run[0] < run[1] else (0, 0), random.randrange(len(Memory))) for run in runs]


@pytest.mark.parametrize(("dtype", "num_splits"), [(DTYPES[0], 200), (DTYPES[1], 200), (DTYPES[2], 600)], ids=str)
def test_a_thousand_random_splits(dtype: torch.dtype, num_splits: int) -> None:
    random = Random(num_splits)
    context = Context(random, dtype)
    splits = [random_split(random) for _ in range(num_splits)]
    states = [context.attend(memory, RUNS) for memory in range(len(Memory))]
    # Each part's state where the part stands in its split; all splits are merged at once.
    outputs = nans(PARTS_MAX, num_splits, HEADS, HEAD_DIM).to(DEVICE)
    lses = torch.full((PARTS_MAX, num_splits, HEADS), -torch.inf, device=DEVICE)
    for split, parts in enumerate(splits):
        for place, (run, memory) in enumerate(parts):
            outputs[place, split] = states[memory].output[RUNS.index(run)]
            lses[place, split] = states[memory].lse[RUNS.index(run)]
    merged = merge_states(outputs, lses, dtype=dtype)
    visible = torch.ones(1, NUM_TOKENS, dtype=torch.bool)
    whole = (context.query, context.key, context.value, visible, SCALE)
    expected = truth(*whole)
    allowed = ERROR_RATIO_MAX * relative_rms(plain_torch(*whole), expected.output)
    if dtype == torch.float32:
        allowed = max(allowed, FLOAT32_ERROR_MAX)
    for split in range(num_splits):
        assert relative_rms(merged.output[split].cpu(), expected.output[0]) <= allowed, splits[split]
    assert float((merged.lse.cpu() - expected.lse).abs().max()) <= LSE_ERROR_MAX


def test_where_a_part_lies_does_not_change_its_state() -> None:
    """The same bits from every memory, whatever else is attended to by the same launch."""
    context = Context(Random(0), torch.bfloat16)
    runs = [(2, 6), (0, 0), (7, 8), (0, 8)]
    expected = context.attend(0, runs)
    for memory in range(len(Memory)):
        for i, run in enumerate(runs):
            state = context.attend(memory, [run])
            assert torch.equal(state.output[0], expected.output[i])
            assert torch.equal(state.lse[0], expected.lse[i])


def test_the_number_of_splits_follows_from_length_and_multiprocessors() -> None:
    """Two programs a multiprocessor; no split without work, and no more than there may be."""
    assert choose_num_splits(8, 128 << 10, 132) == 33
    assert choose_num_splits(8, 128 << 10, 132) * 8 >= 2 * 132
    assert choose_num_splits(512, 128 << 10, 132) == 1
    assert choose_num_splits(1, 4 * SPLIT_TOKENS_MIN, 132) == 4
    assert choose_num_splits(1, 10**6, 1000) == NUM_SPLITS_MAX
    assert choose_num_splits(0, 0, 132) == 1
