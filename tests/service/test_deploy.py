"""What is under service/deploy says what `hicache serve` understands, and supervisors hear how a server is."""

import asyncio
import configparser
import json
import os
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hicache.service import healthcheck
from hicache.service.config import ServeConfig
from hicache.service.readiness import ALIVE, READY, STOPPING, Supervisor
from hicache.service.server.cache import options_of
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess, arguments, thread_server
from tests.service.stored import LAYOUT

DEPLOY: Final = ROOT / "service" / "deploy"
MANIFESTS: Final = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket that hears what is told to a supervisor; its name is in `tmp_path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(WAIT_S)
        yield heard


# -- readiness --------------------------------------------------------------------------------------------------------


def test_a_supervisor_is_told_by_a_datagram_at_a_path_or_at_a_name(tmp_path: Path, supervisor: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "OTHER": "stays"}
    told = Supervisor(environment)
    assert environment == {"OTHER": "stays"}
    assert told.tell(READY, "STATUS=well")
    assert supervisor.recv(100) == b"READY=1\nSTATUS=well"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        name = f"hicache-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        assert Supervisor({"NOTIFY_SOCKET": f"@{name}"}).tell(READY)
        assert abstract.recv(100) == b"READY=1"


def test_nobody_who_hears_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not Supervisor({}).tell(READY)
    assert not Supervisor({"NOTIFY_SOCKET": "relative"}).tell(READY)
    assert not caplog.text
    assert not Supervisor({"NOTIFY_SOCKET": str(tmp_path / "none")}).tell(READY)
    assert "the supervisor does not hear" in caplog.text


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 0.0), ({"WATCHDOG_USEC": "3000000"}, 3.0), ({"WATCHDOG_USEC": "nonsense"}, 0.0),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getpid())}, 0.001),
    ],
)  # fmt: skip
def test_signs_of_life_are_given_where_they_are_meant_for_this_process(
    environment: dict[str, str], seconds: float
) -> None:
    assert Supervisor(environment).watchdog_s == seconds


def test_signs_of_life_end_with_the_loop(tmp_path: Path, supervisor: socket.socket) -> None:
    told = Supervisor({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000"})

    async def live() -> None:
        loop = asyncio.get_running_loop()
        supervisor.setblocking(False)
        async with asyncio.TaskGroup() as tasks:
            alive = tasks.create_task(told.keep_alive())
            for _ in range(5):
                assert await asyncio.wait_for(loop.sock_recv(supervisor, 100), WAIT_S) == ALIVE.encode()
            alive.cancel()

    asyncio.run(live())


def test_a_server_says_when_it_is_ready_that_it_lives_and_when_it_stops(
    tmp_path: Path, supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    told: list[str] = []

    def hear() -> None:
        """At once, as a supervisor does: what finds no room in the socket is not told."""
        while STOPPING not in told:
            told.append(supervisor.recv(100).decode())

    with ThreadPoolExecutor(1) as threads:
        hearing = threads.submit(hear)
        server = ServerProcess(tmp_path, arguments())
        try:
            while len(told) < 3 and not hearing.done():
                threading.Event().wait(0.01)
        finally:
            assert server.stop() == 0
        hearing.result()
    assert set(told[:3]) == {READY, ALIVE}
    assert set(told[3:]) <= {ALIVE, STOPPING}


# -- health -----------------------------------------------------------------------------------------------------------


def test_the_health_check_tells_a_server_that_is_well(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server:
        assert healthcheck.main([str(server.directory)]) == 0
        assert healthcheck.main([str(server.directory), "hicache.v1.Cache"]) == 0
        assert healthcheck.main([str(server.directory), "nvme"]) == 1, "it has none"
    assert healthcheck.main([str(server.directory)]) == 1, "it is gone"
    assert healthcheck.main(["a", "b", "c"]) == 2


def test_the_health_check_is_a_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hicache.service.healthcheck", str(tmp_path)], cwd=ROOT, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, b"")


# -- files ------------------------------------------------------------------------------------------------------------


def documents() -> dict[str, Any]:
    """Every document of the manifests, by its kind and name."""
    found = {}
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            found[f"{document['kind']}/{document['metadata']['name']}"] = document
    return found


def settings_of(text: str) -> ServeConfig:
    config = ServeConfig.checked(tomllib.loads(text))
    options_of(config)
    return config


def test_the_settings_are_good() -> None:
    config = settings_of((DEPLOY / "hicache.toml").read_text())
    assert config.metrics_port == 9464
    for name in ("ConfigMap/hicache", "ConfigMap/hicache-node"):
        assert settings_of(documents()[name]["data"]["hicache.toml"]).layout == config.layout


def test_the_unit_starts_the_server_with_directories_that_the_settings_name() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # how its documentation says that case is kept
    unit.read(DEPLOY / "hicache.service")
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"].split()[1:] == ["serve", "--config", "/etc/hicache/hicache.toml"]
    config = settings_of((DEPLOY / "hicache.toml").read_text())
    assert str(config.socket_dir) == f"/run/{service['RuntimeDirectory']}"
    assert [str(path) for path in config.nvme_dirs] == [f"/var/lib/{service['StateDirectory']}"]
    assert service["RuntimeDirectoryMode"] == "0700"
    assert int(service["TimeoutStopSec"]) > config.times.drain_s + 15


def test_the_image_copies_what_exists_and_starts_the_server() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert {"pyproject.toml", "constraints.txt", "hicache", "kernels", "tiers", "service", "tools"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(kept)
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0]) == ["hicache", "serve"]
    assert json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[0]) == ["--config", "/etc/hicache/hicache.toml"]


@pytest.mark.parametrize(
    ("name", "settings"), [("Pod/engine", "ConfigMap/hicache"), ("DaemonSet/hicache", "ConfigMap/hicache-node")]
)
def test_pods_have_what_the_server_needs(name: str, settings: str) -> None:
    found = documents()
    spec = found[name]["spec"]
    spec = spec.get("template", {}).get("spec", spec)
    (container,) = [each for each in spec["initContainers"] + spec["containers"] if each["name"] == "hicache"]
    config = settings_of(found[settings]["data"]["hicache.toml"])
    assert container["args"] == ["--config", "/etc/hicache/hicache.toml"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert f"ConfigMap/{mounts['/etc/hicache']['configMap']['name']}" == settings
    assert str(config.socket_dir.parent) in mounts
    assert str(config.nvme_dirs[0].parent) in mounts
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert limit >= config.host_bytes + config.limits.total_staging_bytes
    for probe in ("startupProbe", "livenessProbe"):
        command = container[probe]["exec"]["command"]
        assert command[:4] == ["python", "-m", "hicache.service.healthcheck", str(config.socket_dir)]
    assert spec["terminationGracePeriodSeconds"] > config.times.drain_s + 15


def test_every_metric_of_the_dashboard_exists(tmp_path: Path) -> None:
    more: dict[str, Any] = {"nvme__dir": str(tmp_path / "nvme"), "nvme__bytes": 8 * LAYOUT.page_bytes}
    with thread_server(tmp_path, **more) as server:
        families = server.call(lambda inside: inside.measured())
    names = {name for family in families for name in named(family.type, family.name)}
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"]]
    shown = {name for query in queries for name in re.findall(r"\bhicache_\w+", query)}
    assert shown - names == set()
    assert len(shown) > 30
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def named(kind: str, name: str) -> list[str]:
    """What Prometheus calls the samples of a metric."""
    if kind == "histogram":
        return [f"{name}_bucket", f"{name}_count", f"{name}_sum"]
    return [f"{name}_total"] if kind == "counter" else [name]
