"""The worker's side: loads and saves, on threads of their own.

Every job has an end: calls have their times, and what cannot be had in time is reported as missing, so that vLLM
computes it. The blocks that a save reads are a request's own and full, so nothing changes them while the request lives;
vLLM keeps them after its end until `results` says that they are read. Blocks are taken away earlier by a preemption,
and in layers with a window, when it has passed them: who writes to them next waits for a copy under way (`take_away`),
and what was not copied by then is not saved.
"""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from hicache.service.client import Client, Outcome, Prompt
from hicache.service.engines.link import Link
from hicache.service.engines.vllm.blocks import Blocks
from hicache.service.engines.vllm.counts import Counts
from hicache.service.engines.vllm.plan import NULL_BLOCK, Load, Plan, Results, Save
from hicache.service.engines.vllm.settings import Settings

IDLE_WAIT_S: Final = 0.002
"""How long an engine with nothing to compute waits for loads at a time. Where it shares its process with them, its
empty steps would keep the interpreter from the threads that copy."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Saving:
    """The saves of one request."""

    prompt: Prompt
    num_jobs: int = 0
    """Not ended yet."""
    num_preempted: int = 0
    """How often its blocks were taken away: jobs of before must not read theirs any more."""
    copying: threading.Lock = field(default_factory=threading.Lock)
    """Held while its blocks are read, and while that number rises."""


@dataclass(eq=False, slots=True)
class _Job:
    """One save."""

    save: Save
    saving: _Saving
    num_preempted: int
    """How often the request had been preempted when it began."""
    began: float
    """When."""
    is_overwritten: bool = False
    """Whether somebody else writes to a block of it. Set while `saving.copying` is held."""

    @property
    def is_stale(self) -> bool:
        """Whether its blocks are somebody else's by now."""
        return self.is_overwritten or self.saving.num_preempted != self.num_preempted


class Transfers:
    """Loads and saves of one worker. Its methods belong to the worker's thread and do not wait for the sidecar, but
    `results` in an idle step, `take_away` for a copy, and `close`."""

    def __init__(self, link: Link, blocks: Blocks, settings: Settings, *, page_size: int, rank: int) -> None:
        self._link: Final = link
        self._blocks: Final = blocks
        self._settings: Final = settings
        self._page_size: Final = page_size
        self._rank: Final = rank
        self._loader: Final = ThreadPoolExecutor(1, "hicache-load")
        self._saver: Final = ThreadPoolExecutor(1, "hicache-save")
        self._lock: Final = threading.Lock()
        self._has_loaded: Final = threading.Event()
        self._savings: Final[dict[str, _Saving]] = {}
        self._jobs: Final[set[_Job]] = set()
        """Saves that have not ended."""
        self._ended: Final[set[str]] = set()
        """Finished requests that have saves under way."""
        self._unreported: Final[set[str]] = set()
        self._results = Results()
        self.counts: Final = Counts()
        self._num_loads = self._num_saves = 0

    @property
    def num_saves(self) -> int:
        """Saves that have begun and not ended."""
        with self._lock:
            return self._num_saves

    # -- the worker's thread ------------------------------------------------------------------------------------------

    def begin_loads(self, plan: Plan) -> None:
        """Begin to fill blocks that vLLM has set aside."""
        # From now on: a load that waits for others, as of a disk that does not answer, has no more time than they.
        now = time.monotonic()
        for load in plan.loads:
            with self._lock:
                self._num_loads += 1
            self._loader.submit(self._carry_out_load, load, self._blocks.fence(), now + load.timeout_s)

    def begin_saves(self, plan: Plan) -> None:
        """Begin to save blocks that the work queued until now fills."""
        self._unreported.update(plan.unreported)
        for save in plan.saves:
            with self._lock:
                saving = self._savings.get(save.request_id)
                if saving is None:
                    saving = self._savings[save.request_id] = _Saving(Prompt(save.namespace, rank=self._rank))
                saving.num_jobs += 1
                self._num_saves += 1
                is_left_out = self._num_saves > self._settings.max_pending_saves
                job = _Job(save, saving, saving.num_preempted, time.monotonic())
                self._jobs.add(job)
            self._saver.submit(self._carry_out_save, job, self._blocks.fence(), is_left_out)

    def take_away(self, plan: Plan) -> None:
        """Blocks of preempted requests, and others, are about to be overwritten. Waits for copies under way."""
        for name in plan.preempted:
            with self._lock:
                saving = self._savings.get(name)
            if saving is not None:
                with saving.copying:
                    saving.num_preempted += 1
        if plan.overwritten:
            with self._lock:
                jobs = tuple(self._jobs)
            for job in jobs:
                if not plan.overwritten.isdisjoint(chain.from_iterable(job.save.blocks)):
                    with job.saving.copying:
                        job.is_overwritten = True

    def results(self, finished: set[str], *, is_idle: bool) -> Results:
        """What has ended since the last time. `finished`: requests that have ended in the engine."""
        if is_idle and self._num_loads:
            self._has_loaded.wait(IDLE_WAIT_S)
        self._has_loaded.clear()
        with self._lock:
            self._ended.update(name for name in finished if name in self._savings)
            results, self._results = self._results, Results()
            for name in [each for each in self._ended if not self._savings[each].num_jobs]:
                self._ended.discard(name)
                del self._savings[name]
                if name in self._unreported:
                    self._unreported.discard(name)
                else:
                    results.saved.add(name)
        return results

    def close(self) -> None:
        """Wait for what is under way, each for its own time at most, and begin nothing more."""
        self._loader.shutdown(cancel_futures=True)
        self._saver.shutdown()

    # -- the loader's thread ------------------------------------------------------------------------------------------

    def _carry_out_load(self, load: Load, fence: Any, deadline: float) -> None:
        num_pages = len(load.blocks[0])
        num_loaded, began = 0, time.monotonic()
        try:
            self._blocks.wait_for(fence)
            num_loaded = self._link.call(lambda client: self._load(client, load, deadline)) or 0
        except Exception:
            _log.exception("hicache: a load failed; its pages are computed")
        finally:
            self.counts.add(
                loaded_pages=num_loaded,
                loaded_bytes=num_loaded * self._blocks.page_bytes,
                load_seconds=time.monotonic() - began,
                unloaded_pages=num_pages - num_loaded,
            )
            missing = [group[num_loaded:] for group in load.blocks]
            with self._lock:
                results = self._results
                results.loaded.add(load.request_id)
                if num_loaded < num_pages:
                    results.failed.add(load.request_id)
                    results.failed_blocks.update(block for block in missing[0] if block != NULL_BLOCK)
                self._num_loads -= 1
                self._has_loaded.set()

    def _load(self, client: Client, load: Load, deadline: float) -> int:
        """Fill a load's blocks; how many pages, from the first on, are right."""
        prompt = Prompt(load.namespace, memoryview(load.tokens).cast("i"), rank=self._rank)
        num_pages, done = len(load.blocks[0]), 0
        while done < num_pages and time.monotonic() < deadline:
            first_page = load.first_page + done
            # Where a lease holds less than all, as one session may not have all of the arena, the rest follows.
            with client.acquire(prompt, first_page=first_page, timeout_s=deadline - time.monotonic()) as lease:
                if lease.first_page != first_page or not len(lease):
                    break
                some = lease[: num_pages - done]
                self._blocks.load(load.blocks, done, some)
                lease.check()  # before they count: the way out of the block looks once more
                done += len(some)
        return done

    # -- the saver's thread -------------------------------------------------------------------------------------------

    def _carry_out_save(self, job: _Job, fence: Any, is_left_out: bool) -> None:
        save, saving = job.save, job.saving
        num_stored = num_cached = 0
        try:
            saving.prompt.extend(memoryview(save.new_tokens).cast("i"))
            if not is_left_out and not job.is_stale:
                self._blocks.wait_for(fence)
                num_stored, num_cached = self._link.call(lambda client: self._save(client, job)) or (0, 0)
        except Exception:
            _log.exception("hicache: a save failed")
        finally:
            self.counts.add(
                saved_pages=num_stored,
                saved_bytes=num_stored * self._blocks.page_bytes,
                save_seconds=time.monotonic() - job.began,
                unsaved_pages=len(save.blocks[0]) - num_cached,
            )
            with self._lock:
                self._results.saved_pages += [(save.request_id, save.first_page + page) for page in range(num_cached)]
                self._num_saves -= 1
                saving.num_jobs -= 1
                self._jobs.discard(job)

    def _save(self, client: Client, job: _Job) -> tuple[int, int]:
        """Store a save's pages, as many as the sidecar takes. Returns how many were stored, and how many, from the
        first on, are in the sidecar now."""
        save, saving = job.save, job.saving
        deadline = time.monotonic() + self._settings.save_timeout_s
        num_pages, done, num_stored = len(save.blocks[0]), 0, 0
        num_tokens = (save.first_page + num_pages) * self._page_size
        while done < num_pages and time.monotonic() < deadline:
            reservation = client.reserve(
                saving.prompt,
                num_tokens=num_tokens,
                first_page=save.first_page + done,
                timeout_s=deadline - time.monotonic(),
            )
            with reservation:
                if reservation.outcome is Outcome.RESIDENT:
                    return num_stored, num_pages
                first = reservation.first_page - save.first_page
                if reservation.outcome is not Outcome.ACCEPTED or first < 0:
                    break
                with saving.copying:
                    if job.is_stale:
                        break
                    self._blocks.save(save.blocks, first, list(reservation))
                num_written = len(reservation)
                if reservation.commit(timeout_s=max(0.01, deadline - time.monotonic())).outcome is Outcome.REFUSED:
                    break
                done = first + num_written
                num_stored += num_written
        return num_stored, done
