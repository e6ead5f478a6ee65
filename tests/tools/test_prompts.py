"""Prompts and plans: documents are prefixes, whatever the model's chat template looks like."""

from itertools import takewhile
from pathlib import Path

import pytest

from hicache.tools.demo.corpus import SizedDocument
from hicache.tools.demo.model import SYSTEM_PROMPT, Prompter, find_model
from hicache.tools.demo.options import DemoOptions
from hicache.tools.demo.plan import Plan, make_plan
from hicache.tools.demo.sources import read_sources
from hicache.tools.exits import UsageProblem
from tests.tools.tiny_model import CHAT_TEMPLATE, write_model

TEXT = "A first line.\nA second line, with more in it.\n" * 20
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHAT_TEMPLATE
)
BROKEN = "{{ raise_exception('this template is broken') }}"


def shared(first: list[int], second: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, NO_SYSTEM, None], ids=["chat", "no system prompt", "no template"])
def test_prompts_about_one_document_share_everything_before_the_question(tmp_path: Path, template: str | None) -> None:
    prompter = Prompter(find_model(write_model(tmp_path, [TEXT], chat_template=template)))
    first, second = prompter.prompt([TEXT], "What is it?"), prompter.prompt([TEXT], "Why is it?")
    assert shared(first, second) >= prompter.count(SYSTEM_PROMPT) + prompter.count(TEXT) - 4
    other = prompter.prompt(["Nothing of the kind.\n"], "What is it?")
    assert shared(first, other) >= prompter.count(SYSTEM_PROMPT) - 4
    both = prompter.prompt([TEXT, "Nothing of the kind.\n"], "What is it?")
    assert shared(first, both) >= prompter.count(SYSTEM_PROMPT) + prompter.count(TEXT) - 4
    text = prompter.text(first)
    assert text.index(SYSTEM_PROMPT) < text.index("A second line") < text.index("What is it?")


def test_a_template_that_fails_for_another_reason_is_not_passed_over(tmp_path: Path) -> None:
    prompter = Prompter(find_model(write_model(tmp_path, [TEXT], chat_template=BROKEN)))
    with pytest.raises(Exception, match="this template is broken"):
        prompter.prompt([TEXT], "What is it?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a context of 1,024 tokens."""
    return write_model(tmp_path_factory.mktemp("tiny"), [TEXT], max_positions=1_024)


def plan(tmp_path: Path, **options: object) -> Plan:
    chosen = DemoOptions(**options)  # type: ignore[arg-type]  # each test gives fields of the right type
    return make_plan(chosen, read_sources(chosen), tmp_path)


def write_documents(folder: Path, *sizes: int) -> Path:
    docs = folder / "docs"
    docs.mkdir()
    for number, size in enumerate(sizes):
        (docs / f"{number:02}.txt").write_text("".join(f"{number} has line {line}.\n" for line in range(size)))
    return docs


def test_a_plan_fits_the_model_and_exceeds_the_device_once(tmp_path: Path, model: Path) -> None:
    made = plan(tmp_path, docs=write_documents(tmp_path, 20, 30, 25, 28, 22, 26, 24, 1, 900), model=model)
    assert len(made.asks) == len(made.prompts) == len(made.questions) == 41
    assert max(map(len, made.prompts)) + made.options.max_new_tokens <= 1_024
    oversized = [number for number, ask in enumerate(made.asks) if ask.oversized]
    assert len(oversized) == 1
    assert len(made.prompts[oversized[0]]) * made.layout.token_bytes > made.budgets.device_bytes
    assert any("08.txt is longer than the model's context: cut to" in note for note in made.notes)


def test_more_documents_than_requests_can_visit_are_left_out_with_a_note(tmp_path: Path, model: Path) -> None:
    made = plan(tmp_path, docs=write_documents(tmp_path, *[3] * 12), model=model, requests=20)
    assert [document.document.title for document in made.documents] == [f"{number:02}.txt" for number in range(8)]
    assert made.notes[0] == "using the first 8 of 12 documents; --requests 30 would use them all"
    assert len(plan(tmp_path, docs=tmp_path / "docs", model=model, requests=30).documents) == 12


def test_a_plan_without_room_for_an_oversized_request_says_so(tmp_path: Path, model: Path) -> None:
    made = plan(tmp_path, docs=write_documents(tmp_path, 20, 30), model=model, device_bytes=1 << 30, requests=5)
    assert not any(ask.oversized for ask in made.asks)
    assert made.notes == [
        "no request is larger than the device tier: the model's context or the documents are too short"
    ]


def test_a_question_longer_than_the_context_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "questions").write_text("why? " * 2_000)
    with pytest.raises(
        UsageProblem, match=r"a prompt of 1,012 tokens has no room for a document beside a question of [\d,]+"
    ):
        plan(tmp_path, docs=write_documents(tmp_path, 3), questions=tmp_path / "questions", model=model)


def test_own_documents_are_cut_to_a_short_context(tmp_path: Path, model: Path) -> None:
    made = plan(tmp_path, model=model, requests=10)
    assert len(made.documents) == 4
    assert all(isinstance(document, SizedDocument) and document.num_tokens < 1_000 for document in made.documents)
    assert made.notes[0].startswith("argparse is longer than the model's context: cut to ")
    questions = {question for document in made.documents for question in document.document.questions}
    assert set(made.questions) <= questions
