"""The worker's side of adapters: what vLLM has loaded, and that pages go only with the adapter they were computed with.

vLLM reads an adapter's files when it first needs it, and again when it has put it out of memory since; what it reads
then may be another version. It tells connectors nothing of that. So its loading is watched, and what it brings is
digested before vLLM has it. Where pages are wanted for an adapter that is not in memory, vLLM's loader is called for it
here, some steps before vLLM would, which is given what was read when it comes to it.
"""

import hashlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from hicache.errors import BadRequest
from hicache.service.engines.vllm.adapters import Adapters, Answer, Loaded
from hicache.service.engines.vllm.plan import Load, Plan, Save

_FORMAT: Final = b"hicache-vllm-adapter\x01"
_NUM_THREADS: Final = 4
READ_S: Final = 1.0
"""How long what was read for a request is what vLLM would read itself, if no pages were loaded for it."""
_LOADS: Final = "_load_adapter"
"""The method of vLLM's `WorkerLoRAManager` that reads an adapter and returns it as it is in the files, cast to the
engine's `lora_dtype`: every adapter passes through it."""
_USES: Final = "set_active_adapters"
"""The one that it calls for each step, and when it warms up."""
_APPLIES: Final = ("target_modules", "enable_tower_connector_lora", "fully_sharded_loras")
"""What vLLM's configuration says of where and how the weights of all adapters are applied."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """An adapter that vLLM is to have, whatever its files hold by now."""

    model: Any
    path: str
    """Where it was read: numbers are vLLM's own, and may be somebody else's by now."""
    until: float
    """As long as this, or while there are"""
    requests: set[str] = field(default_factory=set)
    """that pages were loaded for, and that have computed nothing yet."""


class LoadedAdapters:
    """The adapters of one worker. Belongs to the worker's thread, on which vLLM loads them, too."""

    def __init__(self, lora_config: Any, rank: int, *, max_held: int, read_s: float = READ_S) -> None:
        """`lora_config`: vLLM's, by which it is known which of a process's managers is this worker's. `max_held`: so
        many adapters are in memory for requests that wait, beside those that vLLM has."""
        self.lora_config: Final = lora_config
        self._rank: Final = rank
        self._max_held: Final = max_held
        self._read_s: Final = read_s
        self._adapters: Final = Adapters(1)
        self._manager: weakref.ref[Any] | None = None
        self._held: Final[dict[int, _Held]] = {}
        self._news: list[Loaded] = []
        self._answers: list[Answer] = []

    def fit(self, plan: Plan) -> Plan:
        """A plan whose loads and saves are right for the adapters that there are. Those that are not bring nothing and
        keep nothing, and end as others do: the plan is one for the step that has just been computed."""
        self._let_go(plan.started)
        for lora in plan.asked_adapters:
            self._at_hand(lora)
            self._answers.append(Answer(lora.lora_int_id, self._rank))
        loads = [each if self._holds(each) else replace(each, timeout_s=0.0) for each in plan.loads]
        saves = [each if self._is_of(each) else replace(each, blocks=((),) * len(each.blocks)) for each in plan.saves]
        return replace(plan, loads=loads, saves=saves)

    def take_news(self) -> tuple[list[Loaded], list[Answer]]:
        """What was loaded and answered since the last call."""
        news, self._news = self._news, []
        answers, self._answers = self._answers, []
        return news, answers

    def met(self, manager: Any) -> None:
        """This is the worker's manager."""
        self._manager = weakref.ref(manager)

    def heard(self, lora: Any, model: Any) -> None:
        """vLLM's loader has read an adapter."""
        digest = ""
        if lora.load_inplace:
            # KV that was computed with what it had before may be in any place.
            self._held.pop(int(lora.lora_int_id), None)
        else:
            try:
                digest = digest_of(model, self.lora_config)
            except Exception:
                _log.exception("hicache: an adapter is of an unknown form; its requests go without the cache")
        loaded = Loaded(int(lora.lora_int_id), str(lora.lora_name), str(lora.lora_path), self._rank, digest)
        # This worker is the only one here.
        self._adapters.take([loaded._replace(rank=0)])
        self._news.append(loaded)

    def held(self, lora: Any) -> Any:
        """The adapter that vLLM is to have where it is about to read one. None where it is to read."""
        held = self._held.get(lora.lora_int_id)
        if held is None or lora.load_inplace or held.path != lora.lora_path:
            return None
        return held.model if held.requests or time.monotonic() < held.until else None

    def _is_of(self, save: Save) -> bool:
        """Whether what a save reads was computed with the adapter that the scheduler's side was told of."""
        return save.lora is None or bool(self._adapters.digest(save.lora))

    def _holds(self, load: Load) -> bool:
        """Whether the request of a load will compute with the adapter that the scheduler's side was told of."""
        if load.lora is None:
            return True
        model = self._at_hand(load.lora)
        if model is None or not self._adapters.digest(load.lora) or not self._has_room(load.lora):
            return False
        new = _Held(model, load.lora.lora_path, time.monotonic())
        held = self._held.setdefault(load.lora.lora_int_id, new)
        held.requests.add(load.request_id)
        return True

    def _at_hand(self, lora: Any) -> Any:
        """An adapter that is in memory from now on. vLLM would read it on this thread, too, when a request computes.
        None where it cannot be had; what is wrong with it vLLM will say."""
        manager, number = None if self._manager is None else self._manager(), int(lora.lora_int_id)
        if manager is None or lora.load_inplace:
            return None
        try:
            model = manager._adapter_manager.get_adapter(number)
            model = self.held(lora) if model is None else model
            if model is None and self._has_room(lora):
                model = getattr(manager, _LOADS)(lora)
                self._held[number] = _Held(model, lora.lora_path, time.monotonic() + self._read_s)
        except Exception as error:
            _log.info("hicache: an adapter cannot be had: %s", error)
            return None
        return model

    def _has_room(self, lora: Any) -> bool:
        """Whether an adapter may be held. One that no request waits for makes room."""
        if lora.lora_int_id in self._held or len(self._held) < self._max_held:
            return True
        spare = next((number for number, held in self._held.items() if not held.requests), None)
        return spare is not None and self._held.pop(spare) is not None

    def _let_go(self, started: Iterable[str]) -> None:
        """Hold nothing any more for these requests."""
        now = time.monotonic()
        for number, held in list(self._held.items()):
            held.requests.difference_update(started)
            if not held.requests and now >= held.until:
                del self._held[number]


_ALL: Final[weakref.WeakSet[LoadedAdapters]] = weakref.WeakSet()
"""Of this process's workers."""


def watch(managers: type[Any], adapters: LoadedAdapters) -> None:
    """From now on `adapters` hears of what is loaded for its worker. `managers`: vLLM's `WorkerLoRAManager`. Raises
    `BadRequest` where that is another one than was known."""
    known = {name: getattr(managers, name, None) for name in (_LOADS, _USES)}
    for name, method in known.items():
        if method is None:
            raise BadRequest("enable_lora", f"{managers.__name__} of this release has no {name}")
    if not hasattr(known[_LOADS], "is_watched"):
        setattr(managers, _LOADS, _loading(known[_LOADS]))
        setattr(managers, _USES, _using(known[_USES]))
    _ALL.add(adapters)


def _of(manager: Any) -> list[LoadedAdapters]:
    """Who is to hear of a manager's adapters."""
    found = [each for each in _ALL if each.lora_config is manager.lora_config]
    for each in found:
        each.met(manager)
    return found


def _loading(load: Any) -> Callable[[Any, Any], Any]:
    def loads(manager: Any, lora: Any) -> Any:
        watching = _of(manager)
        for each in watching:
            held = each.held(lora)
            if held is not None:
                return held
        model = load(manager, lora)
        for each in watching:
            each.heard(lora, model)
        return model

    loads.is_watched = True  # type: ignore[attr-defined]  # functions have attributes
    return loads


def _using(use: Any) -> Callable[..., Any]:
    def uses(manager: Any, *args: Any, **kwargs: Any) -> Any:
        _of(manager)
        return use(manager, *args, **kwargs)

    return uses


def digest_of(model: Any, lora_config: Any) -> str:
    """`"sha256:"` and the digest of an adapter as vLLM has read it, a `LoRAModel`, and of what of it is applied, as
    vLLM's `LoRAConfig` says. Its weights are in memory of their own from now on: otherwise some are the file itself,
    mapped, and change with it. Raises `AttributeError` or `TypeError` for a form of adapters that is not known."""
    applied = [getattr(lora_config, name, None) for name in _APPLIES]
    names: list[Any] = [model.rank, bool(model.is_3d_lora_weight), applied]
    tensors: list[Tensor] = []

    def take(owner: Any, attribute: str) -> None:
        tensor = getattr(owner, attribute)
        if tensor is not None:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{attribute} is a {type(tensor).__name__}")
            if not tensor.is_pinned():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                setattr(owner, attribute, tensor)
            names.append([attribute, str(tensor.dtype), list(tensor.shape)])
            tensors.append(tensor)

    for name, weights in sorted(model.loras.items()):
        names.append([name, weights.rank, weights.scaling])
        take(weights, "lora_a")
        take(weights, "lora_b")
    for name, module in sorted(model.modules_to_save.items()):
        names.append([name])
        take(module, "weight")
        take(module, "bias")
    return f"sha256:{_digest(names, tensors)}"


def _digest(names: Any, tensors: Iterable[Tensor]) -> str:
    def bytes_of(tensor: Tensor) -> bytes:
        return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()

    whole = hashlib.sha256(_FORMAT + repr(names).encode())
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for each in threads.map(bytes_of, tensors):
            whole.update(each)
    return whole.hexdigest()
