"""The session of an engine with its sidecar, without an engine."""

import threading
import time
from dataclasses import replace
from pathlib import Path

from hicache.service.client import Prompt
from hicache.service.engines.link import Link
from hicache.service.engines.settings import EngineSettings
from tests.service.serving import WAIT_S, thread_server
from tests.service.stored import NAMESPACE, PAGE


def test_a_session_that_has_all_its_namespaces_is_begun_anew(tmp_path: Path) -> None:
    with thread_server(tmp_path, limits__max_namespaces=3) as server:
        link = Link(EngineSettings(socket_dir=str(server.directory)), name="engine", staging_bytes=0)

        def is_answered(salt: int) -> bool:
            """Whether a request with a salt of its own is looked up."""
            prompt = Prompt(replace(NAMESPACE, salt=bytes([salt])), [0] * PAGE)
            return link.call(lambda client: client.lookup(prompt)) is not None

        try:
            assert [is_answered(salt) for salt in range(5)] == [True, True, True, False, False]
            deadline = time.monotonic() + WAIT_S
            while not link.is_up:
                assert time.monotonic() < deadline
                threading.Event().wait(0.01)
            assert is_answered(4)
        finally:
            link.close()
