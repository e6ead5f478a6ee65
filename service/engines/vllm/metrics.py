"""The connector's counts as vLLM publishes them: in its log, and as Prometheus counters `vllm:hicache_...`."""

from typing import Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from hicache.service.engines.vllm.counts import COUNTERS, summed

PREFIX: Final = "vllm:hicache_"


class HicacheStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counts of some steps; `data` by name, as in `COUNTERS`."""

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: Any) -> "HicacheStats":
        """Those of another worker, or of later steps, with these."""
        return HicacheStats(data=summed(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return {f"hicache {name.replace('_', ' ')}": round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class HicachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """A counter for each count and engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        counter = metric_types[Counter]
        self._counters: Final = {
            name: create_metric_per_engine(
                counter(name=PREFIX + name, documentation=says, labelnames=labelnames), per_engine
            )
            for name, says in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what `HicacheStats` has brought."""
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)
