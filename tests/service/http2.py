"""A client that speaks gRPC by hand, so that it may do what no gRPC library does: offer no window, or read nothing."""

import socket
import struct
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, PingAckReceived, ResponseReceived, SettingsAcknowledged, TrailersReceived
from h2.settings import SettingCodes

from hicache.service import wire

CHUNK: Final = 1 << 16


class RawChannel:
    """One connection. A context manager."""

    def __init__(self, at: Path | int, *, window: int, source: str = "127.0.0.1") -> None:
        """`at`: a Unix socket, or a port of the loopback address, to connect to from `source`. `window`: bytes of each
        stream's answers that the server may send unasked."""
        self.socket: Final = socket.socket(socket.AF_UNIX if isinstance(at, Path) else socket.AF_INET)
        self.socket.settimeout(30.0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)  # the least: TCP's is soon full
        if isinstance(at, int):
            self.socket.bind((source, 0))
        self.socket.connect(str(at) if isinstance(at, Path) else ("127.0.0.1", at))
        self._http: Final = H2Connection(H2Configuration())
        self._http.initiate_connection()
        self._http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.flush()
        while not any(SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings for event in self._agreed()):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _agreed(self) -> list[SettingsAcknowledged]:
        return [event for event in self.receive() if isinstance(event, SettingsAcknowledged)]

    def flush(self) -> None:
        """Send what there is. Waits for the server to take it."""
        self.socket.sendall(self._http.data_to_send())

    def call(
        self, path: str, messages: Iterable[bytes], *, token: bytes = b"", access: bytes = b"", is_over: bool = True
    ) -> int:
        """Begin a call, without a deadline, and send its messages; its stream. `is_over`: no more messages come."""
        stream = self._http.get_next_available_stream_id()
        headers = [
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
            ("te", "trailers"), ("content-type", "application/grpc"),
            (wire.TOKEN_METADATA, b64encode(token).decode().rstrip("=")),
            (wire.ACCESS_METADATA, b64encode(access).decode().rstrip("=")),
        ]  # fmt: skip
        self._http.send_headers(stream, headers)
        for message in messages:
            self._http.send_data(stream, struct.pack(">BI", 0, len(message)) + message)
        if is_over:
            self._http.end_stream(stream)
        self.flush()
        return stream

    def arrived(self) -> list[grpc.StatusCode]:
        """Wait until gRPC has all that was sent, whether or not the server has looked at it; how calls ended of which
        it has said so before. Raises as `receive` does."""
        self._http.ping(bytes(8))
        self.flush()
        events = list[Event]()
        while not any(isinstance(event, PingAckReceived) for event in events):
            events += self.receive()
        return _ended(events)

    def open_window(self, stream: int, num_bytes: int) -> None:
        """Let the server send so many bytes of a stream's answer."""
        self._http.increment_flow_control_window(num_bytes, stream)
        self.flush()

    def receive(self) -> list[Event]:
        """What the server has said since; answers its pings. Waits for something. Raises `EOFError` when it hung
        up."""
        data = self.socket.recv(CHUNK)
        if not data:
            raise EOFError("the server hung up")
        events = self._http.receive_data(data)
        self.flush()
        return events

    def ended(self) -> list[grpc.StatusCode]:
        """How calls ended of which the server has said so since. Raises as `receive` does."""
        return _ended(self.receive())


def _ended(events: list[Event]) -> list[grpc.StatusCode]:
    """How calls ended, as far as the events tell it."""
    headers = [event.headers for event in events if isinstance(event, ResponseReceived | TrailersReceived)]
    numbers = [int(value) for each in headers for name, value in each if name == b"grpc-status"]
    return [next(code for code in grpc.StatusCode if code.value[0] == number) for number in numbers]
