"""The embedded cache over an NVMe tier with a codec: what comes back is what was computed, or nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import hicache
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service.compose import HiCache
from hicache.tier import NVME

LAYERS, HEADS, DIM, PAGE = 3, 2, 32, 16
LAYOUT = KVLayout.uniform(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=KVDtype.BFLOAT16, page_size=PAGE)
EXACT = Namespace(model="random numbers", layout=LAYOUT)
LOSSY = replace(EXACT, codec="int8")
NUM_TOKENS = 4 * PAGE
PROMPTS = 12
"""Prompts of four pages each; device and host hold two of them each."""


def open_cache(directory: Path, codec: str) -> HiCache:
    return hicache.HiCache.open(
        LAYOUT, device_bytes=8 * LAYOUT.page_bytes, host_bytes=8 * LAYOUT.page_bytes, nvme_dir=directory / "nvme",
        nvme_bytes=128 * LAYOUT.page_bytes, nvme_codec=codec,
    )  # fmt: skip


def tokens_of(prompt: int) -> list[int]:
    return [1000 * prompt + token for token in range(NUM_TOKENS)]


def kv_of(prompt: int, layer: int, *, noise: bool) -> torch.Tensor:
    """Keys and values of a prompt, `[2, tokens, heads, dim]`: as models make them, or any bits but NaNs."""
    random = torch.Generator().manual_seed(10 * prompt + layer)
    shape = 2, NUM_TOKENS, HEADS, DIM
    if noise:
        bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=random, dtype=torch.int32) & 0xBFFF
        return bits.to(torch.int16).view(torch.bfloat16)
    return torch.randn(shape, generator=random).to(torch.bfloat16)


def compute_all(cache: HiCache, namespace: Namespace, *, noise: bool = False) -> None:
    for prompt in range(PROMPTS):
        with cache.sequence(namespace, tokens_of(prompt)) as sequence, sequence.step(tokens_of(prompt)) as step:
            for layer in range(LAYERS):
                key, value = kv_of(prompt, layer, noise=noise)
                step.write(layer, key, value)


def found_again(cache: HiCache, namespace: Namespace, prompt: int) -> tuple[int, float]:
    """How many tokens of a prompt are cached, and the largest error of what attention is given of them."""
    tokens = tokens_of(prompt)
    with cache.sequence(namespace, [*tokens, 1]) as sequence, sequence.step([1]) as step:
        worst = 0.0
        for layer in range(LAYERS):
            at = 0
            right = kv_of(prompt, layer, noise=False)
            step.write(layer, right[0, :1], right[1, :1])
            for part in step.parts(layer):
                pages = part.pages[part.block_table.long()]
                kv = pages.transpose(0, 1).reshape(2, -1, HEADS, DIM)[:, : part.num_tokens]
                difference = kv.float() - right[:, at : at + part.num_tokens].float()
                worst = max(worst, float(difference.abs().max()))
                at += part.num_tokens
        return sequence.num_cached, worst


@pytest.mark.parametrize(("codec", "namespace"), [("exponent-zstd", EXACT), ("lz4", EXACT), ("int8", LOSSY)])
def test_pages_come_back_from_an_encoding_tier(codec: str, namespace: Namespace, tmp_path: Path) -> None:
    with open_cache(tmp_path, codec) as cache:
        compute_all(cache, namespace)
        assert cache.match(namespace, tokens_of(0)).by_tier == {NVME: NUM_TOKENS}
        found = [found_again(cache, namespace, prompt) for prompt in range(PROMPTS)]
    assert [cached for cached, _ in found] == [NUM_TOKENS] * PROMPTS
    errors = np.array([error for _, error in found])
    if codec == "int8":
        assert 0 < errors[0] < 0.05
    else:
        assert not errors.any()


def test_others_never_get_the_bytes_of_a_lossy_tier(tmp_path: Path) -> None:
    with open_cache(tmp_path, "int8") as cache:
        compute_all(cache, EXACT)
        compute_all(cache, LOSSY)
        for prompt in range(PROMPTS):
            assert NVME not in cache.match(EXACT, tokens_of(prompt)).by_tier
            cached, error = found_again(cache, EXACT, prompt)
            assert (cached, error) in ((0, 0.0), (NUM_TOKENS, 0.0))
        assert cache.match(LOSSY, tokens_of(0)).by_tier == {NVME: NUM_TOKENS}


def test_pages_that_do_not_fit_leave_host_memory_and_nothing_stops(tmp_path: Path) -> None:
    with open_cache(tmp_path, "exponent-zstd") as cache:
        compute_all(cache, EXACT, noise=True)
        assert cache.match(EXACT, tokens_of(0)).num_tokens == 0
        assert cache.match(EXACT, tokens_of(PROMPTS - 1)).num_tokens == NUM_TOKENS
        assert cache.stats()["tiers"]["nvme"]["counters"]["write.incompressible"] >= 4
        assert "write.ok" not in cache.stats()["tiers"]["nvme"]["counters"]
