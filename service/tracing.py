"""Spans of calls for OpenTelemetry, where the environment names a collector; nothing of it is loaded otherwise.

One span a call, and one a look-up on a session's stream, which itself has none: how it ended and how many bytes came
and went, below the caller's own span where the call brings one ("traceparent"). Nothing that a prompt consists of is in
it, nor whose it is. The exporter speaks OTLP over HTTP and takes its settings from the environment, as OpenTelemetry
describes them; what it cannot send in time is dropped.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

import hicache

if TYPE_CHECKING:
    from opentelemetry.context import Context as SpanContext
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Either of them asks for traces."""
CLOSE_S: Final = 1.0
"""How long a stop waits for the last spans to be sent."""

_log = logging.getLogger(__name__)


class Tracing(grpc.aio.ServerInterceptor):
    """Makes spans of the calls of the servers that it is an interceptor of."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider: Final = provider
        self._tracer: Final = provider.get_tracer("hicache", hicache.__version__)
        self._propagator: Final = TraceContextTextMapPropagator()

    @classmethod
    def asked_for(cls, environment: Mapping[str, str]) -> "Tracing | None":
        """If the environment names a collector, and what it takes is installed: otherwise that is said, once."""
        if not any(environment.get(name) for name in ENDPOINTS):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            _log.warning("a collector of traces is named, but there are none: install hicache[otel] (%s)", error)
            return None
        resource = Resource.create({"service.name": "hicache", "service.version": hicache.__version__})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def close(self) -> None:
        """Send what is left, as far as that goes within `CLOSE_S`."""
        ending = threading.Thread(target=self._provider.shutdown, name="hicache-traces", daemon=True)
        ending.start()
        ending.join(CLOSE_S)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of one call, within a span."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        path, metadata = handler_call_details.method, handler_call_details.invocation_metadata or ()
        inside: Any = next(each for each in (
            handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream
        ) if each is not None)  # fmt: skip

        async def answer(request: Any, context: Any) -> Any:
            with self._span(path, metadata, context) as span:
                reply = await inside(request, _Seen(context, span, request))
                span.set_attribute("hicache.reply.bytes", len(reply))
                return reply

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._span(path, metadata, context) as span:
                num_bytes = 0
                async for reply in inside(request, _Seen(context, span, request)):
                    num_bytes += len(reply)
                    yield reply
                span.set_attribute("hicache.reply.bytes", num_bytes)

        if not handler.response_streaming:
            make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else (
                grpc.unary_unary_rpc_method_handler
            )  # fmt: skip
            return make(answer)
        if not inspect.isasyncgenfunction(inside):
            return handler  # a session's stream, which is no call
        make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else (
            grpc.unary_stream_rpc_method_handler
        )  # fmt: skip
        return make(stream)

    def note(
        self, path: str, code: grpc.StatusCode, took_s: float, request_bytes: int, reply_bytes: int
    ) -> None:
        """A call has just ended that travelled on a session's stream, and therefore below no span of the caller."""
        from opentelemetry.context import Context

        ended_ns = time.time_ns()
        span = self._start(path, Context(), began_ns=ended_ns - round(took_s * 1e9))
        span.set_attribute("hicache.request.bytes", request_bytes)
        span.set_attribute("hicache.reply.bytes", reply_bytes)
        _end(span, code, ended_ns)

    def _start(self, path: str, parent: "SpanContext", *, began_ns: int | None = None) -> "Span":
        from opentelemetry.trace import SpanKind

        service, _, method = path.lstrip("/").partition("/")
        return self._tracer.start_span(
            path.lstrip("/"),
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
            start_time=began_ns,
        )

    @contextmanager
    def _span(self, path: str, metadata: Any, context: Any) -> Iterator["Span"]:
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        span = self._start(path, self._propagator.extract(carrier))
        code = grpc.StatusCode.OK
        try:
            yield span
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except BaseException:
            aborted: grpc.StatusCode | None = context.code()
            code = aborted or grpc.StatusCode.UNKNOWN
            raise
        finally:
            _end(span, code)


def _end(span: "Span", code: grpc.StatusCode, ended_ns: int | None = None) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if code is not grpc.StatusCode.OK:
        span.set_status(Status(StatusCode.ERROR, code.name))
    span.end(ended_ns)


class _Seen:
    """A call's context, of which it is seen how many bytes it brings."""

    def __init__(self, context: Any, span: "Span", request: object) -> None:
        self._context: Final = context
        self._span: Final = span
        if isinstance(request, bytes):
            self._note(request)

    def _note(self, request: bytes) -> None:
        self._span.set_attribute("hicache.request.bytes", len(request))

    async def read(self) -> Any:
        """The context's own."""
        request = await self._context.read()
        if isinstance(request, bytes):
            self._note(request)
        return request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
