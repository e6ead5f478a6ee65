"""`hicache completion`: what makes a shell complete commands, options and file names."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Final

from hicache.tools.cli import COMMANDS
from hicache.tools.exits import Exit, UsageProblem

_EPILOG: Final = """\
examples:
  hicache completion bash > ~/.local/share/bash-completion/completions/hicache
  hicache completion zsh > ~/.zfunc/_hicache      (with ~/.zfunc in fpath)
  hicache completion fish > ~/.config/fish/completions/hicache.fish
  hicache completion --json      (the words themselves, for another shell)

exit status: 0 printed; 2 bad usage
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Prints the completion of a shell, made from the commands and options of this hicache."
    parser.epilog = _EPILOG
    parser.add_argument("shell", nargs="?", choices=tuple(_SCRIPTS), help="which shell; may be left out with --json")
    parser.add_argument("--json", action="store_true", help="print JSON instead: commands, options and their words")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    commands = {name: _words(name) for name in COMMANDS}
    if args.shell is None and not args.json:
        raise UsageProblem(f"name a shell: {', '.join(_SCRIPTS)}")
    script = _SCRIPTS[args.shell](commands) if args.shell is not None else None
    if args.json:
        told = {name: {"summary": COMMANDS[name], **asdict(words)} for name, words in commands.items()}
        print(json.dumps({
            "format": "hicache-completion", "version": 1, "shell": args.shell, "script": script, "commands": told,
        }, indent=2))  # fmt: skip
    else:
        print(script, end="")
    return Exit.OK


@dataclass(frozen=True, slots=True)
class Words:
    """What may stand behind a command."""

    options: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    """Of options that take one of several words."""
    operands: tuple[str, ...]
    """Words that may stand alone."""


def _words(name: str) -> Words:
    parser = argparse.ArgumentParser(prog=name)
    import_module(f"hicache.tools.commands.{name}").configure(parser)
    options, values, operands = set[str](), dict[str, tuple[str, ...]](), list[str]()
    for action in parser._actions:  # what `add_argument` returned; argparse has no other list of it
        choices = tuple([str(choice) for choice in action.choices or ()])
        for option in action.option_strings:
            if option.startswith("--"):
                options.add(option)
                if choices:
                    values[option] = choices
        if not action.option_strings:
            operands += choices
    return Words(tuple(sorted(options)), values, tuple(operands))


def _bash(commands: Mapping[str, Words]) -> str:
    cases = "\n".join(
        f"    {name}) words='{' '.join(words.options)}' operands='{' '.join(words.operands)}' ;;"
        for name, words in commands.items()
    )
    values = "\n".join(
        f"    {name}:{option}) words='{' '.join(choices)}' ;;"
        for name, words in commands.items() for option, choices in words.values.items()
    )  # fmt: skip
    return f"""\
_hicache() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words= operands=
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W '{" ".join(commands)} --help --version' -- "$current"))
    return
  fi
  case ${{COMP_WORDS[1]}}:${{COMP_WORDS[COMP_CWORD-1]}} in
{values}
  esac
  if [[ -n $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  else
    mapfile -t COMPREPLY < <(compgen -W "$operands" -- "$current"; compgen -f -- "$current")
  fi
}}
complete -o filenames -F _hicache hicache
"""


def _zsh(commands: Mapping[str, Words]) -> str:
    named = "\n".join(f"    {_quoted(f'{name}:{COMMANDS[name]}')}" for name in commands)
    cases = "\n".join(
        f"    {name}) words_=({' '.join(words.options)}) operands=({' '.join(words.operands)}) ;;"
        for name, words in commands.items()
    )
    values = "\n".join(
        f"    {name}:{option}) compadd -- {' '.join(choices)}; return ;;"
        for name, words in commands.items() for option, choices in words.values.items()
    )  # fmt: skip
    return f"""\
#compdef hicache
_hicache() {{
  local -a words_ operands commands=(
{named}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  case $words[2]:$words[CURRENT-1] in
{values}
  esac
  case $words[2] in
{cases}
  esac
  if [[ $words[CURRENT] == -* ]]; then
    compadd -a words_
  else
    compadd -a operands
    _files
  fi
}}
# As a file of $fpath this is the function itself when it is called for the first time; else it is sourced.
if [[ $funcstack[1] == _hicache ]]; then
  _hicache "$@"
else
  compdef _hicache hicache
fi
"""


def _fish(commands: Mapping[str, Words]) -> str:
    first = "complete -c hicache -n __fish_use_subcommand -f"
    lines = [f"{first} -a {name} -d {_quoted(COMMANDS[name])}" for name in commands]
    for name, words in commands.items():
        within = f"complete -c hicache -n '__fish_seen_subcommand_from {name}'"
        for option in words.options:
            value = f" -x -a {_listed(words.values[option])}" if option in words.values else ""
            lines.append(f"{within} -l {option.removeprefix('--')}{value}")
        if words.operands:
            lines.append(f"{within} -a {_listed(words.operands)}")
    return "\n".join(lines) + "\n"


def _listed(words: Iterable[str]) -> str:
    return _quoted(" ".join(words))


def _quoted(text: str) -> str:
    """A word in single quotes, for zsh and fish alike."""
    return "'" + text.replace("'", "'\\''") + "'"


_SCRIPTS: Final[dict[str, Callable[[Mapping[str, Words]], str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
