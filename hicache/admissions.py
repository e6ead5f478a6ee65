"""NVMe admission by name.

    always        whatever leaves the host (default)
    second-touch  what was used twice: the fewest writes, without the first returns (`hicache.policy.admission`)
    predicted     what its class says comes back, as far as that pays for the writes (`hicache.policy.predicted`)
"""

from collections.abc import Callable, Mapping
from typing import Final

from hicache.errors import BadRequest
from hicache.policy.admission import AdmissionPolicy, AlwaysAdmission, SecondTouchAdmission
from hicache.policy.predicted import PredictedAdmission

ALWAYS: Final = "always"
STRETCH_TOKENS: Final = 256
"""Tokens that are judged together, where pages are not larger."""
ADMISSIONS: Final[Mapping[str, Callable[[int, int, float | None], AdmissionPolicy]]] = {
    ALWAYS: lambda capacity_pages, stride, pages_per_s: AlwaysAdmission(),
    "second-touch": lambda capacity_pages, stride, pages_per_s: SecondTouchAdmission(stride=stride),
    "predicted": lambda capacity_pages, stride, pages_per_s: PredictedAdmission(
        capacity_pages=capacity_pages, stride=stride, pages_per_s=pages_per_s
    ),
}
"""What makes an admission policy of each name, with its defaults: for an NVMe tier of so many pages, of which so many
are judged together, and so many may be written in a second in the long run (None for no bound)."""


def check_admission(name: object) -> str:
    """The name of an admission policy. Raises `BadRequest` with those there are."""
    if not isinstance(name, str) or name not in ADMISSIONS:
        raise BadRequest("admission", f"{name!r:.80} is none of {', '.join(ADMISSIONS)}")
    return name


def admission_named(
    name: str, capacity_pages: int, *, page_size: int = STRETCH_TOKENS, pages_per_s: float | None = None
) -> AdmissionPolicy:
    """An admission policy of that name, for pages of `page_size` tokens. Raises `BadRequest` as `check_admission`
    does."""
    return ADMISSIONS[check_admission(name)](capacity_pages, max(1, STRETCH_TOKENS // page_size), pages_per_s)
