"""Opens the cache that a server serves: the arena and, where it was asked for, NVMe. The device is the engines' own."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

from aiofiles.os import wrap

from hicache.cache import Cache
from hicache.clock import Clock
from hicache.errors import BadRequest
from hicache.policy.base import HearsCopies
from hicache.service.building import cache_over, open_nvme
from hicache.service.config import ServeConfig
from hicache.service.options import Options
from hicache.tier import HOST, NVME, Tier, TierId
from hicache.tiers.host import HostTier
from hicache.tiers.nvme.geometry import PageShape

_KEYS: Final = {
    "host_bytes": "host.bytes",
    "capacity_pages": "host.bytes",
    "nvme_dir": "nvme.dir",
    "nvme_bytes": "nvme.bytes",
    "nvme_capacity_pages": "nvme.bytes",
    "nvme_min_free_bytes": "nvme.min_free_bytes",
    "nvme_write_bytes_per_day": "nvme.write_bytes_per_day",
    "nvme_codec": "nvme.codec",
    "admission": "nvme.admission",
    "tenant_quotas": "tenants",
}
"""Arguments of the embedded cache and its tiers by another name than the key of a server's configuration."""


class Served(NamedTuple):
    """A cache and its arena. The cache is to be entered."""

    cache: Cache
    host: HostTier


def options_of(config: ServeConfig) -> Options:
    """The configuration as the composition root takes it. Raises `BadRequest` in the configuration's own words."""
    try:
        return Options.checked(
            config.layout,
            device_bytes=config.layout.page_bytes,  # none is made
            host_bytes=config.host_bytes,
            nvme_dir=config.nvme_dirs or None,
            nvme_bytes=config.nvme_bytes,
            nvme_min_free_bytes=config.nvme_min_free_bytes,
            nvme_write_bytes_per_day=config.nvme_write_bytes_per_day,
            nvme_codec=config.nvme_codec,
            device="cpu",
            metadata_bytes=config.metadata_bytes,
            policy=config.policy,
            write_policy=config.write_policy,
            exclusive=config.exclusive,
            admission=config.nvme_admission,
            tenant_quotas=config.quotas,
            prefill=None,
            progress=None,
        )
    except BadRequest as error:
        raise _in_own_words(error) from None


def _in_own_words(error: BadRequest) -> BadRequest:
    """The same, naming the configuration's key."""
    return BadRequest(_KEYS.get(error.field, error.field), error.problem)


async def open_cache(
    options: Options,
    clock: Clock,
    *,
    listeners: Sequence[HearsCopies] = (),
    make_host: Callable[..., HostTier] = HostTier,
) -> Served:
    """Open the tiers; if one refuses, those before it are closed. `listeners` hear of all copies, those found on NVMe
    included. `make_host` is given `page_bytes`, `capacity_bytes` and `layer_bytes`. Raises `TierUnavailable`,
    `BadRequest`."""
    try:
        async with AsyncExitStack() as stack:
            # Allocating takes a while; a thread does it, so that signals are heard meanwhile.
            layout = options.layout
            host = await wrap(make_host)(
                page_bytes=layout.page_bytes,
                capacity_bytes=options.host_bytes,
                # Checksums of layers are of use to NVMe alone.
                layer_bytes=PageShape.of(layout).layer_bytes if options.nvme_dirs else None,
            )
            stack.push_async_callback(host.close)
            tiers: dict[TierId, Tier] = {HOST: host}
            if options.nvme_dirs:
                # Last, because it alone leaves something behind.
                nvme = await wrap(open_nvme)(options, clock)
                stack.push_async_callback(nvme.close)
                tiers[NVME] = nvme
            cache = cache_over(options, tiers, clock, listeners=listeners)
            stack.pop_all()
            return Served(cache, host)
    except BadRequest as error:
        raise _in_own_words(error) from None
