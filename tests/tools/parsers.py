"""The parsers of the commands, gone through: for tests that hold for every command there is."""

import argparse
from importlib import import_module


def options_of(name: str) -> set[str]:
    """The long options of a command."""
    parser = argparse.ArgumentParser(prog=name)
    import_module(f"hicache.tools.commands.{name}").configure(parser)
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
