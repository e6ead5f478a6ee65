"""What a server may be told, and what it refuses: by file, by flags, and as a command that has touched nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import BadRequest
from hicache.quotas import TenantQuota
from hicache.service.config import KEYS, REQUIRED, ServeConfig
from hicache.service.server.cache import options_of
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess, arguments, settings
from tests.service.stored import PAGE


def test_the_least_that_is_asked_for_is_enough(tmp_path: Path) -> None:
    config = ServeConfig.checked(settings(tmp_path))
    assert config.layout.page_size == PAGE
    assert config.host_bytes == 64 * config.layout.page_bytes
    assert config.tenants == {}


def test_every_key_can_be_set(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "nvme__dir": [str(tmp_path / "a"), str(tmp_path / "b")], "nvme__bytes": "1GiB", "nvme__min_free_bytes": 0,
        "nvme__write_bytes_per_day": "1tb", "nvme__codec": "none", "nvme__admission": "second-touch",
        "metadata_bytes": "16MiB", "policy": "value", "write_policy": "write-through", "exclusive": False,
        "limits__max_sessions": 3, "limits__max_calls": 4, "limits__max_calls_per_session": 5, "limits__max_tokens": 6,
        "limits__max_namespaces": 7, "limits__max_handles": 8, "limits__max_leases": 9, "limits__leased_share": 0.25,
        "limits__staging_bytes": "1k", "limits__total_staging_bytes": "2k", "limits__message_bytes": "2MiB",
        "times__lease_s": 1, "times__attach_s": 0.5, "times__max_call_s": 2, "times__drain_s": 3, "metrics__port": 9464,
        "http__listen": "localhost:8080", "http__tokenizer": "model",
        "events__endpoint": "ipc:///run/hicache/events", "events__replay_endpoint": "tcp://127.0.0.1:5558",
        "tcp__listen": "127.0.0.1:7443", "tcp__token_sha256": "ab" * 32, "tcp__plain": False, "tcp__cert": "a.pem",
        "host__keep_arena": True, "socket_group": 12, "tcp__key": "a.key", "tcp__client_ca": "ca.pem",
    }  # fmt: skip
    config = ServeConfig.checked(settings(tmp_path, **values))
    assert {key.replace("__", ".") for key in values} == set(KEYS) - set(REQUIRED) - {"socket_dir"}
    assert config.nvme_dirs == (tmp_path / "a", tmp_path / "b")
    assert (config.nvme_bytes, config.nvme_write_bytes_per_day) == (1 << 30, 10**12)
    assert (config.limits.max_handles, config.limits.leased_share, config.limits.staging_bytes) == (8, 0.25, 1024)
    assert (config.times.lease_s, config.times.attach_s) == (1.0, 0.5)
    assert config.metrics_port == 9464
    options = options_of(config)
    assert (options.policy, options.admission, options.write_policy.value) == ("value", "second-touch", "write-through")


def test_tenants_have_secrets_and_parts(tmp_path: Path) -> None:
    tables = {"red": {"secret_sha256": "ab" * 32, "host": 0.25, "nvme": "1MiB"}, "blue": {}}
    nvme: dict[str, Any] = {"nvme__dir": str(tmp_path / "nvme"), "nvme__bytes": "2MiB"}
    config = ServeConfig.checked(settings(tmp_path, tenants=tables, **nvme))
    assert config.tenants == {"red": b"\xab" * 32, "blue": None}
    assert config.quotas == {"red": TenantQuota(host=0.25, nvme=1 << 20)}
    assert options_of(config).tenant_quotas["red"].host == 0.25


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("frobnicate", 1), ("nvme__frobnicate", 1), ("limits", 3), ("host__bytes", 0), ("host__bytes", "many"),
        ("host__bytes", -1), ("host__bytes", 1.5), ("host__bytes", True), ("layout__dtype", "float99"),
        ("layout__page_size", 0), ("layout__page_size", 257), ("layout__num_layers", 2000), ("policy", "mru"),
        ("policy", ""), ("write_policy", "never"), ("exclusive", 1), ("nvme__bytes", "1GiB"), ("nvme__dir", "x"),
        ("nvme__dir", 3), ("nvme__min_free_bytes", 4096), ("nvme__codec", "zip"), ("nvme__admission", "never"),
        ("metadata_bytes", 1), ("limits__leased_share", 0), ("limits__leased_share", 1.5), ("times__lease_s", 0),
        ("limits__staging_bytes", "1TiB"), ("times__drain_s", float("inf")), ("times__drain_s", "soon"),
        ("socket_dir", ""), ("socket_dir", "a\0b"), ("tenants__red", 1), ("tenants", {"": {}}),
        ("tenants", {"red": {"secret": "x"}}), ("tenants", {"red": {"secret_sha256": "x"}}),
        ("tenants", {"red": {"host": 2.0}}), ("tenants", {"red": {"host": 0.7}, "blue": {"host": 0.7}}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, key: str, value: object) -> None:
    """F38."""
    tree: dict[str, Any] = {key: value}
    with pytest.raises(BadRequest) as refused:
        options_of(ServeConfig.checked(settings(tmp_path, **tree)))
    assert refused.value.field.startswith(key.split("__", maxsplit=1)[0])
    assert list(tmp_path.iterdir()) == []


def test_each_tenant_has_a_part_of_the_sessions(tmp_path: Path) -> None:
    """F38, I33: of a server whose half has no session for each, one tenant could take all."""
    tables: dict[str, Any] = {f"tenant-{number}": {} for number in range(4)}
    assert len(ServeConfig.checked(settings(tmp_path, tenants=tables, limits__max_sessions=8)).tenants) == 4
    with pytest.raises(BadRequest, match=r"limits\.max_sessions: is less than 8"):
        ServeConfig.checked(settings(tmp_path, tenants=tables, limits__max_sessions=7))


@pytest.mark.parametrize("missing", REQUIRED)
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    tree: dict[str, Any] = settings(tmp_path)
    table, _, key = missing.partition(".")
    del tree[table][key]
    with pytest.raises(BadRequest, match=f"{missing}: is missing"):
        ServeConfig.checked(tree)


def _serve(*words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hicache.tools", "serve", *words],
        cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_a_wrong_setting_is_bad_usage_and_touches_nothing(tmp_path: Path) -> None:
    """F38: exit status 2, one line that names the key."""
    (tmp_path / "wrong.toml").write_text("nonsense")
    (tmp_path / "unknown.toml").write_text("[host]\nbytes = 1\nsize = 2\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    for words, named in (
        (["--config", "wrong.toml"], "is no TOML"),
        (["--config", "unknown.toml"], "host.size"),
        (["--config", "missing.toml"], "No such file"),
        (["--set", "host.bytes"], "is not KEY=VALUE"),
        ([*arguments(), "--socket-dir", "run", "--set", "policy=mru"], "policy"),
        ([*arguments(), "--socket-dir", "run", "--nvme", "1GiB"], "nvme.bytes"),
    ):
        done = _serve(*words, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert named in done.stderr
        assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_flags_overrule_the_file(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(
        'socket_dir = "elsewhere"\n[layout]\nnum_layers = 2\nnum_kv_heads = 1\nhead_dim = 16\ndtype = "float32"\n'
        "page_size = 16\n[host]\nbytes = \"lots\"\n"
    )
    assert _serve("--config", "good.toml", "--check", cwd=tmp_path).returncode == 2
    done = _serve("--config", "good.toml", "--host", "1MiB", "--check", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["good.toml"]


def test_what_shows_only_at_the_start_is_named_as_it_was_set_and_leaves_nothing(tmp_path: Path) -> None:
    """F38: a tier with more pages than can be numbered, and one that is larger than its disk."""
    nvme = {"nvme__dir": f'"{tmp_path / "nvme"}"'}
    for more, named in (
        ({"host__bytes": 1 << 60}, "host.bytes: "),
        ({**nvme, "nvme__bytes": 1 << 60}, "nvme.bytes: "),
        ({**nvme, "nvme__bytes": 1 << 40, "nvme__min_free_bytes": 1 << 60}, "nvme.bytes: "),
    ):
        done = _serve(*arguments(**more), "--socket-dir", str(tmp_path / "run"), cwd=tmp_path)
        assert done.returncode == 2, done
        assert done.stderr.startswith(f"hicache serve: {named}"), done.stderr
        assert done.stderr.count("\n") == 1
        assert list(tmp_path.iterdir()) == []


def test_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    """F25: the server could not start; exit status 1, and nothing is left."""
    done = _serve(*arguments(host_pages=1 << 28), "--socket-dir", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 1, done
    assert "bytes of memory" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """F40, I41: while the first one waits for a session that holds something."""
    from hicache.service.client import Prompt, connect
    from tests.service.stored import NAMESPACE

    server = ServerProcess(tmp_path, arguments(times__drain_s=60.0))
    with connect(server.directory) as client:
        assert len(client.reserve(Prompt(NAMESPACE, range(PAGE)))) == 1
        server.process.send_signal(signal.SIGTERM)
        while not client.is_draining:
            client.lookup(Prompt(NAMESPACE, [1]))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert server.stop() == 128 + signal.SIGTERM
