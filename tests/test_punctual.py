"""The bound in seconds is one: what is late without the machine's doing is found."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.punctual import in_time
from tests.repository import ROOT


def test_what_takes_too_long_fails() -> None:
    def is_late() -> bool:
        try:
            with in_time(0.02):
                threading.Event().wait(0.2)
        except AssertionError:
            return True
        return False

    assert any(is_late() for _ in range(100)), "it was always the machine's fault"


def test_what_raises_is_not_timed() -> None:
    with pytest.raises(KeyError), in_time(0.0):
        raise KeyError


STOPPED = """
import sys
from tests.punctual import Lateness
with Lateness() as late:
    print("begun", flush=True)
    sys.stdin.readline()
print(late.seconds)
"""


def test_a_process_that_is_stopped_knows_for_how_long() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    threading.Event().wait(0.3)
    process.send_signal(signal.SIGCONT)
    told, _ = process.communicate("\n", timeout=30.0)
    assert float(told) >= 0.2
