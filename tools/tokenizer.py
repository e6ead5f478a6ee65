"""A tokenizer from its directory, for commands that read prompts or show text."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.terminal import printable

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def opened(directory: Path) -> "Tokenizer":
    """The tokenizer of a directory's tokenizer.json. Raises `UsageProblem` for what is none, and `CommandFailed`
    without the package that reads it."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UsageProblem(f"--tokenizer: {printable(os.fspath(directory))} has no tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CommandFailed("decoding tokens needs the package tokenizers: pip install 'hicache[demo]'") from error
    try:
        return Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # the library raises plain exceptions
        raise UsageProblem(f"--tokenizer: {printable(os.fspath(path))} is not a tokenizer: {error}") from error


def decoder(directory: Path) -> Callable[[list[int]], str]:
    """What makes text of tokens, leaving out ids that the tokenizer does not have. Raises as `opened` does."""
    tokenizer = opened(directory)

    def decode(tokens: list[int]) -> str:
        size = tokenizer.get_vocab_size()
        text: str = tokenizer.decode([token for token in tokens if 0 <= token < size])
        return text

    return decode
