"""One forward pass of a request, and the attention function through which transformers reaches it.

transformers calls an attention function by name and gives it the module, query, key and value, but not the cache. The
pass under way is therefore kept per thread while the model runs (`running`). In it, for every layer in order, the cache
layer writes the new keys and values and returns just those, and the attention function attends to them and to all that
the sequence holds before them.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from hicache.errors import BadRequest
from hicache.kernels.attend import attend
from hicache.kernels.scoring import PLAIN, Scoring
from hicache.layout import KVLayout

if TYPE_CHECKING:
    from hicache.service.compose import Step

ATTENTION: Final = "hicache"
"""Name of the attention function and of its mask, as `set_attn_implementation` takes it."""

_OTHER_ATTENTION: Final = ("s_aux", "position_bias")
"""Arguments by which a model asks for what is not done here."""

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Row:
    """What one sequence has in a pass."""

    step: "Step"
    tokens: npt.NDArray[np.int32]
    """Ids of its new tokens."""
    start: int
    """Tokens before them."""


class ForwardPass:
    """The tokens of one call of the model: stored layer by layer, then kept or dropped as a whole.

    Belongs to the thread that began it. Each row of the call is a sequence of its own, or None where a row has ended
    and what is computed for it means nothing. All rows have the same number of new tokens.
    """

    def __init__(
        self,
        owner: object,
        layout: KVLayout,
        windows: Sequence[int | None],
        rows: Sequence[Row | None],
        num_new: int,
    ) -> None:
        """`windows`: for each layer the tokens that a query sees, None for all. `rows`: their steps have been entered,
        and are the pass's to leave."""
        self.owner: Final = owner
        """Whose cache the pass writes to."""
        self.rows: Final = rows
        self.num_new: Final = num_new
        self.thread_id: Final = threading.get_ident()
        group = layout.groups[0]
        self._due: Final = layout.num_layers
        self._windows: Final = windows
        self._shape: Final = (len(rows), group.num_kv_heads, num_new, group.head_dim)
        self._dtype: Final[torch.dtype] = getattr(torch, layout.dtype.value)
        self._num_layers = 0
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_open = True

    def has_written(self, layer: int) -> bool:
        """Whether this pass stored its tokens in `layer` already."""
        return layer < self._num_layers

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one layer's new keys and values `[rows, num_kv_heads, num_new, head_dim]`, keys after RoPE.

        Raises `BadRequest` when the model computes something else than the layout says, or layers out of order.
        """
        assert self._is_open, "the pass has ended"
        if layer != self._num_layers or layer >= self._due:
            raise BadRequest("model", f"stored layer {layer} where layer {self._num_layers} was due")
        for name, tensor in (("keys", key), ("values", value)):
            if tensor.shape != self._shape or tensor.dtype != self._dtype:
                problem = f"{name} {tuple(tensor.shape)} in {tensor.dtype}, not {self._shape} in {self._dtype}"
                raise BadRequest("model", f"computed {problem}")
        for index, row in enumerate(self.rows):
            if row is not None:
                row.step.write(layer, key[index].transpose(0, 1), value[index].transpose(0, 1))
        self._new = (key, value)
        self._num_layers += 1

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attention of the new tokens over their whole sequences: `[rows, num_new, num_heads, head_dim]` in query's
        dtype, zeros for a row that has ended.

        Query `[rows, num_heads, num_new, head_dim]`; key and value are the very tensors that `write` was given for this
        layer. Raises `BadRequest` when they are not: the stored ones would be other ones than those attended to.
        """
        if self._new is None or layer != self._num_layers - 1 or key is not self._new[0] or value is not self._new[1]:
            raise BadRequest("model", "changes keys or values between its cache and its attention")
        self._new = None
        if scoring.window != self._windows[layer]:
            problem = f"attends in layer {layer} with window {scoring.window}, not {self._windows[layer]}"
            raise BadRequest("model", f"{problem} as its configuration says")
        is_placed = scoring.window is not None
        outputs = []
        for index, row in enumerate(self.rows):
            new = query[index].transpose(0, 1)
            if row is None:
                outputs.append(torch.zeros_like(new))
                continue
            output, _ = attend(
                new,
                row.step.parts(layer, placed=is_placed),
                key=key[index].transpose(0, 1),
                value=value[index].transpose(0, 1),
                scale=scale,
                scoring=scoring,
                first_position=row.start if is_placed else None,
            )
            outputs.append(output)
        return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)

    def commit(self) -> None:
        """Keep the tokens: every layer is stored. Raises `BadRequest`, keeping nothing, if one is missing; what leaving
        a step raises, keeping the rows before it."""
        if self._num_layers != self._due:
            error = BadRequest("model", f"stored {self._num_layers} of {self._due} layers")
            self.discard(error)
            raise error
        self._is_open = False
        leave([row.step for row in self.rows if row is not None], None)

    def discard(self, error: BaseException | None) -> None:
        """Drop the tokens: the sequences are as they were before the pass. `error` is what ended it, if that is
        known."""
        self._is_open = False
        leave([row.step for row in self.rows if row is not None], error if error is not None else _Dropped())


def leave(steps: Sequence["Step"], error: BaseException | None) -> None:
    """Leave steps that were entered: with an error, and once one of them could not be committed, dropping their
    tokens. Raises what the first that could not be committed raised."""
    failure: BaseException | None = None
    for step in steps:
        why = error or failure
        try:
            step.__exit__(None if why is None else type(why), why, None if why is None else why.__traceback__)
        except Exception as raised:
            failure = failure or raised
    if failure is not None:
        raise failure


class _Dropped(Exception):
    """Tells a step that its tokens are not wanted."""


@contextmanager
def running(forward: ForwardPass | None) -> Iterator[None]:
    """Attention in this thread belongs to `forward` meanwhile; with None to no request at all."""
    before = current()
    _local.forward = forward
    try:
        yield
    finally:
        _local.forward = before


def current() -> ForwardPass | None:
    """The pass that attention in this thread belongs to."""
    forward: ForwardPass | None = getattr(_local, "forward", None)
    return forward


def register() -> None:
    """Make the attention function and its mask known to transformers, for all models of the process. Idempotent."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _mask)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query `[B, HQ, L, D]`, key and value `[B, H, S, D]` to `[B, L, HQ, D]`."""
    forward = current()
    soft_cap, window = kwargs.get("softcap"), kwargs.get("sliding_window")
    if forward is None:
        # A call without a request's cache, on a model that an engine is attached to: as it was before.
        if soft_cap is not None:
            return _capped_attention(query, key, value, attention_mask, scaling, soft_cap), None
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    if attention_mask is not None:
        raise BadRequest("attention_mask", "is not plainly causal; masks are not supported with a request's cache")
    for name in _OTHER_ATTENTION:
        if kwargs.get(name) is not None:
            raise BadRequest("model", f"attends with {name}, which is not supported")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False or dropout:
        raise BadRequest("model", "attends with dropout or not causally")
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    layer = module.layer_idx
    assert isinstance(layer, int)
    scoring = PLAIN if soft_cap is None and window is None else Scoring(soft_cap=soft_cap, window=window)
    return forward.attend(layer, query, key, value, scale, scoring), None


def _capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    soft_cap: float,
) -> torch.Tensor:
    """Attention with capped scores, which torch's own does not have; shapes and mask as `_attention` takes them."""
    num_groups = query.shape[1] // key.shape[1]
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    scores = query @ key.repeat_interleave(num_groups, 1).transpose(2, 3) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap)
    if attention_mask is None:
        num_new, num_keys = scores.shape[-2:]
        mask = torch.ones(num_new, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_new)
    else:
        mask = attention_mask
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights.nan_to_num() @ value.repeat_interleave(num_groups, 1)).transpose(1, 2).contiguous()


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask for a request's pass: its mask was checked before it began, and `attend` is causal, and has a window, by
    itself."""
    if current() is None:
        mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
        return mask
    is_causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
    # A window's mask is made anew each time; what says that it is nothing else is that torch's own could do without.
    has_window = kwargs.get("local_size") is not None and kwargs.get("allow_is_causal_skip", True)
    if not (is_causal or has_window) or kwargs.get("use_vmap"):
        raise BadRequest("model", "masks otherwise than causally, or by a window")
    return None
