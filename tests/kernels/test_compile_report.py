"""Every kernel compiles for every GPU we name, without one, and needs no more than there is."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hicache.kernels.compile_report import HEADER, Row, compile_case, line, main, pairwise_cover, summary
from hicache.kernels.forms import DTYPES, HEAD_DIMS, KERNELS, PAGE_SIZES, Case, Form, all_cases, form_of, source_of
from tests.repository import ROOT

ROW = Row("decode", "bfloat16", 128, 16, False, 90, None, 96, 39168, 0, 20000, 128)

VECTOR_BITS_MIN = dict.fromkeys(["decode", "cascade", "mla", "extend", "extend-prefix", "extend-new", "merge"], 128)
VECTOR_BITS_MIN |= {"gather": 64, "scatter": 64}
"""What stays uncoalesced shows in these: attention loads 16 bytes at a time whatever the page, copies at least 8. What
works on one page of one head a program has no more than 4 bytes a thread where the page is one token."""


def report(tmp_path: Path, *arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the report with an empty cache, in a process that does not interpret unless told to."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "hicache.kernels.compile_report", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pairwise_cover_compiles_from_an_empty_cache(tmp_path: Path) -> None:
    """In less than three minutes on two cores that have nothing else to do; the report's last line says how long."""
    arches = ("--arch", "80", "--arch", "90", "--arch", "100")
    done = report(tmp_path, "--pairwise", *arches, "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.splitlines()[-1])
    rows = [Row(**row) for row in json.loads((tmp_path / "report.json").read_text())["rows"]]
    assert {(row.kernel, row.arch) for row in rows} == set(itertools.product(KERNELS, (80, 90, 100)))
    for row in rows:
        assert row.error is None, row
        assert row.cubin_bytes > 1000, row
        assert 0 < row.registers <= 255, row
        assert row.problem is None, row
        assert row.vector_bits >= VECTOR_BITS_MIN.get(row.kernel, 32), row
        assert line(row) in done.stdout
    assert f"{len(rows)} forms, 0 failing, " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("mla", "bfloat16", 64, 16, options=True), Case("extend-new", "float16", 256, 1)], ids=str
)
def test_the_largest_forms_are_smaller_where_there_is_less_shared_memory(case: Case) -> None:
    largest, smaller = compile_case(case, 90), compile_case(case, 89)
    assert largest.shared_bytes > 99 << 10
    assert smaller.problem is None


def test_the_cover_has_every_pair_and_few_cases() -> None:
    cases = all_cases(KERNELS, DTYPES, HEAD_DIMS, PAGE_SIZES)
    cover = pairwise_cover(cases)

    def pairs(chosen: list[Case]) -> set[tuple[tuple[str, Any], ...]]:
        return {pair for case in chosen for pair in itertools.combinations(sorted(asdict(case).items()), 2)}

    assert pairs(cover) == pairs(cases)
    assert len(cover) < len(cases) / 4


def test_a_form_that_differs_in_nothing_is_compiled_once() -> None:
    assert len(all_cases(["merge"], DTYPES, [64], PAGE_SIZES)) == 2 * 3  # states are not stored in float8
    assert len(all_cases(["mla"], DTYPES, HEAD_DIMS, PAGE_SIZES)) == 2 * len(DTYPES) * len(PAGE_SIZES)
    every = len(DTYPES) * len(HEAD_DIMS) * len(PAGE_SIZES)
    assert len(all_cases(["decode"], DTYPES, HEAD_DIMS, PAGE_SIZES)) == 2 * every


def test_float8_is_bytes_where_the_gpu_cannot_convert_it() -> None:
    form = form_of(Case("decode", "float8_e4m3fn", 64, 16), 80)
    assert source_of(form, 80).signature["p_pages"] == "*u8"
    assert source_of(form, 90).signature["p_pages"] == "*fp8e4nv"


def test_what_fails_the_report() -> None:
    assert ROW.problem is None
    assert replace(ROW, error="CompilationError: no").problem == "does not compile"
    assert replace(ROW, spill_bytes=8).problem == "spills"
    assert replace(ROW, spill_bytes=8, arch=80).problem is None
    for arch, kibibytes in ((80, 163), (89, 99), (90, 227), (100, 227)):
        assert replace(ROW, arch=arch, shared_bytes=kibibytes << 10).problem is None
        assert "shared memory" in str(replace(ROW, arch=arch, shared_bytes=(kibibytes << 10) + 1).problem)


def test_a_row_stands_under_the_header() -> None:
    shown = dict(zip(HEADER.split(), line(ROW).split(), strict=True))
    assert shown == {
        "kernel": "decode", "dtype": "bfloat16", "head": "128", "page": "16", "with": "-", "arch": "sm_90",
        "regs": "96", "shared": "39168", "spill": "0", "load": "128",
    }  # fmt: skip
    failed = line(replace(ROW, error="CompilationError: at 2:\n  no"))
    assert failed.endswith("does not compile: CompilationError: at 2: no")


def test_a_kernel_that_does_not_compile_fails_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def unknown_type(case: Case, shared_bytes: int) -> Form:
        return form._replace(types=form.types | {"p_output": "*nothing"})

    form = form_of(Case("merge", "float32", 64, 16), 90)
    monkeypatch.setitem(KERNELS, "merge", unknown_type)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    arguments = ["--kernel", "merge", "--dtype", "float32", "--head-dim", "64", "--arch", "90", "--jobs", "1"]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "does not compile" in shown
    assert "1 forms, 1 failing, " in shown


def test_the_parts_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    parts = []
    for part in ("1/2", "2/2", "1/1"):
        arguments = ["--kernel", "score-ball", "--dtype", "float16", "--arch", "80", "--arch", "90", "--jobs", "1"]
        assert main([*arguments, "--part", part]) == 0
        table = capsys.readouterr().out.partition("most of a kernel")[0]
        parts.append([row for row in table.splitlines() if row.startswith("score-ball ")])
    assert len(parts[0]) == len(parts[1]) == 4
    assert sorted(parts[0] + parts[1]) == sorted(parts[2])


def test_the_summary_has_the_most_that_a_kernel_needs() -> None:
    rows = [ROW, replace(ROW, registers=255, spill_bytes=8), replace(ROW, spill_bytes=4), replace(ROW, arch=100)]
    heading, *lines = (line.split() for line in summary(rows))
    assert heading[-6:] == ["arch", "forms", "regs", "shared", "spilling", "spill"]
    assert lines == [
        ["decode", "sm_90", "3", "255", "39168", "2", "8"], ["decode", "sm_100", "1", "96", "39168", "0", "0"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kernel", "nothing"], ["--arch", "70"], ["--jobs", "0"], ["--head-dim", "x"], ["--part", "0/2"],
        ["--part", "3/2"], ["--part", "1"], ["stray"],
    ],
)  # fmt: skip
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_process_that_interprets_is_refused(tmp_path: Path) -> None:
    done = report(tmp_path, "--pairwise", interpret=True)
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr
    assert done.stdout == ""
