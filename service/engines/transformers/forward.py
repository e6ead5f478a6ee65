"""One forward pass of a request, and the attention function through which transformers reaches it.

transformers calls an attention function by name and gives it the module, query, key and value, but not the cache. The
pass under way is therefore kept per thread while the model runs (`running`). In it, for every layer in order, the cache
layer writes the new keys and values and returns just those, and the attention function attends to them and to all that
the sequence holds before them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from hicache.errors import BadRequest
from hicache.kernels.attend import attend
from hicache.layout import KVLayout

if TYPE_CHECKING:
    from hicache.service.compose import Step

ATTENTION: Final = "hicache"
"""Name of the attention function and of its mask, as `set_attn_implementation` takes it."""

_OTHER_ATTENTION: Final = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments by which a model asks for something beside full causal attention."""

_local = threading.local()


class ForwardPass:
    """The tokens of one call of the model: stored layer by layer, then kept or dropped as a whole.

    Belongs to the thread that began it.
    """

    def __init__(self, owner: object, layout: KVLayout, step: "Step", tokens: npt.NDArray[np.int32]) -> None:
        self.owner: Final = owner
        """Whose cache the pass writes to."""
        self.tokens: Final = tokens
        """Ids of its tokens."""
        self.thread_id: Final = threading.get_ident()
        group = layout.groups[0]
        self._due: Final = layout.num_layers
        self._shape: Final = (1, group.num_kv_heads, len(tokens), group.head_dim)
        self._dtype: Final[torch.dtype] = getattr(torch, layout.dtype.value)
        self._num_layers = 0
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self._step = step.__enter__()
        self._is_open = True

    def has_written(self, layer: int) -> bool:
        """Whether this pass stored its tokens in `layer` already."""
        return layer < self._num_layers

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store one layer's new keys and values `[1, num_kv_heads, num_new, head_dim]`, keys after RoPE.

        Raises `BadRequest` when the model computes something else than the layout says, or layers out of order.
        """
        assert self._is_open, "the pass has ended"
        if layer != self._num_layers or layer >= self._due:
            raise BadRequest("model", f"stored layer {layer} where layer {self._num_layers} was due")
        for name, tensor in (("keys", key), ("values", value)):
            if tensor.shape != self._shape or tensor.dtype != self._dtype:
                problem = f"{name} {tuple(tensor.shape)} in {tensor.dtype}, not {self._shape} in {self._dtype}"
                raise BadRequest("model", f"computed {problem}")
        self._step.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        self._new = (key, value)
        self._num_layers += 1

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of the new tokens over the whole sequence: `[1, num_new, num_heads, head_dim]` in query's dtype.

        Query `[1, num_heads, num_new, head_dim]`; key and value are the very tensors that `write` was given for this
        layer. Raises `BadRequest` when they are not: the stored ones would be other ones than those attended to.
        """
        if self._new is None or layer != self._num_layers - 1 or key is not self._new[0] or value is not self._new[1]:
            raise BadRequest("model", "changes keys or values between its cache and its attention")
        self._new = None
        output, _ = attend(
            query[0].transpose(0, 1),
            self._step.parts(layer),
            key=key[0].transpose(0, 1),
            value=value[0].transpose(0, 1),
            scale=scale,
        )
        return output[None]

    def commit(self) -> None:
        """Keep the tokens: every layer is stored. Raises `BadRequest`, keeping nothing, if one is missing."""
        if self._num_layers != self._due:
            error = BadRequest("model", f"stored {self._num_layers} of {self._due} layers")
            self.discard(error)
            raise error
        self._is_open = False
        self._step.__exit__(None, None, None)

    def discard(self, error: BaseException | None) -> None:
        """Drop the tokens: the sequence is as it was before the pass. `error` is what ended it, if that is known."""
        error = error if error is not None else _Dropped()
        self._is_open = False
        self._step.__exit__(type(error), error, error.__traceback__)


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
    if forward is None:
        # A call without a request's cache, on a model that an engine is attached to: as it was before.
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    if attention_mask is not None:
        raise BadRequest("attention_mask", "is not plainly causal; masks are not supported with a request's cache")
    for name in _OTHER_ATTENTION:
        if kwargs.get(name) is not None:
            raise BadRequest("model", f"attends with {name}; full attention only")
    if kwargs.get("is_causal") is False or dropout:
        raise BadRequest("model", "attends with dropout or not causally")
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    layer = module.layer_idx
    assert isinstance(layer, int)
    return forward.attend(layer, query, key, value, scale), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask for a request's pass: its mask was checked before it began, and `attend` is causal by itself."""
    if current() is None:
        mask: torch.Tensor | None = sdpa_mask(*args, **kwargs)
        return mask
    if kwargs.get("mask_function", causal_mask_function) is not causal_mask_function:
        raise BadRequest("model", "masks otherwise than causally; full attention only")
    return None
