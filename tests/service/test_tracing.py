"""Spans of calls, as a collector of the test's own receives them."""

import builtins
import http.server
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from hicache.service import wire
from hicache.service.client import Prompt, connect
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.tracing import Tracing
from tests.repository import ROOT
from tests.service.serving import WAIT_S, thread_server
from tests.service.stored import NAMESPACE, PAGE, store

TRACE_ID: Final = "4bf92f3577b34da6a3ce929d0e0e4736"


class Collector:
    """Receives spans over HTTP."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                data = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests.append(ExportTraceServiceRequest.FromString(data))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(WAIT_S)
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    try:
        yield collector
    finally:
        collector.close()


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


def test_each_call_is_a_span_with_its_end_and_its_sizes(tmp_path: Path, collector: Collector) -> None:
    with thread_server(tmp_path) as server:
        with connect(server.directory, name="secret name") as client:
            store(client, range(2 * PAGE))
            client.lookup(Prompt(NAMESPACE, range(2 * PAGE)))  # on the session's stream
            token = ((wire.TOKEN_METADATA, client.welcome.token),)
            with grpc.insecure_channel(wire.address(str(server.directory / wire.DATA_SOCKET))) as channel:
                lookup = channel.unary_unary(wire.path_of(wire.CACHE.methods_by_name["Lookup"]), bytes, bytes)
                prefix = pb.Prefix(namespace_id=1, tokens=wire.pack_int32(range(2 * PAGE)))
                request = pb.LookupRequest(prefix=prefix).SerializeToString()
                parent = ("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-01")
                reply = lookup(request, timeout=WAIT_S, metadata=(*token, parent))
                with pytest.raises(grpc.RpcError):
                    lookup(b"no message", timeout=WAIT_S, metadata=token)
        with grpc.insecure_channel(wire.address(str(server.directory / wire.ADMIN_SOCKET))) as channel:
            inspect = channel.unary_stream(wire.path_of(wire.ADMIN.methods_by_name["Inspect"]), bytes, bytes)
            pieces = list(inspect(pb.InspectRequest(view=pb.VIEW_STATS).SerializeToString(), timeout=WAIT_S))
    spans = collector.spans()
    names = [span.name.removeprefix("hicache.v1.") for span in spans]
    assert sorted(set(names)) == [
        "Admin/Inspect", "Cache/Commit", "Cache/Lookup", "Cache/Register", "Cache/Reserve",
    ]  # fmt: skip
    streamed, found, refused = [span for span in spans if span.name.endswith("Lookup")]
    assert found.trace_id.hex() == TRACE_ID
    assert found.parent_span_id.hex() == "00f067aa0ba902b7"
    assert attributes(found) == {
        "rpc.system": "grpc", "rpc.service": "hicache.v1.Cache", "rpc.method": "Lookup", "rpc.grpc.status_code": 0,
        "hicache.request.bytes": len(request), "hicache.reply.bytes": len(reply),
    }  # fmt: skip
    assert not streamed.parent_span_id
    assert attributes(streamed) == attributes(found)
    assert 0 < streamed.end_time_unix_nano - streamed.start_time_unix_nano < WAIT_S * 1e9
    assert attributes(refused)["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert (refused.status.code, refused.status.message) == (2, "INVALID_ARGUMENT")
    assert not refused.parent_span_id
    (inspected,) = [span for span in spans if span.name.endswith("Inspect")]
    assert attributes(inspected)["hicache.reply.bytes"] == sum(map(len, pieces))
    # I40: neither whose they are nor what they hold.
    everything = b"".join(request.SerializeToString() for request in collector.requests)
    assert b"secret name" not in everything
    assert token[0][1] not in everything


def test_without_a_collector_nothing_is_loaded() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, hicache.service.server.process; print(*sys.modules)"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert not [name for name in loaded if name.startswith("opentelemetry")]
    assert Tracing.asked_for({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None


def test_what_is_not_installed_is_said_once_and_the_server_goes_on(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    importing = builtins.__import__

    def refused(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError(name)
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refused)
    caplog.set_level(logging.WARNING, logger="hicache")
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        assert store(client, range(PAGE)) == PAGE
        assert client.lookup(Prompt(NAMESPACE, range(PAGE))).num_tokens == PAGE
    assert sum("hicache[otel]" in record.message for record in caplog.records) == 1
    assert not collector.requests


def test_a_collector_that_does_not_answer_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        assert store(client, range(PAGE)) == PAGE
