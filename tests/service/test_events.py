"""KV events as a router hears them: the form that vLLM documents, read here without any code that writes it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from hicache.errors import BadRequest
from hicache.residency import Residency
from hicache.service.client import Durability, connect
from hicache.service.events import publisher
from hicache.service.server.process import Server
from hicache.tier import HOST, NVME
from tests.service.serving import WAIT_S, ThreadServer, settings, thread_server
from tests.service.stored import LAYOUT, PAGE, store

Index = dict[tuple[int, str], tuple[int, ...]]
"""What a router keeps: the tokens up to the end of each block, by hash and medium."""


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(kind) as connection:
        connection.setsockopt(zmq.RCVTIMEO, int(1000 * WAIT_S))
        connection.setsockopt(zmq.LINGER, 0)
        if kind == zmq.SUB:
            connection.setsockopt(zmq.SUBSCRIBE, b"")
        connection.connect(endpoint)
        yield connection


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    more: dict[str, Any] = {"nvme__dir": str(tmp_path / "nvme"), "nvme__bytes": 64 * LAYOUT.page_bytes}
    with thread_server(tmp_path, host_pages=8, **endpoints(tmp_path), **more) as running:
        yield running


def endpoints(directory: Path) -> dict[str, Any]:
    return {"events__endpoint": f"ipc://{directory}/events", "events__replay_endpoint": f"ipc://{directory}/replay"}


def replayed(endpoint: str, first: int) -> list[tuple[int, list[dict[str, Any]]]]:
    """The events of each message from a sequence on, with its sequence."""
    messages: list[tuple[int, list[dict[str, Any]]]] = []
    with connected(zmq.DEALER, endpoint) as connection:
        connection.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            empty, topic, sequence, payload = connection.recv_multipart()
            assert empty == topic == b""
            if int.from_bytes(sequence, "big", signed=True) == -1:
                return messages
            messages.append((int.from_bytes(sequence, "big"), events_of(payload)))


def events_of(payload: bytes) -> list[dict[str, Any]]:
    time, events, rank = msgpack.unpackb(payload)
    assert time > 1.6e9
    assert rank == 0
    return list(events)


def apply(index: Index, event: dict[str, Any]) -> None:
    """Keep an index as a router does."""
    if event["type"] == "AllBlocksCleared":
        index.clear()
    elif event["type"] == "BlockRemoved":
        for block in event["block_hashes"]:
            del index[block, event["medium"]]
    else:
        assert event["type"] == "BlockStored"
        assert set(event) == {
            "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
            "extra_keys",
        }  # fmt: skip
        assert event["block_size"] == PAGE
        assert len(event["token_ids"]) == PAGE * len(event["block_hashes"])
        parent = event["parent_block_hash"]
        before = () if parent is None else next(tokens for (block, _), tokens in index.items() if block == parent)
        for at, block in enumerate(event["block_hashes"]):
            before += tuple(event["token_ids"][at * PAGE : (at + 1) * PAGE])
            assert (block, event["medium"]) not in index, "it was not told that it had left"
            index[block, event["medium"]] = before


def truth(inside: Server) -> set[tuple[tuple[int, ...], str]]:
    """The tokens up to the end of each page that can be served, with its medium, as the tree has them."""
    tree, found = inside.cache.tree, set()
    for batch in tree.walk(batch=100):
        for info in batch:
            tokens = tuple(tree.tokens_of(info.node).tolist())
            for tier, medium in ((HOST, "CPU"), (NVME, "DISK")):
                if info.node.residency(tier) is Residency.RESIDENT:
                    ends = range(info.first_page + 1, info.first_page + info.num_pages + 1)
                    found |= {(tokens[: end * PAGE], medium) for end in ends}
    return found


def told_all(inside: Server) -> bool:
    assert inside.publisher is not None
    is_moving = any(lane.stats.queued_pages or lane.stats.in_flight_pages for lane in inside.cache.lanes)
    return not is_moving and not inside.publisher._pending


def test_an_index_of_the_events_is_what_the_tree_has(server: ThreadServer, tmp_path: Path) -> None:
    """I38: stores that share a prefix, demotions for want of room, and a flush; nothing is told twice or never."""
    with connect(server.directory) as client:
        for prompt in range(5):
            tokens = [*range(2 * PAGE), *range(1000 * prompt, 1000 * prompt + 2 * PAGE)]
            assert store(client, tokens, durability=Durability.WAIT) == 4 * PAGE
        server.until(told_all, within_s=WAIT_S)
        index: Index = {}
        messages = replayed(f"ipc://{tmp_path}/replay", 0)
        for _, events in messages:
            for event in events:
                apply(index, event)
        assert [sequence for sequence, _ in messages] == list(range(len(messages)))
        assert messages[0][1][0] == {"type": "AllBlocksCleared"}
        kept = {(tokens, medium) for (_, medium), tokens in index.items()}
        assert kept == server.call(truth)
        assert {medium for _, medium in kept} == {"CPU", "DISK"}
        server.run(server.server.cache.flush_in_steps())
        server.until(told_all, within_s=WAIT_S)
        for _, events in replayed(f"ipc://{tmp_path}/replay", len(messages)):
            for event in events:
                apply(index, event)
        assert index == {}


def test_listeners_hear_at_once_without_gaps(server: ThreadServer, tmp_path: Path) -> None:
    with connected(zmq.SUB, f"ipc://{tmp_path}/events") as listener, connect(server.directory) as client:
        heard: list[int] = []
        for prompt in range(3):
            store(client, range(1000 * prompt, 1000 * prompt + PAGE))
            server.until(told_all, within_s=WAIT_S)
            if not heard:
                # A subscription takes effect when it arrives: until then there is nothing to hear.
                for again in range(1000):
                    store(client, range(100_000 + 1000 * again, 100_000 + 1000 * again + PAGE))
                    if listener.poll(10):
                        break
            topic, sequence, payload = listener.recv_multipart()
            assert topic == b""
            assert events_of(payload)
            heard.append(int.from_bytes(sequence, "big"))
        assert heard == list(range(heard[0], heard[0] + 3))


def test_pages_found_at_the_start_are_told(tmp_path: Path) -> None:
    more: dict[str, Any] = {"nvme__dir": str(tmp_path / "nvme"), "nvme__bytes": 64 * LAYOUT.page_bytes}
    with thread_server(tmp_path, **more) as server, connect(server.directory) as client:
        store(client, range(3 * PAGE), durability=Durability.WAIT)
    with thread_server(tmp_path, **more, **endpoints(tmp_path)) as server:
        server.until(told_all, within_s=WAIT_S)
        index: Index = {}
        for _, events in replayed(f"ipc://{tmp_path}/replay", 0):
            for event in events:
                apply(index, event)
    assert sorted((len(tokens), medium) for (_, medium), tokens in index.items()) == [
        (PAGE, "DISK"), (2 * PAGE, "DISK"), (3 * PAGE, "DISK")
    ]  # fmt: skip


def test_pages_of_tenants_are_not_told(tmp_path: Path) -> None:
    """I33: an index elsewhere knows no tenants."""
    with thread_server(tmp_path, tenants={"red": {}}, **endpoints(tmp_path)) as server:
        with connect(server.directory, tenant="red") as client:
            assert store(client, range(PAGE), tenant="red") == PAGE
        server.until(told_all, within_s=WAIT_S)
        messages = replayed(f"ipc://{tmp_path}/replay", 0)
    assert [events for _, events in messages] == [[{"type": "AllBlocksCleared"}]]


def test_replays_are_bounded_and_nonsense_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "KEPT_BATCHES", 2)
    with thread_server(tmp_path, **endpoints(tmp_path)) as server, connect(server.directory) as client:
        for prompt in range(4):
            store(client, range(1000 * prompt, 1000 * prompt + PAGE))
            server.until(told_all, within_s=WAIT_S)
        with connected(zmq.DEALER, f"ipc://{tmp_path}/replay") as connection:
            for frames in ([b"x"], [b"", b"short"], [b"", bytes(8), b"more"], [b"no", bytes(8)]):
                connection.send_multipart(frames)
        assert [sequence for sequence, _ in replayed(f"ipc://{tmp_path}/replay", 0)] == [3, 4]


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557", "inproc://x", "x"])
def test_endpoints_that_others_could_reach_are_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(BadRequest, match=r"events.endpoint: .* begins with none of"):
        ThreadServer(settings(tmp_path, events__endpoint=endpoint))


def test_an_endpoint_in_use_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with thread_server(tmp_path, events__endpoint="tcp://127.0.0.1:0") as server:
        assert server.server.publisher is not None
        taken = server.server.publisher.endpoint
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(BadRequest, match=r"events.endpoint: .* cannot be had: Address already in use"):
            ThreadServer(settings(other, events__endpoint=taken, nvme__dir=str(other / "nvme"), nvme__bytes="1MiB"))
        assert not (other / "nvme").exists()


def test_a_path_that_another_program_has_stays_its_own(tmp_path: Path) -> None:
    """ZMQ by itself takes the path of a socket that somebody listens at, who then hears of nobody any more, and removes
    files."""
    mine = f"ipc://{tmp_path}/events"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with thread_server(tmp_path / "first", events__endpoint=mine) as first:
        with pytest.raises(BadRequest, match=r"events\.endpoint: .*another program's"):
            ThreadServer(settings(tmp_path / "second", events__endpoint=mine))
        with connected(zmq.SUB, mine) as listener, connect(first.directory) as client:
            store(client, range(PAGE))
            assert any(event["type"] == "BlockStored" for event in _heard(listener))
    (tmp_path / "file").write_text("mine")
    for key in ("events__endpoint", "events__replay_endpoint"):
        more: dict[str, Any] = {"events__endpoint": mine, key: f"ipc://{tmp_path}/file"}
        with pytest.raises(BadRequest, match="another program's"):
            ThreadServer(settings(tmp_path / "second", **more))
    assert (tmp_path / "file").read_text() == "mine"


def _heard(listener: "zmq.Socket[bytes]") -> Iterator[dict[str, Any]]:
    while True:
        yield from events_of(listener.recv_multipart()[2])


def test_a_path_that_nobody_listens_at_is_taken(tmp_path: Path) -> None:
    """After `kill -9`."""
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(tmp_path / "events"))
    with thread_server(tmp_path, **endpoints(tmp_path)) as server:
        assert replayed(f"ipc://{tmp_path}/replay", 0)[0][1] == [{"type": "AllBlocksCleared"}]
        assert server.server.publisher is not None


def test_a_replay_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"events.endpoint: is given together with"):
        ThreadServer(settings(tmp_path, events__replay_endpoint="tcp://127.0.0.1:0"))
