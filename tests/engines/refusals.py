"""What the connector says to configurations that it cannot serve, each tried with a real vLLM's configuration.

It reads one line of JSON, {"model": directory, "sidecars": {name: socket directory}}, and answers with one,
{name: {"lax": tried, "strict": tried}}, where tried is {"raised": text or null, "lines": [...], "matched": [...] or
null, "freed": bool}: what was raised when the scheduler's and then the worker's side of the connector were made, what
was logged as a warning, what the scheduler's side had to say of a request, and whether the worker's side lets go of
blocks that it was to save. The interpreter of the engines' environment runs it.
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

from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service.engines.vllm.plan import Plan, Save
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
            worker = HicacheConnector(vllm_config, KVConnectorRole.WORKER, kv)
            stack.callback(worker.shutdown)
            worker.register_kv_caches({name: case.caches() for name in LAYERS})
            request = SimpleNamespace(
                request_id="a", num_tokens=100, all_token_ids=list(range(100)), cache_salt=None, lora_request=None
            )
            answer["matched"] = scheduler.get_num_new_matched_tokens(request, 0)
            answer["freed"] = freed(worker)
        except Exception as error:
            answer["raised"] = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return answer


def freed(worker: Any) -> bool:
    """Whether blocks are given back that were to be saved: vLLM keeps those of a finished request until it is told."""
    from hicache.service.engines.vllm.connector import StepPlan

    layout = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=32, dtype=KVDtype.FLOAT32, page_size=BLOCK)
    save = Save("a", Namespace(model="any", layout=layout), bytes(4 * BLOCK), 0, ((1,),))
    worker.bind_connector_metadata(StepPlan(Plan(saves=[save])))
    worker.wait_for_save()
    deadline, finished = time.monotonic() + 10.0, {"a"}
    while time.monotonic() < deadline:
        if worker.get_transfer_results(finished).finished_sending:
            return True
        finished = set()
    return False


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
