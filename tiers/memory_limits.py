"""How much memory this process may still take: asked before a large allocation, because the kernel's own answer to too
large a one is to kill a process."""

from collections.abc import Iterator
from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be had without swapping: the smallest of what the machine and the control groups above this
    process leave. None where none of them says. An estimate, since others allocate too."""
    found = [*_machine(proc), *_control_groups(proc, cgroup)]
    return max(0, min(found)) if found else None


def _machine(proc: Path) -> Iterator[int]:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _control_groups(proc: Path, cgroup: Path) -> Iterator[int]:
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, limit, usage, reclaimable = cgroup, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            limit, usage, reclaimable = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # A group's limit binds all groups below it. Inside a container the path may name nothing; the root then counts.
        group = root / path.lstrip("/")
        while True:
            bound, used = _number(_read(group / limit)), _number(_read(group / usage))
            if bound is not None and used is not None:
                yield bound - used + _field(_read(group / "memory.stat"), reclaimable)
            if group == root:
                break
            group = group.parent


def _field(table: str, name: str) -> int:
    for line in table.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None  # "max" is no limit


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
