"""Everything that is decided before a run: checked, so that nothing is created for a run that cannot be.

The order is that of cost: options, then files, then the tokenizer, and weights only when all else is known to be right.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import BadRequest
from hicache.layout import KVDtype, KVLayout
from hicache.tiers.memory_limits import available_bytes
from hicache.tools.demo import budgets as budget
from hicache.tools.demo.corpus import (
    Document,
    SizedDocument,
    fit,
    read_documents,
    read_questions,
    with_questions,
)
from hicache.tools.demo.model import Prompter, find_model, load_config, max_positions
from hicache.tools.demo.options import DEFAULT_DOCUMENTS, DemoOptions
from hicache.tools.demo.stdlib import standard_library
from hicache.tools.demo.workload import QUESTION_TOKENS, Ask, build_workload, choose_oversized
from hicache.tools.exits import UsageProblem
from hicache.tools.terminal import printable
from hicache.tools.units import plural

if TYPE_CHECKING:
    from hicache.service.engines.models import ModelFiles

PAGE_SIZE: Final = 16
"""Tokens in a page."""
MAX_CONTEXT: Final = 131_072
"""Longest context used, in tokens, whatever more a model allows."""
MIN_CONTEXT: Final = 256
"""A model with a shorter context has no use for a cache of documents."""
TEMPLATE_SLACK: Final = 8
"""Tokens by which parts may grow where they are joined."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What a run is about, read and checked without a tokenizer."""

    files: "ModelFiles"
    documents: list[Document] | None
    """The user's documents; None for the demo's own, which are rendered when their length can be measured."""
    questions: tuple[str, ...] | None
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, decided down to the last token."""

    options: DemoOptions
    files: "ModelFiles"
    prompter: Prompter
    layout: KVLayout
    documents: list[SizedDocument]
    budgets: budget.Budgets
    working_set_tokens: int
    asks: list[Ask]
    questions: list[str]
    """One an ask."""
    prompts: list[list[int]]
    """Token ids, one an ask."""
    notes: list[str]
    """Remarks for people."""


def read_sources(options: DemoOptions) -> Sources:
    """Read and check everything that the options name. Raises `UsageProblem`, or `CommandFailed` without a model."""
    options.check()
    questions = read_questions(options.questions) if options.questions is not None else None
    documents, notes = read_documents(options.docs) if options.docs is not None else (None, [])
    return Sources(find_model(options.model), documents, questions, notes)


def make_plan(options: DemoOptions, sources: Sources, nvme_parent: Path) -> Plan:
    """Decide the run. Loads tokenizer and configuration, not the weights.

    `nvme_parent` is an existing directory on the file system that the NVMe tier will lie on.
    """
    config = load_config(sources.files)
    layout = layout_of_config(config, options.dtype)
    budget.check_budgets(layout, options.device_bytes, options.host_bytes)
    prompter = Prompter(sources.files)
    notes = list(sources.notes)
    documents = _documents(options, sources, prompter, config, notes)
    sizes = [document.num_tokens for document in documents]
    longest = max(len(prompter.prompt([document.document.text], question))
                  for document in documents for question in document.document.questions[:1])  # fmt: skip
    shared = len(prompter.prompt([""], ""))
    max_prompt = min(max_positions(config), MAX_CONTEXT) - options.max_new_tokens
    working_set = sum(sizes) + shared

    def chosen(other_tokens: int) -> budget.Budgets:
        return budget.choose_budgets(
            layout, working_set_tokens=working_set, largest_tokens=longest, other_tokens=other_tokens,
            device_bytes=options.device_bytes, host_bytes=options.host_bytes,
        )  # fmt: skip

    capacity = {"device_tokens": chosen(0).device_bytes // layout.page_bytes * layout.page_size,
                "host_tokens": chosen(0).host_bytes // layout.page_bytes * layout.page_size}  # fmt: skip
    overhead = shared + QUESTION_TOKENS + TEMPLATE_SLACK
    oversized = choose_oversized(
        sizes, device_tokens=capacity["device_tokens"], max_tokens=max_prompt - overhead, seed=options.seed
    )
    asks = build_workload(sizes, num_requests=options.requests, seed=options.seed, oversized=oversized, **capacity)
    questions = _questions(asks, documents, options.seed)
    prompts = [prompter.prompt([documents[index].document.text for index in ask.documents], question)
               for ask, question in zip(asks, questions, strict=True)]  # fmt: skip
    _check_oversized(asks, prompts, capacity["device_tokens"], notes)
    other = sum(
        len(prompt) - sizes[ask.documents[0]] + options.max_new_tokens
        for ask, prompt in zip(asks, prompts, strict=True)
    )
    plan = Plan(
        options, sources.files, prompter, layout, documents, chosen(other), working_set, asks, questions, prompts, notes
    )
    budget.check_memory(plan.budgets, available_bytes(), device_is_cpu=options.device == "cpu")
    budget.check_disk(nvme_parent, plan.budgets.nvme_bytes)
    return plan


def layout_of_config(config: Any, dtype: str) -> KVLayout:
    """The layout that a model of this configuration will have in `dtype`, before its weights are loaded.

    Raises `UsageProblem` for a configuration that does not describe a decoder with keys and values.
    """
    text = config.get_text_config(decoder=True)
    try:
        heads = text.num_attention_heads
        return KVLayout.uniform(
            num_layers=text.num_hidden_layers,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            dtype=KVDtype(dtype),
            page_size=PAGE_SIZE,
        )
    except (AttributeError, TypeError, BadRequest) as error:
        raise UsageProblem(f"--model: this is not a decoder with keys and values: {printable(str(error))}") from error


def _documents(
    options: DemoOptions, sources: Sources, prompter: Prompter, config: Any, notes: list[str]
) -> list[SizedDocument]:
    """The documents, each short enough for the model, with what was cut or left out added to `notes`."""
    context = min(max_positions(config), MAX_CONTEXT)
    longest_question = max(
        (prompter.prompt([""], question) for document in sources.documents or [] for question in document.questions),
        key=len, default=prompter.prompt([""], "?" * QUESTION_TOKENS),
    )  # fmt: skip
    if sources.questions is not None:
        longest_question = max((prompter.prompt([""], question) for question in sources.questions), key=len)
    room = context - options.max_new_tokens - len(longest_question) - TEMPLATE_SLACK
    if context < MIN_CONTEXT or room < PAGE_SIZE:
        raise UsageProblem(
            f"--model: a context of {context:,} tokens is too short for a question of {len(longest_question):,} tokens"
        )
    if sources.documents is None:
        sized = standard_library(min(DEFAULT_DOCUMENTS, options.max_documents), prompter.count)
        if sources.questions is not None:
            asked = with_questions([document.document for document in sized], sources.questions)
            sized = [SizedDocument(document, old.num_tokens) for document, old in zip(asked, sized, strict=True)]
        too_long = [document for document in sized if document.num_tokens > room]
        if too_long:
            notes.append(f"{plural(len(too_long), 'document')} cut to the model's context of {context:,} tokens")
        return [
            fit(document.document, room, prompter.count) if document in too_long else document for document in sized
        ]
    documents = sources.documents
    if sources.questions is not None:
        documents = with_questions(documents, sources.questions)
    if len(documents) > options.max_documents:
        notes.append(
            f"using the first {options.max_documents} of {plural(len(documents), 'document')}; "
            f"--requests {len(documents) * 5 // 2 + 1} would use them all"
        )
        documents = documents[: options.max_documents]
    sized = [fit(document, room, prompter.count) for document in documents]
    notes += [
        f"{printable(document.document.title, 60)} is longer than the model's context: cut to "
        f"{document.num_tokens:,} tokens"
        for document in sized
        if document.cut_from is not None
    ]
    return sized


def _questions(asks: Sequence[Ask], documents: Sequence[SizedDocument], seed: int) -> list[str]:
    """Each document's questions in turn, beginning with any; the oversized request asks about its last document, which
    is the farthest from where its context begins."""
    rng = random.Random(f"hicache demo questions {seed}")
    first = [rng.randrange(len(document.document.questions)) for document in documents]
    questions = []
    for ask in asks:
        index = ask.documents[-1]
        own = documents[index].document.questions
        questions.append(own[(first[index] + ask.visit) % len(own)])
    return questions


def _check_oversized(asks: list[Ask], prompts: Sequence[Sequence[int]], device_tokens: int, notes: list[str]) -> None:
    if not any(ask.oversized and len(prompt) > device_tokens for ask, prompt in zip(asks, prompts, strict=True)):
        notes.append(
            "no request is larger than the device tier: the model's context or the documents are too short for it"
        )
