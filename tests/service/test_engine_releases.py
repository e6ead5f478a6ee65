"""Releases of engines that hicache was not run with: they lack names that it imports, and go on without it, or are told
at their start. Each stands here as the few modules of it that every release has had."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.repository import ROOT

VLLM = {
    "vllm/__init__.py": '__version__ = "0.11.2"',
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": """
        import enum
        from abc import ABC, abstractmethod

        class KVConnectorRole(enum.Enum):
            SCHEDULER = 0
            WORKER = 1

        class KVConnectorMetadata(ABC):
            pass

        class KVConnectorBase_V1(ABC):
            def __init__(self, vllm_config, role):
                self.role = role

            @abstractmethod
            def start_load_kv(self, forward_context, **kwargs): ...
            @abstractmethod
            def wait_for_layer_load(self, layer_name): ...
            @abstractmethod
            def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
            @abstractmethod
            def wait_for_save(self): ...
            @abstractmethod
            def get_num_new_matched_tokens(self, request, num_computed_tokens): ...
            @abstractmethod
            def update_state_after_alloc(self, request, blocks, num_external_tokens): ...
            @abstractmethod
            def build_connector_meta(self, scheduler_output): ...
        """,
}
SGLANG = {
    "sglang/__init__.py": "",
    "sglang/version.py": '__version__ = "0.5.2"',
    "sglang/srt/mem_cache/hicache_storage.py": """
        from abc import ABC, abstractmethod

        class HiCacheStorage(ABC):
            @abstractmethod
            def get(self, key, target_location=None, target_sizes=None): ...
            @abstractmethod
            def batch_get(self, keys, target_locations=None, target_sizes=None): ...
            @abstractmethod
            def set(self, key, value=None, target_location=None, target_sizes=None): ...
            @abstractmethod
            def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...
            @abstractmethod
            def exists(self, key): ...
            @abstractmethod
            def delete(self, key): ...
            @abstractmethod
            def clear(self): ...
        """,
}
VLLM_STARTS = """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=SETTINGS))
    connector = getattr(import_module("hicache.service.engines.vllm"), NAME)
    assert issubclass(connector, KVConnectorBase_V1)
    scheduler, worker = connector(config, KVConnectorRole.SCHEDULER), connector(config, KVConnectorRole.WORKER)
    answer = [scheduler.get_num_new_matched_tokens(SimpleNamespace(), 0), scheduler.role.name, worker.role.name]
    scheduler.update_state_after_alloc(SimpleNamespace(), None, 0)
    scheduler.build_connector_meta(SimpleNamespace())
    worker.start_load_kv(None)
    worker.wait_for_layer_load("a")
    worker.save_kv_layer("a", None, None)
    worker.wait_for_save()
    """
SGLANG_STARTS = """
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    backend = getattr(import_module("hicache.service.engines.sglang"), NAME)
    assert issubclass(backend, HiCacheStorage)
    storage = backend(SimpleNamespace(extra_config={"hicache": SETTINGS}), {})
    answer = [
        storage.exists("a"), storage.batch_exists(["a"], extra_info=None), storage.get("a", target_location=None),
        storage.batch_get(["a", "b"]), storage.set("a", value=None), storage.batch_set(["a"], values=None),
        storage.batch_get_v1(["a"], None, extra_info=None), storage.batch_set_v1(["a"], None), storage.clear(),
    ]
    """
AROUND = """
    import json, logging
    from importlib import import_module
    from types import SimpleNamespace
    lines = []
    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
    logging.getLogger().addHandler(Lines())
    raised = answer = None
    try:
        {starts}
    except Exception as error:
        raised = f"{{type(error).__name__}}: {{error}}"
    print(json.dumps({{"raised": raised, "lines": lines, "answer": answer}}))
    """


def start(
    directory: Path, modules: dict[str, str], starts: str, name: str, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What an engine of such modules makes of hicache's class of a name."""
    for path, text in modules.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    said = dedent(starts).strip().replace("NAME", repr(name)).replace("SETTINGS", repr(settings or {}))
    code = dedent(AROUND).format(starts=said.replace("\n", "\n    "))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


@pytest.mark.parametrize("name", ["HicacheConnector", "HicacheOffloadingConnector"])
def test_an_older_vllm_goes_on_without_the_cache_and_is_told_once(tmp_path: Path, name: str) -> None:
    found = start(tmp_path, VLLM, VLLM_STARTS, name)
    assert found["raised"] is None
    assert found["answer"] == [[0, False], "SCHEDULER", "WORKER"]
    assert found["lines"] == [
        "hicache: this engine runs without the cache: vllm: release 0.11.2 is not one of 0.32"
    ]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("HicacheConnector", {"strict": True}),
        ("HicacheOffloadingConnector", {"hicache": {"strict": True}}),
        ("HicacheTier", {}),
        ("HicacheOffloadingSpec", {}),
    ],
)
def test_what_an_older_vllm_cannot_go_on_without_stops_it(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    found = start(tmp_path, VLLM, VLLM_STARTS, name, settings)
    assert found["raised"] == "BadRequest: vllm: release 0.11.2 is not one of 0.32"


def test_a_vllm_that_has_or_wants_other_connectors_is_told(tmp_path: Path) -> None:
    (base,) = [path for path in VLLM if path.endswith("base.py")]
    wants_more = VLLM[base].rstrip() + "\n            @abstractmethod\n            def what_is_new(self): ...\n"
    for number, text in enumerate(("", wants_more)):
        takes = 'answer = str(getattr(import_module("hicache.service.engines.vllm"), NAME))'
        found = start(tmp_path / str(number), {**VLLM, base: text}, takes, "HicacheConnector")
        assert found["raised"] == "BadRequest: vllm: release 0.11.2 is not one of 0.32"


def test_an_older_sglang_goes_on_without_the_cache_and_is_told_once(tmp_path: Path) -> None:
    found = start(tmp_path, SGLANG, SGLANG_STARTS, "HicacheStorage")
    assert found["raised"] is None
    assert found["answer"] == [False, 0, None, [None, None], False, False, [False], [False], True]
    assert found["lines"] == [
        "hicache: this engine runs without the cache: sglang: release 0.5.2 is not one of 0.5.23"
    ]


def test_an_older_sglang_that_is_to_be_strict_does_not_start(tmp_path: Path) -> None:
    found = start(tmp_path, SGLANG, SGLANG_STARTS, "HicacheStorage", {"strict": True})
    assert found["raised"] == "BadRequest: sglang: release 0.5.2 is not one of 0.5.23"
