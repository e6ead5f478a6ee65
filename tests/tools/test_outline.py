"""`hicache tree` of a server that tells a part of its tree: what is left out is counted where it hangs."""

from pathlib import Path

import pytest

from hicache.service.dashboard import walk
from hicache.service.server import surveying
from hicache.service.server.process import Server
from hicache.tier import HOST
from hicache.tools.commands import tree
from hicache.tools.outline import outline
from hicache.tools.owner import reached
from hicache.tools.terminal import Style
from tests.service.stored import LAYOUT, NAMESPACE, PAGE
from tests.tools.served import Shell, check_schema, known_server


def _of_another_tenant(inside: Server) -> None:
    """One page of a namespace of its own."""
    other = NAMESPACE.__class__(model="m", layout=LAYOUT, tenant="red")
    slots = inside.cache.tiers[HOST].allocate(1)
    inside.cache.tree.insert(other, range(PAGE), tier=HOST, slots=slots, now=inside.cache.clock.monotonic())


def test_the_largest_branches_are_shown_and_the_others_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with known_server(tmp_path) as (server, _):
        server.call(_of_another_tenant)
        shell = Shell(server.directory, capsys)
        text = shell.text("tree", "--limit", "3")
        assert text.partition("namespace ")[2].partition("\n")[2] == (
            " tokens bytes tiers last use uses leases\n"
            "└─ tokens 0 1 2 3 … 32 8.00 KiB . N AGE - -\n"
            " ├─ tokens 900 901 902 903 … 48 12.0 KiB H . AGE - -\n"
            " └─ … 1 more prefix, 8.00 KiB\n"
            "\n"
            "… 1 more prefix of smaller namespaces, 4.00 KiB\n"
        )
        told = shell.json("tree", "--limit", "3")
        assert (told["num_prefixes"], told["num_seen"]) == (4, 4)
        assert [(each["num_tokens"], each["subtree_prefixes"], each["hidden"]) for each in told["prefixes"]] == [
            (32, 3, 1), (48, 1, 0),
        ]  # fmt: skip
        assert shell.text("tree", "--limit", "1").endswith(
            " tokens bytes tiers last use uses leases\n└─ … 3 more prefixes, 28.0 KiB\n\n"
            "… 1 more prefix of smaller namespaces, 4.00 KiB\n"
        )
        for limits in (["--limit", "1"], ["--limit", "3"], ["--width", "1"], ["--depth", "1"], []):
            told = shell.json("tree", *limits)
            assert told["hidden"] + sum(1 + each["hidden"] for each in told["prefixes"]) == 4, limits
        assert [each["depth"] for each in shell.json("tree", "--limit", "10000")["prefixes"]] == [1, 2, 2, 1]
        assert shell("tree", "--limit", "10001")[0] == 2


def test_what_was_seen_until_time_was_up_is_shown_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "STEP", 1)
    monkeypatch.setattr(surveying, "LOOK_S", 0.0)
    steps = []
    with known_server(tmp_path) as (server, _), reached(server.directory) as owner:
        for until, expected in ((0.0, 1), (float("inf"), 3)):
            snapshot = outline(
                owner, limit=10, depth=None, num_tokens=4, until=until,
                progress=lambda what, done, total: steps.append((done, total)),
            )  # fmt: skip
            assert (snapshot.num_seen, snapshot.num_prefixes, len(snapshot.nodes)) == (expected, 3, expected)
            remark = "Looked at 1 of 3 prefixes: --within gives it more time."
            assert (remark in list(tree.lines(snapshot, tree.View(), Style()))) == (expected < 3)
            check_schema("tree", tree.to_json(snapshot, tree.View()))
    assert steps == [(1, 3), (1, 3), (2, 3), (3, 3)]
