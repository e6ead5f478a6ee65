"""What the connector cannot serve: the engine starts without a cache and is told once how to mend it, or, where its
configuration says `strict`, it does not start."""

import hashlib
import json
import os
import subprocess
from contextlib import ExitStack
from typing import Any

import pytest

from hicache.tools.bench.engine_models import make_tiny
from tests.engines.running import PYTHON
from tests.engines.test_vllm import arguments
from tests.repository import ROOT
from tests.service.serving import ServerProcess

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

MENDS = {
    "release": "vllm: release 0.99.1 is not one of 0.32",
    "pipeline ranks": "pipeline_parallel_size: 2 ranks are not supported, only 1",
    "pipeline ranks, in a worker alone": "pipeline_parallel_size: 2 ranks are not supported, only 1",
    "layers that have no backend": "attention_backend: a layer does not say which one it has",
    "prefill context ranks": "prefill_context_parallel_size: 2 ranks are not supported, only 1",
    "decode context ranks": "decode_context_parallel_size: 2 ranks are not supported, only 1",
    "no transfer": "kv_cache_groups: none of them is transferred",
    "other kind": "kv_cache_groups: MLAAttentionSpec is not one of FullAttentionSpec, SlidingWindowSpec",
    "padding": "kv_cache_groups: blocks with padding cannot be mapped to pages",
    "values of another size": "kv_cache_groups: keys and values of different sizes cannot be mapped to pages",
    "cache dtype": "cache_dtype: float64 is not one of",
    "made up weights": "name them with the setting `weights`",
    "weights that are not there": "name them with `weights`",
    "memory that is no blocks": "its blocks are not 16384 bytes each, one after the other",
    "no sidecar": "start one with `hicache serve`",
    "pages of another size": "start it with `hicache serve --set layout.num_layers=4",
    "no secret": "look at the settings `tenant` and `secret_file`",
    "wrong secret": "look at the settings `tenant` and `secret_file`",
    "no secret file": "secret_file: /nowhere/at/all: No such file or directory",
    "sidecar of another version": "install the same release of hicache",
}
"""What the line says."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("refusals")
    model = make_tiny(directory / "model")
    changes: dict[str, dict[str, Any]] = {
        "fits": {},
        "other pages": {"layout.page_size": 16},
        "secret": {"tenants.a.secret_sha256": f'"{hashlib.sha256(b"right").hexdigest()}"'},
    }
    with ExitStack() as stack:
        sidecars = {"none": str(directory / "none")}
        for number, (name, change) in enumerate(changes.items()):
            own = directory / str(number)
            own.mkdir()
            server = ServerProcess(own, arguments(own, **change))
            stack.callback(server.stop)
            sidecars[name] = str(server.directory)
        found = subprocess.run(
            [str(PYTHON), str(ROOT / "tests" / "engines" / "refusals.py")],
            input=json.dumps({"model": str(model), "sidecars": sidecars}),
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(directory / "cache")},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    read: dict[str, Any] = json.loads(found.stdout)
    return read


def test_all_are_tried(answers: dict[str, Any]) -> None:
    assert set(answers) == set(MENDS)


@pytest.mark.parametrize("name", MENDS)
def test_it_starts_without_a_cache_and_says_once_what_mends_it(answers: dict[str, Any], name: str) -> None:
    lax = answers[name]["lax"]
    assert lax["raised"] is None
    assert lax["matched"] in ([0, False], [0, True])
    assert lax["freed"], "blocks that were to be saved would be kept for ever"
    # A side that goes on asking for its sidecar says for itself that it has none.
    ours = [line for line in lax["lines"] if "hicache" in line]
    assert len({line.partition(": ")[0] for line in ours}) == len(ours), ours
    assert len(ours) == (2 if "going on without" in ours[0] else 1), ours
    assert all(MENDS[name] in line for line in ours), ours


@pytest.mark.parametrize("name", MENDS)
def test_where_it_is_to_be_strict_it_does_not_start(answers: dict[str, Any], name: str) -> None:
    strict = answers[name]["strict"]
    assert MENDS[name] in (strict["raised"] or "")
