"""Runs the tests in `tests/kernels/launched`, each file in a process that interprets the kernels, or on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

FILES = sorted((Path(__file__).parent / "launched").glob("test_*.py"))


def launch(file: Path, environment: dict[str, str]) -> None:
    """Run one file in a child process; its failures become the message of ours."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file.relative_to(ROOT))]
    done = subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=600)
    # Status 5, no tests collected, is a failure too.
    assert done.returncode == 0, f"{' '.join(command)} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"


def test_there_is_a_file_for_every_kernel() -> None:
    kernels = {"attend", "cascade", "decode", "extend", "gather", "merge", "mla", "quant", "rope", "score"}
    assert {file.stem for file in FILES} >= {f"test_{kernel}" for kernel in kernels}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file: Path) -> None:
    launch(file, {"TRITON_INTERPRET": "1", "HICACHE_TEST_DEVICE": "cpu"})


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_on_a_gpu(file: Path) -> None:
    launch(file, {"HICACHE_TEST_DEVICE": "cuda"})
