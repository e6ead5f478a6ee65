"""What `hicache doctor` says of a server and its machine: versions, configuration, sockets, tiers, limits, disks, GPU.

Looks and changes nothing. What cannot be looked at is a line too, never an end.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import hicache
from hicache.errors import BadRequest
from hicache.tools.checks import Check, Verdict
from hicache.tools.exits import CommandFailed
from hicache.tools.owner import OtherVersion, reached
from hicache.tools.terminal import printable
from hicache.tools.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from hicache.service.config import ServeConfig

LEAST_FILES: Final = 4096
"""Descriptors that a server should be able to open: each session takes some, and each segment on NVMe one."""
_CUPY: Final = ("cupy-cuda13x", "cupy-cuda12x")
_NVIDIA: Final = Path("/proc/driver/nvidia/version")
_WORKS: Final = {"": "answers and makes progress", "hicache.v1.Cache": "takes new sessions"}
"""What health is asked for, and what it means."""


def diagnose(directory: Path, settings: dict[str, object] | None) -> list[Check]:
    """Every line about the server whose sockets are in `directory`, and with `settings` about those."""
    checks = [*_versions(), *(_configuration(settings) if settings is not None else ()), _sockets(directory)]
    try:
        with reached(directory) as owner:
            stats = owner.stats
    except CommandFailed as problem:
        mend = "start it with hicache serve; its log says why it ended, or what it waits for"
        if isinstance(problem, OtherVersion):
            mend = "ask it with the hicache that it was started with, or start it again with this one"
        return [*checks, Check(Verdict.FAIL, "server", str(problem), mend), _limits(None), _gpu()]
    server = stats["server"]
    return [
        *checks, _server(stats), *_health(directory), *_tiers(stats["tiers"]), *_lanes(stats["lanes"]),
        _limits(int(server["pid"])), _gpu(),
    ]  # fmt: skip


def _versions() -> Iterator[Check]:
    """What hicache asks for beside itself, as far as it is older or missing."""
    problems = []
    try:
        requirements = metadata.requires("hicache") or []
    except metadata.PackageNotFoundError:
        yield Check(Verdict.WARN, "packages", "hicache is not installed as a package: its needs are not known")
        return
    for requirement in requirements:
        found = re.fullmatch(r"([\w.-]+)>=([\d.]+)", requirement)  # those of extras have a marker behind
        if found is None:
            continue
        name, least = found.groups()
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is missing")
            continue
        if _numbers(version) < _numbers(least):
            problems.append(f"{name} {version} is older than {least}")
    if problems:
        yield Check(Verdict.FAIL, "packages", ", ".join(problems), "pip install --upgrade hicache")
    else:
        yield Check(Verdict.OK, "packages", f"hicache {hicache.__version__} has all that it needs")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple([int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]])


def _configuration(settings: dict[str, object]) -> Iterator[Check]:
    from hicache.service.config import ServeConfig

    try:
        config = ServeConfig.checked(settings)
    except BadRequest as error:
        yield Check(Verdict.FAIL, "configuration", printable(str(error), 200), "hicache serve --help lists the keys")
        return
    yield Check(Verdict.OK, "configuration", "its settings are good")
    yield from _memory(config)
    yield from _disks(config)


def _memory(config: "ServeConfig") -> Iterator[Check]:
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    says = f"host.bytes is {format_bytes(config.host_bytes)} of {format_bytes(installed)} installed"
    if config.host_bytes > installed:
        yield Check(Verdict.FAIL, "memory", says, "set host.bytes to what is free beside engines and page cache")
    elif config.host_bytes > installed * 0.9:
        yield Check(Verdict.WARN, "memory", says, "engines and the kernel need some of it, too")
    else:
        yield Check(Verdict.OK, "memory", says)


def _disks(config: "ServeConfig") -> Iterator[Check]:
    for each in config.nvme_dirs:
        path = Path(each)
        name = printable(os.fspath(path))
        if not path.is_dir():
            yield Check(Verdict.WARN, "disk", f"{name} does not exist yet", "a server makes it, if its parent is there")
            continue
        if not os.access(path, os.W_OK | os.X_OK):
            yield Check(Verdict.FAIL, "disk", f"{name} cannot be written", "give it to the server's user")
            continue
        free = shutil.disk_usage(path).free
        yield Check(Verdict.OK, "disk", f"{name} has {format_bytes(free)} free (see also hicache doctor {name})")


def _sockets(directory: Path) -> Check:
    name = printable(os.fspath(directory))
    try:
        status = directory.stat()
    except OSError as error:
        return Check(Verdict.FAIL, "sockets", f"{name}: {error.strerror}", "hicache serve makes it")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o067:
        return Check(Verdict.FAIL, "sockets", f"others may enter {name} (mode {mode:04o})", f"chmod 700 {name}")
    if status.st_uid != os.geteuid():
        return Check(Verdict.WARN, "sockets", f"{name} is user {status.st_uid}'s", "run this as the server's user")
    who = "this user's alone" if not mode & 0o010 else f"this user's, and group {status.st_gid} may connect"
    return Check(Verdict.OK, "sockets", f"{name} is {who} (mode {mode:04o})")


def _server(stats: dict[str, Any]) -> Check:
    server = stats["server"]
    version = printable(str(server["version"]), 20)
    says = f"version {version}, up {format_seconds(server['up_s'])}, {plural(len(stats['sessions']), 'session')}"
    if stats["draining"]:
        return Check(Verdict.WARN, "server", f"{says}; it is about to stop", "wait, and start it again")
    if version != hicache.__version__:
        return Check(Verdict.WARN, "server", f"{says}; this is {hicache.__version__}", "restart it to upgrade it")
    return Check(Verdict.OK, "server", says)


def _health(directory: Path) -> Iterator[Check]:
    from hicache.service.healthcheck import is_well

    for service, says in _WORKS.items():
        if is_well(directory, service):
            yield Check(Verdict.OK, "health", says)
        else:
            yield Check(Verdict.FAIL, "health", f"not so: it {says}", "look into its log; stats shows queues and tiers")


def _tiers(tiers: dict[str, Any]) -> Iterator[Check]:
    for name, tier in tiers.items():
        says = f"{format_bytes(tier['used_bytes'])} of {format_bytes(tier['capacity_bytes'])} in use"
        if tier["down"]:
            mend = "free space or mend the disk; hicache doctor DIR looks at what lies there"
            yield Check(Verdict.FAIL, f"tier {name}", f"takes no new pages: {printable(str(tier['down']), 200)}", mend)
        else:
            yield Check(Verdict.OK, f"tier {name}", says)


def _lanes(lanes: dict[str, Any]) -> Iterator[Check]:
    for name, lane in lanes.items():
        if lane["failed"]:
            says = f"{plural(lane['failed'], 'page')} could not be copied since the start"
            yield Check(Verdict.WARN, f"lane {name}", says, "hicache stats says of which tier pages were corrupt")


def _limits(pid: int | None) -> Check:
    """Of the server, or without one of this shell."""
    whose = "the server" if pid is not None else "this shell"
    try:
        text = Path(f"/proc/{pid if pid is not None else 'self'}/limits").read_text()
    except OSError as error:
        return Check(Verdict.WARN, "limits", f"those of {whose} cannot be read: {error.strerror}")
    found = re.search(r"^Max open files\s+(\d+)", text, re.MULTILINE)
    if found is not None and int(found[1]) < LEAST_FILES:
        says = f"{whose} may open {int(found[1]):,} files; with many engines that is too few"
        return Check(Verdict.WARN, "limits", says, f"ulimit -n {16 * LEAST_FILES}, or LimitNOFILE= in its unit")
    return Check(Verdict.OK, "limits", f"{whose} may open {found[1] if found is not None else 'any number of'} files")


def _gpu() -> Check:
    if not _NVIDIA.exists():
        return Check(Verdict.OK, "gpu", "this machine has no NVIDIA driver; only a device tier needs one")
    for name in _CUPY:
        try:
            return Check(Verdict.OK, "gpu", f"NVIDIA driver, and {name} {metadata.version(name)} to register memory")
        except metadata.PackageNotFoundError:
            continue
    mend = "pip install 'hicache[cuda13]' (or cuda12)"
    return Check(Verdict.WARN, "gpu", "NVIDIA driver, but no cupy: engines copy through unregistered memory", mend)
