"""The engine: attaches a transformers model to a cache, and opens requests on it."""

import dataclasses
import functools
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hicache.errors import BadRequest
from hicache.kernels import decode_cpu
from hicache.kernels.remote_speeds import measure_speeds
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.service.engines.transformers import forward
from hicache.service.engines.transformers.batch import Batch, rows_of
from hicache.service.engines.transformers.identity import layout_of, namespace_of, weights_fingerprint, windows_of
from hicache.service.engines.transformers.request import Request
from hicache.service.engines.transformers.request_cache import RequestCache
from hicache.service.engines.transformers.token_ids import token_ids

if TYPE_CHECKING:
    from hicache.service.compose import HiCache

DEFAULT_CHUNK_SIZE: Final = 512
"""Tokens of one forward pass in a prefill. On two cores a prompt of 2,000 tokens then takes 4 to 8 % more than in one
pass (13 % in passes of 256), while its new pages need a quarter of the room on the device."""

_log = logging.getLogger(__name__)

_attached: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()


class TransformersEngine:
    """A decoder model of Hugging Face transformers that takes its keys and values from a hicache cache.

    Attached from construction until `detach`, or the end of the `with` block. While attached, the model attends through
    hicache wherever a request's cache is passed to it, and as before everywhere else. One engine a model at a time;
    several requests may take turns, and threads may run passes of different requests at the same time.

    model: in evaluation mode; see `identity.check_supported` for which models. Its weights must not change while
        attached: a request on changed weights is refused.
    cache: of the layout `layout_of(model, page_size=...)`.
    tokenizer: enters the namespace if given.
    namespace: instead of the one computed from the weights (`namespace_of`); must have the model's layout.
    chunk_size: tokens of one forward pass in `Request.prefill` and `Request.generate`, by default 512 or half of the
        device tier, if that is less.

    Raises `BadRequest` for a model that cannot be served, is attached already, or does not fit the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: "HiCache",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        namespace: Namespace | None = None,
        chunk_size: int | None = None,
    ) -> None:
        layout = layout_of(model, page_size=cache.layout.page_size)
        if layout != cache.layout:
            raise BadRequest("cache.layout", f"is {cache.layout}, but the model computes {layout}")
        if namespace is not None and namespace.layout != layout:
            raise BadRequest("namespace.layout", f"is {namespace.layout}, but the model computes {layout}")
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise BadRequest("chunk_size", f"{chunk_size!r} is not an integer of at least 1")
        self.model: Final = model
        self.cache: Final = cache
        self.layout: Final = layout
        self.namespace: Final = namespace or namespace_of(model, tokenizer, page_size=layout.page_size)
        """Everything beside tokens that pages of this model are stored under."""
        self.chunk_size: Final = chunk_size or _default_chunk_size(cache)
        self.vocab_size: Final[int] = model.config.vocab_size
        self.windows: Final = windows_of(model)
        """For each layer how many tokens a query sees, None for all."""
        self._parameters = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
        self._fingerprint = weights_fingerprint(model)
        self.is_attached = False
        """Whether the model still attends through this engine."""
        self._attach()
        self._preparing = threading.Thread(target=_prepare, args=(model.device, layout), name="hicache-prepare")
        self._preparing.start()

    def request(
        self,
        input_ids: npt.ArrayLike | torch.Tensor,
        *,
        namespace: Namespace | None = None,
        timeout_s: float = 60.0,
    ) -> Request:
        """Open a request on a prompt: find what is cached of it, protect it, bring it to the device as far as it fits.
        What comes from host memory is not waited for here, but by each layer of the first passes.

        input_ids: `[tokens]` or `[1, tokens]`, at least one token.
        namespace: the engine's with another tenant or salt, to keep pages apart.
        timeout_s: longest wait for pages and for room, in seconds.

        Raises `BadRequest` for ids outside the vocabulary, changed weights or a foreign namespace, and what
        `HiCache.sequence` raises.
        """
        tokens = token_ids(input_ids, self.vocab_size)
        if not len(tokens):
            raise BadRequest("input_ids", "is empty; a request needs at least one token")
        return Request(self, self._checked(namespace), tokens, timeout_s)

    def batch(
        self,
        input_ids: Sequence[npt.ArrayLike] | torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        namespace: Namespace | None = None,
        timeout_s: float = 60.0,
    ) -> Batch:
        """Open requests on several prompts that go through the model together.

        input_ids: ids `[rows, tokens]`, padded on the left, or a sequence of ids for each row.
        attention_mask: for padded ids, of their shape: 0 for padding, 1 else, as tokenizers give it with
            `padding_side="left"`.
        namespace, timeout_s: as `request` takes them.

        Each row needs a page of the device tier while it runs, and all of them one more; contexts need not fit.

        Raises `BadRequest` for padding elsewhere and for more rows than that, and what `request` raises.
        """
        rows = rows_of(input_ids, attention_mask, self.vocab_size)
        if len(rows) >= self.cache.device_pages:
            has = f"the device tier has {self.cache.device_pages} pages"
            raise BadRequest("input_ids", f"have {len(rows)} rows, but {has}: one for each row is needed, and one more")
        namespace = self._checked(namespace)
        with ExitStack() as opened:
            requests = [opened.enter_context(Request(self, namespace, row, timeout_s)) for row in rows]
            batch = Batch(self, requests, timeout_s)
            opened.pop_all()
        return batch

    def _checked(self, namespace: Namespace | None) -> Namespace:
        """The namespace of a request. Raises `BadRequest`."""
        namespace = namespace or self.namespace
        if dataclasses.replace(namespace, tenant=self.namespace.tenant, salt=self.namespace.salt) != self.namespace:
            raise BadRequest("namespace", "differs from the engine's in more than tenant and salt")
        if weights_fingerprint(self.model) != self._fingerprint:
            raise BadRequest("model", "has other weights than when it was attached; attach it anew")
        return namespace

    def detach(self) -> None:
        """Give the model back as it was. Requests can only be closed after that. Idempotent."""
        if not self.is_attached:
            return
        self.is_attached = False
        self._preparing.join()
        # Whoever wrapped the method after us keeps ours inside; it then only passes calls on.
        if self.model.__dict__.get("forward") is self._forward:
            del self.model.__dict__["forward"]
            self.model.__dict__.update(self._forward_before)
        self.model.set_attn_implementation(self._attention_before)
        _attached.discard(self.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _attach(self) -> None:
        model = self.model
        if model in _attached:
            raise BadRequest("model", "is attached to another engine; detach that first")
        self._attention_before: str = model.config._attn_implementation
        forward.register()
        model.set_attn_implementation(forward.ATTENTION)
        if model.config._attn_implementation != forward.ATTENTION:
            raise BadRequest("model", f"{type(model).__name__} has attention of its own that cannot be replaced")
        # The model's `forward` is wrapped rather than hooked: hooks of torch do not hear of an interrupt.
        self._forward_before = {name: value for name, value in model.__dict__.items() if name == "forward"}
        self._forward = _wrapped(model.forward, self)
        model.__dict__["forward"] = self._forward
        self.is_attached = True
        _attached.add(model)

    def run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model. With a request's cache it is a pass of that request, kept if it returns and dropped if
        it raises."""
        arguments = dict(zip(self._parameters, args)) | kwargs
        cache = arguments.get("cache")
        cache = cache if cache is not None else arguments.get("past_key_values")
        if not isinstance(cache, RequestCache):
            with forward.running(None):
                return original(*args, **kwargs)
        if cache.owner.engine is not self:
            raise BadRequest("cache", "belongs to a request of another engine")
        return cache.owner.run(original, args, kwargs, arguments)


def _wrapped(original: Callable[..., Any], engine: TransformersEngine) -> types.MethodType:
    """`model.forward` through the engine; a method, so that copying the model binds it to the copy."""

    @functools.wraps(original)
    def call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if model is not engine.model:
            return type(model).forward(model, *args, **kwargs)
        return engine.run(original, args, kwargs) if engine.is_attached else original(*args, **kwargs)

    return types.MethodType(call, engine.model)


def _prepare(device: torch.device, layout: KVLayout) -> None:
    """Have what decoding is fast with, while requests begin without it: the loops of the CPU, or on a GPU what decides
    how many pages of host memory are left to them."""
    dtype: torch.dtype = getattr(torch, layout.dtype.value)
    decode_cpu.prepare(dtype)
    if device.type == "cuda":
        try:
            measure_speeds(device, dtype)
        except RuntimeError as error:
            _log.warning("pages in host memory are all streamed to %s, which could not be measured: %s", device, error)


def _default_chunk_size(cache: "HiCache") -> int:
    return min(DEFAULT_CHUNK_SIZE, max(1, cache.device_pages // 2) * cache.layout.page_size)
