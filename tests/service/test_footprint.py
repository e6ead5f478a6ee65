"""What a server touches of the machine, and what its files and its log say."""

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.service.client import Durability, connect
from tests.service.serving import ServerProcess, arguments
from tests.service.stored import PAGE, check, store

AUDIT: Final = """
import json, os, sys

CHANGING = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown",
            "os.truncate", "os.utime", "os.mkfifo", "os.mknod"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
log = os.open(os.environ["AUDIT_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

def audit(event, arguments):
    if event == "open":
        if not isinstance(arguments[2], int) or not arguments[2] & WRITING:
            return
    elif event not in CHANGING:
        return
    names = [os.fsdecode(each) for each in arguments if isinstance(each, (str, bytes))]
    os.write(log, (json.dumps([event, names]) + "\\n").encode())

sys.addaudithook(audit)
"""
"""Put into a process as `sitecustomize`: what it opens for writing, makes, renames and removes stands in a file."""
SECRET: Final = b"correct horse battery staple"


def test_nothing_is_touched_but_the_data_and_the_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I40: files are the owner's alone, and neither secrets nor token ids stand in the log."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(AUDIT)
    audited, data = tmp_path / "audited", tmp_path / "nvme"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("AUDIT_FILE", str(audited))
    tokens = range(1_234_567_000, 1_234_567_000 + 4 * PAGE)
    more: dict[str, Any] = {
        "nvme__dir": json.dumps(str(data)),
        "nvme__bytes": '"64MiB"',
        "tenants__one__secret_sha256": json.dumps(hashlib.sha256(SECRET).hexdigest()),
    }
    server = ServerProcess(tmp_path, arguments(**more))
    try:
        with connect(server.directory, tenant="one", secret=SECRET) as client:
            store(client, tokens, tenant="one", durability=Durability.WAIT)
            assert check(client, tokens, tenant="one") == 4 * PAGE
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (*data.rglob("*"), *server.directory.rglob("*"))}
    finally:
        assert server.stop() == 0
    assert len(modes) > 5
    for path, mode in modes.items():
        assert mode & 0o077 == 0, f"{path} has mode {mode:o}"
    touched = [(event, name) for event, names in map(json.loads, audited.read_text().splitlines()) for name in names]
    assert any(str(data) in name for _, name in touched), "the audit sees nothing"
    # A name without a folder is one in a directory that is held open; these are told apart by what lies there.
    known = {path.name.removesuffix(".new") for path in (*modes, *data.rglob("*"))}
    ours = tuple([f"{directory}{os.sep}" for directory in (data, server.directory)])
    foreign = [
        (event, name)
        for event, name in touched
        if not f"{name}{os.sep}".startswith((*ours, os.devnull)) and name.removesuffix(".new") not in known
    ]
    assert foreign == []
    log = server.errors()
    assert SECRET.decode() not in log
    assert "1234567" not in log
