"""The program in the folder's README does what stands below it, with the server that stands above it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess, arguments
from tests.service.stored import LAYOUT

README: Final = (ROOT / "service" / "README.md").read_text()


def test_the_program_prints_what_stands_below_it(tmp_path: Path) -> None:
    ((program, output),) = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, flags=re.DOTALL)
    (command,) = re.findall(r"```sh\nhicache serve (.*?)```", README, flags=re.DOTALL)
    shown = {word for word in command.split() if word.startswith("layout.")}
    layout = {word.replace('"', "") for word in arguments() if word.startswith("layout.")}
    assert shown == layout
    options = [*arguments(nvme__bytes=256 * LAYOUT.page_bytes), "--nvme-dir", str(tmp_path / "nvme")]
    server = ServerProcess(tmp_path, options, name="hicache")
    try:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == (output, "")
    finally:
        assert server.stop() == 0


def test_links_and_files_that_it_names_exist() -> None:
    named = re.findall(r"`([a-z_]+\.py)`", README)
    found = {path.name for path in (ROOT / "service").rglob("*.py")}
    assert [name for name in named if name not in found] == []
