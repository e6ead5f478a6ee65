"""What vLLM's connector copies on CUDA: blocks of the engine's KV memory, which lies as vLLM lays it out, to pages of
shared memory and back, by kernels on streams of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import Tensor

from hicache.service.engines.vllm.blocks import STAGE_BYTES, Blocks
from hicache.service.engines.vllm.identity import Groups
from hicache.service.engines.vllm.plan import NULL_BLOCK
from hicache.tier import HOST
from hicache.tiers.arena import Arena
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.gpu_check.parts import LeftOut, Place, Report, host_s, measured
from hicache.tools.gpu_check.speed import GB, pinned_gb_s

ORDERS: Final = {"nhd": (0, 1, 2, 3, 4), "hnd": (0, 1, 3, 2, 4)}
"""How `[blocks, keys and values, tokens, heads, dim]` lies in memory, as vLLM's layouts are called."""
BLOCK: Final = 16
"""Tokens of a block."""


def check_connector(place: Place, report: Report) -> None:
    """Blocks to pages and back, every byte: in both orders, with layers apart and together in one memory, with two
    groups and blocks that are none, with more pages than pass at once, and right behind what fills the blocks."""
    for order in ORDERS:
        for is_one_memory in (False, True):
            engine = _Engine(place, order, is_one_memory, group_layers=place.size((24, 8), (2, 1)))
            wrong = _round_trip(engine, engine.num_pages_at_once * 5 // 2)
            name = f"connector_{order}_{'one_memory' if is_one_memory else 'layers_apart'}_wrong"
            report(Row(name, wrong, "bytes", Baseline("held", engine.num_bytes), goal=0.0))
    if not place.has_gpu:
        raise LeftOut("needs a GPU; copied without one")


@measured
def check_connector_speed(place: Place, report: Report) -> None:
    """Saving and loading pages of a model of 8 billion parameters, beside one large copy from and to pinned memory."""
    engine = _Engine(place, "nhd", True, group_layers=place.size((32,), (2,)))
    num_pages = place.size(64, 3)
    into, out = pinned_gb_s(place)
    with engine.pages(num_pages) as pages:
        blocks = (tuple(range(1, num_pages + 1)),)
        for name, copy, baseline in (
            ("connector_save", engine.blocks.save, out), ("connector_load", engine.blocks.load, into),
        ):  # fmt: skip
            gb_s = num_pages * engine.blocks.page_bytes / host_s(partial(copy, blocks, 0, pages)) / GB
            report(Row(name, gb_s, "GB/s", Baseline("pinned copy", baseline), higher_is_better=True))


class _Engine:
    """KV memory of an engine, full of random bytes, and the connector's view of it."""

    def __init__(self, place: Place, order: str, is_one_memory: bool, *, group_layers: tuple[int, ...]) -> None:
        heads, dim = place.size((8, 128), (2, 16))
        dtype = torch.bfloat16
        layer_bytes = 2 * BLOCK * heads * dim * dtype.itemsize
        num_layers = sum(group_layers)
        self.num_pages_at_once: Final = place.size(STAGE_BYTES // (layer_bytes * num_layers), 4)
        self.num_blocks: Final = 6 * self.num_pages_at_once
        generator = torch.Generator(place.device).manual_seed(1)
        memory = torch.randint(
            256, (num_layers, self.num_blocks, layer_bytes), dtype=torch.uint8, device=place.device, generator=generator
        )
        self.layers: Final = list(memory) if is_one_memory else [layer.clone() for layer in memory]
        """Each uint8 `[num_blocks, layer_bytes]`, in the order in which it lies."""
        names = [f"layer {number}" for number in range(num_layers)]
        shape = (self.num_blocks, 2, BLOCK, heads, dim)
        lies = [shape[axis] for axis in ORDERS[order]]
        # The order of two axes is its own inverse.
        caches = {
            name: layer.view(dtype).view(lies).permute(ORDERS[order])
            for name, layer in zip(names, self.layers, strict=True)
        }
        ends = [sum(group_layers[: index + 1]) for index in range(len(group_layers))]
        self.group_layers: Final = group_layers
        groups = Groups(
            ids=tuple(range(len(group_layers))),
            layer_names=tuple(
                tuple(names[end - count : end]) for end, count in zip(ends, group_layers, strict=True)
            ),
            block_size=BLOCK, layer_bytes=layer_bytes, num_kv_heads=heads, head_dim=dim, dtype="bfloat16",
            windows=(None,) * len(group_layers),
        )  # fmt: skip
        self.blocks: Final = Blocks(groups, caches, self.num_blocks)

    @contextmanager
    def pages(self, count: int) -> Iterator[list[memoryview]]:
        """Pages of shared memory, one behind the other, as a sidecar's arena has them."""
        size = self.blocks.page_bytes
        arena = Arena(HOST, count * size)
        try:
            views = [arena.memory[index * size : (index + 1) * size] for index in range(count)]
            yield views
            for view in views:
                view.release()
        finally:
            arena.close()

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return sum(layer.numel() for layer in self.layers)

    def page(self, blocks: list[int]) -> Tensor:
        """What a page has whose block in each group is given: uint8 `[page_bytes]` on the CPU."""
        parts, first = [], 0
        for count, block in zip(self.group_layers, blocks, strict=True):
            parts += [layer[block].cpu() for layer in self.layers[first : first + count]]
            first += count
        return torch.cat(parts)


def _round_trip(engine: _Engine, num_pages: int) -> int:
    """Save pages from some blocks and load them into others; how many bytes are not as they should be, in the pages and
    in all of the engine's memory."""
    wrong, num_groups = 0, len(engine.group_layers)
    order = torch.randperm(engine.num_blocks - 1, generator=torch.Generator().manual_seed(2)) + 1
    saved, loaded = order[:num_pages], order[num_pages : 2 * num_pages]
    # Each group has blocks of its own, and the second one none where its window has passed.
    sources = tuple(tuple(saved.roll(group).tolist()) for group in range(num_groups))
    into = [loaded.roll(group) for group in range(num_groups)]
    into[-1][::3] = NULL_BLOCK
    targets = tuple(tuple(ids.tolist()) for ids in into)
    for layer in engine.layers:
        layer[saved] ^= 0xFF  # queued, and not waited for: a copy begins behind it
    with engine.pages(num_pages) as pages:
        engine.blocks.wait_for(engine.blocks.fence())
        engine.blocks.save(sources, 0, pages)
        for index, page in enumerate(pages):
            wanted = engine.page([ids[index] for ids in sources])
            wrong += int((torch.frombuffer(page, dtype=torch.uint8) != wanted).sum())
        expected = [layer.cpu().clone() for layer in engine.layers]
        first = 0
        for count, source, target in zip(engine.group_layers, sources, targets, strict=True):
            is_there = [block != NULL_BLOCK for block in target]
            for layer in expected[first : first + count]:
                layer[torch.tensor(target)[is_there]] = layer[torch.tensor(source)[is_there]]
            first += count
        engine.blocks.wait_for(engine.blocks.fence())
        engine.blocks.load(targets, 0, [page.toreadonly() for page in pages])
    for layer, wanted in zip(engine.layers, expected, strict=True):
        wrong += int((layer.cpu() != wanted).sum())
    return wrong
