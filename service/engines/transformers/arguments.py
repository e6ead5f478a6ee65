"""Which calls of a model can be served with a request's cache: those whose keys and values hang on the tokens alone."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from hicache.errors import BadRequest
from hicache.service.engines.transformers.token_ids import Tokens

_PASS_ARGUMENTS: Final = frozenset({
    "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep",
    "return_dict", "output_hidden_states", "output_attentions", "labels", "inputs_embeds",
})  # fmt: skip
"""Arguments of a forward pass whose meaning is known here. Another one that carries a tensor may change the KV."""
_HINT: Final = (
    "a forward pass takes the tokens after those that are computed, "
    "generate() all tokens, or those after with an attention_mask for all"
)


def check_call(model: PreTrainedModel, arguments: Mapping[str, Any], num_rows: int) -> torch.Tensor:
    """The ids `[num_rows, tokens]` of a call that can be served. Raises `BadRequest` naming the argument that cannot,
    or the state of the model that keeps it from being."""
    ids = arguments.get("input_ids")
    if ids is None or arguments.get("inputs_embeds") is not None:
        raise BadRequest("inputs_embeds", "do not say which tokens they are; pass input_ids")
    assert isinstance(ids, torch.Tensor)
    if ids.dim() != 2 or ids.shape[0] != num_rows or ids.shape[1] < 1:
        what = "a request is one sequence, no batch" if num_rows == 1 else f"the batch has {num_rows} rows"
        raise BadRequest("input_ids", f"have shape {tuple(ids.shape)}, not [{num_rows}, tokens]: {what}")
    if arguments.get("use_cache") is False:
        raise BadRequest("use_cache", "is False although a request's cache was passed")
    if arguments.get("output_attentions"):
        raise BadRequest("output_attentions", "is not supported: attention weights are never there as a whole")
    for name, value in arguments.items():
        if name not in _PASS_ARGUMENTS and isinstance(value, torch.Tensor):
            raise BadRequest(name, "is not supported: keys and values may depend on it beside the tokens")
    if model.training:
        raise BadRequest("model", "is in training mode; call model.eval()")
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
        raise BadRequest("model", "cannot have gradients through cached keys; call it under torch.no_grad()")
    return ids


def check_row(
    arguments: Mapping[str, Any], index: int, new: Tokens, known: Tokens, *, start: int, padding: int
) -> None:
    """Check what a call says of one row: that its `new` tokens follow `start` others, and these `padding`, whose mask
    is 0. `known`: those of the new ones that the request knows already. Raises `BadRequest`."""
    end = start + len(new)
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is None and padding:
        raise BadRequest("attention_mask", f"is missing: row {index} is padded")
    if mask is not None:
        shape = (mask.shape[0], padding + end)
        expected = torch.arange(padding + end, device=mask.device) >= padding
        if tuple(mask.shape) != shape or not torch.equal(mask[index], expected.to(mask.dtype)):
            padded = f", after {padding} zeros in row {index}" if padding else ""
            raise BadRequest("attention_mask", f"is not ones of shape {shape}{padded}: other masks are not supported")
    if not np.array_equal(known, new[: len(known)]):
        raise BadRequest("input_ids", f"differ from the request's own at position {start}; {_HINT}")
    if positions is not None:
        expected = torch.arange(start, end, dtype=positions.dtype, device=positions.device)
        row = positions[index if positions.shape[0] > 1 else 0]
        if row.shape != expected.shape or not torch.equal(row, expected):
            raise BadRequest("position_ids", f"are not {start} to {end - 1}; {_HINT}")
