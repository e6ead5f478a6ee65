"""A real vLLM in a process of its own, which answers questions of one line of JSON each.

    first line   {"model": directory, "config": the connector's settings or null, "new_tokens": 8, "llm": arguments of
                  `LLM`}; answered by {"ready": true} when the engine is up
    others       {"prompts": [[token, ...], ...], "together": false}
                  answered by {"tokens": [[...], ...], "scheduled": [tokens computed for each prompt], "seconds": [...]}
                 {"reset": true}: forget what vLLM itself has kept, and what it may load

It is run by the interpreter of the engines' environment, with the repository on its path, and ends with its input.
"""

import json
import os
import sys
import time
from typing import Any

os.environ.update({
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
})  # fmt: skip
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    asked: dict[str, Any] = json.loads(sys.stdin.readline())

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduled = [0]
    plain = Scheduler.schedule

    def counted(self: Any, *args: Any, **more: Any) -> Any:
        output = plain(self, *args, **more)
        scheduled[0] += output.total_num_scheduled_tokens
        return output

    # What the engine computes, not what its statistics say that it did not.
    Scheduler.schedule = counted
    arguments: dict[str, Any] = {
        "dtype": "float32", "block_size": 32, "enforce_eager": True, "seed": 0, "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni", "max_model_len": 4096, **asked.get("llm", {}),
    }  # fmt: skip
    if asked["config"] is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "HicacheConnector",
            "kv_connector_module_path": "hicache.service.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": asked["config"],
        }
    llm = LLM(model=asked["model"], **arguments)
    sampling = SamplingParams(temperature=0.0, max_tokens=asked["new_tokens"], ignore_eos=True, detokenize=False)
    answer({"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        if question.get("reset"):
            answer({"reset": bool(llm.reset_prefix_cache(reset_connector=True))})
            continue
        tokens, computed, seconds = [], [], []
        prompts = question["prompts"]
        for batch in [prompts] if question.get("together") else [[each] for each in prompts]:
            before, began = scheduled[0], time.monotonic()
            outputs = llm.generate([{"prompt_token_ids": each} for each in batch], sampling, use_tqdm=False)
            tokens += [list(each.outputs[0].token_ids) for each in outputs]
            computed.append(scheduled[0] - before)
            seconds.append(time.monotonic() - began)
        answer({"tokens": tokens, "scheduled": computed, "seconds": seconds})
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
