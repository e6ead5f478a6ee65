"""A server that is killed and started again at random moments, while a client goes on with what it was named before."""

import random
import signal
import threading
from pathlib import Path
from typing import Final

import pytest

from hicache.errors import HicacheError, LeaseExpired
from hicache.service.client import Client, Durability, Prompt, connect
from hicache.service.client.pages import Lease
from tests.service.serving import WAIT_S, ServerProcess, arguments
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store

pytestmark = pytest.mark.faults

KILLS: Final = 10
NUM_PROMPTS: Final = 8
NUM_PAGES: Final = 4


def _prompt(number: int) -> range:
    return range(1000 * number, 1000 * number + NUM_PAGES * PAGE)


class _Engine:
    """Looks up, reads and stores prompts in a thread, whatever becomes of the server, and compares every byte."""

    def __init__(self, client: Client) -> None:
        self._client: Final = client
        self._prompts: Final = [Prompt(NAMESPACE, _prompt(number)) for number in range(NUM_PROMPTS)]
        """Kept over restarts, with what servers have called them."""
        self._thread: Final = threading.Thread(target=self._run)
        self._is_over: Final = threading.Event()
        self.wrong: list[BaseException] = []
        self.num_done = 0
        self._thread.start()

    def _run(self) -> None:
        try:
            number = 0
            while not self._is_over.is_set():
                number = (number + 1) % NUM_PROMPTS
                try:
                    self._go_on(number)
                    self.num_done += 1
                except HicacheError:
                    self._is_over.wait(0.01)  # nobody is there for now
        except BaseException as error:
            self.wrong.append(error)

    def _go_on(self, number: int) -> None:
        prompt, tokens = self._prompts[number], _prompt(number)
        assert self._client.lookup(prompt).num_tokens in range(0, len(tokens) + 1, PAGE)
        with self._client.acquire(prompt) as lease:
            assert [lease.read(page) for page in range(len(lease))] == [
                page_bytes(tokens, page) for page in range(len(lease))
            ]
        store(self._client, tokens, prompt=prompt)

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def _is_right(lease: Lease, tokens: range) -> bool:
    """Whether a lease of a server that is gone still reads its own pages, or says that it has ended."""
    try:
        return lease.read(0) == page_bytes(tokens, 0)
    except LeaseExpired:
        return True


@pytest.mark.parametrize("seed", [1])
def test_whoever_was_named_something_by_another_boot_is_told_or_right(tmp_path: Path, seed: int) -> None:
    """I37, I28: ten kills at random moments within the time of a beat. No handle, lease or reservation of a boot means
    anything to the next one."""
    draw = random.Random(seed)
    options = [*arguments(nvme__bytes=1024 * LAYOUT.page_bytes), "--nvme-dir", str(tmp_path / "nvme")]
    server = ServerProcess(tmp_path, options)
    try:
        with connect(server.directory) as client, connect(server.directory) as looking:
            durable = range(90_000, 90_000 + NUM_PAGES * PAGE)
            store(client, durable, durability=Durability.WAIT)
            engine, boots = _Engine(client), {looking.welcome.boot_id}
            try:
                for _ in range(KILLS):
                    lease = looking.acquire(Prompt(NAMESPACE, durable))
                    reservation = looking.reserve(Prompt(NAMESPACE, range(70_000, 70_000 + PAGE)))
                    threading.Event().wait(draw.uniform(0.0, 0.3))
                    before = engine.num_done
                    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
                    server = ServerProcess(tmp_path, options)
                    assert check(looking, durable) == len(durable)
                    with pytest.raises(LeaseExpired):
                        reservation.commit()
                    assert _is_right(lease, durable)
                    lease.release()
                    boots.add(looking.welcome.boot_id)
                    while engine.num_done < before + NUM_PROMPTS and not engine.wrong:
                        threading.Event().wait(0.01)
            finally:
                engine.end()
            assert engine.wrong == []
            assert len(boots) == KILLS + 1
    finally:
        assert server.stop() == 0, server.errors()
