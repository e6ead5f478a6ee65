"""A real vLLM in a process of its own, which answers questions of one line of JSON each.

    first line   {"model": directory, "config": the connector's settings or null, "new_tokens": 8, "llm": arguments of
                  `LLM`}; answered by {"ready": true} when the engine is up
    others       {"prompts": [[token, ...], ...], "together": false, "salt": null, "adapter": directory or null,
                  "picture": number or null: which one stands where prompts have the token for it}
                  answered by {"tokens": [[...], ...], "scheduled": [tokens computed for each prompt], "seconds": [...],
                  "waited_s": [seconds of those in which nothing was computed], "cached": [tokens of each prompt that
                  vLLM says were cached]}; where the engine's worker is in this process, a prompt is asked when all
                  that was computed before is saved: what it finds is no race
                 {"metrics": true}: what vLLM counts, by name, over all labels; needs disable_log_stats = false
                 {"forget": true}: forget what vLLM itself has kept; what the sidecar has stays
                 {"reset": true}: forget what vLLM itself has kept, and what it may load

It is run by the interpreter of the engines' environment, with the repository on its path, and ends with its input.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from hicache.service.engines.vllm.transfers import Transfers
from hicache.tools.bench.engine_process import ENVIRONMENT, llm_arguments, watch_steps
from tests.engines.pictures import picture

SAVED_WITHIN_S: Final = 10.0


def await_saves(workers: Sequence[Transfers]) -> None:
    """Wait until everything that the connector's workers save is saved, for a while."""
    until = time.monotonic() + SAVED_WITHIN_S
    for each in workers:
        while each.num_saves and time.monotonic() < until:
            os.sched_yield()


class Steps:
    """What vLLM's scheduler has done."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.waited_s = 0.0
        self._idle_since: float | None = None

    def begin(self) -> None:
        """Others are asked now: until then it was not waited for anything."""
        self._idle_since = None

    def see(self, num_tokens: int, began: float) -> None:
        now = time.monotonic()
        self.num_tokens += num_tokens
        self.waited_s += now - (began if self._idle_since is None else self._idle_since)
        self._idle_since = None if num_tokens else now


def main() -> None:
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    asked: dict[str, Any] = json.loads(sys.stdin.readline())

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    steps = Steps()
    watch_steps(steps.see)
    llm = LLM(model=asked["model"], **{**llm_arguments(asked["config"]), **asked["llm"]})
    workers = [each for each in gc.get_objects() if isinstance(each, Transfers)]
    sampling = SamplingParams(temperature=0.0, max_tokens=asked["new_tokens"], ignore_eos=True, detokenize=False)
    adapters: dict[str, int] = {}
    answer({"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        if question.get("reset"):
            answer({"reset": bool(llm.reset_prefix_cache(reset_connector=True))})
            continue
        if question.get("forget"):
            while not llm.reset_prefix_cache():
                # Blocks that were saved are free when the engine has made another step.
                llm.generate([{"prompt_token_ids": [0]}], sampling, use_tqdm=False)
            answer({"forget": True})
            continue
        if question.get("metrics"):
            counted: dict[str, float] = {}
            for metric in llm.get_metrics():
                if hasattr(metric, "value"):
                    counted[metric.name] = counted.get(metric.name, 0.0) + metric.value
            answer({"metrics": counted})
            continue
        tokens, computed, seconds, waited_s, cached = [], [], [], [], []
        prompts = question["prompts"]
        more: dict[str, Any] = {"cache_salt": question["salt"]} if question.get("salt") else {}
        if question.get("picture") is not None:
            more["multi_modal_data"] = {"image": picture(question["picture"])}
        path = question.get("adapter")
        lora = LoRARequest(path, adapters.setdefault(path, len(adapters) + 1), path) if path else None
        for batch in [prompts] if question.get("together") else [[each] for each in prompts]:
            steps.begin()
            before, waited_before_s, began = steps.num_tokens, steps.waited_s, time.monotonic()
            asked_now = [{"prompt_token_ids": each, **more} for each in batch]
            outputs = llm.generate(asked_now, sampling, use_tqdm=False, lora_request=lora)
            tokens += [list(each.outputs[0].token_ids) for each in outputs]
            cached += [each.num_cached_tokens for each in outputs]
            computed.append(steps.num_tokens - before)
            seconds.append(time.monotonic() - began)
            waited_s.append(steps.waited_s - waited_before_s)
            await_saves(workers)
        answer({
            "tokens": tokens, "scheduled": computed, "seconds": seconds, "waited_s": waited_s, "cached": cached,
        })  # fmt: skip
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
