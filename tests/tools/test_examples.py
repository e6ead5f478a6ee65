"""The examples run as they are."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.service.engines.models import load_model, load_tokenizer
from hicache.service.engines.transformers import layout_of
from hicache.tools.examples.prefill_decode import PAGE_SIZE, main
from tests.repository import ROOT
from tests.service.serving import ServerProcess
from tests.service.test_transformers_sidecar import options_for
from tests.tools.tiny_model import write_model

PROMPT: Final = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4
NEW: Final = 6


def options(model: Path, socket_dir: Path) -> list[str]:
    """Of both processes."""
    return ["--model", str(model), "--socket-dir", str(socket_dir), "--memory", str(4 << 20),
            "--max-new-tokens", str(NEW)]  # fmt: skip


def prefilled_elsewhere(model: Path, socket_dir: Path) -> dict[str, Any]:
    """What the first of two processes says."""
    program = [sys.executable, "-m", "hicache.tools.examples.prefill_decode", "prefill", PROMPT]
    result = subprocess.run(
        [*program, *options(model, socket_dir)], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_one_process_decodes_what_another_one_prefilled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_model(tmp_path / "model", [PROMPT])
    layout = layout_of(load_model(directory), page_size=PAGE_SIZE)
    server = ServerProcess(tmp_path, options_for(layout, tmp_path))
    try:
        # More than once where the machine is too busy to look something up within a quarter of a second.
        for _ in range(3):
            prefilled = prefilled_elsewhere(directory, server.directory)
            if prefilled["saved"]:
                break
        assert (prefilled["found_tokens"], prefilled["saved"]) == (0, True)
        for _ in range(3):
            assert main(["decode", PROMPT, *options(directory, server.directory)]) == 0
            decoded = json.loads(capsys.readouterr().out)
            if decoded["found_tokens"]:
                break
    finally:
        server.stop()
    num_tokens = prefilled["prompt_tokens"]
    assert num_tokens > 4 * PAGE_SIZE
    assert decoded["found_tokens"] == (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    assert decoded["tokens"] == plain_tokens(directory)
    assert main(["decode", PROMPT, "--model", str(directory), "--socket-dir", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().out.startswith(f"prefill_decode: {tmp_path}/nowhere: No such file or directory")


def plain_tokens(directory: Path) -> list[int]:
    """What transformers alone generates."""
    model: Any = load_model(directory)
    ids = load_tokenizer(directory)(PROMPT, return_tensors="pt")["input_ids"]
    tokens: list[int] = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
    return tokens
