"""`python -m hicache.service.healthcheck [SOCKET_DIR] [SERVICE]`: ends with 0 if a server is well, else with 1.

For supervisors that run a command. Without arguments it asks whether this user's own server makes progress;
`hicache.v1.Cache` is well while new sessions are taken too, `nvme` while that tier gives what it is asked for.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hicache.service.sockets import default_directory
from hicache.service.wire import HEALTH_SOCKET, address

ANSWER_S: Final = 3.0
"""How long a server may take that is well."""


def is_well(socket_dir: Path, service: str) -> bool:
    """Whether the server whose sockets are in `socket_dir` says so of a service of its. Waits `ANSWER_S` at most."""
    path = os.fspath(socket_dir.absolute() / HEALTH_SOCKET)
    with grpc.insecure_channel(address(path)) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=ANSWER_S
            )
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(arguments: Sequence[str]) -> int:
    """The exit status; 2 for too many arguments."""
    if len(arguments) > 2:
        print("usage: python -m hicache.service.healthcheck [SOCKET_DIR] [SERVICE]", file=sys.stderr)
        return 2
    socket_dir = Path(arguments[0]) if arguments and arguments[0] else default_directory()
    return 0 if is_well(socket_dir, arguments[1] if len(arguments) > 1 else "") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
