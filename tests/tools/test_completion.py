"""`hicache completion`: shells complete with it, in the way that its help says to install it."""

import json
import os
import pty
import re
import select
import subprocess
from collections.abc import Callable
from pathlib import Path
from shutil import which
from time import monotonic
from typing import Final

import pytest

from hicache.tools.cli import COMMANDS, main
from tests.tools.served import check_schema

WAIT_S: Final = 30.0
HOME: Final = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "TERM": "dumb"}


def script(shell: str, capsys: "pytest.CaptureFixture[str]") -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def _bash(tmp_path: Path, line: str) -> set[str]:
    program = 'source ./script; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _hicache; printf "%s\\n" "${COMPREPLY[@]}"'
    words = line.split(" ")
    result = subprocess.run(
        ["bash", "-uc", program, "bash", *words], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stderr == ""
    return set(result.stdout.splitlines())


def _fish(tmp_path: Path, line: str) -> set[str]:
    result = subprocess.run(
        ["fish", "--no-config", "-c", f"source ./script; complete -C '{line}'"],
        cwd=tmp_path, env=HOME | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert result.stderr == ""
    return {each.partition("\t")[0] for each in result.stdout.splitlines()}


def _zsh(tmp_path: Path, line: str) -> set[str]:
    """What one press of the Tab key makes of the last word. The script is a function that zsh loads by itself."""
    (tmp_path / "functions").mkdir(exist_ok=True)
    (tmp_path / "functions" / "_hicache").write_text((tmp_path / "script").read_text())
    controller, terminal = pty.openpty()
    begin = "PS1='go> '; fpath=($PWD/functions $fpath); autoload -U compinit; compinit -u -D; print RE''ADY\n"
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], cwd=tmp_path, env=HOME, stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True,
    )  # fmt: skip
    shown, deadline = "", monotonic() + WAIT_S

    def until(pattern: str) -> None:
        nonlocal shown
        while not re.search(pattern, shown):
            assert select.select([controller], [], [], max(0.0, deadline - monotonic()))[0], repr(shown)
            shown += os.read(controller, 1 << 16).decode()

    try:
        os.write(controller, begin.encode())
        until(r"READY[^>]*go> ")  # the line editor listens
        shown = ""
        # Another letter shows where the word ends that the key has made.
        os.write(controller, f"{line}\t%".encode())
        until("%")
    finally:
        shell.kill()
        shell.wait()
        os.close(controller)
        os.close(terminal)
    completed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x00-\x1f]", "", shown).rpartition("%")[0]
    return {completed.strip().rpartition(" ")[2]}


COMPLETED: Final[dict[str, Callable[[Path, str], set[str]]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""What a shell completes a line to, with the script in `tmp_path / "script"`: the candidates for its last word; of zsh
the one that it takes."""


@pytest.mark.parametrize("shell", [shell for shell in COMPLETED if which(shell)])
def test_shells_complete_commands_options_values_and_files(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script").write_text(script(shell, capsys))
    (tmp_path / "demo.snapshot").write_text("")
    for line, word in (
        ("hicache un", "unpin"), ("hicache evict --ti", "--tier"), ("hicache evict --tier h", "host"),
        ("hicache replay --write-po", "--write-policy"), ("hicache trace r", "record"),
        ("hicache completion fi", "fish"), ("hicache tree de", "demo.snapshot"),
    ):  # fmt: skip
        assert COMPLETED[shell](tmp_path, line) == {word}, line


def test_bash_offers_everything_that_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script").write_text(script("bash", capsys))
    assert _bash(tmp_path, "hicache ") == {*COMMANDS, "--help", "--version"}
    assert _bash(tmp_path, "hicache evict --") == {
        "--tier", "--pages", "--bytes", "--socket-dir", "--json", "--dry-run", "--help",
    }  # fmt: skip
    assert _bash(tmp_path, "hicache completion ") == {"bash", "zsh", "fish", "script"}
    (tmp_path / "of *  today").write_text("")
    assert _bash(tmp_path, "hicache tree o") == {"of *  today"}


@pytest.mark.parametrize("shell", COMPLETED)
def test_every_command_and_option_is_named(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for name in COMMANDS:
        assert name in text
    for option in ("socket-dir", "dry-run", "one-in", "tokenizer", "nvme-dir", "requests", "write-policy"):
        assert option in text


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert capsys.readouterr().err.startswith("hicache completion: argument shell: invalid choice: 'csh'")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_has_examples_statuses_and_short_lines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 110
    assert f"\n  hicache {name}" in shown, "an example"
    assert "exit status: 0 " in shown


def test_the_words_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    check_schema("completion", told)
    assert (told["shell"], told["script"]) == (None, None)
    assert {name: words["summary"] for name, words in told["commands"].items()} == COMMANDS
    assert told["commands"]["evict"]["values"] == {"--tier": ["host", "nvme"]}
    assert told["commands"]["trace"]["operands"] == ["record"]
    text = script("fish", capsys)
    assert main(["completion", "fish", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    check_schema("completion", told)
    assert (told["shell"], told["script"]) == ("fish", text)


def test_no_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 2
    assert capsys.readouterr() == ("", "hicache completion: name a shell: bash, zsh, fish\n")
