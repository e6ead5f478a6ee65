"""A real vLLM in a process of its own: reads one JSON object from standard input, writes one to standard output.

    in   {"model": directory, "config": the connector's extra config or null, "prompts": [[token, ...], ...],
          "new_tokens": 8, "engine": more arguments of `LLM`, "steps": [...]}
    out  {"tokens": [[...], ...], "scheduled": tokens that were computed for each prompt, "seconds": [...]}

It is run by the interpreter of the engines' environment, with the repository on its path.
"""

import json
import os
import sys
import time
from typing import Any

os.environ.update({
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING",
})  # fmt: skip


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    asked: dict[str, Any] = json.loads(sys.stdin.readline())

    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduled = [0]
    plain = Scheduler.schedule

    def counted(self: Any, *args: Any, **more: Any) -> Any:
        output = plain(self, *args, **more)
        scheduled[0] += output.total_num_scheduled_tokens
        return output

    Scheduler.schedule = counted
    more = dict(asked.get("engine", {}))
    if asked["config"] is not None:
        more["kv_transfer_config"] = {
            "kv_connector": "HicacheConnector",
            "kv_connector_module_path": "hicache.service.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": asked["config"],
        }
    llm = LLM(
        model=asked["model"], dtype="float32", block_size=32, enforce_eager=True, seed=0,
        distributed_executor_backend="uni", skip_tokenizer_init=True, max_model_len=asked.get("max_model_len", 4096), **more,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=asked["new_tokens"], ignore_eos=True, detokenize=False)
    answer: dict[str, Any] = {"tokens": [], "scheduled": [], "seconds": []}
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        command = json.loads(line)
        if "prompts" in command:
            outcome: dict[str, Any] = {"tokens": [], "scheduled": [], "seconds": []}
            batches = [command["prompts"]] if command.get("together") else [[each] for each in command["prompts"]]
            for batch in batches:
                before, began = scheduled[0], time.monotonic()
                outputs = llm.generate([{"prompt_token_ids": each} for each in batch], sampling, use_tqdm=False)
                outcome["tokens"] += [list(each.outputs[0].token_ids) for each in outputs]
                outcome["scheduled"].append(scheduled[0] - before)
                outcome["seconds"].append(time.monotonic() - began)
            answer = outcome
        elif command.get("reset"):
            # What vLLM itself has kept is forgotten, so that the next hit is the sidecar's.
            answer = {"reset": llm.reset_prefix_cache()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
