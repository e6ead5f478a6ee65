"""An answer given through hicache, held against plain `transformers` generation by the same model without hicache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hicache.tools.demo.results import Comparison

GREEDY: Final[Mapping[str, Any]] = {
    "do_sample": False, "temperature": None, "top_p": None, "top_k": None,
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
}  # fmt: skip
"""Options of `generate` on both sides: the largest logit wins, whatever the model's own settings say."""
NEAR_TIE: Final = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.5}
"""By dtype: two logits closer than this may change places through rounding alone. Sums taken in another order differ by
up to 1e-4 in float32 for the demo's model; the other dtypes round that much coarser."""


@dataclass(frozen=True, slots=True)
class Answer:
    """New tokens, and the logits that each was chosen from."""

    tokens: tuple[int, ...]
    logits: torch.Tensor
    """`[len(tokens), vocab_size]`, float32, CPU."""


def plain_answer(model: Any, tokens: Sequence[int], max_new_tokens: int) -> Answer:
    """What the model answers by itself: its ordinary attention and cache, the prompt `tokens` computed from the start.

    No hicache engine is attached to `model`.
    """
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    with torch.no_grad():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            **GREEDY,
        )
    return Answer(tuple(output.sequences[0, ids.shape[1] :].tolist()), torch.cat(output.logits).float().cpu())


def compare(number: int, ours: Answer, plain: Answer, tolerance: float) -> Comparison:
    """Whether request `number` was answered with the same tokens, and how far the logits are apart.

    Steps are compared up to the first that chose another token, that one included: until there both had the same tokens
    before them. It is a near tie if the plain run's two best logits were closer than `tolerance` there. Logits that are
    not finite make the answers different.
    """
    steps = min(len(ours.tokens), len(plain.tokens))
    parted = next((step for step in range(steps) if ours.tokens[step] != plain.tokens[step]), None)
    last = steps if parted is None else parted + 1
    difference = (ours.logits[:last] - plain.logits[:last]).abs()
    largest = float(difference.max()) if last else 0.0
    if not bool(torch.isfinite(ours.logits[:last]).all()):
        return Comparison(number, "different", float("inf"), parted)
    if parted is None:
        return Comparison(number, "equal" if ours.tokens == plain.tokens else "different", largest)
    best = plain.logits[parted].topk(2).values
    gap = float(best[0] - best[1])
    return Comparison(number, "near tie" if gap < tolerance else "different", largest, parted, gap)
