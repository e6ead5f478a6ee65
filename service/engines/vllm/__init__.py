"""hicache for vLLM: a KV connector that keeps the pages of finished work in the sidecar and loads them again.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "HicacheConnector",
        "kv_connector_module_path": "hicache.service.engines.vllm", "kv_role": "kv_both"}'

The files, in the order in which a request meets them:

    connector.py      `HicacheConnector`, what vLLM calls; each of its two sides is one object
    settings.py       what `kv_connector_extra_config` may say
    identity.py       which pages may be this engine's: the namespace of a request
    adapters.py       which LoRA adapters workers have loaded, for it
    scheduling.py     the scheduler's side: what is cached, what is to be loaded and saved
    tracked.py        what it keeps of a request
    plan.py           what that side tells the other one in each step
    loaded.py         the worker's side: what vLLM loads as an adapter, and that pages go only with it
    transfers.py      loads and saves, on threads of their own
    blocks.py         the engine's KV memory, block by block, as bytes
    report.py         what the worker's side says after a step

and where vLLM offloads to host memory itself, with the sidecar below it:

    offloading.py     `HicacheOffloadingConnector` and `HicacheOffloadingSpec`: vLLM's own, that tell whose chunks these
                      are, and run on a CPU
    tier.py           `HicacheTier`, the sidecar as a secondary tier
    chunks.py         which chunks may be an engine's

and in other releases of vLLM than those that it was run with:

    refused.py        a connector that does nothing

`machine.py` says what the machine decides about the bytes of a block. Beside this package, for all engines: `link` is
the session with the sidecar, and doing without; `weights` digests a model's files; `settings` is what every engine may
be told; `objects` keeps pages by keys, and `ranges` copies them.

Nothing here makes a request fail or wait for more than its time: what cannot be had is computed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import BadRequest
from hicache.service.engines.vllm.identity import check_version

if TYPE_CHECKING:
    from hicache.service.engines.vllm.connector import HicacheConnector
    from hicache.service.engines.vllm.offloading import HicacheOffloadingConnector, HicacheOffloadingSpec
    from hicache.service.engines.vllm.tier import HicacheTier

__all__ = ["HicacheConnector", "HicacheOffloadingConnector", "HicacheOffloadingSpec", "HicacheTier"]

_MODULES: Final = {
    "HicacheConnector": "connector",
    "HicacheOffloadingConnector": "offloading",
    "HicacheOffloadingSpec": "offloading",
    "HicacheTier": "tier",
}


def __getattr__(name: str) -> Any:
    # The files beside these are used, and tested, where there is no vLLM.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    try:
        check_version(vllm.__version__)
    except BadRequest as error:
        from hicache.service.engines.vllm.refused import refused

        return refused(name, error)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
