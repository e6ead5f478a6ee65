"""`HicacheConnector`: the connector as vLLM calls it. See the package for what to write in its configuration."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hicache.errors import HicacheError
from hicache.service.engines.link import Link, check_pages
from hicache.service.engines.vllm.blocks import Blocks
from hicache.service.engines.vllm.events import Announcements
from hicache.service.engines.vllm.identity import Backends, Groups, Identity, check_parallel, format_of
from hicache.service.engines.vllm.loaded import LoadedAdapters, watch
from hicache.service.engines.vllm.machine import backends_of, machine_of
from hicache.service.engines.vllm.metrics import HicachePromMetrics, HicacheStats
from hicache.service.engines.vllm.plan import Plan
from hicache.service.engines.vllm.report import SavedPage, WorkerReport
from hicache.service.engines.vllm.scheduling import Scheduling
from hicache.service.engines.vllm.settings import Settings
from hicache.service.engines.vllm.transfers import Transfers

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("vllm.hicache")
_SOURCES: Final = {"host": CacheHitSource.HOST, "nvme": CacheHitSource.DISK}


class StepPlan(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """A `Plan` on its way from one side to the other."""

    def __init__(self, plan: Plan) -> None:
        self.plan: Final = plan


class HicacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """Saves full blocks to the sidecar and loads them between steps. Made by vLLM, once for each role.

    What does not fit (another release, blocks that are no pages, a sidecar with other pages, a wrong secret) leaves the
    engine without a cache and one line in its log, or, with `strict`, stops its start.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        given = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        self._settings: Final = Settings.of(given)
        self._scheduling: Scheduling | None = None
        self._transfers: Transfers | None = None
        self._link: Link | None = None
        self._groups: Groups | None = None
        self._plan = Plan()
        self._failed_blocks: set[int] = set()
        self._saved_pages: list[SavedPage] = []
        self._adapters: LoadedAdapters | None = None
        """Those of this worker, where it has any."""
        self._backends: Backends = ()
        self._refusal = ""
        """Why this worker has no cache, until it is said."""
        events = vllm_config.kv_events_config
        self._has_events: Final = bool(events is not None and events.enable_kv_cache_events)
        self._announcements: Announcements | None = None
        try:
            check_parallel(vllm_config.parallel_config)
            self._groups = Groups.of(kv_cache_config)
            self._groups.layout()  # what cannot be a page is told here, not by each worker
            if role == KVConnectorRole.SCHEDULER:
                self._begin_scheduling(vllm_config, kv_cache_config, self._groups)
        except HicacheError as error:
            if self._settings.strict:
                raise
            self._groups = None
            if role == KVConnectorRole.SCHEDULER:
                _log.warning("hicache: this engine runs without the cache: %s", error)
            else:
                # What is wrong for all sides is said by the scheduler's. Where that one has a cache, it will ask.
                self._refusal = str(error)

    def _begin_scheduling(self, vllm_config: Any, kv_cache_config: Any, groups: Groups) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            # vLLM reads it after its connector is made. A cache that loses a page must not cost a request.
            transfer.kv_load_failure_policy = "recompute"
            _log.info("hicache: kv_load_failure_policy is now recompute")
        machine = machine_of(getattr(torch, groups.dtype), groups.block_size, groups.head_dim)
        format_id = format_of(vllm_config, kv_cache_config, groups, machine, vllm.__version__)
        identity = Identity.of(vllm_config, groups, format_id, self._settings.weights)
        self._link = self._new_link("scheduler", staging_bytes=0, groups=groups)
        self._scheduling = Scheduling(
            identity,
            groups,
            self._link,
            lookup_timeout_s=self._settings.lookup_timeout_s,
            load_timeout_s=self._settings.load_timeout_s,
        )
        if self._has_events:
            self._announcements = Announcements(
                groups.block_size, vllm_config.parallel_config.tensor_parallel_size
            )

    def _new_link(self, name: str, *, staging_bytes: int, groups: Groups) -> Link:
        check = check_pages(groups.layout())
        return Link(self._settings, name=f"vllm {name}", staging_bytes=staging_bytes, check=check)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that does not happen is a later miss."""
        return False

    # -- the scheduler's side -----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind those that vLLM has, and that they are loaded between steps. None for a
        request that is to wait for the next step."""
        if self._scheduling is None:
            return 0, False
        num_tokens = self._scheduling.matched(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there."""
        if self._scheduling is not None:
            self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """What the worker's side does in this step."""
        if self._scheduling is None:
            return StepPlan(Plan())
        plan = self._scheduling.plan(scheduler_output)
        if self._announcements is not None:
            for save in plan.saves:
                self._announcements.planned(self._scheduling.request(save.request_id), save)
        return StepPlan(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the worker's side said."""
        if self._scheduling is not None:
            output = connector_output
            self._scheduling.ended(output.finished_recving or (), output.finished_sending or ())
            report = output.kv_connector_worker_meta
            if report is not None and report.backends:
                self._scheduling.take_backends(report.backends)
            if report is not None and (report.loaded or report.answers):
                self._scheduling.take_adapters(report.loaded, report.answers)
            if self._announcements is not None:
                if report is not None:
                    self._announcements.saved(report.num_workers)
                self._announcements.ended(output.finished_sending or ())

    def has_pending_block_frees(self) -> bool:
        """Whether blocks become free soon without a preemption."""
        return self._scheduling is not None and self._scheduling.keeps_blocks

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether blocks are kept until they are saved."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether blocks are kept until they are saved."""
        is_kept = self._scheduling is not None and self._scheduling.finished(request)
        if not is_kept and self._announcements is not None:
            self._announcements.ended([request.request_id])
        return is_kept, None

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Which tier gave how many of the tokens that are loaded: memory or disk."""
        if self._scheduling is None or not num_external_tokens:
            return {}
        sources = self._scheduling.sources(request, num_external_tokens)
        return {_SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED): count for tier, count in sources.items()}

    def take_events(self) -> Iterable[Any]:
        """Pages that this engine has saved, in vLLM's form and names, where its events are on."""
        return () if self._announcements is None else self._announcements.take()

    # -- both sides ---------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> Any:
        """What was counted since the last call; None for nothing, as in most steps."""
        side = self._scheduling or self._transfers
        counted = {} if side is None else side.counts.take()
        return HicacheStats(data=counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Counts that came from another process."""
        return HicacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        """Counters for Prometheus."""
        return HicachePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- the scheduler's side, when weights have changed --------------------------------------------------------------

    def reset_cache(self) -> bool | None:
        """Nothing of before is loaded from now on."""
        if self._scheduling is not None:
            self._scheduling.reset()
        return True

    # -- the worker's side --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, Tensor]") -> None:
        """The KV memory of this worker."""
        groups = self._groups
        if groups is None:
            return
        parallel = self._vllm_config.parallel_config
        rank = parallel.rank % parallel.tensor_parallel_size
        names = [name for each in groups.layer_names for name in each]
        try:
            backends = backends_of(self._vllm_config, names)
            adapters = None
            lora = self._vllm_config.lora_config
            if lora is not None:
                adapters = LoadedAdapters(lora, rank, max_held=lora.max_cpu_loras)
                watch(WorkerLoRAManager, adapters)
            blocks = Blocks(groups, kv_caches, self._kv_cache_config.num_blocks)
            self._link = self._new_link("worker", staging_bytes=self._settings.staging_bytes, groups=groups)
        except HicacheError as error:
            if self._settings.strict:
                raise
            _log.warning("hicache: this worker, and so its engine, runs without the cache: %s", error)
            return
        self._transfers = Transfers(self._link, blocks, self._settings, page_size=groups.block_size, rank=rank)
        self._backends, self._adapters = backends, adapters

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        plan = self._get_connector_metadata().plan
        # vLLM has loaded by now what this step needs.
        self._plan = plan = plan if self._adapters is None else self._adapters.fit(plan)
        if self._transfers is not None:
            self._transfers.begin_loads(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: "Tensor", attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: saves begin when all layers are computed."""

    def wait_for_save(self) -> None:
        """Begin this step's saves. Nothing is waited for: blocks stay until they are saved."""
        if self._transfers is not None:
            self._transfers.begin_saves(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What has ended since the last step."""
        if self._transfers is None:
            return KVConnectorTransferResults()
        results = self._transfers.results(finished_req_ids, is_idle=self._plan.is_idle)
        self._saved_pages = results.saved_pages
        # vLLM takes blocks back one by one where it has one group, and whole requests where it has several. Where a
        # window has been skipped, what is in front of the failed block is not enough to go on from either.
        has_window = self._groups is not None and self._groups.has_window
        is_alone = len(self._kv_cache_config.kv_cache_groups) == 1 and not has_window
        self._failed_blocks |= results.failed_blocks if is_alone else set()
        return KVConnectorTransferResults(
            finished_sending=results.saved,
            finished_recving=results.loaded,
            failed_recving=set() if is_alone else results.failed,
        )

    def build_connector_worker_meta(self) -> Any:
        """Pages that were saved, for the events of the scheduler's side, adapters that were loaded, and what it has
        asked."""
        saved, self._saved_pages = self._saved_pages, []
        pages = dict.fromkeys(saved, 1) if self._has_events else {}
        backends = [self._backends] if self._plan.asks_backends else []
        loaded, answers = ([], []) if self._adapters is None else self._adapters.take_news()
        if backends and self._refusal:
            _log.warning("hicache: this worker, and so its engine, runs without the cache: %s", self._refusal)
            self._refusal = ""
        has_news = pages or backends or loaded or answers
        return WorkerReport(pages, backends, loaded, answers) if has_news else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not filled, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def handle_preemptions(self, kv_connector_metadata: StepPlan) -> None:
        """Blocks are about to be overwritten."""
        if self._transfers is not None:
            self._transfers.take_away(kv_connector_metadata.plan)

    def shutdown(self) -> None:
        """End what is under way, and the session."""
        if self._transfers is not None:
            self._transfers.close()
        if self._link is not None:
            self._link.close()
