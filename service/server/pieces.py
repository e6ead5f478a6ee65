"""Pages piece by piece, for sessions that map no memory: out of the arena under a lease, and into staging memory."""

from crc32c import crc32c

from hicache.errors import BadRequest, CorruptPage, LeaseExpired
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.session import Session
from hicache.service.server.staging import STAGING
from hicache.service.wire import PIECE_BYTES
from hicache.tiers.host import HostTier


def read_piece(host: HostTier, session: Session, request: pb.ReadRequest) -> pb.ReadReply:
    """See `ReadRequest`. The page stays what it is meanwhile: the lease keeps it in place. Raises `LeaseExpired`,
    `BadRequest`."""
    lent = session.leases.get(request.lease)
    if lent is None:
        raise LeaseExpired("lease", f"{request.lease} has ended or was never this session's")
    _check_piece(len(lent.slots), host.page_bytes, request.index, request.offset, request.length, "length")
    page = host.view(int(lent.slots[request.index]))
    data = bytes(page[request.offset : request.offset + request.length])
    return pb.ReadReply(data=data, checksum=crc32c(data))


def write_piece(page_bytes: int, session: Session, request: pb.WriteRequest) -> pb.WriteReply:
    """See `WriteRequest`. Raises `LeaseExpired`, `BadRequest`, `CorruptPage`."""
    reservation, staging = session.reservations.get(request.reservation), session.staging
    if reservation is None or staging is None:
        raise LeaseExpired("reservation", f"{request.reservation} has ended or was never this session's")
    slots = reservation.staging_slots
    _check_piece(len(slots), page_bytes, request.index, request.offset, len(request.data), "data")
    slot = int(slots[request.index])
    if crc32c(request.data) != request.checksum:
        raise CorruptPage(STAGING, slot, "a piece of it came with another checksum")
    with staging.view(slot, page_bytes) as page:
        page[request.offset : request.offset + len(request.data)] = request.data
    return pb.WriteReply()


def _check_piece(num_pages: int, page_bytes: int, index: int, offset: int, length: int, field: str) -> None:
    """Raises `BadRequest` unless there is such a piece of such a page."""
    if index >= num_pages:
        raise BadRequest("index", f"{index} is not within the {num_pages} pages")
    if offset >= page_bytes:
        raise BadRequest("offset", f"{offset} is not within the {page_bytes} bytes of a page")
    if not 1 <= length <= min(PIECE_BYTES, page_bytes - offset):
        most = min(PIECE_BYTES, page_bytes - offset)
        raise BadRequest(field, f"{length} bytes are not 1 to {most}, which a piece may have from there on")
