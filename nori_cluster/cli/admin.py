"""The admin service of a cluster, for `status` and `drain`; says what to do when nothing listens there."""

import socket

from nori_cluster.errors import ConfigError, NoriError
from nori_cluster.rpc.admin import AdminClient

CONNECT_SECONDS = 3.0


class NoCluster(NoriError):
    """Nothing listens at the admin address."""


def connect(address: str) -> AdminClient:
    """A client of host:port (IPv6: [::1]:8001). Asks the socket first: gRPC's own error for this is a paragraph."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--admin {address!r} is not host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or error
        raise NoCluster(f"no cluster at {address} ({reason}); start one with `nori serve` or pass --admin") from error
    return AdminClient(address)
