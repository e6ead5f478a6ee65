"""Metrics of a running server, read as Prometheus reads them, and the identities between them."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hicache.errors import BadRequest
from hicache.residency import Residency
from hicache.service.client import Client, Durability, EngineWork, Prompt, connect
from hicache.service.errors import LimitReached
from hicache.service.metrics import Histogram
from hicache.service.server import http as endpoint
from hicache.service.server.process import Server
from hicache.tier import HOST, NVME, TierId
from tests.service.serving import WAIT_S, ThreadServer, settings, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def ask(port: int, target: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """One request: status, type of the answer, and the answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        connection.request(method, target, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers.get("Content-Type", ""), response.read().decode()


def port_of(server: ThreadServer) -> int:
    metrics = server.server.metrics
    assert metrics is not None
    return metrics.port


def measured(server: ThreadServer) -> Values:
    status, _, text = ask(port_of(server))
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(values: Values, name: str, **labels: str) -> float:
    return values[name, frozenset(labels.items())]


def total(values: Values, name: str) -> float:
    return sum([each for (found, _), each in values.items() if found == name])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    nvme: dict[str, Any] = {"nvme__dir": str(tmp_path / "nvme"), "nvme__bytes": 64 * LAYOUT.page_bytes}
    with thread_server(tmp_path, host_pages=8, metrics__port=0, **nvme) as running:
        yield running


def use(client: Client) -> None:
    """Store 12 pages where 8 have room, so that some are demoted; then 3 hits of whole prompts, and 2 misses."""
    for prompt in range(3):
        tokens = range(1000 * prompt, 1000 * prompt + 4 * PAGE)
        assert store(client, tokens, durability=Durability.WAIT) == 4 * PAGE
    for prompt in (0, 1, 2):
        assert check(client, range(1000 * prompt, 1000 * prompt + 4 * PAGE)) == 4 * PAGE
    for prompt in (7, 8):
        assert check(client, range(1000 * prompt, 1000 * prompt + 2 * PAGE)) == 0


def test_lookups_are_hits_and_misses_and_tokens_add_up(server: ThreadServer) -> None:
    with connect(server.directory) as client:
        use(client)
        values = measured(server)
    assert value(values, "hicache_hits_total") == 3
    assert value(values, "hicache_misses_total") == 2
    assert value(values, "hicache_lookups_total") == 5
    # Counted by another hand: one `Acquire` is one look-up.
    assert value(values, "hicache_call_seconds_count", method="Acquire", code="OK") == 5
    assert value(values, "hicache_tokens_asked_total") == (3 * 4 + 2 * 2) * PAGE
    assert total(values, "hicache_tokens_found_total") == 3 * 4 * PAGE
    assert value(values, "hicache_tokens_missed_total") == 2 * 2 * PAGE
    assert value(values, "hicache_tokens_stored_total") == 3 * 4 * PAGE


def test_bytes_in_less_bytes_out_are_resident(server: ThreadServer) -> None:
    """I38: room is counted where it is taken and given back, what is resident where it is free; and the tree, which
    counts nodes, knows the same pages."""
    with connect(server.directory) as client:
        use(client)
        server.until(lambda inside: not any(lane.stats.queued_pages for lane in inside.cache.lanes), within_s=WAIT_S)
        values = measured(server)
    for tier in (HOST, NVME):
        bytes_in = value(values, "hicache_tier_bytes_in_total", tier=tier)
        bytes_out = value(values, "hicache_tier_bytes_out_total", tier=tier)
        resident = value(values, "hicache_tier_resident_bytes", tier=tier)
        assert bytes_in - bytes_out == resident
        assert resident == server.call(partial(_resident_pages, tier)) * LAYOUT.page_bytes > 0
    assert value(values, "hicache_tier_bytes_out_total", tier=HOST) > 0


def _resident_pages(tier: TierId, inside: Server) -> int:
    nodes = [info.node for batch in inside.cache.tree.walk(batch=100) for info in batch]
    return sum([node.num_pages for node in nodes if node.residency(tier) is not Residency.ABSENT])


def test_what_was_found_at_the_start_has_come_in(tmp_path: Path) -> None:
    nvme_bytes = 64 * LAYOUT.page_bytes
    more: dict[str, Any] = {"nvme__dir": str(tmp_path / "nvme"), "nvme__bytes": nvme_bytes, "metrics__port": 0}
    with thread_server(tmp_path, **more) as server, connect(server.directory) as client:
        store(client, range(4 * PAGE), durability=Durability.WAIT)
    with thread_server(tmp_path, **more) as server:
        values = measured(server)
    assert value(values, "hicache_tier_bytes_in_total", tier=NVME) == 4 * LAYOUT.page_bytes
    assert value(values, "hicache_tier_resident_bytes", tier=NVME) == 4 * LAYOUT.page_bytes


def test_what_leaves_a_tier_is_counted_by_why_and_what_is_written_by_how_much(server: ThreadServer) -> None:
    with connect(server.directory) as client:
        use(client)
        values = measured(server)
    assert value(values, "hicache_pages_evicted_total", tier=HOST, reason="kept-below") >= 4
    assert value(values, "hicache_lane_bytes_total", lane="host->nvme") == 12 * LAYOUT.page_bytes
    assert value(values, "hicache_lane_pages_total", lane="nvme->host", end="ok") >= 4
    assert value(values, "hicache_nvme_written_bytes_total") > 12 * LAYOUT.page_bytes
    written = value(values, "hicache_nvme_written_bytes_total") / (12 * LAYOUT.page_bytes)
    assert value(values, "hicache_nvme_write_amplification") == pytest.approx(written)
    assert value(values, "hicache_nvme_undurable_changes") >= 0
    assert value(values, "hicache_stored_bytes_total") == 12 * LAYOUT.page_bytes


def test_what_the_budget_of_writes_refuses_is_counted(tmp_path: Path) -> None:
    """I39: prompts of sixteen times an hour's share are stored, of which NVMe takes that share alone."""
    per_hour = 16 * LAYOUT.page_bytes
    nvme = {"nvme__dir": str(tmp_path / "nvme"), "nvme__bytes": 256 * LAYOUT.page_bytes}
    more: dict[str, Any] = {**nvme, "nvme__write_bytes_per_day": 24 * per_hour, "metrics__port": 0}
    with thread_server(tmp_path, host_pages=8, **more) as server, connect(server.directory) as client:
        for number in range(64):
            tokens = range(1000 * number, 1000 * number + 4 * PAGE)
            with client.reserve(Prompt(NAMESPACE, tokens)) as reservation:
                for index, page in enumerate(reservation):
                    page[:] = page_bytes(tokens, reservation.first_page + index)
                if len(reservation):
                    reservation.commit(durability=Durability.BEHIND)
        server.until(lambda inside: not any(lane.stats.queued_pages for lane in inside.cache.lanes), within_s=WAIT_S)
        values = measured(server)
    assert value(values, "hicache_stored_bytes_total") >= 10 * per_hour
    assert 0 < value(values, "hicache_lane_bytes_total", lane="host->nvme") <= per_hour
    assert value(values, "hicache_nvme_refused_total", reason="write-budget") > 0
    assert value(values, "hicache_nvme_refused_total", reason="free-space") == 0


def test_leases_have_ages_and_sessions_are_counted(server: ThreadServer) -> None:
    with connect(server.directory) as client:
        store(client, range(2 * PAGE))
        with client.acquire(Prompt(NAMESPACE, range(2 * PAGE))):
            values = measured(server)
            assert value(values, "hicache_sessions") == value(values, "hicache_leases") == 1
            assert value(values, "hicache_leased_pages") == 2
            assert value(values, "hicache_oldest_lease_seconds") > 0
            assert value(values, "hicache_lease_seconds_count") == 0
        server.until(lambda inside: inside.sessions.lease_times.count == 1, within_s=WAIT_S)
        values = measured(server)
        assert value(values, "hicache_oldest_lease_seconds") == value(values, "hicache_leases") == 0
        assert value(values, "hicache_lease_seconds_count") == 1
        assert value(values, "hicache_lease_seconds_bucket", le="+Inf") == 1
    server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)
    values = measured(server)
    assert value(values, "hicache_sessions_begun_total") == total(values, "hicache_sessions_ended_total") == 1


def test_calls_are_counted_by_how_they_end(tmp_path: Path) -> None:
    with thread_server(tmp_path, limits__max_leases=1, metrics__port=0) as server, connect(server.directory) as client:
        store(client, range(PAGE))
        with client.acquire(Prompt(NAMESPACE, range(PAGE))), pytest.raises(LimitReached):
            client.acquire(Prompt(NAMESPACE, range(PAGE)))
        values = measured(server)
    assert value(values, "hicache_call_seconds_count", method="Acquire", code="OK") == 1
    assert value(values, "hicache_call_seconds_count", method="Acquire", code="RESOURCE_EXHAUSTED") == 1
    assert value(values, "hicache_lookups_total") == 1, "what is refused at once asks for nothing"


def test_engines_report_their_work_and_hits_save_prefill(tmp_path: Path) -> None:
    work = EngineWork(
        queue_waits=2, queue_wait_s=0.5, prefill_tokens=1000, prefill_s=2.0, decode_tokens=30, decode_s=1.5
    )
    with thread_server(tmp_path, times__lease_s=1.0, metrics__port=0) as server, connect(server.directory) as client:
        store(client, range(4 * PAGE))
        client.acquire(Prompt(NAMESPACE, range(4 * PAGE))).release()
        assert value(measured(server), "hicache_prefill_saved_seconds_total") == 0, "nobody has said how fast it is"
        client.report(work)
        client.report(work)
        server.until(lambda inside: inside.sessions.work.queue_waits == 4, within_s=WAIT_S)
        client.acquire(Prompt(NAMESPACE, range(4 * PAGE))).release()
        client.acquire(Prompt(NAMESPACE, range(4 * PAGE)), first_page=3).release()
        values = measured(server)
        for field in ("queue_waits", "prefill_tokens", "decode_tokens"):
            assert value(values, f"hicache_engine_{field}_total") == 2 * getattr(work, field)
        assert value(values, "hicache_engine_queue_wait_seconds_total") == 1.0
        assert value(values, "hicache_engine_prefill_seconds_total") == 4.0
        assert value(values, "hicache_engine_decode_seconds_total") == 3.0
        # 2 ms a token: 64 tokens, and the 16 that were not the caller's already.
        assert value(values, "hicache_prefill_saved_seconds_total") == pytest.approx(0.002 * (4 + 1) * PAGE)


@pytest.mark.parametrize("work", [
    EngineWork(queue_waits=-1), EngineWork(prefill_tokens=1 << 41), EngineWork(prefill_s=-0.5),
    EngineWork(decode_s=float("nan")), EngineWork(queue_wait_s=1e10),
])  # fmt: skip
def test_what_an_engine_cannot_have_done_is_refused(work: EngineWork) -> None:
    (field,) = [name for name, each in asdict(work).items() if each != 0]
    with pytest.raises(BadRequest, match=field):
        work.check()


def test_a_session_that_reports_nonsense_is_ended(server: ThreadServer) -> None:
    with connect(server.directory) as client:
        assert client._attachment is not None
        client._attachment.work.append(EngineWork(prefill_tokens=1 << 60))
        server.until(lambda inside: sum(inside.sessions.ended.values()) == 1, within_s=WAIT_S)
        assert value(measured(server), "hicache_engine_prefill_tokens_total") == 0
        assert store(client, range(PAGE)) == PAGE, "it begins a new one"


def test_nothing_names_a_tenant_or_a_client(tmp_path: Path) -> None:
    """I33: whoever can reach the port may read what is there."""
    with thread_server(tmp_path, tenants={"acme-secret-name": {}}, metrics__port=0) as server:
        with connect(server.directory, tenant="acme-secret-name", name="client-of-acme") as client:
            store(client, range(PAGE), tenant="acme-secret-name")
            _, _, text = ask(port_of(server))
        assert "hicache_sessions 1" in text
        assert "acme" not in text


def test_only_metrics_are_served(server: ThreadServer) -> None:
    port = port_of(server)
    assert ask(port)[:2] == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert ask(port, "/metrics?name=x")[0] == 200
    assert ask(port, method="HEAD") == (200, "text/plain; version=0.0.4; charset=utf-8", "")
    status, kind, text = ask(port, Accept="application/openmetrics-text; version=1.0.0")
    assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text")
    assert text.endswith("# EOF\n")
    assert [ask(port, target)[0] for target in ("/", "/etc/passwd", "/metrics/", "http://other/")] == [404] * 4
    assert ask(port, method="POST")[0] == 405


@pytest.mark.parametrize(
    "data", [b"\xff" * 100, b"GET /metrics\r\n\r\n", b"a" * endpoint.MAX_HEAD_BYTES, b"GET / HTTP/1.1\r\n", b""]
)
def test_what_is_no_request_is_refused_and_harms_nobody(server: ThreadServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server)), WAIT_S) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert connection.makefile("rb").readline() == b"HTTP/1.1 400 Bad Request\r\n"
    assert measured(server)


def test_idle_connections_are_few_and_end(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who connect and ask nothing take no more than their share, and it comes back."""
    address = ("127.0.0.1", port_of(server))
    with monkeypatch.context() as patched, ExitStack() as stack:
        patched.setattr(endpoint, "REQUEST_S", 0.3)
        idle = [stack.enter_context(socket.create_connection(address, WAIT_S)) for _ in range(20)]
        for connection in idle:
            assert connection.recv(1) == b""
    assert measured(server)


def test_a_port_in_use_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BadRequest, match=rf"metrics.port: {port} cannot be had: Address already in use"):
            ThreadServer(settings(tmp_path, metrics__port=port, nvme__dir=str(tmp_path / "nvme"), nvme__bytes="1MiB"))
    assert not (tmp_path / "nvme").exists()


def test_without_a_port_nothing_listens(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server:
        assert server.server.metrics is None
        assert server.call(lambda inside: inside.status()["metrics_port"]) is None


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 2.0):
        histogram.note(seconds)
    assert histogram.buckets() == [("0.1", 2), ("1", 3), ("+Inf", 4)]
    assert histogram.count == 4
    assert histogram.sum_s == pytest.approx(2.65)
