"""The documents that the demo asks about: the user's own files, or the standard library's documentation.

A document's length is measured with the model's tokenizer; one that is too long is cut at a line border. Nothing here
writes, and everything that can be wrong with a directory is found before anything else is done with it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hicache.tools.exits import UsageProblem
from hicache.tools.terminal import printable
from hicache.tools.units import plural

CountTokens = Callable[[str], int]
"""Number of tokens of a text."""

SUFFIXES: Final = (".txt", ".md")
"""Files of a `--docs` directory that are read, whatever the case of the suffix."""
MAX_READ_BYTES: Final = 8 << 20
"""Most bytes read of one file; what lies beyond could not fit a model's context."""
MAX_FILES: Final = 10_000
"""Most files looked at in a `--docs` directory."""
GENERIC_QUESTIONS: Final = (
    "What is this text about?",
    "Name the most important point of this text.",
    "Summarize this text in one sentence.",
    "Who would want to read this text?",
    "What does this text say first?",
)
"""Asked about the user's documents where no questions file is given."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text and what is asked about it."""

    title: str
    """Short name for people; file names may hold anything, so it is escaped when it is shown."""
    text: str
    questions: tuple[str, ...]
    """At least one."""


@dataclass(frozen=True, slots=True)
class SizedDocument:
    """A document as it is asked about: no longer than asked for."""

    document: Document
    num_tokens: int
    """Tokens of the text."""
    cut_from: int | None = None
    """Tokens of the text before it was cut (at least this many); None if it is whole."""


def read_documents(directory: Path) -> tuple[list[Document], list[str]]:
    """The `.txt` and `.md` files under `directory`, in order of their paths, with generic questions; and notes on what
    was left out, for people.

    Subdirectories are read too, hidden files and directories and links to directories are not. Files with nothing but
    white space are left out. A title is the path below `directory`.

    Raises `UsageProblem` if the directory is missing, unreadable or has no such file, or a file is not UTF-8 text.
    """
    paths = _text_files(directory)
    if not paths:
        raise UsageProblem(f"--docs: {_name(directory)} has no {' or '.join(SUFFIXES)} file")
    documents, empty = [], []
    for path in paths:
        text = read_text(path, "--docs")
        title = os.fspath(path.relative_to(directory))
        if text.strip():
            documents.append(Document(title, text, GENERIC_QUESTIONS))
        else:
            empty.append(title)
    if not documents:
        raise UsageProblem(f"--docs: every file in {_name(directory)} is empty")
    notes = [f"{plural(len(empty), 'empty file')} left out: {printable(', '.join(empty), 80)}"] if empty else []
    return documents, notes


def read_questions(path: Path) -> tuple[str, ...]:
    """The questions of a file, one a line; empty lines are passed over.

    Raises `UsageProblem` if the file is missing, is not UTF-8 text or has no question.
    """
    questions = tuple(line.strip() for line in read_text(path, "--questions").splitlines() if line.strip())
    if not questions:
        raise UsageProblem(f"--questions: {_name(path)} has no question")
    return questions


def read_text(path: Path, option: str) -> str:
    """The text of a UTF-8 file, at most `MAX_READ_BYTES` of it, with plain line ends and without a byte order mark.

    Raises `UsageProblem`, naming `option` and the file, for one that cannot be read or is not text.
    """
    try:
        if not path.is_file():
            problem = "is a directory" if path.is_dir() else "is not a file" if path.exists() else "does not exist"
            raise UsageProblem(f"{option}: {_name(path)} {problem}")
        with path.open("rb") as file:
            data = file.read(MAX_READ_BYTES)
    except OSError as error:
        raise UsageProblem(f"{option}: {_name(path)} cannot be read: {error.strerror}") from error
    if b"\0" in data:
        raise UsageProblem(f"{option}: {_name(path)} is not text: it has a NUL byte at offset {data.index(0)}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # A character cut in two by the limit is not the file's fault.
        if len(data) < MAX_READ_BYTES or error.start < len(data) - 3:
            raise UsageProblem(
                f"{option}: {_name(path)} is not text: it is not UTF-8 at offset {error.start}"
            ) from error
        text = data[: error.start].decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def with_questions(documents: list[Document], questions: tuple[str, ...]) -> list[Document]:
    """The documents with the user's questions instead of their own."""
    return [replace(document, questions=questions) for document in documents]


def fit(document: Document, max_tokens: int, count_tokens: CountTokens) -> SizedDocument:
    """The document with at most `max_tokens` tokens of text, cut behind the last line that fits; where not even the
    first line does, within it."""
    text = document.text
    # Few tokenizers spend less than a token on 16 characters; what lies far beyond the limit is not even counted.
    head = text[: max_tokens * 16 + 16]
    num_tokens = count_tokens(head)
    if num_tokens <= max_tokens and len(head) == len(text):
        return SizedDocument(document, num_tokens)
    kept = _longest(head.splitlines(keepends=True), max_tokens, count_tokens) or _longest(
        list(head[: max_tokens * 16]), max_tokens, count_tokens
    )
    return SizedDocument(replace(document, text=kept), count_tokens(kept), cut_from=num_tokens)


def _longest(pieces: list[str], max_tokens: int, count_tokens: CountTokens) -> str:
    """The most leading pieces whose text has at most `max_tokens` tokens, by bisection."""
    fits, too_many = 0, len(pieces) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if count_tokens("".join(pieces[:middle])) <= max_tokens:
            fits = middle
        else:
            too_many = middle
    return "".join(pieces[:fits])


def _text_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        raise UsageProblem(f"--docs: {_name(directory)} {problem}")
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise UsageProblem(f"--docs: {printable(str(error.filename))} cannot be read: {error.strerror}")

    for folder, subfolders, names in os.walk(directory, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        found += [
            Path(folder, name)
            for name in names
            if name.lower().endswith(SUFFIXES) and not name.startswith(".") and Path(folder, name).is_file()
        ]
        if len(found) > MAX_FILES:
            raise UsageProblem(f"--docs: {_name(directory)} has more than {MAX_FILES:,} {' and '.join(SUFFIXES)} files")
    return sorted(found)


def _name(path: Path) -> str:
    return printable(os.fspath(path))
