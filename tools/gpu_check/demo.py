"""The demo on a GPU, in short: a real model, three tiers, and answers that stay the same."""

import json
import subprocess
import sys

from hicache.tools.bench.results import Baseline, Row
from hicache.tools.demo.model import find_model
from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.gpu_check.parts import LeftOut, Place, Report

LIMIT_S = 110


def check_demo(place: Place, report: Report) -> None:
    """`hicache demo --quick --device cuda`."""
    place.require_gpu()
    try:
        find_model(None)
    except (UsageProblem, CommandFailed) as problem:
        raise LeftOut(f"needs the demo's model: {problem}") from problem
    run_demo(place, report, "--device", "cuda")


def run_demo(place: Place, report: Report, *options: str) -> None:
    """The demo in short, with these options too."""
    file = place.directory / "demo.json"
    command = [sys.executable, "-m", "hicache.tools", "demo", "--quick", "--requests", "12", "--json", str(file)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    summary = json.loads(file.read_text(encoding="utf-8"))["summary"]
    outputs = summary["identical_outputs"]
    report(Row(
        "demo_identical_outputs", outputs["equal"] + outputs["near_ties"], "requests",
        Baseline("compared", outputs["compared"]), goal=1.0, goal_is_ratio=True, higher_is_better=True,
    ))  # fmt: skip
    report(Row("demo_hit_rate", summary["hit_rate"], "", higher_is_better=True))
    if summary["ttft_ratio"] is not None:
        report(Row("demo_ttft_ratio", summary["ttft_ratio"], ""))
