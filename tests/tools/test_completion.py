"""`hicache completion`: bash completes with it, and all shells are told of all commands and options."""

import subprocess
from pathlib import Path

import pytest

from hicache.tools.cli import COMMANDS, main


def _completed(tmp_path: Path, script: str, *words: str) -> set[str]:
    """What bash offers for the last of these words."""
    (tmp_path / "hicache.bash").write_text(script)
    program = 'source hicache.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _hicache; printf "%s\\n" "${COMPREPLY[@]}"'
    result = subprocess.run(
        ["bash", "-euc", program, "bash", *words], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stderr == ""
    return set(result.stdout.split())


def test_bash_completes_commands_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert _completed(tmp_path, script, "hicache", "") == {*COMMANDS, "--help", "--version"}
    assert _completed(tmp_path, script, "hicache", "un") == {"unpin"}
    assert _completed(tmp_path, script, "hicache", "evict", "--") == {
        "--tier", "--pages", "--bytes", "--socket-dir", "--json", "--dry-run", "--help",
    }  # fmt: skip
    (tmp_path / "demo.snapshot").write_text("")
    assert _completed(tmp_path, script, "hicache", "tree", "de") == {"demo.snapshot"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_named(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in COMMANDS:
        assert name in script
    for option in ("socket-dir", "dry-run", "one-in", "tokenizer", "nvme-dir", "requests"):
        assert option in script


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert capsys.readouterr().err.startswith("hicache completion: argument shell: invalid choice: 'csh'")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_has_examples_statuses_and_short_lines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 110
    if name not in ("serve", "replay", "bench"):
        assert f"\n  hicache {name}" in shown, "an example"
        assert "exit status: 0 " in shown
