"""Small decoder models with seeded random weights, and what plain transformers computes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hicache.layout import KVLayout
from hicache.service.compose import HiCache

# Its progress bars start a thread that outlives the test.
transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # carries no types

PAGE_SIZE: Final = 16
VOCAB_SIZE: Final = 97

TOLERANCE: Final = 5e-5
"""Largest accepted difference of a float32 logit.

The engine adds up the same products in another order (page by page, then merged by log-sum-exp), so each attention
output may be off by some float32 roundings of 6e-8 relative; three layers and logits of up to about 10 make 1e-5 of
that. A wrong, missing or misplaced token changes logits by 0.1 to 10.
"""


def tiny_model(kind: str = "Llama", *, num_heads: int = 6, num_kv_heads: int = 2, seed: int = 0, **config: Any) -> Any:
    """A model of three layers, head size 16, in float32 and evaluation mode.

    Its weights are wide enough for logits that are far apart: greedy tokens hang on every token of the context, and do
    not flip by rounding.
    """
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": num_heads * 16,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    } | config
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    return model_class(model_class.config_class(**config)).eval()


def tiny_tokenizer(vocabulary: dict[str, int]) -> Any:
    """A tokenizer that knows these words and takes every other one for `a`."""
    words = Tokenizer(WordLevel(vocabulary, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)  # type: ignore[no-untyped-call]  # no types


def random_ids(length: int, seed: int = 1) -> torch.Tensor:
    """Token ids `[1, length]`."""
    return torch.randint(0, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Plain:
    """What plain transformers generates."""

    tokens: tuple[int, ...]
    logits: torch.Tensor
    """`[len(tokens), vocab_size]`, float32."""


def plain_generate(model: Any, ids: torch.Tensor, max_new_tokens: int, *, tolerance: float = TOLERANCE) -> Plain:
    """Greedy generation without hicache; asserts that no token is so close to another that rounding could flip it."""
    output = model.generate(
        ids, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    logits = torch.cat(output.logits)
    best, second = logits.topk(2).values.unbind(-1)
    assert float((best - second).min()) > 4 * tolerance, "the reference is a near tie; choose another seed"
    return Plain(tuple(output.sequences[0, ids.shape[1] :].tolist()), logits)


def assert_same(
    tokens: Sequence[int], logits: torch.Tensor | None, plain: Plain, *, tolerance: float = TOLERANCE
) -> None:
    """The same greedy tokens, from logits that agree within the tolerance."""
    assert tuple(tokens) == plain.tokens
    assert logits is not None
    torch.testing.assert_close(logits, plain.logits, rtol=0, atol=tolerance)


def open_cache(layout: KVLayout, *, device_pages: int = 64, host_pages: int = 64, **options: Any) -> HiCache:
    """A cache in memory with room for so many pages in each tier, out of which leaves what was used longest ago."""
    return HiCache.open(
        layout,
        device_bytes=device_pages * layout.page_bytes,
        host_bytes=host_pages * layout.page_bytes,
        **{"policy": "lru", **options},
    )


def kept(num_computed: int, length: int) -> int:
    """Tokens found again of a prompt of `length` tokens that begins a sequence of `num_computed`: those in whole pages,
    except the last token."""
    return min(num_computed // PAGE_SIZE * PAGE_SIZE, length - 1)


@dataclass
class PassCounter:
    """Tokens that really went through the layers of a model, pass by pass."""

    passes: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.passes)

    def take(self) -> int:
        """Tokens since the last call of this."""
        tokens = self.tokens
        self.passes.clear()
        return tokens


@contextmanager
def counting(model: Any) -> Iterator[PassCounter]:
    """Count what goes through the first layer: whatever the model's callers say, this is what was computed."""
    counter = PassCounter([])

    def count(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        counter.passes.append(hidden.shape[1])

    layers = model.get_decoder().layers
    handle = layers[0].register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counter
    finally:
        handle.remove()
