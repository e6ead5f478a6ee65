"""What vLLM is given in a release that hicache was not run with. Other releases lack names that the connector imports,
or mean others by them, so nothing is taken here but the base of all connectors.
"""

import inspect
import logging
from importlib import import_module
from typing import Any, ClassVar, Final

from hicache.errors import BadRequest

_BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CONNECTORS: Final = ("HicacheConnector", "HicacheOffloadingConnector")

_log = logging.getLogger("vllm.hicache")


def refused(name: str, refusal: BadRequest) -> type[Any]:
    """What stands for hicache's class of that name: a connector that does nothing, says why when it is made, once an
    engine, or, with `strict`, raises `refusal` then. Raises it here for what vLLM cannot go on without (a tier, a
    spec), and where the release has no connectors of this kind."""
    if name not in _CONNECTORS:
        raise refusal
    try:
        base = import_module(_BASE)
        members = {"refusal": refusal, "plan": base.KVConnectorMetadata}
        # Without the latter a release that has it gives up its groups of blocks.
        parents = [base.KVConnectorBase_V1, *([base.SupportsHMA] if hasattr(base, "SupportsHMA") else [])]
    except (ImportError, AttributeError) as error:
        raise refusal from error
    connector = type(name, (_Nothing, *parents), members)
    if inspect.isabstract(connector):
        raise refusal
    return connector


class _Nothing:
    """Every call that there was in the releases so far, answered with nothing."""

    refusal: ClassVar[BadRequest]
    plan: ClassVar[type[Any]]
    requires_kv_delivery: ClassVar[bool] = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        given = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        if given.get("strict") or (given.get("hicache") or {}).get("strict"):
            raise self.refusal
        more = () if kv_cache_config is None else (kv_cache_config,)  # older releases have two arguments
        super().__init__(vllm_config, role, *more)  # type: ignore[call-arg]  # vLLM's, as `refused` puts it together
        if role.name == "SCHEDULER":
            _log.warning("hicache: this engine runs without the cache: %s", self.refusal)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.plan()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
