"""What stands for a request, or a batch of them, in transformers: a cache without tensors."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from hicache.errors import BadRequest
from hicache.service.engines.transformers.forward import current

if TYPE_CHECKING:
    from hicache.service.engines.transformers.engine import TransformersEngine


class PassOwner(Protocol):
    """A request, or a batch: whose keys and values a forward pass of the model stores."""

    @property
    def engine(self) -> "TransformersEngine":
        """To whose model it belongs."""
        ...

    def run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Mapping[str, Any]
    ) -> Any:
        """A call of the model, `original(*args, **kwargs)`, whose arguments by name are `arguments`: a pass that is
        kept if it returns and dropped if it raises."""
        ...

    def length_of(self, layer: int) -> int:
        """Tokens that one layer holds, of a batch in its longest row, those of a pass under way included once the layer
        has stored them."""
        ...


class RequestCache(Cache):
    """A request, or a batch, as transformers sees it. Holds no tensors: layers write to sequences."""

    def __init__(self, owner: PassOwner) -> None:
        self.owner: Final = owner
        super().__init__(layers=[_RequestLayer(owner, layer) for layer in range(owner.engine.layout.num_layers)])


class _RequestLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__ carries no types
    """One layer of a request's cache. `update` returns only the new keys and values: attention reads the rest."""

    is_sliding = False

    def __init__(self, owner: PassOwner, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' class carries no types
        self.is_initialized = True
        self._owner = owner
        self._layer = layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: pages exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        forward = current()
        if forward is None or forward.owner is not self._owner:
            raise BadRequest("cache", "works only in a call of the model itself, while its engine is attached")
        forward.write(self._layer, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._owner.length_of(self._layer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        _refuse("crop", "going back, as assisted decoding does")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        _refuse("reorder_cache", "beams")

    def batch_repeat_interleave(self, repeats: int) -> None:
        _refuse("batch_repeat_interleave", "batches")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        _refuse("batch_select_indices", "batches")

    def reset(self) -> None:
        _refuse("reset", "starting over; open another request")

    def offload(self) -> None:
        _refuse("offload", "transformers' own offloading")

    def prefetch(self) -> None:
        _refuse("prefetch", "transformers' own offloading")


def _refuse(method: str, what: str) -> NoReturn:
    raise BadRequest(f"cache.{method}", f"a request's cache does not support {what}")
