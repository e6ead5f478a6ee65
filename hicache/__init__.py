"""hicache: a hierarchical KV cache for LLM inference, over GPU memory, host memory and NVMe.

    import hicache

    with hicache.HiCache.open(layout, device_bytes=..., host_bytes=..., nvme_dir=...) as cache:
        ...

Importing this package loads neither torch nor numpy nor gRPC; `hicache.HiCache` loads what it needs on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache.service.compose import HiCache as HiCache

__all__ = ["HiCache"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The one upward reference of the project: the composition root, reached when it is first asked for.
    if name == "HiCache":
        from hicache.service.compose import HiCache

        return HiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
