"""Whether a real router follows our events: `vllm-router` with two sidecars and two workers that only count.

    python -m venv /tmp/router && /tmp/router/bin/pip install vllm-router
    python -m tests.service.router /tmp/router/bin/vllm-router

It is not among the tests, for the router is not among what the project installs. What it does: prompts are stored in
one sidecar or the other, demoted to NVMe, forgotten, and after each change requests with these prompts are sent to the
router, which must send them where the pages are. Exits with 1 and says where it went wrong if it does not.
"""

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any, Final

from hicache.service.client import Durability, connect
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, PAGE, store
from tests.service.test_deadlines import leave_the_host

MODEL: Final = "m"
PAGES: Final = 8
"""Of each prompt."""
SETTLE_S: Final = 10.0
"""Within so many seconds the router has heard of a change: it is asked until it answers as it should."""
REQUESTS: Final = 10
"""Requests that must go to one worker, in a row, before it is believed."""


class Worker(ThreadingHTTPServer):
    """Answers as an engine would, and counts what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.num_asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Worker

    def do_GET(self) -> None:
        self._answer({"data": [{"id": MODEL, "object": "model"}], "object": "list"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/completions":
            self.server.num_asked += 1
        self._answer({"id": "1", "object": "text_completion", "model": MODEL, "choices": [{"index": 0, "text": "."}]})

    def _answer(self, what: dict[str, Any]) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # the name it has
        """Says nothing."""


@contextmanager
def _worker() -> Iterator[Worker]:
    worker = Worker()
    thread = threading.Thread(target=worker.serve_forever)
    thread.start()
    try:
        yield worker
    finally:
        worker.shutdown()
        thread.join()
        worker.server_close()


@contextmanager
def _sidecar(directory: Path) -> Iterator[ThreadServer]:
    directory.mkdir()
    more: dict[str, Any] = {
        "nvme__dir": str(directory / "nvme"),
        "nvme__bytes": 256 * LAYOUT.page_bytes,
        # The router takes no other kind of endpoint.
        "events__endpoint": f"tcp://127.0.0.1:{_free_port()}",
        "events__replay_endpoint": f"tcp://127.0.0.1:{_free_port()}",
    }
    with thread_server(directory, **more) as server:
        yield server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Router:
    """The router's process."""

    def __init__(self, command: str, workers: list[Worker], servers: list[ThreadServer]) -> None:
        self.port = _free_port()
        words = [command, "--host", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(_free_port()),
                 "--policy", "kv_aware", "--kv-event-block-size", str(PAGE), "--kv-event-model", MODEL,
                 "--log-level", "warning", "--worker-urls", *(worker.url for worker in workers)]  # fmt: skip
        for worker, server in zip(workers, servers, strict=True):
            words += ["--kv-event-source", f"{worker.url}={server.config.events_endpoint}"]
            words += ["--kv-event-replay-source", f"{worker.url}={server.config.events_replay_endpoint}"]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL)

    def ask(self, tokens: list[int]) -> int:
        """Send a request with a prompt of these tokens; the HTTP status of the answer, 0 for none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            body = json.dumps({"model": MODEL, "prompt": tokens, "max_tokens": 1})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()


def _goes_to(router: Router, workers: list[Worker], tokens: list[int], wanted: int) -> float:
    """Ask until `REQUESTS` requests in a row have gone to one worker; how long it took until the first of them."""
    began = since = monotonic()
    in_a_row = 0
    while in_a_row < REQUESTS:
        before = [worker.num_asked for worker in workers]
        if router.ask(tokens) == 200 and workers[wanted].num_asked > before[wanted]:
            in_a_row += 1
            continue
        in_a_row, since = 0, monotonic()
        if since > began + SETTLE_S:
            raise SystemExit(f"requests do not go to worker {wanted}")
    return since - began


def main(command: str) -> None:
    """Run it all, and print a line for each change."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [stack.enter_context(_sidecar(place / name)) for name in ("one", "two")]
        workers = [stack.enter_context(_worker()) for _ in servers]
        clients = [stack.enter_context(connect(server.directory)) for server in servers]
        prompts = [list(range(1000 * number, 1000 * number + PAGES * PAGE)) for number in range(1, 5)]
        store(clients[0], prompts[3])  # before there is a router: it asks for what it has missed
        router = Router(command, workers, servers)
        stack.callback(router.close)
        began = monotonic()
        while router.ask([1]) != 200:
            if monotonic() > began + WAIT_S or router.process.poll() is not None:
                raise SystemExit("the router does not serve")

        def demoted(number: int) -> None:
            servers[number].run(leave_the_host(servers[number]))

        def forgotten(number: int) -> None:
            servers[number].run(servers[number].server.cache.flush_in_steps())

        steps: list[tuple[str, Callable[[], object], int, int]] = [
            ("was stored in 1 before the router began", lambda: None, 3, 0),
            ("stored in 1", lambda: store(clients[0], prompts[0], durability=Durability.WAIT), 0, 0),
            ("stored in 2", lambda: store(clients[1], prompts[1], durability=Durability.WAIT), 1, 1),
            ("demoted to NVMe in 1, which still has it alone", lambda: demoted(0), 0, 0),
            ("stored in 2 as well, there in memory", lambda: store(clients[1], prompts[0]), 0, 1),
            ("forgotten by 2, so that 1 alone has it, on NVMe", lambda: forgotten(1), 0, 0),
            ("another one stored in 2", lambda: store(clients[1], prompts[2]), 2, 1),
        ]
        for what, change, prompt, wanted in steps:
            change()
            took = _goes_to(router, workers, prompts[prompt], wanted)
            print(f"{what}: {REQUESTS} of {REQUESTS} requests go to worker {wanted + 1}, {took:.2f} s later")


if __name__ == "__main__":
    main(*sys.argv[1:])
