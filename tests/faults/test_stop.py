"""A server whose disk answers nothing any more stops all the same, in a process of its own (F18, I41)."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
import pytest

from hicache.errors import DeadlineExceeded
from hicache.service import wire
from hicache.service.client import Durability, Prompt, connect
from tests.punctual import in_time
from tests.repository import ROOT
from tests.service.serving import WAIT_S, arguments
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, page_bytes, store

pytestmark = pytest.mark.faults

STOP_S: Final = 10.0
"""From the signal to the end of the process."""
SERVER: Final = """
import signal, sys, threading
from hicache.tiers.nvme.io import FileIO

answers = threading.Event()
answers.set()

def held(call):
    def wait(*args):
        answers.wait()
        return call(*args)
    return wait

for name in ("preadv", "pwritev", "fdatasync", "fsync"):
    setattr(FileIO, name, held(getattr(FileIO, name)))
signal.signal(signal.SIGUSR1, lambda *_: answers.clear())
from hicache.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_hung_disk_does_not_hold_up_a_stop(tmp_path: Path, is_busy: bool) -> None:
    """With nothing under way the disk hangs at the last commit; else moves wait for it, and a session that stays."""
    options = arguments(host_pages=16, nvme__dir=f'"{tmp_path / "nvme"}"', nvme__bytes=256 * LAYOUT.page_bytes)
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, "serve", "--socket-dir", str(tmp_path / "run"), *options],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith(b"serving at")
        where = wire.address(str(tmp_path / "run" / wire.ADMIN_SOCKET))
        with connect(tmp_path / "run") as client, grpc.insecure_channel(where) as admin:
            store(client, range(4 * PAGE), durability=Durability.WAIT)
            process.send_signal(signal.SIGUSR1)
            if is_busy:
                verifying = admin.unary_unary(wire.path_of(wire.ADMIN.methods_by_name["Verify"]), bytes, bytes)
                verifying.future(b"")
            for first in range(1000, 7000, 1000) if is_busy else ():
                prompt = Prompt(NAMESPACE, tokens := range(first, first + 4 * PAGE))
                # Where there is no room, a busy machine may not be told so in time.
                with suppress(DeadlineExceeded), client.reserve(prompt, timeout_s=1.0) as reservation:
                    for index, view in enumerate(reservation):
                        view[:] = page_bytes(tokens, reservation.first_page + index)
                    if len(reservation):
                        reservation.commit(durability=Durability.BEHIND)
            if is_busy:
                client.pin(Prompt(NAMESPACE, range(4 * PAGE)))
            with in_time(STOP_S):
                process.terminate()
                assert process.wait(WAIT_S) == 0
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
        assert "does not answer" in (tmp_path / "errors").read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
