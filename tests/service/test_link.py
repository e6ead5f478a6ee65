"""The session of an engine with its sidecar, without an engine."""

from dataclasses import replace
from pathlib import Path

from hicache.service.client import Prompt
from hicache.service.engines.link import Link
from hicache.service.engines.settings import EngineSettings
from tests.service.serving import thread_server
from tests.service.stored import NAMESPACE, PAGE


def test_an_engine_goes_on_beyond_the_namespaces_that_its_session_may_have(tmp_path: Path) -> None:
    with thread_server(tmp_path, limits__max_namespaces=3) as server:
        link = Link(EngineSettings(socket_dir=str(server.directory)), name="engine", staging_bytes=0)

        def is_answered(salt: int) -> bool:
            """Whether a request with a salt of its own is looked up."""
            prompt = Prompt(replace(NAMESPACE, salt=bytes([salt])), [0] * PAGE)
            return link.call(lambda client: client.lookup(prompt)) is not None

        try:
            assert all(is_answered(salt) for salt in (0, 1, 2, 3, 4, 0))
            assert server.call(lambda inside: inside.sessions.num_begun) == 1
        finally:
            link.close()
