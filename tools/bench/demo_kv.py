"""Queries, keys and values as a real model makes them: the demo's model over a document of the demo."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache.tools.demo.model import Prompter, find_model, load_model
from hicache.tools.demo.stdlib import render

_NAME = "hicache_bench_recording"


@dataclass(frozen=True)
class Recorded:
    """What attention saw, float32, after RoPE."""

    kv: npt.NDArray[np.float32]
    """`[layers, 2, num_tokens, kv_heads, head_dim]`."""
    queries: npt.NDArray[np.float32]
    """`[layers, num_tokens, heads, head_dim]`."""


def demo_kv(num_tokens: int) -> Recorded:
    """Run the first `num_tokens` tokens of the documentation of `statistics` through the model, in float32 on the CPU.
    Takes half a minute for 2,048.

    Raises `UsageProblem` or `CommandFailed` when the model or transformers is not installed.
    """
    files = find_model(None)
    from transformers import AttentionInterface

    tokens = Prompter(files).tokenizer(render("statistics"), add_special_tokens=False, verbose=False)["input_ids"]
    assert len(tokens) >= num_tokens, "the document is shorter"
    model = load_model(files, dtype=torch.float32, device="cpu")
    seen: list[tuple[torch.Tensor, ...]] = []

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """`[1, heads, tokens, dim]` in, `[1, tokens, heads, dim]` out."""
        seen.append((query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=options["scaling"], enable_gqa=True
        )
        return output.transpose(1, 2), None

    AttentionInterface.register(_NAME, attend)
    model.set_attn_implementation(_NAME)
    with torch.inference_mode():
        model(torch.tensor([tokens[:num_tokens]]), use_cache=False)
        kv = torch.stack([torch.stack((key[0], value[0])) for _, key, value in seen]).transpose(2, 3)
        queries = torch.stack([query[0] for query, _, _ in seen]).transpose(1, 2)
    return Recorded(kv.contiguous().numpy(), queries.contiguous().numpy())
