"""The README's Python does what the README says it prints, and its links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.repository import ROOT

README: Final = (ROOT / "README.md").read_text()
EXAMPLES: Final = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, flags=re.DOTALL)
"""Each program with the output that stands below it."""


def test_every_program_stands_with_its_output() -> None:
    assert len(EXAMPLES) == README.count("```python") >= 2


@pytest.mark.parametrize(("program", "output"), EXAMPLES, ids=["transformers", "own engine", "restart"])
def test_the_programs_print_what_stands_below_them(program: str, output: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == output


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert "overview.svg" in targets
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_the_targets_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", re.sub(r"make an? ", "", README)))
    assert {"demo", "test", "check", "faults"} <= named <= targets
