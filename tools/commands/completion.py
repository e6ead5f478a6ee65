"""`hicache completion`: what makes a shell complete commands, options and file names."""

import argparse
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final

from hicache.tools.cli import COMMANDS
from hicache.tools.exits import Exit

_EPILOG: Final = """\
examples:
  hicache completion bash > ~/.local/share/bash-completion/completions/hicache
  hicache completion zsh > ~/.zfunc/_hicache      (with ~/.zfunc in fpath)
  hicache completion fish > ~/.config/fish/completions/hicache.fish

exit status: 0 printed; 2 bad usage
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Prints the completion of a shell, made from the commands and options of this hicache."
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=tuple(_SCRIPTS), help="which shell")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    print(_SCRIPTS[args.shell]({name: _options(name) for name in COMMANDS}), end="")
    return Exit.OK


def _options(name: str) -> list[str]:
    """The options of a command, as its usage names them."""
    parser = argparse.ArgumentParser(prog=name)
    import_module(f"hicache.tools.commands.{name}").configure(parser)
    return sorted({"--help", *re.findall(r"--[a-z][a-z-]*", parser.format_usage())})


def _bash(options: Mapping[str, list[str]]) -> str:
    cases = "\n".join(f"    {name}) words='{' '.join(words)}' ;;" for name, words in options.items())
    return f"""\
_hicache() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words=
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W '{" ".join(options)} --help --version' -- "$current"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _hicache hicache
"""


def _zsh(options: Mapping[str, list[str]]) -> str:
    named = "\n".join(f"    {_quoted(f'{name}:{COMMANDS[name]}')}" for name in options)
    cases = "\n".join(f"    {name}) compadd -- {' '.join(words)} ;;" for name, words in options.items())
    return f"""\
#compdef hicache
_hicache() {{
  local -a commands=(
{named}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  if [[ $words[CURRENT] != -* ]]; then
    _files
    return
  fi
  case $words[2] in
{cases}
  esac
}}
compdef _hicache hicache
"""


def _fish(options: Mapping[str, list[str]]) -> str:
    first = "complete -c hicache -n __fish_use_subcommand -f"
    lines = [f"{first} -a {name} -d {_quoted(COMMANDS[name])}" for name in options]
    lines += [
        f"complete -c hicache -n '__fish_seen_subcommand_from {name}' -l {word.removeprefix('--')}"
        for name, words in options.items() for word in words
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A word in single quotes, for zsh and fish alike."""
    return "'" + text.replace("'", "'\\''") + "'"


_SCRIPTS: Final[dict[str, Callable[[Mapping[str, list[str]]], str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
