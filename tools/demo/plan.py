"""A run, decided before it begins: prompts down to the last token, budgets, and that there is room for them.

It takes the tokenizer and the configuration of the model and creates nothing; weights are loaded for a plan that holds.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import BadRequest
from hicache.layout import KVDtype, KVLayout
from hicache.tiers.memory_limits import available_bytes
from hicache.tools.demo.budgets import Budgets, check_budgets, check_disk, check_memory, choose_budgets
from hicache.tools.demo.corpus import Document, SizedDocument, fit, with_questions
from hicache.tools.demo.model import Prompter, load_config, max_positions
from hicache.tools.demo.options import DEFAULT_DOCUMENTS, DemoOptions
from hicache.tools.demo.sources import Sources
from hicache.tools.demo.stdlib import standard_library
from hicache.tools.demo.workload import Ask, build_workload, choose_oversized
from hicache.tools.exits import UsageProblem
from hicache.tools.terminal import printable
from hicache.tools.units import plural

if TYPE_CHECKING:
    from hicache.service.engines.models import ModelFiles

PAGE_SIZE: Final = 16
"""Tokens in a page."""
MAX_CONTEXT: Final = 131_072
"""Longest context used, in tokens, whatever more a model allows."""
MIN_ROOM: Final = 2 * PAGE_SIZE
"""A model whose context leaves less room for a document has no use for a cache."""
TEMPLATE_SLACK: Final = 8
"""Tokens by which the template's parts may grow where a document joins them."""
JOIN_TOKENS: Final = 2
"""Most tokens that stand between two documents of one prompt."""
MAX_CUT_NOTES: Final = 5
"""Documents that are named when they are cut; more are counted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, decided down to the last token."""

    options: DemoOptions
    files: "ModelFiles"
    prompter: Prompter
    layout: KVLayout
    documents: list[SizedDocument]
    budgets: Budgets
    working_set_tokens: int
    asks: list[Ask]
    questions: list[str]
    """One an ask."""
    prompts: list[list[int]]
    """Token ids, one an ask."""
    notes: list[str]
    """Remarks for people."""


def make_plan(options: DemoOptions, sources: Sources, nvme_parent: Path) -> Plan:
    """Decide the run. Loads tokenizer and configuration, not the weights.

    `nvme_parent` is an existing directory on the file system that the NVMe tier will lie on.
    """
    config = load_config(sources.files)
    layout = layout_of_config(config, options.dtype)
    check_budgets(layout, options.device_bytes, options.host_bytes)
    prompter = Prompter(sources.files)
    notes = list(sources.notes)
    max_prompt = min(max_positions(config), MAX_CONTEXT) - options.max_new_tokens
    documents = _candidates(options, sources, prompter, notes)
    room = _room(documents, prompter, max_prompt)
    sized = _fitted(documents, room, prompter, notes)
    sizes = [document.num_tokens for document in sized]
    working_set = sum(sizes) + len(prompter.prompt([""], ""))

    def budgets_with(other_tokens: int) -> Budgets:
        return choose_budgets(
            layout, working_set_tokens=working_set, largest_tokens=max(sizes) + max_prompt - room,
            max_context=max_prompt, other_tokens=other_tokens,
            device_bytes=options.device_bytes, host_bytes=options.host_bytes,
        )  # fmt: skip

    device_tokens, host_tokens = (
        size // layout.page_bytes * layout.page_size
        for size in (budgets_with(0).device_bytes, budgets_with(0).host_bytes)
    )
    asks = build_workload(
        sizes, num_requests=options.requests, seed=options.seed, device_tokens=device_tokens, host_tokens=host_tokens,
        oversized=choose_oversized(
            [size + JOIN_TOKENS for size in sizes], device_tokens=device_tokens, max_tokens=room, seed=options.seed
        ),
    )  # fmt: skip
    if not any(ask.oversized for ask in asks):
        notes.append("no request is larger than the device tier: the model's context or the documents are too short")
    questions = _questions(asks, documents, options.seed)
    prompts = [
        prompter.prompt([sized[index].document.text for index in ask.documents], question)
        for ask, question in zip(asks, questions, strict=True)
    ]
    beside = (len(prompt) - sizes[ask.documents[0]] for ask, prompt in zip(asks, prompts, strict=True))
    budgets = budgets_with(sum(beside) + len(asks) * options.max_new_tokens)
    check_memory(budgets, available_bytes(), device_is_cpu=options.device.startswith("cpu"))
    check_disk(nvme_parent, budgets.nvme_bytes)
    return Plan(options, sources.files, prompter, layout, sized, budgets, working_set, asks, questions, prompts, notes)


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


def _candidates(options: DemoOptions, sources: Sources, prompter: Prompter, notes: list[str]) -> list[Document]:
    """The documents to ask about, whole, with their questions; a note says what is left out."""
    documents = sources.documents
    if documents is None:
        documents = standard_library(min(DEFAULT_DOCUMENTS, options.max_documents), prompter.count)
    elif len(documents) > options.max_documents:
        notes.append(
            f"using the first {options.max_documents} of {plural(len(documents), 'document')}; "
            f"--requests {-(-len(documents) * 5 // 2)} would use them all"
        )
        documents = documents[: options.max_documents]
    return documents if sources.questions is None else with_questions(documents, sources.questions)


def _room(documents: Sequence[Document], prompter: Prompter, max_prompt: int) -> int:
    """Tokens of documents that a prompt has room for, whatever the question. Raises `UsageProblem` for too few."""
    questions = {question for document in documents for question in document.questions}
    overhead = max(len(prompter.prompt([""], question)) for question in questions) + TEMPLATE_SLACK
    if max_prompt - overhead < MIN_ROOM:
        raise UsageProblem(
            f"--model: a prompt of {max_prompt:,} tokens has no room for a document beside a question of {overhead:,}"
        )
    return max_prompt - overhead


def _fitted(documents: Sequence[Document], room: int, prompter: Prompter, notes: list[str]) -> list[SizedDocument]:
    """The documents, each short enough for the model; notes say which were cut."""
    sized = [fit(document, room, prompter.count) for document in documents]
    cut = [document for document in sized if document.cut_from is not None]
    for document in cut[:MAX_CUT_NOTES]:
        title = printable(document.document.title, 60)
        notes.append(f"{title} is longer than the model's context: cut to {document.num_tokens:,} tokens")
    if len(cut) > MAX_CUT_NOTES:
        notes.append(f"{plural(len(cut) - MAX_CUT_NOTES, 'more document')} cut to the model's context")
    return sized


def _questions(asks: Sequence[Ask], documents: Sequence[Document], seed: int) -> list[str]:
    """Each document's questions in turn, beginning with any; the oversized request asks about its last document, which
    is the farthest from where its context begins."""
    rng = random.Random(f"hicache demo questions {seed}")
    first = [rng.randrange(len(document.questions)) for document in documents]
    questions = []
    for ask in asks:
        own = documents[ask.documents[-1]].questions
        questions.append(own[(first[ask.documents[-1]] + ask.visit) % len(own)])
    return questions
