"""The table between errors, statuses and reason codes, in both directions."""

import grpc
import pytest

import hicache.errors
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
from hicache.service import errors
from hicache.service.errors import WIRE, ServerFailure, ServiceError, Unreachable, from_error, from_wire, to_wire
from hicache.service.proto import hicache_pb2 as pb

ERRORS: list[HicacheError] = [
    BadRequest("prefix.tokens", "holds 3 bytes, which are no whole ids"),
    NoRoom("host", pages_asked=9, pages_free=2),
    NoRoom("leases", pages_asked=0, pages_free=0, problem="4 are all that one owner may have"),
    NotResident("nvme", "page 7"),
    LeaseExpired("deadline", "lease 3 has ended"),
    DeadlineExceeded("no room was made before the deadline"),
    CorruptPage("nvme", 12, "its checksum is another one"),
    TierUnavailable("nvme", "is read-only"),
    Closed("the server is stopping"),
    *(kind("what is wrong", field="staging_bytes") for kind in WIRE if issubclass(kind, ServiceError)),
]


def _types(module: object) -> set[type[HicacheError]]:
    found = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, HicacheError)]
    return {*found} - {HicacheError, ServiceError, Unreachable}


def test_every_type_of_error_has_a_place_in_the_table() -> None:
    assert set(WIRE) == _types(hicache.errors) | _types(errors)


def test_every_reason_code_belongs_to_one_type() -> None:
    reasons = [wire.reason for wire in WIRE.values()]
    assert sorted(reasons) == sorted(set(pb.Reason.values()) - {pb.REASON_NONE})


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was_sent(error: HicacheError) -> None:
    status, message = to_wire(error)
    assert status is WIRE[type(error)].status
    back = from_wire(status, "", message.SerializeToString())
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert {**vars(back)} == {**vars(error)}


def test_the_list_of_errors_leaves_none_out() -> None:
    assert {type(error) for error in ERRORS} == set(WIRE)


def test_a_type_without_a_place_goes_as_the_one_it_derives_from() -> None:
    class Finer(NoRoom):
        pass

    _, message = to_wire(Finer("host", pages_asked=1, pages_free=0))
    assert message.reason == pb.REASON_NO_ROOM
    assert to_wire(HicacheError("odd"))[1].reason == pb.REASON_INTERNAL


def test_a_reason_of_a_later_version_is_a_failure_of_the_server() -> None:
    message = pb.Error.FromString(b"\x08\xe7\x07\x1a\x03odd")  # reason 999, problem "odd"
    assert isinstance(from_error(message), ServerFailure)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unreachable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.LimitReached),
        (grpc.StatusCode.UNIMPLEMENTED, errors.VersionMismatch),
        (grpc.StatusCode.UNKNOWN, ServerFailure),
    ],
)
def test_what_grpc_itself_answers_is_told_apart(status: grpc.StatusCode, kind: type[HicacheError]) -> None:
    error = from_wire(status, "details", None)
    assert type(error) is kind
    assert "details" in str(error)


def test_a_long_text_is_cut() -> None:
    assert len(to_wire(Closed("x" * 10_000))[1].problem) == errors.MAX_PROBLEM_CHARS
