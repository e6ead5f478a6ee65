"""Runs the tests in `tests/kernels/launched` in processes that interpret the kernels, or on a GPU.

Two processes for all files: importing torch and Triton anew for each would take longer than most of them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

FILES = {file.stem.removeprefix("test_"): file for file in (Path(__file__).parent / "launched").glob("test_*.py")}
DECODING = ("cascade", "decode", "mla")
GROUPS = {"decoding": DECODING, "others": tuple(sorted(FILES.keys() - set(DECODING)))}


def launch(names: tuple[str, ...], environment: dict[str, str]) -> None:
    """Run these files in a child process; its failures become the message of ours."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(FILES[name].relative_to(ROOT)) for name in names]
    done = subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=600)
    # Status 5, no tests collected, is a failure too.
    assert done.returncode == 0, f"{' '.join(command)} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"


def test_there_is_a_file_for_every_kernel() -> None:
    kernels = {"attend", "cascade", "decode", "extend", "gather", "merge", "mla", "quant", "rope", "score"}
    assert kernels <= FILES.keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", GROUPS)
def test_in_the_interpreter(group: str) -> None:
    launch(GROUPS[group], {"TRITON_INTERPRET": "1", "HICACHE_TEST_DEVICE": "cpu"})


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", GROUPS)
def test_on_a_gpu(group: str) -> None:
    launch(GROUPS[group], {"HICACHE_TEST_DEVICE": "cuda"})
