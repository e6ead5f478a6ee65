"""A page of real keys and values, for codecs to be tried on.

`real_kv_bf16.bin` holds six layers (0, 6, 12, 18, 24 and 29 of 30) of 64 tokens (512 to 575) of the documentation of
the standard library's `statistics` module, as SmolLM2-135M-Instruct sees it: keys after RoPE, bfloat16, little-endian,
`[layer, 2: K, V, token, 3 heads, 64]`. Made by `python -m tests.tiers.real_kv` with Python 3.11 and transformers 5.24.
"""

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.layout import KVDtype, KVLayout

FILE: Final = Path(__file__).with_name("real_kv_bf16.bin")
LAYERS: Final = (0, 6, 12, 18, 24, 29)
FIRST_TOKEN: Final = 512
NUM_TOKENS: Final = 64
NUM_HEADS: Final = 3
HEAD_DIM: Final = 64


def real_pages(page_size: int) -> list[npt.NDArray[np.uint16]]:
    """The excerpt cut into pages of so many tokens: bits of bfloat16, `[6, 2, page_size, 3, 64]` each."""
    kv = np.frombuffer(FILE.read_bytes(), "<u2").reshape(len(LAYERS), 2, NUM_TOKENS, NUM_HEADS, HEAD_DIM)
    return [
        np.ascontiguousarray(kv[:, :, start : start + page_size]) for start in range(0, NUM_TOKENS, page_size)
    ]


def real_layout(page_size: int, dtype: KVDtype = KVDtype.BFLOAT16) -> KVLayout:
    """The layout of these pages."""
    return KVLayout.uniform(
        num_layers=len(LAYERS), num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=dtype, page_size=page_size
    )


def _make() -> None:
    import torch

    from hicache.tools.bench.demo_kv import demo_kv

    kv = torch.from_numpy(demo_kv(FIRST_TOKEN + NUM_TOKENS).kv)[list(LAYERS), :, FIRST_TOKEN:]
    FILE.write_bytes(kv.to(torch.bfloat16).contiguous().view(torch.uint16).numpy().astype("<u2").tobytes())


if __name__ == "__main__":
    _make()
