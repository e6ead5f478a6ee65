"""What `HiCache.open` was asked for, checked before anything is made."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from hicache.admissions import ALWAYS, check_admission
from hicache.arguments import flag, whole
from hicache.errors import BadRequest
from hicache.layout import KVLayout
from hicache.metadata import check_metadata_bytes
from hicache.policies import check_policy
from hicache.prefill import PrefillCurve
from hicache.quotas import TenantQuota, TenantQuotas, check_quotas, in_shares
from hicache.tier import DEVICE, HOST, NVME
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.striped import MAX_STORES
from hicache.write_policy import WritePolicy

SECONDS_PER_DAY: Final = 86_400.0

Progress = Callable[[str, int, int], None]
"""What `HiCache.open` tells while a restart brings pages back: the phase, how much is done, and of how much."""
Directories = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One directory of the NVMe tier, or several."""


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `HiCache.open`. Made by `checked`."""

    layout: KVLayout
    device_bytes: int
    host_bytes: int
    nvme_dirs: tuple[Path, ...]
    nvme_bytes: int
    nvme_min_free_bytes: int
    nvme_write_bytes_per_day: int | None
    nvme_codec: str
    device: str
    metadata_bytes: int | None
    policy: str
    tenant_quotas: Mapping[str, TenantQuota]
    admission: str
    write_policy: WritePolicy
    exclusive: bool
    prefill: PrefillCurve | Literal["measure"] | None
    progress: Progress | None

    @classmethod
    def checked(
        cls,
        layout: KVLayout,
        *,
        device_bytes: int,
        host_bytes: int,
        nvme_dir: Directories | None,
        nvme_bytes: int | None,
        nvme_min_free_bytes: int,
        nvme_write_bytes_per_day: int | None,
        nvme_codec: str,
        device: str,
        metadata_bytes: int | None,
        policy: str,
        tenant_quotas: TenantQuotas | None = None,
        admission: str = ALWAYS,
        write_policy: str,
        exclusive: bool,
        prefill: PrefillCurve | Literal["measure"] | None,
        progress: Progress | None,
    ) -> "Options":
        """Raises `BadRequest` naming the argument and its bound."""
        if not isinstance(layout, KVLayout):
            raise BadRequest("layout", f"{type(layout).__name__} is no KVLayout")
        if (nvme_dir is None) != (nvme_bytes is None):
            raise BadRequest("nvme_bytes", "is given together with nvme_dir, or neither is")
        for name, value, unused in (
            ("nvme_min_free_bytes", nvme_min_free_bytes, 0),
            ("nvme_write_bytes_per_day", nvme_write_bytes_per_day, None),
            ("nvme_codec", nvme_codec, "none"),
            ("admission", admission, ALWAYS),
            ("exclusive", exclusive, False),
            ("write_policy", WritePolicy.named(write_policy), WritePolicy.DEMOTE),
        ):
            if nvme_dir is None and value != unused:
                raise BadRequest(name, "is given together with nvme_dir")
        if not isinstance(nvme_codec, str):
            raise BadRequest("nvme_codec", f"{type(nvme_codec).__name__} is no codec's name")
        try:
            PageShape.of(layout, codec=nvme_codec)
        except BadRequest as error:
            raise BadRequest("nvme_codec", error.problem) from None
        if not isinstance(device, str):
            raise BadRequest("device", f"{type(device).__name__} is no device's name")
        num_tiers = 2 if nvme_dir is None else 3
        check_metadata_bytes(metadata_bytes, page_size=layout.page_size, num_tiers=num_tiers)
        check_policy(policy)
        check_admission(admission)
        written = WritePolicy.named(write_policy)
        if flag("exclusive", exclusive) and written is not WritePolicy.DEMOTE:
            raise BadRequest("exclusive", f"contradicts {written.value}, which keeps copies on NVMe")
        if prefill == "measure" and not device.startswith("cpu"):
            raise BadRequest("prefill", f"steps on {device} are left before their work has ended; give a PrefillCurve")
        if not (prefill is None or prefill == "measure" or isinstance(prefill, PrefillCurve)):
            raise BadRequest("prefill", f"{prefill!r:.80} is no PrefillCurve, nor 'measure'")
        if progress is not None and not callable(progress):
            raise BadRequest("progress", f"{type(progress).__name__} cannot be called")
        page_bytes = layout.page_bytes
        budgets = {
            DEVICE: _budget("device_bytes", device_bytes, page_bytes),
            HOST: _budget("host_bytes", host_bytes, page_bytes),
            NVME: 0 if nvme_bytes is None else _budget("nvme_bytes", nvme_bytes, page_bytes),
        }
        quotas = in_shares(
            check_quotas(tenant_quotas), {tier_id: budget for tier_id, budget in budgets.items() if budget}
        )
        return cls(
            layout=layout,
            device_bytes=budgets[DEVICE],
            host_bytes=budgets[HOST],
            nvme_dirs=_directories(nvme_dir),
            nvme_bytes=budgets[NVME],
            nvme_min_free_bytes=whole("nvme_min_free_bytes", nvme_min_free_bytes, 0),
            nvme_write_bytes_per_day=(
                None
                if nvme_write_bytes_per_day is None
                else _budget("nvme_write_bytes_per_day", nvme_write_bytes_per_day, page_bytes)
            ),
            nvme_codec=nvme_codec,
            device=device,
            metadata_bytes=metadata_bytes,
            policy=policy,
            tenant_quotas=quotas,
            admission=admission,
            write_policy=written,
            exclusive=exclusive,
            prefill=prefill,
            progress=progress,
        )

    @property
    def nvme_pages_per_s(self) -> float | None:
        """Pages that the write budget grants in the long run; None without one."""
        daily = self.nvme_write_bytes_per_day
        return None if daily is None else daily / self.layout.page_bytes / SECONDS_PER_DAY

    def told(self, phase: str) -> Callable[[int, int], None]:
        """The opener's `progress` for one phase."""
        progress = self.progress
        if progress is None:
            return lambda _done, _total: None
        return partial(progress, phase)


def _budget(field: str, value: object, page_bytes: int) -> int:
    """A number of bytes that holds at least one page."""
    number = whole(field, value, 0)
    if number < page_bytes:
        raise BadRequest(field, f"{number} bytes are less than one page of {page_bytes} bytes")
    return number


def _directories(nvme_dir: Directories | None) -> tuple[Path, ...]:
    """The directories of the NVMe tier. Raises `BadRequest` for none, too many, no path, and one named twice."""
    if nvme_dir is None:
        return ()
    if isinstance(nvme_dir, str | os.PathLike):
        names = [nvme_dir]
    elif isinstance(nvme_dir, Iterable) and not isinstance(nvme_dir, bytes | bytearray):
        names = list(nvme_dir)
    else:
        raise BadRequest("nvme_dir", f"{type(nvme_dir).__name__} is no path, nor several")
    if not 1 <= len(names) <= MAX_STORES:
        raise BadRequest("nvme_dir", f"{len(names)} directories are not within 1 to {MAX_STORES}; or give None")
    for each in names:
        path = os.fspath(each) if isinstance(each, str | os.PathLike) else None
        if not isinstance(path, str):
            raise BadRequest("nvme_dir", f"{each!r:.80} is no path")
        if not path:
            raise BadRequest("nvme_dir", "is empty; name a directory, or None for no NVMe tier")
        if "\0" in path:
            raise BadRequest("nvme_dir", f"{path!r:.80} holds a zero byte")
    paths = [os.path.realpath(each) for each in names]
    for path in paths:
        if paths.count(path) > 1:
            raise BadRequest("nvme_dir", f"{path} is named twice")
    return tuple([Path(each) for each in names])
