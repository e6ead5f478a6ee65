"""The session of an engine with its sidecar, without an engine."""

from dataclasses import replace
from pathlib import Path

import pytest

from hicache.service.client import Client, Prompt
from hicache.service.client.results import Lookup
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


def test_a_request_that_is_refused_costs_the_others_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with thread_server(tmp_path, limits__max_tokens=8 * PAGE) as server:
        link = Link(EngineSettings(socket_dir=str(server.directory)), name="engine", staging_bytes=0)

        def is_answered(num_pages: int, rank: int = 0) -> bool:
            def ask(client: Client) -> Lookup:
                return client.lookup(Prompt(NAMESPACE, [0] * (num_pages * PAGE), rank=rank))

            return link.call(ask) is not None

        try:
            for _ in range(2):
                assert is_answered(8)
                assert not is_answered(8, rank=1)  # of an engine of one rank
                assert is_answered(8)
                assert not is_answered(9)
            assert link.is_up
        finally:
            link.close()
    said = [each.getMessage() for each in caplog.records if "went without the cache" in each.getMessage()]
    assert len(said) == 2
    assert "rank: 1 is not within 0 to 0" in said[0]
    assert f"{9 * PAGE} tokens are more than {8 * PAGE}" in said[1]
