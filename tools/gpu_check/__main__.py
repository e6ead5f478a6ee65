"""Everything that needs a GPU, in one go: is it right, and how fast is it.

    python -m hicache.tools.gpu_check --out DIR                 # every part: some six minutes on one H200
    python -m hicache.tools.gpu_check --out DIR --part decode   # only this one (repeatable)

Each part runs in a process of its own with a time limit, so that one that fails, hangs or kills its process takes
nothing from the others. Prints one table and what became of the goals; writes DIR/gpu_check.json. On a machine without
a GPU the kernels are interpreted and the tiers are in CPU memory; parts that measure are rehearsed with small sizes,
and say, as what remains does, that they need a GPU.

Exit status: 0 every part that could run succeeded, 1 a part failed or a comparison was off, 2 bad usage. Figures that
miss their goal are marked and do not change it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from time import monotonic
from typing import Any, Final

import torch

from hicache.tools.bench import results
from hicache.tools.exits import Exit
from hicache.tools.gpu_check import goals
from hicache.tools.gpu_check.parts import LeftOut, Part, Place
from hicache.tools.terminal import Style, printable

_HERE: Final = "hicache.tools.gpu_check"


def _part(name: str, where: str, summary: str, estimate_s: int, limit_s: float, *, interprets: bool = False) -> Part:
    return Part(name, f"{_HERE}.{where}", summary, estimate_s, limit_s, interprets=interprets)


def _measures(name: str, where: str, summary: str, estimate_s: int, limit_s: float) -> Part:
    return Part(name, f"{_HERE}.{where}", summary, estimate_s, limit_s, interprets=True, measures=True)


PARTS: Final = {
    part.name: part
    for part in (
        _part("kernels", "correctness:check_kernels", "every kernel against float64", 70, 150, interprets=True),
        _part("copies", "memory:check_copies", "pages between device and host, byte by byte", 15, 60),
        _part("registration", "memory:check_registration", "an arena mapped read-only, and staging", 10, 60),
        _part("connector", "connector:check_connector", "vLLM's blocks to shared memory and back", 12, 60,
              interprets=True),
        _part("tiers", "tiers:check_tiers", "attention over device, host and NVMe", 25, 90),
        _part("demo", "demo:check_demo", "the demo with --device cuda, in short", 60, 120),
        _measures("memory", "speed:check_memory", "memory and link", 12, 60),
        _measures("fragments", "speed:check_fragments", "scattered fragments over the link", 25, 90),
        _measures("connector-speed", "connector:check_connector_speed", "vLLM's blocks over the link", 12, 60),
        _measures("decode", "attention:check_decode", "decode beside reading alone", 30, 90),
        _measures("extend", "attention:check_extend", "prefill over a cached prefix", 20, 90),
        _measures("beyond", "beyond:check_beyond", "prefill beyond the device's memory", 30, 90),
        _measures("decode-beyond", "beyond:check_decode_beyond", "decode beyond the device's memory", 15, 60),
        _measures("cascade", "attention:check_cascade", "requests that share a document", 15, 60),
    )
}
"""The parts in order. Their estimates have not been measured yet."""
PACKAGES: Final = (
    "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "numpy", "transformers", "aiofiles", "crc32c", "lz4", "xxhash",
    "zstandard",
)  # fmt: skip
"""Whose versions are told."""


@dataclass(slots=True)
class Outcome:
    """What became of a part."""

    part: Part
    status: str
    """"ok", "failed", "timed out", or what the part needs."""
    seconds: float
    detail: str = ""
    """The end of what a failing part said."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """As `results.Row.to_json`, those that were reported before it ended."""
    lines: list[str] = field(default_factory=list)
    """The same as a person reads them."""

    @property
    def is_wrong(self) -> bool:
        """Whether it shows that something does not work: it failed, or compared and found a difference."""
        off = not self.part.measures and any(row["ok"] is False for row in self.rows)
        return self.status in ("failed", "timed out") or off


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hicache.tools.gpu_check", description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go; made if need be")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part (repeatable)")
    # In the process of one part: what it calls, and where its rows go.
    parser.add_argument("--call", nargs=2, metavar=("WHERE", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.call is not None:
        where, rows = options.call
        return _run_here(where, options.out, Path(rows))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()  # whether anything can be written there
    except OSError as problem:
        parser.error(f"argument --out: {printable(str(options.out))}: {problem.strerror}")
    return run_parts([PARTS[name] for name in options.part or PARTS], options.out)


def run_parts(parts: Sequence[Part], out: Path) -> int:
    """Run the parts, print the table, write `out/gpu_check.json`; returns the exit status."""
    about = _about()
    print("gpu_check: " + ", ".join(f"{key} {value}" for key, value in about.items()))
    print(results.HEADING, flush=True)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="hicache-gpu-check-", dir=out) as scratch:
        for part in parts:
            outcome = _run_part(part, Path(scratch))
            outcomes.append(outcome)
            print(f"{part.name}: {part.summary} — {outcome.status}, {outcome.seconds:.0f} s")
            for line in outcome.lines:
                print(line)
            if outcome.detail:
                print("    " + printable(outcome.detail.strip().splitlines()[-1]))
            sys.stdout.flush()
            _write(out, about, outcomes)
    print("\n".join(goals.table((row for outcome in outcomes for row in outcome.rows), Style.of(sys.stdout))))
    wrong = [outcome.part.name for outcome in outcomes if outcome.is_wrong]
    total = sum(outcome.seconds for outcome in outcomes)
    print(f"{len(outcomes)} parts in {total:.0f} s; wrong: {', '.join(wrong) or 'none'}")
    return Exit.FAILED if wrong else Exit.OK


def _run_part(part: Part, scratch: Path) -> Outcome:
    """Run one part in a process of its own, whatever becomes of that."""
    directory, rows = scratch / part.name, scratch / f"{part.name}.jsonl"
    directory.mkdir()
    command = [sys.executable, "-m", _HERE, "--out", str(directory), "--call", part.where, str(rows)]
    began = monotonic()
    # In a session of its own: what it starts is ended with it.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, env=_environment(part),
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=part.limit_s)
        status = {0: "ok", _LEFT_OUT: output.strip().rpartition("\n")[2]}.get(process.returncode, "failed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, status = _what_it_said(process), "timed out"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    reported = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()] if rows.exists() else []
    detail = output[-4000:] if status in ("failed", "timed out") else ""
    return Outcome(
        part, status, monotonic() - began, detail, [row["row"] for row in reported], [row["line"] for row in reported]
    )


def _what_it_said(process: "subprocess.Popen[str]") -> str:
    """The output of a process that was killed; nothing if even that did not end it, as when a driver hangs."""
    try:
        return process.communicate(timeout=_GRACE_S)[0]
    except subprocess.TimeoutExpired:
        return ""


_GRACE_S: Final = 10
_LEFT_OUT: Final = 77
"""Exit status of a part that cannot run here; the last line it prints says what it needs."""


def _environment(part: Part) -> dict[str, str]:
    """Of a part's process: without a GPU the kernels are interpreted."""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if part.interprets and not _has_gpu():
        environment["TRITON_INTERPRET"] = "1"
    return environment


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def _run_here(where: str, directory: Path, rows: Path) -> int:
    """One part, in this process: rows are written as they come, so that they outlive it."""
    module, function = where.split(":")
    style = Style.of(sys.stdout)
    place = Place(torch.device("cuda:0" if _has_gpu() else "cpu"), directory)

    def report(row: results.Row) -> None:
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": row.to_json(), "line": results.line(row, style)}) + "\n")

    try:
        getattr(import_module(module), function)(place, report)
    except LeftOut as reason:
        print(reason)
        return _LEFT_OUT
    except Exception:
        traceback.print_exc()
        return Exit.FAILED
    return Exit.OK


def _about() -> dict[str, str]:
    """The machine and what is installed on it."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    missing = sorted(set(PACKAGES) - versions.keys())
    if missing:
        versions["missing"] = " ".join(missing)
    card = "none"
    if _has_gpu():
        properties = torch.cuda.get_device_properties(0)
        card = f"{properties.name} (sm_{properties.major}{properties.minor}, {properties.total_memory >> 30} GiB)"
    return {"card": card, "CUDA": str(torch.version.cuda), **versions}


def _write(out: Path, about: dict[str, str], outcomes: Sequence[Outcome]) -> None:
    parts = [
        {
            "name": outcome.part.name, "status": outcome.status, "seconds": outcome.seconds, "detail": outcome.detail,
            "rows": outcome.rows,
        }
        for outcome in outcomes
    ]  # fmt: skip
    found = goals.to_json(row for outcome in outcomes for row in outcome.rows)
    text = json.dumps({"about": about, "goals": found, "parts": parts}, indent=1)
    (out / "gpu_check.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
