"""Are the ports of a cluster free? Asked before a model is loaded, so that the answer takes no minute."""

import errno
import socket

from nori_cluster.config import ClusterConfig
from nori_cluster.errors import ConfigError, NoriError


class PortInUse(NoriError):
    """Another process listens there; names the port and the flag that moves ours."""


def wanted(config: ClusterConfig) -> list[tuple[str, int, str]]:
    """(host, port, flag) of everything a local cluster listens on; 0 = chosen by the system."""
    ports = config.ports
    outside = [(ports.http, "--port"), (ports.grpc, "--grpc-port"), (ports.metrics, "--metrics-port")]
    inside = [(ports.router, "--router-port"), (ports.admin, "--admin-port")]
    groups = range(config.replicas) if ports.dataplane else ()
    inside += [(ports.dataplane + group, "--data-plane-port") for group in groups]
    return [(config.host, *item) for item in outside] + [(config.internal_host, *item) for item in inside]


def check_free(config: ClusterConfig) -> None:
    """Raises PortInUse, or ConfigError for a host that is not of this machine."""
    for host, port, flag in wanted(config):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise PortInUse(f"port {port} is in use; choose another with {flag}") from error
                if error.errno == errno.EACCES:
                    raise PortInUse(f"port {port} needs more rights; choose another with {flag}") from error
                reason = error.strerror or error
                raise ConfigError(f"--host {host}: cannot listen there: {reason}") from error
