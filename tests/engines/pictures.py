"""A small model that looks at pictures, as a directory of Hugging Face files in float32, with a tokenizer and all that
vLLM's processor needs, and pictures for it."""

import json
from pathlib import Path
from typing import Any, Final

from hicache.tools.bench.engine_models import VOCABULARY

SIDE: Final = 56
"""Pixels of a picture's side, and of the only cut-out that is made of it."""
PICTURE: Final = 5
"""The token that stands for a picture in a prompt."""
PICTURE_TOKENS: Final = 7
"""How many tokens vLLM puts in its place: what begins it, what says that it is whole, four of it, what ends it."""
SCALE: Final = 3.0
"""By how much weights are larger than a model's first ones, so that it matters which picture it is."""
_SPECIAL: Final = {
    "<unk>": 0, "<s>": 1, "</s>": 2, "<image>": PICTURE, "<fake_token_around_image>": 6, "<global-img>": 7,
    "<end_of_utterance>": 8,
}  # fmt: skip


def make_idefics(directory: Path) -> Path:
    """An Idefics 3 with random weights, whose text model is that of `make_tiny`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # its thread would outlive what is made here
    torch.manual_seed(3)
    text = {
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 4096, "pad_token_id": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": 14,
    }  # fmt: skip
    config = Idefics3Config(
        vision_config=vision, text_config=text, image_token_id=PICTURE, scale_factor=2,
        pad_token_id=2,  # type: ignore[call-arg]  # which all configurations take
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(SCALE)
    model.save_pretrained(directory)
    words = {f"t{number}": number for number in range(VOCABULARY) if number not in _SPECIAL.values()}
    tokenizer = Tokenizer(models.WordLevel({**words, **_SPECIAL}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers'
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
        additional_special_tokens=[word for word, number in _SPECIAL.items() if number >= PICTURE],
    ).save_pretrained(directory)  # fmt: skip
    whole = {"longest_edge": SIDE}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False, "size": whole,
            "max_image_size": whole,
        },
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    }  # fmt: skip
    for name, told in files.items():
        (directory / name).write_text(json.dumps(told))
    return directory


def picture(number: int) -> Any:
    """A picture, the same for the same number."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
