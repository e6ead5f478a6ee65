"""Documents: the user's files, what is refused, cutting, and the standard library's texts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.tools.demo import corpus, stdlib
from hicache.tools.demo.corpus import Document, fit, read_documents, read_questions
from hicache.tools.exits import CommandFailed, UsageProblem


def words(text: str) -> int:
    """A stand-in for a tokenizer: four characters a token."""
    return -(-len(text) // 4)


def write(folder: Path, name: str, content: str | bytes = "text\n") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(directory: Path) -> str:
    with pytest.raises(UsageProblem) as caught:
        read_documents(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_text_files_are_read_in_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "deep/er/c.TXT", "d.rst", ".hidden.txt", ".git/e.txt", "f.txt.bak"):
        write(tmp_path, name, f"I am {name}\n")
    write(tmp_path, "directory.txt/inside.md", "inside\n")
    (tmp_path / "dangling.md").symlink_to(tmp_path / "nothing")
    (tmp_path / "linked.md").symlink_to(tmp_path / "a.md")
    (tmp_path / "loop").symlink_to(tmp_path)
    documents, notes = read_documents(tmp_path)
    assert [document.title for document in documents] == [
        "a.md", "b.txt", "deep/er/c.TXT", "directory.txt/inside.md", "linked.md",
    ]  # fmt: skip
    assert documents[0].text == "I am a.md\n"
    assert all(document.questions for document in documents)
    assert notes == []


def test_a_file_of_any_length_is_taken_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "one.txt", "x")
    write(tmp_path, "none.txt", "")
    write(tmp_path, "space.md", " \n\t\n")
    documents, notes = read_documents(tmp_path)
    assert [document.title for document in documents] == ["one.txt"]
    assert notes == ["2 empty files left out: none.txt, space.md"]


def test_line_ends_and_byte_order_marks_are_evened_out(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_documents(tmp_path)[0][0].text == "one\ntwo\nthree\n"


def test_refused_directories(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing") == f"--docs: {tmp_path}/missing does not exist"
    assert refusal(write(tmp_path, "file.txt")) == f"--docs: {tmp_path}/file.txt is not a directory"
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == f"--docs: {tmp_path}/empty has no .txt or .md file"
    write(tmp_path, "blank/a.txt", "\n")
    assert refusal(tmp_path / "blank") == f"--docs: every file in {tmp_path}/blank is empty"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"text\0text", "it has a NUL byte at offset 4"),
        (b"caf\xe9 au lait", "it is not UTF-8 at offset 3"),
        (b"\x89PNG\r\n\x1a\n", "it is not UTF-8 at offset 0"),
        ("utf-16".encode("utf-16"), "it has a NUL byte at offset 3"),
        (b"cut \xe2\x82", "it is not UTF-8 at offset 4"),
    ],
)
def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: Path, content: bytes, problem: str) -> None:
    write(tmp_path, "good.txt")
    write(tmp_path, "bad.txt", content)
    assert refusal(tmp_path) == f"--docs: {tmp_path}/bad.txt is not text: {problem}"


def test_control_characters_of_a_name_are_escaped(tmp_path: Path) -> None:
    write(tmp_path, "\x1b[31mred\n.txt", b"\0")
    assert "\\x1b[31mred\\n.txt is not text" in refusal(tmp_path)


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_FILES", 3)
    for number in range(4):
        write(tmp_path, f"{number}.txt")
    assert refusal(tmp_path) == f"--docs: {tmp_path} has more than 3 .txt and .md files"


def test_a_huge_file_is_read_only_as_far_as_it_could_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_READ_BYTES", 10)
    write(tmp_path, "a.txt", "123456789€ and more")
    assert read_documents(tmp_path)[0][0].text == "123456789"


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe.txt"
    os.mkfifo(path)
    write(tmp_path, "a.txt")
    assert [document.title for document in read_documents(tmp_path)[0]] == ["a.txt"]  # a pipe is not a file
    with pytest.raises(UsageProblem, match=r"--questions: .*pipe\.txt is not a file"):
        read_questions(path)


def test_questions_are_one_a_line(tmp_path: Path) -> None:
    assert read_questions(write(tmp_path, "q", "  Who?\n\nWhy is that?\r\n")) == ("Who?", "Why is that?")
    with pytest.raises(UsageProblem, match="has no question"):
        read_questions(write(tmp_path, "q", "\n \n"))
    with pytest.raises(UsageProblem, match="does not exist"):
        read_questions(tmp_path / "missing")
    with pytest.raises(UsageProblem, match="is a directory"):
        read_questions(tmp_path)


def test_a_document_that_fits_is_left_alone() -> None:
    document = Document("a", "x" * 40, ("?",))
    sized = fit(document, 10, words)
    assert (sized.document, sized.num_tokens, sized.cut_from) == (document, 10, None)


@given(st.lists(st.text("ab \n", max_size=30), max_size=30), st.integers(1, 60))
def test_a_document_is_cut_behind_the_last_line_that_fits(lines: list[str], limit: int) -> None:
    text = "\n".join(lines)
    sized = fit(Document("a", text, ("?",)), limit, words)
    kept = sized.document.text
    assert text.startswith(kept)
    assert sized.num_tokens == words(kept) <= limit
    if sized.cut_from is None:
        assert kept == text
        return
    assert words(text) > limit
    first_line = text.splitlines(keepends=True)[0]
    if words(first_line) <= limit:
        assert kept.endswith("\n")
        next_line = text[len(kept) :].splitlines(keepends=True)[0]
        assert words(kept + next_line) > limit
    else:
        assert len(kept) == limit * 4


def test_a_document_of_one_endless_line_is_cut_within_it() -> None:
    sized = fit(Document("a", "x" * 100_000, ("?",)), 100, words)
    assert sized.num_tokens == 100
    assert sized.cut_from is not None


def test_the_own_documents_have_their_lengths_and_questions() -> None:
    documents = stdlib.standard_library(12, words)
    assert len(documents) == 12
    for document in documents:
        assert stdlib.MIN_TOKENS <= words(document.text) <= stdlib.MAX_TOKENS
        assert 3 <= len(document.questions) <= 5
    assert len({document.text[:200] for document in documents}) == 12


def test_the_own_documents_are_prose_without_boilerplate() -> None:
    text = stdlib.render("subprocess")
    assert "Runs a command, waits for it to complete" in text
    assert "returncode: The exit code of the process, negative for signals." in text
    for unwanted in (
        "MODULE REFERENCE",
        "FILE\n",
        " | ",
        "Method resolution order",
        "Data descriptors",
        "inherited from",
        "\n\n\n",
    ):
        assert unwanted not in text


def test_the_own_documents_are_the_same_in_every_process() -> None:
    program = (
        "import hashlib; from hicache.tools.demo.stdlib import SOURCES, render\n"
        "print(hashlib.sha256(''.join(render(source.module) for source in SOURCES).encode()).hexdigest())"
    )
    digests = {
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
                       capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(digests) == 1


def test_without_enough_documentation_there_is_one_clear_line() -> None:
    with pytest.raises(CommandFailed, match="gives only 0 of 12 documents"):
        stdlib.standard_library(12, lambda text: min(len(text), stdlib.MIN_TOKENS - 1))
