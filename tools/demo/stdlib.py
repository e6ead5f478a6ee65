"""The demo's own documents: what the standard library says about itself, rendered by pydoc, and questions about it.

Every machine that runs Python has these texts, they need no download and no licence of their own, and a reader can
check the answers. Each is cut to its own length between `MIN_TOKENS` and `MAX_TOKENS` tokens. The text of a module
follows the Python version; for one version it is the same everywhere: what depends on the machine or the process
(paths, addresses, values of constants) is left out.
"""

import pydoc
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from hicache.tools.demo.corpus import CountTokens, Document, fit
from hicache.tools.exits import CommandFailed

MIN_TOKENS: Final = 1_500
MAX_TOKENS: Final = 3_000
_TARGETS: Final = (1_840, 1_620, 1_720, 1_570, 1_660, 1_780, 1_600, 1_900, 1_690, 1_640, 1_750, 1_580)
"""Tokens to cut a document to, in turn: lengths differ, as those of real documents do."""


@dataclass(frozen=True, slots=True)
class _Source:
    module: str
    questions: tuple[str, ...]


SOURCES: Final = (
    _Source("argparse", (
        "Which class is the main entry point for command-line parsing?",
        "What does the FileType factory do?",
        "Which formatter adds information about argument defaults to the help?",
        "When is an ArgumentError raised?",
    )),
    _Source("json", (
        "How do I print an object as JSON with an indentation of four spaces?",
        "What are the separators for a compact encoding?",
        "How can decoding be specialized for complex numbers?",
        "Which command validates JSON from the shell?",
    )),
    _Source("sqlite3", (
        "How do I open a database in memory?",
        "Which method of a cursor performs SQL queries?",
        "What happens to a transaction when the with block raises an exception?",
        "What does Blob.seek do?",
    )),
    _Source("subprocess", (
        "What is the difference between call and check_call?",
        "What does PIPE indicate?",
        "Which attributes does CompletedProcess have?",
        "Which exception is raised when a process returns a non-zero exit status?",
    )),
    _Source("statistics", (
        "What does the harmonic_mean function calculate?",
        "How do I calculate the standard deviation of sample data?",
        "What is the median of [2, 3, 4, 5]?",
        "Which functions describe the relation between two inputs?",
        "What does adding two NormalDist instances do?",
    )),
    _Source("csv", (
        "When does QUOTE_MINIMAL put quotes around a field?",
        "What does the doublequote setting control?",
        "Why is splitting a line at commas not enough?",
        "What is the default delimiter?",
    )),
    _Source("difflib", (
        "What does the two-letter code '? ' mean in a delta?",
        "Which function finds close matches of a word?",
        "What does the HtmlDiff class produce?",
        "What is SequenceMatcher used for?",
    )),
    _Source("logging", (
        "What does a FileHandler do?",
        "What is a BufferingFormatter for?",
        "What does the Filter class decide?",
        "What happens when emit raises an exception?",
    )),
    _Source("random", (
        "Which random number generator does this module use?",
        "How do I pick weighted random elements from a list?",
        "What is the period of the generator?",
        "Which method draws from a normal distribution?",
        "What does betavariate return?",
    )),
    _Source("tempfile", (
        "Why should mktemp not be used?",
        "What does SpooledTemporaryFile do when it exceeds its size?",
        "What is the tempdir variable for?",
        "What type do the default path names have?",
    )),
    _Source("configparser", (
        "What does the delimiters argument do?",
        "What happens to duplicate sections when strict is True?",
        "What is the default section called?",
        "Which method reads configuration from a string?",
    )),
    _Source("pathlib", (
        "What is the difference between PurePath and Path?",
        "Which method makes a path absolute?",
        "What does the glob method yield?",
        "How do I test whether a path is a symbolic link?",
    )),
    _Source("threading", (
        "What is a Barrier used for?",
        "What does the wait method of a Condition do?",
        "What happens when a Barrier is broken?",
        "What does BoundedSemaphore check?",
    )),
    _Source("contextlib", (
        "What does the closing context manager do?",
        "What is ExitStack for?",
        "How do I suppress an exception?",
        "What does redirect_stdout do?",
    )),
    _Source("collections", (
        "What does a ChainMap do?",
        "How do I count hashable objects?",
        "What does deque offer that a list does not?",
        "What does namedtuple create?",
    )),
)  # fmt: skip
"""In order of preference; each renders to more than `MIN_TOKENS` tokens with the usual tokenizers."""

_DROPPED_SECTIONS: Final = frozenset({
    "MODULE REFERENCE", "PACKAGE CONTENTS", "SUBMODULES", "DATA", "VERSION", "DATE", "AUTHOR", "CREDITS", "FILE",
})  # fmt: skip
"""Boilerplate, and what depends on the machine or the process."""
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_GROUP: Final = re.compile(
    r"(Methods|Class methods|Static methods|Readonly properties|Data descriptors|Data and other attributes)"
    r" (defined here|inherited from .*):"
)
"""First line of a group of a class's members."""
_KEPT_GROUPS: Final = frozenset(
    {"Methods defined here:", "Class methods defined here:", "Static methods defined here:"}
)


def standard_library(num_documents: int, count_tokens: CountTokens) -> list[Document]:
    """`num_documents` documents of `MIN_TOKENS` to `MAX_TOKENS` tokens each.

    Raises `CommandFailed` when so many cannot be had: a Python without docstrings (`-OO`), or one with few modules.
    """
    documents: list[Document] = []
    for source in SOURCES:
        if len(documents) == num_documents:
            break
        try:
            text = render(source.module)
        except ImportError:
            continue  # sqlite3 is missing from some builds
        target = _TARGETS[len(documents) % len(_TARGETS)]
        sized = fit(Document(source.module, text, source.questions), target, count_tokens)
        if sized.num_tokens >= MIN_TOKENS:
            documents.append(sized.document)
    if len(documents) < num_documents:
        raise CommandFailed(
            f"the standard library's documentation gives only {len(documents)} of {num_documents} documents "
            "(is Python running with -OO?); give documents of your own with --docs"
        )
    return documents


def render(module: str) -> str:
    """A module's documentation as text: pydoc's page without the parts named above and without the rules that pydoc
    draws around classes. Raises `ImportError`."""
    # Defaults of arguments may show where an object lies in memory.
    page = _ADDRESS.sub("", _PlainText().document(import_module(module), module))
    lines: list[str] = []
    section = ""
    members = _Members()
    for line in page.splitlines():
        if line and not line[0].isspace():
            section = line.strip()
        if section in _DROPPED_SECTIONS:
            continue
        # Inside a class pydoc puts a rail, " |", before each line.
        if line.startswith("     |"):
            body = line[8:].rstrip()
            if members.drops(body):
                continue
            line = "        " + body
        else:
            members = _Members()
        line = line.rstrip()
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


class _PlainText(pydoc.TextDoc):
    """pydoc's text, without the overstrikes that made letters bold on a teletype."""

    def bold(self, text: str) -> str:
        return text


class _Members:
    """Decides line by line which members of one class are left out: what it inherits, and what has no text."""

    def __init__(self) -> None:
        self._dropping_group = False
        self._dropping_order = False

    def drops(self, body: str) -> bool:
        """Whether this line, without its rail, is left out."""
        if body.startswith("-" * 30):  # the rule between two groups of members
            self._dropping_group = False
            return True
        if _GROUP.fullmatch(body):
            self._dropping_group = body not in _KEPT_GROUPS
        if body == "Method resolution order:":
            self._dropping_order = True
        if self._dropping_order:
            self._dropping_order = bool(body)
            return True
        return self._dropping_group
