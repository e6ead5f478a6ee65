"""What the kernel says that this process has read from and written to block devices."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIO:
    """Counters of `/proc/self/io` since the process began, or the difference of two of them."""

    read_bytes: int
    """Bytes fetched from block devices: what the page cache already had is not among them."""
    write_bytes: int
    """Bytes sent towards block devices."""

    @classmethod
    def now(cls, path: Path = Path("/proc/self/io")) -> "ProcessIO | None":
        """The counters now; None where the kernel does not keep them (or hides them)."""
        try:
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
            return cls(int(fields["read_bytes"]), int(fields["write_bytes"]))
        except (OSError, KeyError, ValueError):
            return None

    def since(self, earlier: "ProcessIO") -> "ProcessIO":
        """What was read and written between `earlier` and this."""
        return ProcessIO(self.read_bytes - earlier.read_bytes, self.write_bytes - earlier.write_bytes)
