"""What the connector says to configurations that it cannot serve, each tried with a real vLLM's configuration.

It reads one line of JSON, {"model": directory, "sidecars": {name: socket directory}}, and answers with one,
{name: {"lax": tried, "strict": tried}}, where tried is {"raised": text or null, "lines": [...], "matched": [...] or
null, "freed": bool}: what was raised when the scheduler's and then the worker's side of the connector were made, what
was logged as a warning, what the scheduler's side had to say of a request after a step, and whether blocks that it
keeps for saving are let go of by the worker's. The interpreter of the engines' environment runs it.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from hicache.tools.bench.engine_process import BLOCK, ENVIRONMENT

NUM_BLOCKS = 8
LAYERS = [f"model.layers.{number}.self_attn" for number in range(4)]


@dataclass
class Case:
    """One configuration."""

    sidecar: str = "fits"
    config: dict[str, Any] = field(default_factory=dict)
    """The connector's settings."""
    group: dict[str, Any] = field(default_factory=dict)
    """What is other in the group of blocks."""
    spec: dict[str, Any] = field(default_factory=dict)
    """What is other in its specification."""
    change: Callable[[Any], None] = lambda vllm_config: None
    """Changes vLLM's configuration."""
    change_worker: Callable[[Any], None] = lambda vllm_config: None
    """The same, for the worker's side alone."""
    patches: tuple[tuple[str, Any], ...] = ()
    """What is other in the modules."""
    caches: Callable[[], torch.Tensor] = lambda: torch.zeros(NUM_BLOCKS, 2, BLOCK, 64)


def cases() -> dict[str, Case]:
    def set_parallel(name: str) -> Callable[[Any], None]:
        return lambda vllm_config: setattr(vllm_config.parallel_config, name, 2)

    def made_up(vllm_config: Any) -> None:
        vllm_config.load_config.load_format = "dummy"

    def elsewhere(vllm_config: Any) -> None:
        vllm_config.model_config.model = "somebody/nowhere"

    return {
        "release": Case(patches=(("vllm.__version__", "0.99.1"),)),
        "pipeline ranks": Case(change=set_parallel("pipeline_parallel_size")),
        "pipeline ranks, in a worker alone": Case(change_worker=set_parallel("pipeline_parallel_size")),
        "layers that have no backend": Case(change_worker=lambda vllm_config: layers(vllm_config).clear()),
        "prefill context ranks": Case(change=set_parallel("prefill_context_parallel_size")),
        "decode context ranks": Case(change=set_parallel("decode_context_parallel_size")),
        "no transfer": Case(group={"enable_kv_transfer": False}),
        "other kind": Case(spec={"kind": "MLAAttentionSpec"}),
        "padding": Case(spec={"page_size_padded": 1 << 20}),
        "values of another size": Case(spec={"head_size_v": 16}),
        "cache dtype": Case(spec={"dtype": torch.float64}, caches=lambda: torch.zeros(NUM_BLOCKS, 2, BLOCK, 128)),
        "made up weights": Case(change=made_up),
        "weights that are not there": Case(change=elsewhere),
        "memory that is no blocks": Case(caches=lambda: torch.zeros(NUM_BLOCKS, 2, BLOCK, 128)[..., ::2]),
        "no sidecar": Case("none"),
        "pages of another size": Case("other pages"),
        "no secret": Case("secret"),
        "wrong secret": Case("secret", config={"tenant": "a", "secret_file": "/proc/version"}),
        "no secret file": Case("secret", config={"tenant": "a", "secret_file": "/nowhere/at/all"}),
        "sidecar of another version": Case(patches=(("hicache.service.wire.PROTOCOL", 999),)),
    }


class Lines(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Layer:
    """What vLLM's worker knows of a layer."""

    def get_attn_backend(self) -> Any:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend


def layers(vllm_config: Any) -> dict[str, Any]:
    """Those of the worker."""
    found: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    return found


def groups(case: Case) -> Any:
    """A configuration of KV memory: one group of four layers."""
    from vllm.v1 import kv_cache_interface as interface

    told = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32, **case.spec}
    spec = getattr(interface, told.pop("kind", "FullAttentionSpec"))(**told)
    group = interface.KVCacheGroupSpec(LAYERS, spec)
    group = replace(group, **case.group) if case.group else group
    return interface.KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])


def tried(case: Case, model: str, sockets: str, *, strict: bool) -> dict[str, Any]:
    """Make both sides of a connector."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector="HicacheConnector", kv_connector_module_path="hicache.service.engines.vllm", kv_role="kv_both",
        kv_connector_extra_config={"socket_dir": sockets, "strict": strict, "staging_bytes": 1 << 20, **case.config},
    )  # fmt: skip
    vllm_config = EngineArgs(
        model=model, dtype="float32", block_size=BLOCK, max_model_len=1024, kv_transfer_config=transfer
    ).create_engine_config()
    case.change(vllm_config)
    layers(vllm_config).update({name: Layer() for name in LAYERS})
    lines = Lines()
    loggers = [logging.getLogger(name) for name in ("vllm.hicache", "hicache")]
    answer: dict[str, Any] = {"raised": None, "matched": None, "freed": False, "lines": lines.lines}
    with ExitStack() as stack:
        for each in loggers:
            each.addHandler(lines)
            stack.callback(each.removeHandler, lines)
        for name, value in case.patches:
            stack.enter_context(patch(name, value))
        try:
            # As vLLM does it: what it gets depends on its release.
            from hicache.service.engines.vllm import HicacheConnector

            kv = groups(case)
            scheduler = HicacheConnector(vllm_config, KVConnectorRole.SCHEDULER, kv)
            stack.callback(scheduler.shutdown)
            case.change_worker(vllm_config)
            worker = HicacheConnector(vllm_config, KVConnectorRole.WORKER, kv)
            stack.callback(worker.shutdown)
            worker.register_kv_caches({name: case.caches() for name in LAYERS})
            request = SimpleNamespace(
                request_id="a", num_tokens=100, all_token_ids=list(range(100)), cache_salt=None, lora_request=None
            )
            assert scheduler.get_num_new_matched_tokens(request, 0) in ((None, False), (0, False))
            step(scheduler, worker, {}, set())
            answer["matched"] = scheduler.get_num_new_matched_tokens(request, 0)
            answer["freed"] = freed(scheduler, worker, request)
        except Exception as error:
            answer["raised"] = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return answer


def step(scheduler: Any, worker: Any, scheduled: dict[str, int], finished: set[str]) -> set[str]:
    """A step of an engine, with so many first tokens of requests. Returns requests whose blocks are let go of."""
    new = [SimpleNamespace(req_id=name, num_computed_tokens=0, block_ids=((1,),)) for name in scheduled]
    plan = scheduler.build_connector_meta(SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()), num_scheduled_tokens=scheduled, preempted_req_ids=None,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: ((1,),)),
    ))  # fmt: skip
    worker.bind_connector_metadata(plan)
    worker.start_load_kv(None)
    worker.wait_for_save()
    results = worker.get_transfer_results(finished)
    report = worker.build_connector_worker_meta()
    freed: set[str] = results.finished_sending or set()
    scheduler.update_connector_output(
        SimpleNamespace(finished_recving=set(), finished_sending=freed, kv_connector_worker_meta=report)
    )
    return freed


def freed(scheduler: Any, worker: Any, request: Any) -> bool:
    """Whether blocks that are kept for saving are let go of: vLLM waits for that when their request has ended."""
    name = request.request_id
    step(scheduler, worker, {name: BLOCK}, set())
    is_kept, _ = scheduler.request_finished_all_groups(request, ([1],))
    deadline, finished = time.monotonic() + 10.0, {name}
    while is_kept and time.monotonic() < deadline:
        is_kept = name not in step(scheduler, worker, {}, finished)
        finished = set()
    return not is_kept


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    os.environ.update(ENVIRONMENT)
    asked = json.loads(sys.stdin.readline())
    found = {
        name: {
            word: tried(case, asked["model"], asked["sidecars"][case.sidecar], strict=word == "strict")
            for word in ("lax", "strict")
        }
        for name, case in cases().items()
    }
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
