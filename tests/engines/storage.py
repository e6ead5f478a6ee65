"""SGLang's storage backends in a process of its own, which answers questions of one line of JSON each.

Backends are made by SGLang's own factory and driven by its own controller's methods, over its own host pools and keys.
Only what moves between device and host is left out: a test fills the host's pages and reads them.

    {"make": name, "extra": extra configuration, "ranks": {...}, "layout": "page_first", "dtype": "float32",
     "head_dim": 16, "more": ["indexer"]}
                            answered by {"made": name of the class} or {"refused": sentence}
    {"save": name, "tokens": [...], "salt": null, "seed": ""}
                            fills pages with bytes that depend on all of that, and saves them: {"saved": tokens}
    {"load": name, "tokens": [...], "salt": null, "seed": "", "first": page}
                            {"found": tokens, "loaded": tokens, "right": whether all of them are as they were filled}
    {"beside": name, ...}   saves, asks for and loads pages of the pool "indexer": see `Rank.beside`
    {"clear": name}         {"done": true}
    {"close": name}         {"done": true}

It says {"ready": true} first. It is run by the interpreter of the engines' environment, with SGLang and the repository
on its path, and ends with its input.
"""

import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import queue
import sys
import time
import types
from array import array
from typing import Any, Final

PAGE: Final = 16
LAYERS: Final = 2
NUM_PAGES: Final = 64


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for packages that need a GPU, or another build of torch: every name in them is there, and is nothing."""

    NAMES: Final = ("sgl_kernel", "torchvision")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_known = name.split(".", maxsplit=1)[0] in self.NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _AbsentName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentName(name, (), {})


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentName(name, (), {})


class Rank:
    """One rank of an engine: its host pools, its backend and its controller."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import torch
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        self.pool = self._pool(asked)
        self.more = {name: self._pool(asked) for name in asked.get("more", ())}
        ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        config = HiCacheStorageConfig(
            **{**ranks, "is_mla_model": False, **asked.get("ranks", {})}, enable_storage_metrics=False,
            is_page_first_layout=True, model_name="tiny", extra_config=asked["extra"],
        )  # fmt: skip
        backend = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        backend.register_mem_pool_host(self.pool)
        for name, pool in self.more.items():
            backend.register_mem_host_pool_v2(pool, name)
        backend.on_host_pools_registered()
        self.backend = backend
        # The controller without its threads and its process group, of which there is no need with one rank.
        controller = object.__new__(HiCacheController)
        controller.storage_backend, controller.storage_host_pool = backend, self.pool
        controller.page_size, controller.prefetch_sync_queue = PAGE, queue.Queue()
        is_v1 = bool(asked["extra"].get("interface_v1"))
        controller.page_get_func = controller._page_get_zero_copy if is_v1 else controller._generic_page_get
        controller.page_set_func = controller._page_set_zero_copy if is_v1 else controller._generic_page_set
        self.controller = controller
        self._bytes = torch.uint8

    def _pool(self, asked: dict[str, Any]) -> Any:
        import torch
        from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        dtype, head_dim = getattr(torch, asked.get("dtype", "float32")), asked.get("head_dim", 16)
        layers = [tuple(torch.zeros(2 * PAGE, 1, head_dim, dtype=dtype) for _ in range(LAYERS)) for _ in "kv"]
        tables = [torch.tensor([each.data_ptr() for each in plane], dtype=torch.uint64) for plane in layers]
        info = MHABufferInfo(
            buffers=KVBuffers(k=layers[0], v=layers[1], k_data_ptrs=tables[0], v_data_ptrs=tables[1],
                              layout=KVBufferLayout.NHD),
            page_size=PAGE, head_num=1, head_dim=head_dim, v_head_dim=head_dim, dtype=dtype,
            device=torch.device("cpu"),
        )  # fmt: skip
        return MHATokenToKVPoolHost(
            info, 1.0, 0, PAGE, asked.get("layout", "page_first"), pin_memory=False, device="cpu",
            device_capacity_tokens=PAGE, start_layer=0, end_layer=LAYERS, host_token_capacity=NUM_PAGES * PAGE,
        )  # fmt: skip

    def save(self, asked: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.managers.cache_controller import StorageOperation

        keys, indices = self._keys(asked), self.pool.alloc(_whole(asked))
        for number, data in enumerate(self._data(asked)):
            self._write(self.pool, int(indices[number * PAGE]), data)
        operation = StorageOperation(indices, asked["tokens"], hash_value=keys)
        self.controller._page_backup(operation)
        self.pool.free(indices)
        return {"saved": operation.completed_tokens}

    def load(self, asked: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.managers.cache_controller import PrefetchOperation

        first = asked.get("first", 0)
        keys = self._keys(asked)
        key = self._key(asked)
        behind = key[first * PAGE :] if first else key
        operation = PrefetchOperation("asked", behind, keys[first - 1] if first else None)
        began = time.monotonic()
        operation.hash_value, found = self.controller._storage_hit_query(operation)
        operation.host_indices = self.pool.alloc(max(PAGE, found))
        for number in range(found // PAGE):
            self._write(self.pool, int(operation.host_indices[number * PAGE]), bytes(self._page_bytes))
        num_loaded = self.controller._page_transfer(operation) if found else 0
        seconds = time.monotonic() - began
        data = self._data(asked)[first:]
        right = all(
            self._read(self.pool, int(operation.host_indices[number * PAGE])) == data[number]
            for number in range(num_loaded)
        )
        self.pool.free(operation.host_indices)
        return {"found": found, "loaded": num_loaded * PAGE, "right": right, "seconds": seconds}

    def beside(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Save pages of the pool "indexer", those in `kept`; ask what can be restored with them by `policy` (with the
        last `trailing` pages); load all."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        pool, keys, data = self.more["indexer"], self._keys(asked), self._data(asked)
        indices = pool.alloc(len(keys) * PAGE)
        rows = indices.view(len(keys), PAGE)
        for number, each in enumerate(data):
            self._write(pool, int(rows[number, 0]), each)
        kept = asked["kept"]
        saved = self.backend.batch_set_v2([
            PoolTransfer(PoolName.INDEXER, host_indices=rows[kept].flatten(), keys=[keys[number] for number in kept])
        ])  # fmt: skip
        result = self.backend.batch_exists_v2(keys, [
            PoolTransfer(
                PoolName.INDEXER, keys=keys[: asked.get("trailing", 1)], hit_policy=PoolHitPolicy(asked["policy"])
            )
        ])  # fmt: skip
        for number in range(len(keys)):
            self._write(pool, int(rows[number, 0]), bytes(self._page_bytes))
        got = self.backend.batch_get_v2([PoolTransfer(PoolName.INDEXER, host_indices=indices, keys=keys)])
        are_right = [self._read(pool, int(rows[number, 0])) == each for number, each in enumerate(data)]
        wrong = self.backend.batch_get_v2([PoolTransfer(PoolName.INDEXER, host_indices=indices[1:], keys=keys)])
        pool.free(indices)
        return {
            "saved": saved[PoolName.INDEXER], "restorable": result.restorable_prefix_pages,
            "hits": {str(name): hit for name, hit in result.extra_pool_hit_pages.items()},
            "pages": result.kv_hit_pages, "got": got[PoolName.INDEXER], "right": are_right,
            "wrong": wrong[PoolName.INDEXER],
        }  # fmt: skip

    # -- bytes and keys -----------------------------------------------------------------------------------------------

    def _key(self, asked: dict[str, Any]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", asked["tokens"]), extra_key=None, cache_salt=asked.get("salt"))

    def _keys(self, asked: dict[str, Any]) -> list[str]:
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        keys: list[str] = get_storage_hash_str(self._key(asked), None, page_size=PAGE)
        return keys[: len(asked["tokens"]) // PAGE]

    @property
    def _page_bytes(self) -> int:
        return int(self.pool.get_size_per_token()) * PAGE

    def _data(self, asked: dict[str, Any]) -> list[bytes]:
        """What the pages of a prompt hold."""
        return [page_data(asked["tokens"], number, asked.get("seed", ""), self._page_bytes)
                for number in range(len(asked["tokens"]) // PAGE)]  # fmt: skip

    def _write(self, pool: Any, index: int, data: bytes) -> None:
        import torch

        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(pool.dtype)
        pool.set_from_flat_data_page(index, flat)

    def _read(self, pool: Any, index: int) -> bytes:
        page: bytes = pool.get_data_page(index, flat=True).view(self._bytes).numpy().tobytes()
        return page


def page_data(tokens: list[int], number: int, seed: str, num_bytes: int) -> bytes:
    """What a page holds, in the order of SGLang's flat pages."""
    return hashlib.shake_128(repr((seed, tokens[: (number + 1) * PAGE])).encode()).digest(num_bytes)


def _whole(asked: dict[str, Any]) -> int:
    return len(asked["tokens"]) // PAGE * PAGE


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    from transformers.utils import import_utils

    from hicache.errors import HicacheError

    import_utils.is_torchvision_available()  # remembers that it is not there
    sys.meta_path.insert(0, Absent())
    import sglang.srt.mem_cache.storage  # noqa: F401  # without it there is nothing to ask

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    ranks: dict[str, Rank] = {}
    answer({"ready": True})
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        what = next(name for name in ("make", "save", "load", "beside", "clear", "close") if name in asked)
        name = asked[what]
        if what == "make":
            try:
                ranks[name] = Rank(asked)
            except HicacheError as error:
                answer({"refused": str(error)})
            else:
                answer({"made": type(ranks[name].backend).__name__})
        elif what in ("clear", "close"):
            getattr(ranks[name].backend, what)()
            answer({"done": True})
        else:
            answer(getattr(ranks[name], what)(asked))


if __name__ == "__main__":
    main()
