"""The check that runs around every test finds what it is there to find."""

import os
import threading
from pathlib import Path

import pytest

from tests.leaks import nothing_left_behind


def test_a_thread_that_is_left_running_is_found() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="straggler")

    def leave_it_running() -> None:
        with nothing_left_behind(timeout_s=0.01):
            thread.start()

    try:
        with pytest.raises(AssertionError, match="straggler"):
            leave_it_running()
    finally:
        stop.set()
        thread.join()


def test_a_thread_on_its_way_out_is_waited_for() -> None:
    stop = threading.Event()
    with nothing_left_behind():
        threading.Thread(target=stop.wait).start()
        stop.set()


@pytest.mark.parametrize("kind", ["file", "pipe", "memory"])
def test_a_file_that_is_left_open_is_found(kind: str, tmp_path: Path) -> None:
    opened: list[int] = []

    def leave_it_open() -> None:
        with nothing_left_behind(timeout_s=0.01):
            match kind:
                case "file":
                    opened.append(os.open(tmp_path / "left", os.O_CREAT | os.O_RDWR))
                case "pipe":
                    opened.extend(os.pipe())
                case "memory":
                    opened.append(os.memfd_create("left"))

    try:
        with pytest.raises(AssertionError, match="files left open"):
            leave_it_open()
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_what_was_open_before_may_stay(tmp_path: Path) -> None:
    with (tmp_path / "before").open("w"), nothing_left_behind(), (tmp_path / "during").open("w"):
        pass
