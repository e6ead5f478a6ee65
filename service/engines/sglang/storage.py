"""`HicacheStorage`: the backend as SGLang calls it. See the package for what to write in its configuration."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_server_args
from sglang.version import __version__

from hicache.errors import BadRequest, HicacheError
from hicache.layout import KVLayout
from hicache.service.engines.link import Link, check_pages
from hicache.service.engines.objects import Objects
from hicache.service.engines.ranges import Page
from hicache.service.engines.sglang.identity import Identity, layout_of, weights_of
from hicache.service.engines.sglang.pools import Pool, tensor_page
from hicache.service.engines.sglang.settings import Settings

_log = logging.getLogger("sglang.hicache")
_KV: Final = str(PoolName.KV)


class HicacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """Pages of SGLang's host pools in the sidecar. Made by SGLang, once a rank, and called from its storage threads.

    Three ways in, as SGLang has them: v1 and v2 copy between the host pools and shared memory, v0 takes and fills
    tensors. `"interface_v1": 1` in the extra configuration decides for the pool of keys and values, here as there; what
    one way has saved is not found by the other, as the order of bytes may differ.

    Whatever cannot be had is a miss. What does not fit (another release, pools that are no ranges of memory, a sidecar
    with other pages, a wrong secret) leaves the engine without the cache and one line in its log, or, with `strict`,
    stops its start.
    """

    def __init__(self, storage_config: Any, _more: Any = None) -> None:
        """`storage_config`: SGLang's `HiCacheStorageConfig`. Raises `BadRequest` for settings that are wrong."""
        extra_config = storage_config.extra_config or {}
        self._config: Final = storage_config
        self._settings: Final = Settings.in_extra_config(extra_config)
        self._is_flat: Final = not extra_config.get("interface_v1", 0)
        self._identity: Identity | None = None
        self._layout: KVLayout | None = None
        self._link: Link | None = None
        self._pools: Final[dict[str, Pool]] = {}
        self._objects: dict[str, Objects] = {}
        """By the pool's name: pages as their parts."""
        self._flat: Objects | None = None
        """Pages of keys and values as flat tensors."""
        self._fitted(self._identify)

    def _fitted(self, do: Callable[[], None]) -> None:
        """Do a step of the start; without it, one line, unless the settings are strict."""
        try:
            do()
        except HicacheError as error:
            if self._settings.strict:
                raise
            _log.warning("hicache: this engine runs without the cache, or a part of it: %s", error)

    def _identify(self) -> None:
        try:
            arguments = get_server_args()
        except ValueError:  # a pool that somebody drives without a server
            arguments = None
        weights = weights_of(arguments, self._settings.weights)
        self._identity = Identity(self._config, arguments, __version__, weights)

    # -- pools --------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of keys and values, whose pages the sidecar's are made for. Connects. Raises when strict."""
        super().register_mem_pool_host(mem_pool_host)
        if self._identity is not None:
            self._fitted(lambda: self._connect(mem_pool_host))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another pool. Raises when strict."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._layout is not None and str(host_pool_name) not in self._pools:
            self._fitted(lambda: self._add(Pool(str(host_pool_name), host_pool)))

    def _connect(self, mem_pool_host: Any) -> None:
        pool = Pool(_KV, mem_pool_host)
        layout = layout_of(pool)
        if pool.page_bytes > self._settings.staging_bytes:
            raise BadRequest("staging_bytes", f"{self._settings.staging_bytes} do not hold a page of {pool.page_bytes}")
        self._link = Link(
            self._settings,
            name=f"sglang rank {self._config.tp_rank}",
            staging_bytes=self._settings.staging_bytes,
            check=check_pages(layout),
        )
        self._layout = layout
        self._add(pool)

    def _add(self, pool: Pool) -> None:
        assert self._identity is not None, "pools are taken once it is known whose they are"
        assert self._layout is not None, "the first pool brings the layout"
        assert self._link is not None, "the first pool connects"
        namespace = self._identity.of_pool(pool, self._layout, order="parts")
        self._objects[pool.name] = Objects(self._link, namespace, pool.page_bytes)
        if pool.name == _KV:
            flat = self._identity.of_pool(pool, self._layout, order="flat")
            self._flat = Objects(self._link, flat, pool.page_bytes)
        self._pools[pool.name] = pool

    @property
    def _kv(self) -> Objects | None:
        """Where SGLang's calls without a pool's name keep pages."""
        return self._flat if self._is_flat else self._objects.get(_KV)

    # -- what is there ------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages, from the first on, are there."""
        return self._kv.leading(keys, self._lookup_deadline()) if self._kv is not None else 0

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """How much of a prompt can be restored with what all its pools have."""
        deadline = self._lookup_deadline()
        num_kv = self._kv.leading(keys, deadline) if self._kv is not None else 0
        hits = {PoolName.KV: num_kv} if num_kv else {}
        restorable = set(range(1, num_kv + 1))
        for transfer in pool_transfers or ():
            objects = self._objects.get(str(transfer.name))
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # never decides what can be restored; without a word about it, it is not loaded
            found: set[int] = set()
            if objects is not None and transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                found = set(range(1, objects.leading(keys[:num_kv], deadline) + 1))
            elif objects is not None and transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                num_needed = max(1, len(transfer.keys or ()))
                found = _ends([objects.has(key, deadline) for key in keys[:num_kv]], num_needed)
            if found:
                hits[transfer.name] = max(found)
            restorable &= found
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    # -- v1 and v2: between host pools and shared memory --------------------------------------------------------------

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Fill pages of the pool of keys and values; which of them are right now."""
        return self._move(_KV, keys, host_indices, is_load=True)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Keep pages of the pool of keys and values; which of them are cached now."""
        return self._move(_KV, keys, host_indices, is_load=False)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Fill pages of several pools; which of them are right now, by the pool's name."""
        return {each.name: self._move(str(each.name), each.keys or (), each.host_indices, is_load=True)
                for each in transfers}  # fmt: skip

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Keep pages of several pools; which of them are cached now, by the pool's name."""
        return {each.name: self._move(str(each.name), each.keys or (), each.host_indices, is_load=False)
                for each in transfers}  # fmt: skip

    def _move(self, name: str, keys: Sequence[str], host_indices: Any, *, is_load: bool) -> list[bool]:
        pool, objects = self._pools.get(name), self._objects.get(name)
        if pool is None or objects is None or not keys:
            return [False] * len(keys)
        try:
            pages = pool.pages(host_indices, len(keys))
        except BadRequest as error:
            _log.error("hicache: %s", error)
            return [False] * len(keys)
        if is_load:
            return objects.load(keys, pages, self._load_deadline())
        return objects.save(keys, pages, self._save_deadline())

    # -- v0: tensors --------------------------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fill a flat tensor of a page, or a new one; None for a miss."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Sequence[Any] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill flat tensors of pages, or new ones; None for each miss."""
        if self._flat is None:
            return [None] * len(keys)
        tensors = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        done = self._flat.load(keys, [_page(each) for each in tensors], self._load_deadline())
        return [tensor if is_done else None for tensor, is_done in zip(tensors, done, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Keep a page that is given as a flat tensor; whether it is cached now."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[Any] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Keep pages that are given as flat tensors; whether all of them are cached now."""
        if self._flat is None or values is None or len(values) != len(keys):
            return False
        whole = [each.contiguous() if isinstance(each, torch.Tensor) else None for each in values]
        return all(self._flat.save(keys, [_page(each) for each in whole], self._save_deadline()))

    # -- the rest -----------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Nothing of before is found by this engine any more, until it is started again. Nobody else's pages go, and
        this engine's leave the cache when room is needed."""
        if self._identity is not None:
            self._identity.forget()
            for pool in tuple(self._pools.values()):
                self._add(pool)
            _log.info("hicache: this engine uses new names; what was cached under others stays until room is needed")
        return True

    def close(self) -> None:
        """End the session. Idempotent."""
        if self._link is not None:
            self._link.close()

    def _lookup_deadline(self) -> float:
        return time.monotonic() + self._settings.lookup_timeout_s

    def _load_deadline(self) -> float:
        return time.monotonic() + self._settings.load_timeout_s

    def _save_deadline(self) -> float:
        return time.monotonic() + self._settings.save_timeout_s


def _page(tensor: Any) -> Page:
    """A tensor as a page; one of no bytes, which is never found, where it is none."""
    try:
        return tensor_page(tensor)
    except (AttributeError, BadRequest):
        return ()


def _ends(present: Sequence[bool], num_needed: int) -> set[int]:
    """The lengths of prefixes whose last `num_needed` pages, or all where they are fewer, are there."""
    ends, run = set(), 0
    for length, is_there in enumerate(present, start=1):
        run = run + 1 if is_there else 0
        if run >= min(num_needed, length):
            ends.add(length)
    return ends
