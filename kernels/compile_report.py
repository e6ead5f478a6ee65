"""Compile the kernels for GPUs that are not there, and print what each form of them needs.

    python -m hicache.kernels.compile_report                      # everything, for sm_80, sm_89, sm_90 and sm_100
    python -m hicache.kernels.compile_report --part 2/8           # an eighth of it (Triton keeps what is compiled)
    python -m hicache.kernels.compile_report --pairwise           # every pair of kernel, dtype, head size, page size
    python -m hicache.kernels.compile_report --kernel decode --dtype bfloat16 --arch 90

The compiler needs no device. For each form the table shows registers a thread, shared memory a program, and bytes
spilled to local memory; a summary of each kernel follows. Exit status 1 if a form does not compile, needs more shared
memory than the GPU has, or spills on sm_90; 2 for bad usage, `TRITON_INTERPRET=1` included: a process that interprets
cannot compile.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from operator import attrgetter
from time import perf_counter
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget

from hicache.kernels import language, launch
from hicache.kernels.forms import DTYPES, GROUP, HEAD_DIMS, KERNELS, PAGE_SIZES, Case, all_cases, form_of, source_of

ARCHES: Final = (80, 89, 90, 100)
"""GPUs that are compiled for. What fits sm_89 fits sm_86 and sm_120 as well, which have as little shared memory."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the compiler made of a case."""

    kernel: str
    dtype: str
    head_dim: int
    page_size: int
    options: bool
    arch: int
    """Compute capability, 80 for sm_80."""
    error: str | None
    """What the compiler said instead; None if it compiled. The figures are then 0."""
    registers: int
    """Registers a thread."""
    shared_bytes: int
    """Shared memory a program."""
    spill_bytes: int
    """Bytes of registers stored to and loaded from local memory, counted in the code, not in time."""
    cubin_bytes: int
    vector_bits: int
    """Width of the widest load or asynchronous copy from global memory, of one thread."""

    @property
    def problem(self) -> str | None:
        """Why this row fails the report, or None."""
        if self.error is not None:
            return "does not compile"
        shared_bytes_max = launch.shared_bytes_of(*divmod(self.arch, 10))
        if self.shared_bytes > shared_bytes_max:
            return f"needs more than the {shared_bytes_max} bytes of shared memory there are"
        if self.spill_bytes and self.arch == 90:
            return "spills"
        return None


def compile_case(case: Case, arch: int) -> Row:
    """Compile one case for one GPU. What the compiler refuses is in the row, not raised."""
    form = form_of(case, arch)
    options = launch.options(form.variant)
    try:
        compiled = triton.compile(source_of(form, arch), target=GPUTarget("cuda", arch, 32), options=options)
        cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
        registers, stack = _usage(cubin)
        spills = _spills(ptx, arch) if stack else 0
    except Exception as error:  # the compiler raises whatever its passes raise; the report shows it and goes on
        message = f"{type(error).__name__}: {error}"
        return Row(
            **asdict(case), arch=arch, error=message,
            registers=0, shared_bytes=0, spill_bytes=0, cubin_bytes=0, vector_bits=0,
        )
    return Row(
        **asdict(case),
        arch=arch,
        error=None,
        registers=registers,
        shared_bytes=compiled.metadata.shared,
        spill_bytes=spills,
        cubin_bytes=len(cubin),
        vector_bits=_vector_bits(ptx),
    )


def pairwise_cover(cases: Sequence[Case]) -> list[Case]:
    """Few of the cases, in which every two values that meet in some case (a kernel and a dtype, say) still meet.

    Greedy: always the first case with the most pairs that are still missing.
    """

    def pairs(case: Case) -> set[object]:
        return set(itertools.combinations(sorted(asdict(case).items()), 2))

    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


_COLUMNS: Final = "{:<14} {:<13} {:>4} {:>4} {:>4} {:>6} {:>4} {:>7} {:>6} {:>4}"
HEADER: Final = _COLUMNS.format("kernel", "dtype", "head", "page", "with", "arch", "regs", "shared", "spill", "load")


def line(row: Row) -> str:
    """The row as a line under `HEADER`."""
    text = _COLUMNS.format(
        row.kernel, row.dtype, row.head_dim, row.page_size, "all" if row.options else "-", f"sm_{row.arch}",
        row.registers, row.shared_bytes, row.spill_bytes, row.vector_bits,
    )
    if row.problem is not None:
        text += f"  {row.problem}"
    if row.error is not None:
        text += f": {' '.join(row.error.split())[:200]}"
    return text


def summary(rows: Sequence[Row]) -> list[str]:
    """The most that the forms of each kernel need on each GPU, and how many of them spill, as lines."""
    columns = "{:<17} {:>6} {:>5} {:>4} {:>7} {:>7} {:>6}"
    lines = [columns.format("most of a kernel", "arch", "forms", "regs", "shared", "spilling", "spill")]
    key: Callable[[Row], tuple[str, int]] = attrgetter("kernel", "arch")
    for (kernel, arch), found in itertools.groupby(sorted(rows, key=key), key):
        forms = list(found)
        spilling = [row.spill_bytes for row in forms if row.spill_bytes]
        lines.append(columns.format(
            kernel, f"sm_{arch}", len(forms), max(row.registers for row in forms),
            max(row.shared_bytes for row in forms), len(spilling), max(spilling, default=0),
        ))  # fmt: skip
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hicache.kernels.compile_report", description=(__doc__ or "").split("\n")[0]
    )
    only: dict[str, Any] = {"action": "append", "help": "only this one (repeatable)"}
    parser.add_argument("--kernel", choices=KERNELS, **only)
    parser.add_argument("--dtype", choices=DTYPES, **only)
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, **only)
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, **only)
    parser.add_argument("--arch", type=int, choices=ARCHES, **only)
    parser.add_argument("--pairwise", action="store_true", help="a cover of all pairs instead of the full product")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="only the I-th of N parts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"argument --jobs: {options.jobs} is below 1")
    if language.INTERPRETED:
        parser.error("TRITON_INTERPRET=1 is set: a process that interprets kernels cannot compile them")

    cases = all_cases(
        options.kernel or KERNELS,
        options.dtype or DTYPES,
        options.head_dim or HEAD_DIMS,
        options.page_size or PAGE_SIZES,
    )
    if options.pairwise:
        cases = pairwise_cover(cases)
    part, num_parts = options.part
    work = list(itertools.product(cases, options.arch or ARCHES))[part - 1 :: num_parts]
    print(f"Triton {triton.__version__}, {GROUP} query heads a key/value head; registers a thread, bytes of shared")
    print("memory and of spills, bits of the widest load of a thread; with all optional arguments or none")
    print(HEADER)
    rows = []
    began = perf_counter()
    for row in _compile_all(work, options.jobs):
        rows.append(row)
        print(line(row), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"triton": triton.__version__, "rows": [asdict(row) for row in rows]}, file, indent=1)
    failing = [row for row in rows if row.problem]
    print("\n".join(["", *summary(rows)]))
    print(f"{len(rows)} forms, {len(failing)} failing, {perf_counter() - began:.0f} s")
    return 1 if failing else 0


def _part(text: str) -> tuple[int, int]:
    """`I/N` of the command line."""
    part, _, count = text.partition("/")
    if not (part.isdecimal() and count.isdecimal() and 1 <= int(part) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 1 to N")
    return int(part), int(count)


def _compile_all(work: Sequence[tuple[Case, int]], jobs: int) -> Iterator[Row]:
    """Compile in up to `jobs` processes; rows in the order of `work`, each once it and those before it are done."""
    if jobs == 1:
        yield from itertools.starmap(compile_case, work)
        return
    # Forked: importing torch and Triton anew takes each process longer than three kernels do. Nothing runs in threads
    # here that a child could lack.
    with ProcessPoolExecutor(min(jobs, len(work)), mp_context=get_context("fork")) as pool:
        yield from pool.map(compile_case, *zip(*work, strict=True))


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of stack a thread: above 0 if anything was spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name])
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers: {text!r}")
    return int(found[1]), int(found[2])


def _spills(ptx: str, arch: int) -> int:
    """Bytes of spill stores and loads, as the assembler reports them."""
    # The assembler for Blackwell serves Hopper too; the plain one refuses the PTX version that Triton writes for both.
    assembler = triton.knobs.nvidia.ptxas if arch < 90 else triton.knobs.nvidia.ptxas_blackwell
    target = f"sm_{arch}" + ("a" if arch >= 90 else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        text = _run([assembler.path, "-v", f"--gpu-name={target}", file.name, "-o", os.devnull])
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill", text))


def _vector_bits(ptx: str) -> int:
    """Width of the widest load or asynchronous copy from global memory."""
    widths = [32 * int(n or 1) for n in re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b32", ptx)]
    widths += [8 * int(n, 0) for n in re.findall(r"cp\.async\.\S*\.global [^;]*\], (0x[0-9a-f]+|\d+)", ptx)]
    return max(widths, default=0)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{os.path.basename(command[0])} failed: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
