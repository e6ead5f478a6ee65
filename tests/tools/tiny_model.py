"""A model directory as `transformers` saves it: a small Llama with random weights and a tokenizer of its own."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(
    folder: Path,
    texts: Iterable[str],
    *,
    max_positions: int = 8_192,
    chat_template: str | None = CHAT_TEMPLATE,
    **config: Any,
) -> Path:
    """A Llama of two layers with seeded weights, and a byte-level tokenizer trained on `texts`, in `folder`.

    The weights are wide enough for logits that are far apart: greedy tokens hang on the whole context.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # carries no types
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer_class: Any = transformers.PreTrainedTokenizerFast  # carries no types
    tokenizer = tokenizer_class(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {
        "vocab_size": backend.get_vocab_size(), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": max_positions,
        "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | config)).save_pretrained(folder)
    return folder
