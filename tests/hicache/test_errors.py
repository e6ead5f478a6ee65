"""Errors: the drawn tree is the real one, reasons are stable and tell types apart, and messages name what is needed."""

import re

import pytest

from hicache import errors
from hicache.errors import (
    BadRequest,
    Closed,
    CorruptPage,
    DeadlineExceeded,
    HicacheError,
    LeaseExpired,
    NoRoom,
    NotResident,
    TierUnavailable,
)

REASONS = {
    BadRequest: "bad_request",
    NoRoom: "no_room",
    NotResident: "not_resident",
    LeaseExpired: "lease_expired",
    DeadlineExceeded: "deadline_exceeded",
    CorruptPage: "corrupt_page",
    TierUnavailable: "tier_unavailable",
    Closed: "closed",
}


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    defined = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HicacheError)]
    assert drawn == [error.__name__ for error in defined if error is not HicacheError]
    assert all(error.__bases__[0] is HicacheError for error in defined if error is not HicacheError)


def test_reasons_are_stable_and_different() -> None:
    ours = [error for error in HicacheError.__subclasses__() if error.__module__ == errors.__name__]
    assert {error: error.reason for error in ours} == REASONS
    assert len(set(REASONS.values())) == len(REASONS)


@pytest.mark.parametrize(
    ("error", "attributes", "message"),
    [
        (BadRequest("tokens", "is empty"), {"field": "tokens", "problem": "is empty"}, "tokens: is empty"),
        (
            NoRoom("host", pages_asked=8, pages_free=3),
            {"tier": "host", "pages_asked": 8, "pages_free": 3},
            "host: 8 pages asked, 3 free",
        ),
        (NotResident("device", "page 7"), {"tier": "device"}, "page 7 is not resident in device"),
        (CorruptPage("nvme", 5, "checksum"), {"tier": "nvme", "slot": 5}, "nvme slot 5: checksum"),
        (TierUnavailable("nvme", "read-only"), {"tier": "nvme"}, "nvme: read-only"),
    ],
)
def test_errors_carry_what_a_caller_needs(error: HicacheError, attributes: dict[str, object], message: str) -> None:
    assert {name: getattr(error, name) for name in attributes} == attributes
    assert str(error) == message


@pytest.mark.parametrize(("error", "builtin"), [(BadRequest, ValueError), (DeadlineExceeded, TimeoutError)])
def test_errors_are_also_what_python_calls_them(error: type[HicacheError], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)
