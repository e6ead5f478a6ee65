"""The command line as a process: exit statuses, one line on standard error, nothing created, quiet on a closed pipe."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache import __version__
from hicache.tools.cli import COMMANDS
from tests.repository import ROOT
from tests.tools import snapshots

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}


def hicache(
    *args: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hicache.tools", *map(str, args)],
        cwd=cwd, env=ENVIRONMENT | (env or {}), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a bit of everything to name on a command line."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("Some text.\n")
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "b.txt").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "file").write_text("x")
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--docs", "empty"], "--docs: empty has no .txt or .md file"),
        (["--docs", "missing"], "--docs: missing does not exist"),
        (["--docs", "file"], "--docs: file is not a directory"),
        (["--docs", "binary"], "--docs: binary/b.txt is not text: it has a NUL byte at offset 4"),
        (["--docs", ""], "argument --docs: the name is empty"),
        (["--nvme-dir", ""], "argument --nvme-dir: the name is empty"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--device-byte", "4k"], "unrecognized arguments: --device-byte 4k"),
        (["stray\x1b"], "unrecognized arguments: stray\\x1b"),
        (["--device-bytes", "many"], "argument --device-bytes: 'many' is not a size such as 4096, 64MiB or 1.5GB"),
        (["--host-bytes", "0"], "argument --host-bytes: '0' is not within 1 byte to 4 EiB"),
        (["--requests", "0"], "argument --requests: '0' is not a whole number from 1 to 10,000"),
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number from 0 to 9,223,372,036,854,775,807"),
        (["--questions", "missing"], "--questions: missing does not exist"),
        (["--model", "missing"], "--model: missing does not exist"),
        (["--model", "file"], "--model: file is not a directory"),
        (["--json", "empty"], "--json: empty is a directory"),
        (["--json", "missing/x.json"], "--json: missing/x.json is in a directory that does not exist"),
        (["--snapshot", "missing/x"], "--snapshot: missing/x is in a directory that does not exist"),
        (["--json", "x", "--snapshot", "./x"], "--json and --snapshot name the same file"),
        (["--nvme-dir", "file"], "--nvme-dir: file is not a directory"),
        (["--nvme-dir", "missing/deep"], "--nvme-dir: missing/deep does not exist and cannot be made"),
    ],
    ids=lambda value: " ".join(value).replace("\x1b", "") if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_usage_of_the_demo_is_one_line_and_creates_nothing(
    place: Path, arguments: list[str], complaint: str
) -> None:
    before = everything_below(place)
    result = hicache("demo", *arguments, cwd=place, env={"TMPDIR": str(place / "tmp")})
    hint = " (see hicache demo --help)" if complaint.startswith(("argument ", "unrecognized ")) else ""
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"hicache demo: {complaint}{hint}\n")
    assert everything_below(place) == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "hicache: a command is missing (see hicache --help)"),
        (["frob"], "hicache: unknown command 'frob' (see hicache --help)"),
        (["--frob"], "hicache: unrecognized arguments: --frob (see hicache --help)"),
        (["tree", "x", "y"], "hicache tree: unrecognized arguments: y (see hicache tree --help)"),
        (["stats", "missing"], "hicache stats: missing does not exist"),
    ],
)  # fmt: skip
def test_bad_usage_of_the_rest(place: Path, arguments: Sequence[str], complaint: str) -> None:
    result = hicache(*arguments, cwd=place)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", complaint + "\n")


def test_help_names_every_command_and_option() -> None:
    result = hicache("--help")
    assert (result.returncode, result.stderr) == (0, "")
    for name, summary in COMMANDS.items():
        assert f"{name} " in result.stdout
        assert summary in result.stdout
    shown = hicache("demo", "--help").stdout
    for option in ("docs", "questions", "model", "device-bytes", "host-bytes", "nvme-dir", "requests", "seed",
                   "max-new-tokens", "dtype", "device", "json", "snapshot", "quick"):  # fmt: skip
        assert f"--{option}" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert hicache("--version").stdout == f"hicache {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["demo", "--help"],
        ["tree", "--help"],
        ["stats", "{snapshot}"],
        ["tree", "{snapshot}"],
        ["demo", "--docs", "missing"],
    ],
)
def test_starting_loads_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    path = str(snapshots.write(tmp_path))
    expected = 2 if "missing" in arguments else 0
    program = (
        "import contextlib, io, sys\n"
        "from hicache.tools.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    status = main(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'rich', 'grpc', 'asyncio', 'triton', 'tokenizers', 'pydoc'}\n"
        "print(status, sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *(argument.format(snapshot=path) for argument in arguments)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.stdout == f"{expected} []\n"
    assert result.stderr.count("\n") == (expected == 2)


def test_a_closed_pipe_ends_it_quietly(tmp_path: Path) -> None:
    nodes = [snapshots.node(index, None, 0, 1, "+..") for index in range(5_000)]
    path = snapshots.write(tmp_path, snapshots.content(cache=snapshots.cache_snapshot() | {"nodes": nodes}))
    with subprocess.Popen(
        [sys.executable, "-m", "hicache.tools", "tree", "--width", "5000", str(path)],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(str(path).encode())
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_a_pipe_that_was_closed_before_is_quiet_too() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run([sys.executable, "-m", "hicache.tools", "demo", "--help"], env=ENVIRONMENT,
                                stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)  # fmt: skip
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_full_disk_behind_standard_output_is_a_failure(tmp_path: Path) -> None:
    path = snapshots.write(tmp_path)
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-m", "hicache.tools", "tree", path], env=ENVIRONMENT,
                                stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == "hicache tree: [Errno 28] No space left on device\n"


def test_help_that_cannot_be_written_is_a_failure_too() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-m", "hicache.tools", "tree", "--help"], env=ENVIRONMENT,
                                stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)  # fmt: skip
    assert (result.returncode, result.stderr) == (1, "hicache tree: [Errno 28] No space left on device\n")


def test_complaints_go_nowhere_with_standard_error_closed() -> None:
    result = subprocess.run(["/bin/sh", "-c", '"$0" -m hicache.tools stats missing 2>&-', sys.executable],
                            env=ENVIRONMENT, stdout=subprocess.PIPE, timeout=60, check=False)  # fmt: skip
    assert (result.returncode, result.stdout) == (2, b"")


def test_it_runs_with_standard_output_closed(tmp_path: Path) -> None:
    path = snapshots.write(tmp_path)
    result = subprocess.run(["/bin/sh", "-c", '"$0" -m hicache.tools tree "$1" >&-', sys.executable, path],
                            env=ENVIRONMENT, stderr=subprocess.PIPE, timeout=60, check=False)  # fmt: skip
    assert (result.returncode, result.stderr) == (0, b"")


def test_an_encoding_without_block_characters_is_respected(tmp_path: Path) -> None:
    path = snapshots.write(tmp_path)
    result = hicache("tree", path, env={"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert "|- evil\\x1b[31m\\nname" in result.stdout
    assert "~: " in result.stdout, "behind the beginning of a digest"


def test_no_colours_when_it_is_no_terminal(tmp_path: Path) -> None:
    result = hicache("stats", snapshots.write(tmp_path), env={"TERM": "xterm-256color", "FORCE_COLOR": "1"})
    assert "\x1b" not in result.stdout


def test_colours_on_a_terminal(tmp_path: Path) -> None:
    import pty

    path = snapshots.write(tmp_path)
    controller, terminal = pty.openpty()
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    try:
        subprocess.run([sys.executable, "-m", "hicache.tools", "tree", path], env=environment,
                       stdin=terminal, stdout=terminal, stderr=terminal, timeout=60, check=True)  # fmt: skip
        shown = os.read(controller, 100_000).decode()
    finally:
        os.close(controller)
        os.close(terminal)
    assert "\x1b[32mD\x1b[0m" in shown
    assert "evil\\x1b[31m\\nname" in shown
