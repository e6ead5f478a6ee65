from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_NONE: _ClassVar[Reason]
    REASON_BAD_REQUEST: _ClassVar[Reason]
    REASON_NO_ROOM: _ClassVar[Reason]
    REASON_NOT_RESIDENT: _ClassVar[Reason]
    REASON_LEASE_EXPIRED: _ClassVar[Reason]
    REASON_DEADLINE_EXCEEDED: _ClassVar[Reason]
    REASON_CORRUPT_PAGE: _ClassVar[Reason]
    REASON_TIER_UNAVAILABLE: _ClassVar[Reason]
    REASON_CLOSED: _ClassVar[Reason]
    REASON_UNKNOWN_SESSION: _ClassVar[Reason]
    REASON_FORBIDDEN: _ClassVar[Reason]
    REASON_LIMIT: _ClassVar[Reason]
    REASON_UNKNOWN_HANDLE: _ClassVar[Reason]
    REASON_LAYOUT_MISMATCH: _ClassVar[Reason]
    REASON_VERSION_MISMATCH: _ClassVar[Reason]
    REASON_DRAINING: _ClassVar[Reason]
    REASON_INTERNAL: _ClassVar[Reason]
    REASON_UNKNOWN_NAMESPACE: _ClassVar[Reason]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_NONE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_NONE: _ClassVar[Outcome]
    OUTCOME_ACCEPTED: _ClassVar[Outcome]
    OUTCOME_RESIDENT: _ClassVar[Outcome]
    OUTCOME_DURABLE: _ClassVar[Outcome]
    OUTCOME_REFUSED: _ClassVar[Outcome]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_NONE: _ClassVar[Durability]
    DURABILITY_BEHIND: _ClassVar[Durability]
    DURABILITY_WAIT: _ClassVar[Durability]

class View(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VIEW_NONE: _ClassVar[View]
    VIEW_STATS: _ClassVar[View]
    VIEW_SNAPSHOT: _ClassVar[View]

class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_NONE: _ClassVar[Order]
    ORDER_USES: _ClassVar[Order]
    ORDER_LATEST: _ClassVar[Order]
    ORDER_BYTES: _ClassVar[Order]
    ORDER_LEASES: _ClassVar[Order]
REASON_NONE: Reason
REASON_BAD_REQUEST: Reason
REASON_NO_ROOM: Reason
REASON_NOT_RESIDENT: Reason
REASON_LEASE_EXPIRED: Reason
REASON_DEADLINE_EXCEEDED: Reason
REASON_CORRUPT_PAGE: Reason
REASON_TIER_UNAVAILABLE: Reason
REASON_CLOSED: Reason
REASON_UNKNOWN_SESSION: Reason
REASON_FORBIDDEN: Reason
REASON_LIMIT: Reason
REASON_UNKNOWN_HANDLE: Reason
REASON_LAYOUT_MISMATCH: Reason
REASON_VERSION_MISMATCH: Reason
REASON_DRAINING: Reason
REASON_INTERNAL: Reason
REASON_UNKNOWN_NAMESPACE: Reason
TIER_NONE: Tier
TIER_HOST: Tier
TIER_NVME: Tier
OUTCOME_NONE: Outcome
OUTCOME_ACCEPTED: Outcome
OUTCOME_RESIDENT: Outcome
OUTCOME_DURABLE: Outcome
OUTCOME_REFUSED: Outcome
DURABILITY_NONE: Durability
DURABILITY_BEHIND: Durability
DURABILITY_WAIT: Durability
VIEW_NONE: View
VIEW_STATS: View
VIEW_SNAPSHOT: View
ORDER_NONE: Order
ORDER_USES: Order
ORDER_LATEST: Order
ORDER_BYTES: Order
ORDER_LEASES: Order

class Error(_message.Message):
    __slots__ = ("reason", "field", "problem", "pages_asked", "pages_free", "slot")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PAGES_ASKED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    reason: Reason
    field: str
    problem: str
    pages_asked: int
    pages_free: int
    slot: int
    def __init__(self, reason: _Optional[_Union[Reason, str]] = ..., field: _Optional[str] = ..., problem: _Optional[str] = ..., pages_asked: _Optional[int] = ..., pages_free: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "tenant", "secret", "staging_bytes", "name")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    tenant: str
    secret: bytes
    staging_bytes: int
    name: str
    def __init__(self, protocol: _Optional[int] = ..., tenant: _Optional[str] = ..., secret: _Optional[bytes] = ..., staging_bytes: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("welcome", "error")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    error: Error
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "boot_id", "token", "session_id", "page_size", "page_bytes", "slot_stride", "arena_slots", "staging_slots", "attach_ms", "lease_ms", "max_tokens", "max_leases", "max_leased_pages")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_STRIDE_FIELD_NUMBER: _ClassVar[int]
    ARENA_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASES_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASED_PAGES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    boot_id: int
    token: bytes
    session_id: int
    page_size: int
    page_bytes: int
    slot_stride: int
    arena_slots: int
    staging_slots: int
    attach_ms: int
    lease_ms: int
    max_tokens: int
    max_leases: int
    max_leased_pages: int
    def __init__(self, protocol: _Optional[int] = ..., boot_id: _Optional[int] = ..., token: _Optional[bytes] = ..., session_id: _Optional[int] = ..., page_size: _Optional[int] = ..., page_bytes: _Optional[int] = ..., slot_stride: _Optional[int] = ..., arena_slots: _Optional[int] = ..., staging_slots: _Optional[int] = ..., attach_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., max_tokens: _Optional[int] = ..., max_leases: _Optional[int] = ..., max_leased_pages: _Optional[int] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("abandoned", "work", "lookup", "number")
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    abandoned: _containers.RepeatedScalarFieldContainer[int]
    work: EngineWork
    lookup: LookupRequest
    number: int
    def __init__(self, abandoned: _Optional[_Iterable[int]] = ..., work: _Optional[_Union[EngineWork, _Mapping]] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class EngineWork(_message.Message):
    __slots__ = ("queue_waits", "queue_wait_us", "prefill_tokens", "prefill_us", "decode_tokens", "decode_us")
    QUEUE_WAITS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    queue_waits: int
    queue_wait_us: int
    prefill_tokens: int
    prefill_us: int
    decode_tokens: int
    decode_us: int
    def __init__(self, queue_waits: _Optional[int] = ..., queue_wait_us: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., prefill_us: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., decode_us: _Optional[int] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("boot_id", "durable_sequence", "lost", "draining", "number", "lookup", "error")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    durable_sequence: int
    lost: _containers.RepeatedScalarFieldContainer[int]
    draining: bool
    number: int
    lookup: LookupReply
    error: Error
    def __init__(self, boot_id: _Optional[int] = ..., durable_sequence: _Optional[int] = ..., lost: _Optional[_Iterable[int]] = ..., draining: _Optional[bool] = ..., number: _Optional[int] = ..., lookup: _Optional[_Union[LookupReply, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("record", "rank")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    rank: int
    def __init__(self, record: _Optional[bytes] = ..., rank: _Optional[int] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    def __init__(self, namespace_id: _Optional[int] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("namespace_id", "handle", "tokens")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    handle: int
    tokens: bytes
    def __init__(self, namespace_id: _Optional[int] = ..., handle: _Optional[int] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("tier", "num_tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    num_tokens: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("num_tokens", "partial_tokens", "runs", "handle")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    partial_tokens: int
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    handle: int
    def __init__(self, num_tokens: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., handle: _Optional[int] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("prefix", "first_page", "call", "partial")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    first_page: int
    call: int
    partial: bool
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., first_page: _Optional[int] = ..., call: _Optional[int] = ..., partial: _Optional[bool] = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("lease", "num_tokens", "first_page", "slots", "generations", "handle", "partial_tokens", "cut_short")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CUT_SHORT_FIELD_NUMBER: _ClassVar[int]
    lease: int
    num_tokens: int
    first_page: int
    slots: bytes
    generations: bytes
    handle: int
    partial_tokens: int
    cut_short: Reason
    def __init__(self, lease: _Optional[int] = ..., num_tokens: _Optional[int] = ..., first_page: _Optional[int] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., handle: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., cut_short: _Optional[_Union[Reason, str]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("prefix", "call")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    call: int
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., call: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("lease", "num_tokens")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    num_tokens: int
    def __init__(self, lease: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("num_released",)
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    num_released: int
    def __init__(self, num_released: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("prefix", "first_page", "call")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    first_page: int
    call: int
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., first_page: _Optional[int] = ..., call: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("outcome", "reason", "reservation", "first_page", "staging_slots")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    STAGING_SLOTS_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    reason: Reason
    reservation: int
    first_page: int
    staging_slots: bytes
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., reservation: _Optional[int] = ..., first_page: _Optional[int] = ..., staging_slots: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation", "durability", "checksums")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    durability: Durability
    checksums: bytes
    def __init__(self, reservation: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("outcome", "reason", "tier", "num_tokens", "handle", "sequence", "durable_sequence")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    reason: Reason
    tier: Tier
    num_tokens: int
    handle: int
    sequence: int
    durable_sequence: int
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., num_tokens: _Optional[int] = ..., handle: _Optional[int] = ..., sequence: _Optional[int] = ..., durable_sequence: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("lease", "index", "offset", "length")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    lease: int
    index: int
    offset: int
    length: int
    def __init__(self, lease: _Optional[int] = ..., index: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("data", "checksum")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    checksum: int
    def __init__(self, data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("reservation", "index", "offset", "data", "checksum")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    index: int
    offset: int
    data: bytes
    checksum: int
    def __init__(self, reservation: _Optional[int] = ..., index: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("prefix", "within_ms", "max_pages")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_PAGES_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    within_ms: int
    max_pages: int
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., within_ms: _Optional[int] = ..., max_pages: _Optional[int] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("num_there", "num_begun", "num_left_out")
    NUM_THERE_FIELD_NUMBER: _ClassVar[int]
    NUM_BEGUN_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    num_there: int
    num_begun: int
    num_left_out: int
    def __init__(self, num_there: _Optional[int] = ..., num_begun: _Optional[int] = ..., num_left_out: _Optional[int] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("prefix", "returns", "expected_return_ms", "retain_ms", "priority")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_RETURN_MS_FIELD_NUMBER: _ClassVar[int]
    RETAIN_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    returns: bool
    expected_return_ms: int
    retain_ms: int
    priority: int
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., returns: _Optional[bool] = ..., expected_return_ms: _Optional[int] = ..., retain_ms: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class HintReply(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("prefix", "withdraw")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    withdraw: bool
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., withdraw: _Optional[bool] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("view",)
    VIEW_FIELD_NUMBER: _ClassVar[int]
    view: View
    def __init__(self, view: _Optional[_Union[View, str]] = ...) -> None: ...

class InspectPiece(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("tier", "num_pages")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    num_pages: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., num_pages: _Optional[int] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("pages_free",)
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    pages_free: int
    def __init__(self, pages_free: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ("num_held", "is_durable")
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    IS_DURABLE_FIELD_NUMBER: _ClassVar[int]
    num_held: int
    is_durable: bool
    def __init__(self, num_held: _Optional[int] = ..., is_durable: _Optional[bool] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("walk", "max_pages", "one_in")
    WALK_FIELD_NUMBER: _ClassVar[int]
    MAX_PAGES_FIELD_NUMBER: _ClassVar[int]
    ONE_IN_FIELD_NUMBER: _ClassVar[int]
    walk: int
    max_pages: int
    one_in: int
    def __init__(self, walk: _Optional[int] = ..., max_pages: _Optional[int] = ..., one_in: _Optional[int] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("num_pages", "num_corrupt", "num_failed", "walk")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    WALK_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    num_corrupt: int
    num_failed: int
    walk: int
    def __init__(self, num_pages: _Optional[int] = ..., num_corrupt: _Optional[int] = ..., num_failed: _Optional[int] = ..., walk: _Optional[int] = ...) -> None: ...

class NamedPrefix(_message.Message):
    __slots__ = ("namespace", "tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tokens: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class PinPrefixReply(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class UnpinPrefixReply(_message.Message):
    __slots__ = ("was_pinned",)
    WAS_PINNED_FIELD_NUMBER: _ClassVar[int]
    was_pinned: bool
    def __init__(self, was_pinned: _Optional[bool] = ...) -> None: ...

class PrefetchPrefixRequest(_message.Message):
    __slots__ = ("prefix", "within_ms", "max_pages")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_PAGES_FIELD_NUMBER: _ClassVar[int]
    prefix: NamedPrefix
    within_ms: int
    max_pages: int
    def __init__(self, prefix: _Optional[_Union[NamedPrefix, _Mapping]] = ..., within_ms: _Optional[int] = ..., max_pages: _Optional[int] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("num_tokens", "partial_tokens", "runs", "pinned_tokens", "priority", "retained_ms", "published", "taken_tokens", "reason", "load_us", "token_ns")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETAINED_MS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOAD_US_FIELD_NUMBER: _ClassVar[int]
    TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    partial_tokens: int
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    pinned_tokens: int
    priority: int
    retained_ms: int
    published: bool
    taken_tokens: int
    reason: str
    load_us: int
    token_ns: int
    def __init__(self, num_tokens: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., pinned_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., retained_ms: _Optional[int] = ..., published: _Optional[bool] = ..., taken_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., load_us: _Optional[int] = ..., token_ns: _Optional[int] = ...) -> None: ...

class BrowseRequest(_message.Message):
    __slots__ = ("walk", "max_nodes", "tenant", "tokens")
    WALK_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    walk: int
    max_nodes: int
    tenant: str
    tokens: bool
    def __init__(self, walk: _Optional[int] = ..., max_nodes: _Optional[int] = ..., tenant: _Optional[str] = ..., tokens: _Optional[bool] = ...) -> None: ...

class BrowseReply(_message.Message):
    __slots__ = ("nodes", "walk")
    NODES_FIELD_NUMBER: _ClassVar[int]
    WALK_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[BrowsedNode]
    walk: int
    def __init__(self, nodes: _Optional[_Iterable[_Union[BrowsedNode, _Mapping]]] = ..., walk: _Optional[int] = ...) -> None: ...

class BrowsedNode(_message.Message):
    __slots__ = ("namespace", "tenant", "first_page", "num_pages", "tiers", "age_ms", "num_leases", "priority", "retained_ms", "published", "num_children", "tokens", "num_uses", "arriving", "leaving")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETAINED_MS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_CHILDREN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_USES_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tenant: str
    first_page: int
    num_pages: int
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    age_ms: int
    num_leases: int
    priority: int
    retained_ms: int
    published: bool
    num_children: int
    tokens: bytes
    num_uses: int
    arriving: _containers.RepeatedScalarFieldContainer[Tier]
    leaving: _containers.RepeatedScalarFieldContainer[Tier]
    def __init__(self, namespace: _Optional[bytes] = ..., tenant: _Optional[str] = ..., first_page: _Optional[int] = ..., num_pages: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., age_ms: _Optional[int] = ..., num_leases: _Optional[int] = ..., priority: _Optional[int] = ..., retained_ms: _Optional[int] = ..., published: _Optional[bool] = ..., num_children: _Optional[int] = ..., tokens: _Optional[bytes] = ..., num_uses: _Optional[int] = ..., arriving: _Optional[_Iterable[_Union[Tier, str]]] = ..., leaving: _Optional[_Iterable[_Union[Tier, str]]] = ...) -> None: ...

class OutlineRequest(_message.Message):
    __slots__ = ("walk", "max_branches", "max_depth", "max_tokens", "end")
    WALK_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    walk: int
    max_branches: int
    max_depth: int
    max_tokens: int
    end: bool
    def __init__(self, walk: _Optional[int] = ..., max_branches: _Optional[int] = ..., max_depth: _Optional[int] = ..., max_tokens: _Optional[int] = ..., end: _Optional[bool] = ...) -> None: ...

class OutlineReply(_message.Message):
    __slots__ = ("walk", "num_seen", "whole", "branches", "hidden_nodes", "hidden_pages")
    WALK_FIELD_NUMBER: _ClassVar[int]
    NUM_SEEN_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_NODES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_PAGES_FIELD_NUMBER: _ClassVar[int]
    walk: int
    num_seen: int
    whole: bool
    branches: _containers.RepeatedCompositeFieldContainer[OutlinedBranch]
    hidden_nodes: int
    hidden_pages: int
    def __init__(self, walk: _Optional[int] = ..., num_seen: _Optional[int] = ..., whole: _Optional[bool] = ..., branches: _Optional[_Iterable[_Union[OutlinedBranch, _Mapping]]] = ..., hidden_nodes: _Optional[int] = ..., hidden_pages: _Optional[int] = ...) -> None: ...

class OutlinedBranch(_message.Message):
    __slots__ = ("node", "above", "total_nodes", "total_pages", "hidden_nodes", "hidden_pages")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NODES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_NODES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_PAGES_FIELD_NUMBER: _ClassVar[int]
    node: BrowsedNode
    above: int
    total_nodes: int
    total_pages: int
    hidden_nodes: int
    hidden_pages: int
    def __init__(self, node: _Optional[_Union[BrowsedNode, _Mapping]] = ..., above: _Optional[int] = ..., total_nodes: _Optional[int] = ..., total_pages: _Optional[int] = ..., hidden_nodes: _Optional[int] = ..., hidden_pages: _Optional[int] = ...) -> None: ...

class RankRequest(_message.Message):
    __slots__ = ("walk", "order", "max_nodes", "contains", "max_tokens")
    WALK_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    CONTAINS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    walk: int
    order: Order
    max_nodes: int
    contains: str
    max_tokens: int
    def __init__(self, walk: _Optional[int] = ..., order: _Optional[_Union[Order, str]] = ..., max_nodes: _Optional[int] = ..., contains: _Optional[str] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class RankReply(_message.Message):
    __slots__ = ("walk", "nodes", "num_matched", "whole")
    WALK_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_MATCHED_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    walk: int
    nodes: _containers.RepeatedCompositeFieldContainer[BrowsedNode]
    num_matched: int
    whole: bool
    def __init__(self, walk: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[BrowsedNode, _Mapping]]] = ..., num_matched: _Optional[int] = ..., whole: _Optional[bool] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("walk", "wait_ms", "end")
    WALK_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    walk: int
    wait_ms: int
    end: bool
    def __init__(self, walk: _Optional[int] = ..., wait_ms: _Optional[int] = ..., end: _Optional[bool] = ...) -> None: ...

class RecordReply(_message.Message):
    __slots__ = ("asked", "num_dropped", "walk")
    ASKED_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    WALK_FIELD_NUMBER: _ClassVar[int]
    asked: _containers.RepeatedCompositeFieldContainer[AskedPrompt]
    num_dropped: int
    walk: int
    def __init__(self, asked: _Optional[_Iterable[_Union[AskedPrompt, _Mapping]]] = ..., num_dropped: _Optional[int] = ..., walk: _Optional[int] = ...) -> None: ...

class AskedPrompt(_message.Message):
    __slots__ = ("at_us", "session", "is_acquire", "namespace", "tokens", "runs", "first_page")
    AT_US_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IS_ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    at_us: int
    session: int
    is_acquire: bool
    namespace: bytes
    tokens: bytes
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    first_page: int
    def __init__(self, at_us: _Optional[int] = ..., session: _Optional[int] = ..., is_acquire: _Optional[bool] = ..., namespace: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., first_page: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("within_ms",)
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    within_ms: int
    def __init__(self, within_ms: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("num_sessions",)
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    num_sessions: int
    def __init__(self, num_sessions: _Optional[int] = ...) -> None: ...
