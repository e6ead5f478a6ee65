"""`hicache warm` through the OpenAI server of a real vLLM: what it computes is in the sidecar then, and pinned."""

import json
import os
import random
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from hicache.tools.bench.engine_models import VOCABULARY, make_tiny
from hicache.tools.bench.engine_process import BLOCK, ENVIRONMENT
from hicache.tools.cli import main
from tests.engines.running import PYTHON, START_S, ended
from tests.engines.test_vllm import arguments
from tests.repository import ROOT
from tests.service.serving import ServerProcess

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SHARED: Final = 5 * BLOCK
OWN: Final = 3 * BLOCK + 7
NUM_PROMPTS: Final = 6
STARTED: Final = "Application startup complete"
"""What the server says when it listens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, with a tokenizer: each of its words is a token."""
    directory = make_tiny(tmp_path_factory.mktemp("model"))
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=words)  # type: ignore[no-untyped-call]  # transformers'
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def openai_server(model: Path, directory: Path, sockets: Path) -> Iterator[str]:
    """vLLM's server with the connector, once it answers; its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "HicacheConnector", "kv_connector_module_path": "hicache.service.engines.vllm",
        "kv_role": "kv_both", "kv_connector_extra_config": {"socket_dir": str(sockets), "strict": True},
    }  # fmt: skip
    command = [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--block-size", str(BLOCK), "--enforce-eager",
        "--max-model-len", "2048", "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(directory / "cache")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=directory
    )
    said: list[str] = []
    listens = threading.Event()

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if STARTED in line:
                listens.set()
        listens.set()

    reading = threading.Thread(target=listen, name="vllm-says")
    reading.start()
    try:
        assert listens.wait(START_S)
        assert process.poll() is None, "".join(said[-40:])
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            ended(process)
        finally:
            reading.join()
            assert process.stdout is not None
            process.stdout.close()


def text(rng: random.Random, num_tokens: int) -> str:
    return " ".join(f"w{rng.randrange(3, VOCABULARY)}" for _ in range(num_tokens))


def test_what_is_warmed_is_in_the_sidecar_and_pinned(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(5)
    shared = text(rng, SHARED)
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"{shared} {text(rng, OWN)}\n" for _ in range(NUM_PROMPTS)))
    pages = (SHARED + NUM_PROMPTS * (OWN // BLOCK * BLOCK)) // BLOCK
    sidecar = ServerProcess(tmp_path, arguments(tmp_path))

    def warm(url: str) -> dict[str, Any]:
        status = main(["warm", str(file), "--engine", url, "--sidecar", str(sidecar.directory), "--pin", "--json"])
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert status == 0, said
        return said

    try:
        with openai_server(model, tmp_path, sidecar.directory) as url:
            first = warm(url)
        assert (first["model"], first["computed"], first["failures"]) == ("tiny", NUM_PROMPTS, [])
        assert first["prompt_tokens"] == NUM_PROMPTS * (SHARED + OWN)
        assert first["sidecar"]["before"]["pages"]["host"] == 0
        assert first["sidecar"]["after"]["pages"]["host"] == pages
        assert first["pinned"] == {"prompts": NUM_PROMPTS, "tokens": NUM_PROMPTS * (SHARED + OWN // BLOCK * BLOCK)}

        # An engine that was started anew finds what that one was warmed with.
        with openai_server(model, tmp_path, sidecar.directory) as url:
            again = warm(url)
        assert again["cached_tokens"] == NUM_PROMPTS * (SHARED + OWN // BLOCK * BLOCK)
        assert again["sidecar"]["after"]["pages"]["host"] == pages
        before, after = again["sidecar"]["before"], again["sidecar"]["after"]
        assert after["tokens_found"] > before["tokens_found"]
        assert again["pinned"] == first["pinned"]
    finally:
        sidecar.stop()
