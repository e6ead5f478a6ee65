"""Models that real engines run, as directories of Hugging Face files in float32."""

import json
from pathlib import Path
from typing import Any

from hicache.layout import KVDtype, KVLayout

VOCABULARY = 512
"""Tokens of the small model."""


def make_tiny(directory: Path, *, seed: int = 3, **more: Any) -> Path:
    """A small Llama with random weights, the same for the same seed. `more`: what its configuration has besides."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # its thread would outlive what is made here
    torch.manual_seed(seed)  # made in torch's own default, which is float32
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, **more,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_smollm2(directory: Path) -> Path:
    """SmolLM2-135M-Instruct from its wheel, out of GGUF. Takes half a minute and 540 MB.

    Raises `BadRequest` when the wheel is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from hicache.service.engines.models import load_model

    disable_progress_bar()  # type: ignore[no-untyped-call]  # as above
    loaded = load_model("smollm2")
    # What was loaded from GGUF refuses to be saved: its weights go into a model of its shape that came from nowhere.
    told = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**told))
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(directory)
    return directory


def layout_of(directory: Path, *, page_size: int) -> KVLayout:
    """The pages of such a model in an engine that runs it in float32, on one rank."""
    config = json.loads((directory / "config.json").read_text())
    return KVLayout.uniform(
        num_layers=config["num_hidden_layers"], num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"], dtype=KVDtype.FLOAT32, page_size=page_size,
    )  # fmt: skip
