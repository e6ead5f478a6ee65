from pathlib import Path

import pytest

from hicache.tiers.memory_limits import available_bytes

MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\n"


def lay_out(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Files below `root`, and the two folders that `available_bytes` asks for."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, None, id="nothing is known"),
        pytest.param({"proc/meminfo": MEMINFO}, 8_000 * 1024, id="the machine alone"),
        pytest.param(
            {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n", "cgroup/a/b/memory.max": "max\n"},
            8_000 * 1024,
            id="a group without a limit",
        ),
        pytest.param(
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a/b\n",
                "cgroup/a/b/memory.max": "max\n",
                "cgroup/a/b/memory.current": "700\n",
                "cgroup/a/memory.max": "5000\n",
                "cgroup/a/memory.current": "1000\n",
                "cgroup/a/memory.stat": "anon 500\ninactive_file 300\n",
            },
            5_000 - 1_000 + 300,
            id="a limit of the group above",
        ),
        pytest.param(
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/../elsewhere\n",
                "cgroup/memory.max": "2000\n",
                "cgroup/memory.current": "500\n",
            },
            1_500,
            id="the group of a container, seen from inside",
        ),
        pytest.param(
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "5:cpu,memory:/x\n4:devices:/y\n",
                "cgroup/memory/x/memory.limit_in_bytes": "900\n",
                "cgroup/memory/x/memory.usage_in_bytes": "500\n",
                "cgroup/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
            },
            450,
            id="version 1",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "100\n", "cgroup/memory.current": "300\n"},
            0,
            id="more than the limit is in use",
        ),
    ],
)
def test_the_smallest_bound_counts(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert available_bytes(*lay_out(tmp_path, files)) == expected


def test_this_machine_has_some_memory() -> None:
    available = available_bytes()
    assert available is not None
    assert available > 1 << 20
