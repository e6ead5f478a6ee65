"""Where sessions begin over TCP: the service `Door`. Who comes there has brought the access token (`Edge`)."""

from typing import Final

from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.edge import Call
from hicache.service.server.welcoming import Welcoming


class DoorCalls:
    """The service `Door`. Belongs to the event loop."""

    def __init__(self, welcoming: Welcoming) -> None:
        self._welcoming: Final = welcoming

    async def enter(self, call: Call, request: pb.Hello) -> pb.Welcome:
        """See the proto. Waits for the session's staging memory."""
        self._welcoming.check(request)
        _, welcome = await self._welcoming.begin(request)
        return welcome
