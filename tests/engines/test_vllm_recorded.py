"""What a real vLLM asks of a sidecar, recorded: each request once, and a replay finds what vLLM found."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.tools.bench.engine_models import make_tiny
from hicache.tools.cli import main
from tests.engines.running import BLOCK, PAGE_BYTES, conversation_prompts, engine
from tests.engines.test_vllm import OWN_CACHE_OFF, arguments, settings
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "all at once"])
def test_each_request_is_recorded_once_and_a_replay_finds_as_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], together: bool
) -> None:
    prompts, file = conversation_prompts(30, seed=8), tmp_path / "trace.jsonl"
    server = ServerProcess(tmp_path, arguments(tmp_path))
    command = [sys.executable, "-m", "hicache.tools", "trace", "record", str(file), "--json",
               "--socket-dir", str(server.directory)]  # fmt: skip
    try:
        with (
            engine(make_tiny(tmp_path / "model"), tmp_path, settings(server), **OWN_CACHE_OFF) as running,
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as recording,
        ):
            while not file.exists():
                assert recording.poll() is None
                running.ask([prompts[0][: BLOCK - 1]])  # of no whole block
            # Few at a time: others wait, and are looked up again meanwhile.
            answers = running.ask(prompts, together=together)
            recording.send_signal(signal.SIGINT)
            told = json.loads(recording.communicate(timeout=WAIT_S)[0])
    finally:
        server.stop()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line for line in lines if line["hash_ids"]]
    # It asks for whole blocks, and leaves at least one token to compute.
    asked = [tuple(prompt[: (len(prompt) - 1) // BLOCK * BLOCK]) for prompt in prompts]
    assert {line["input_length"] for line in lines} == {*map(len, asked)}
    assert len({tuple(line["hash_ids"]) for line in lines}) == len({*asked})
    assert (told["dropped"], told["ended"]) == (0, "signal")
    assert told["joined"] > 0
    if together:  # those that are the same in whole blocks may be taken for one
        assert len({*asked}) <= len(lines) <= len(asked)
        return
    assert [line["input_length"] for line in lines] == [len(each) for each in asked]
    assert [sum(line["found"].values()) for line in lines] == answers.cached
    sizes = ["--host", str(2_000 * PAGE_BYTES), "--nvme", str(4_000 * PAGE_BYTES), "--token-bytes",
             str(PAGE_BYTES // BLOCK)]  # fmt: skip
    assert main(["replay", str(file), "--device", "0", "--concurrency", "1", *sizes, "--json"]) == 0
    (column,) = json.loads(capsys.readouterr().out)["replays"]
    assert sum(column["tokens_found"].values()) == sum(sum(line["found"].values()) for line in lines)
