"""What SGLang is given in a release that hicache was not run with. Other releases lack names that the backend imports,
or mean others by them, so nothing is taken here but the base of all backends.
"""

import inspect
import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar, Final

from hicache.errors import BadRequest
from hicache.service.engines.sglang.settings import Settings

_BASE: Final = "sglang.srt.mem_cache.hicache_storage"

_log = logging.getLogger("sglang.hicache")


def refused(refusal: BadRequest) -> type[Any]:
    """What stands for `HicacheStorage`: a backend that has nothing, and says why when it is made, or, with `strict`,
    raises `refusal` then. Raises it here where the release has no backends of this kind."""
    try:
        parent = import_module(_BASE).HiCacheStorage
    except (ImportError, AttributeError) as error:
        raise refusal from error
    backend = type("HicacheStorage", (_Nothing, parent), {"refusal": refusal})
    if inspect.isabstract(backend):
        raise refusal
    return backend


class _Nothing:
    """Every call that there was in the releases so far, answered with misses."""

    refusal: ClassVar[BadRequest]

    def __init__(self, storage_config: Any, *_more: Any) -> None:
        if Settings.in_extra_config(storage_config.extra_config).strict:
            raise self.refusal
        _log.warning("hicache: this engine runs without the cache: %s", self.refusal)

    def exists(self, key: str) -> bool:
        return False

    def batch_exists(self, keys: Sequence[str], *_more: Any, **_named: Any) -> int:
        return 0

    def batch_exists_v2(self, keys: Sequence[str], *_more: Any, **_named: Any) -> Any:
        return import_module(_BASE).PoolTransferResult.empty()

    def get(self, key: str, *_more: Any, **_named: Any) -> None:
        return None

    def batch_get(self, keys: Sequence[str], *_more: Any, **_named: Any) -> list[None]:
        return [None] * len(keys)

    def batch_get_v1(self, keys: Sequence[str], *_more: Any, **_named: Any) -> list[bool]:
        return [False] * len(keys)

    def batch_get_v2(self, transfers: Sequence[Any], *_more: Any, **_named: Any) -> dict[Any, list[bool]]:
        return {each.name: [False] * len(each.keys or ()) for each in transfers}

    def set(self, key: str, *_more: Any, **_named: Any) -> bool:
        return False

    def batch_set(self, keys: Sequence[str], *_more: Any, **_named: Any) -> bool:
        return False

    batch_set_v1 = batch_get_v1
    batch_set_v2 = batch_get_v2

    def delete(self, key: str) -> None:
        pass

    def clear(self) -> bool:
        return True
