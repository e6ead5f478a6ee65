"""What a run is about: everything that the options name, read and checked before anything heavy is loaded."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache.tools.demo.corpus import Document, read_documents, read_questions
from hicache.tools.demo.model import find_model
from hicache.tools.demo.options import DemoOptions

if TYPE_CHECKING:
    from hicache.service.engines.models import ModelFiles


@dataclass(frozen=True, slots=True)
class Sources:
    """What the options name."""

    files: "ModelFiles"
    documents: list[Document] | None
    """The user's documents; None for the demo's own, which are rendered when their length can be measured."""
    questions: tuple[str, ...] | None
    notes: list[str]
    """Remarks on what was left out, for people."""


def read_sources(options: DemoOptions) -> Sources:
    """Read and check it. Raises `UsageProblem` for the first thing that is wrong; `CommandFailed` without transformers.

    The model comes last: finding it loads torch.
    """
    options.check()
    questions = read_questions(options.questions) if options.questions is not None else None
    documents, notes = read_documents(options.docs) if options.docs is not None else (None, [])
    return Sources(find_model(options.model), documents, questions, notes)
