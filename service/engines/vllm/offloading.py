"""`HicacheOffloadingConnector`: vLLM's own offloading to host memory, with the sidecar below it.

    {"kv_connector": "HicacheOffloadingConnector", "kv_connector_module_path": "hicache.service.engines.vllm",
     "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 8589934592, "hicache": {}}}

It is vLLM's connector in everything, but that it tells the tier whose chunks it keeps: vLLM's own tells its tiers
neither weights nor configuration. `HicacheOffloadingSpec` is vLLM's tiering spec, and works on a CPU, too.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic
from typing import Any, Final

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hicache.errors import BadRequest, HicacheError
from hicache.service.engines.vllm.chunks import identity_of
from hicache.service.engines.vllm.machine import chosen_backends, machine_of
from hicache.service.engines.vllm.tier import TierSettings

MODULE: Final = "hicache.service.engines.vllm"
TIER: Final = "HicacheTier"
SETTINGS: Final = "hicache"
"""Key of the tier's settings in the extra configuration."""

_log = logging.getLogger("vllm.hicache")


class HicacheOffloadingConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's offloading connector with `HicacheTier` as one of its tiers. Made by vLLM, once for each role."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises `BadRequest` for settings that are wrong."""
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        tier = completed(extra_config)
        if role == KVConnectorRole.SCHEDULER and tier is not None:
            settings = TierSettings.of({key: value for key, value in tier.items() if key not in _FACTORY})
            try:
                tier["identity"] = _identity(vllm_config, settings.weights)
            except HicacheError as error:
                if settings.strict:
                    raise
                extra_config["secondary_tiers"].remove(tier)
                extra_config[SETTINGS] = _REFUSED
                _log.warning("hicache: this engine runs without the cache: %s", error)
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *more: Any, **named: Any) -> Any:
        """vLLM's own metrics of offloading and tiers."""
        completed(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(vllm_config, *more, **named)


class HicacheOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]  # as above
    """vLLM's tiers; on a CPU, where vLLM has no worker for them, with one."""

    def __init__(self, config: Any) -> None:
        """`config`: vLLM's `OffloadingConfig`."""
        super().__init__(config)
        self._host_worker: HostWorker | None = None

    def get_worker(self, kv_caches: Any) -> Any:
        """What copies between an engine's blocks and the primary tier. Made once a worker. Raises `BadRequest`."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._host_worker is None:
            if self.config.canonical_layout:
                raise BadRequest("canonical_layout", "is not supported on a CPU")
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._host_worker = HostWorker(kv_caches, region, self.blocks_per_chunk)
        return self._host_worker


class HostWorker(OffloadingWorker):  # type: ignore[misc]  # as above
    """Copies between blocks in host memory and chunks of the primary tier, on a thread of its own, in few large
    calls."""

    def __init__(self, kv_caches: Any, region: Any, blocks_per_chunk: int) -> None:
        """`kv_caches`: vLLM's `CanonicalKVCaches`. `region`: the primary tier's memory, which this one closes."""
        self._region: Final = region
        self._blocks_per_chunk: Final = blocks_per_chunk
        self._tensors: Final = [each.tensor for each in kv_caches.tensors]
        self._groups: Final = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._chunks: list[torch.Tensor] = []
        for each in kv_caches.tensors:
            size = each.page_size_bytes
            view = region.create_next_worker_view(size * blocks_per_chunk)
            # [chunks, blocks of a chunk, bytes of a block]
            self._chunks.append(view.as_strided((len(view), blocks_per_chunk, size), (view.stride(0), size, 1)))
        self._thread: Final = ThreadPoolExecutor(1, "hicache-offload")
        self._jobs: Final[dict[int, Future[Any]]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy blocks to chunks."""
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, src_spec, dst_spec.block_ids, is_store=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy chunks to blocks."""
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, dst_spec, src_spec.block_ids, is_store=False)
        return True

    def get_finished(self) -> list[Any]:
        """Jobs that have ended since the last call."""
        ended = [job_id for job_id, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job_id).result() for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended."""
        wait([self._jobs[job_id] for job_id in job_ids if job_id in self._jobs])

    def shutdown(self) -> None:
        """End what is under way, and give the memory back."""
        self._thread.shutdown()
        self._chunks.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, blocks: Any, chunk_ids: "np.ndarray[Any, Any]", *, is_store: bool) -> Any:
        began, num_bytes = monotonic(), 0
        first_block = first_chunk = 0
        for tensors, size, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            # The first of a group's blocks may lie anywhere in its chunk.
            places = first % self._blocks_per_chunk + np.arange(size)
            within = torch.from_numpy(places % self._blocks_per_chunk)
            at = first_chunk + places // self._blocks_per_chunk
            chunks = torch.from_numpy(chunk_ids[at].astype(np.int64))
            rows = torch.from_numpy(blocks.block_ids[first_block : first_block + size].astype(np.int64))
            for index in tensors if size else ():
                own, shared = self._tensors[index], self._chunks[index]
                if is_store:
                    shared[chunks, within] = own[rows]
                else:
                    own[rows] = shared[chunks, within]
                num_bytes += size * shared.shape[2]
            first_block += size
            first_chunk += -(-(first % self._blocks_per_chunk + size) // self._blocks_per_chunk) if size else 0
        return TransferResult(job_id, success=True, transfer_size=num_bytes, transfer_time=monotonic() - began)


_REFUSED: Final = None
"""Stands in place of the settings of a tier that did not fit."""
_FACTORY: Final = ("type", "module_path", "backpressure", "identity")
"""What vLLM takes out of a tier's configuration, or this module puts in."""


def completed(extra_config: dict[str, Any]) -> dict[str, Any] | None:
    """Fill in what makes vLLM's offloading connector use the tier. Returns the tier's own configuration; None when
    there is none any more, as it did not fit. Idempotent. Raises `BadRequest`."""
    tiers: list[dict[str, Any]] = extra_config.setdefault("secondary_tiers", [])
    given = extra_config.setdefault(SETTINGS, {})
    ours = [each for each in tiers if each.get("type") == TIER]
    if not ours and given is not _REFUSED:
        if not isinstance(given, Mapping):
            raise BadRequest(SETTINGS, f"{type(given).__name__} is no table of settings")
        ours = [{"type": TIER, "module_path": MODULE, **given}]
        tiers += ours
    extra_config.setdefault("spec_name", "HicacheOffloadingSpec")
    extra_config.setdefault("spec_module_path", MODULE)
    extra_config.setdefault("offload_prompt_only", False)
    return ours[0] if ours else None


def _identity(vllm_config: Any, weights: str) -> str:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    machine = machine_of(model.dtype, cache.block_size, model.get_head_size())
    machine["backends"] = " ".join(chosen_backends(vllm_config))
    return identity_of(vllm_config, machine, vllm.__version__, weights)
