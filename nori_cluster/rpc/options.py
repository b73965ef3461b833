"""Channel and server options of every plane: explicit message bounds, keepalive, no compression.

The server tolerates pings far below the client's interval (else GOAWAY too_many_pings); gRPC ignores misspelt names
in silence, so tests check these by behaviour.
"""

MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_SECONDS = 20.0
KEEPALIVE_TIMEOUT_SECONDS = 10.0
MIN_PING_INTERVAL_SECONDS = 2.0  # what any client may do, streams open or not

Options = list[tuple[str, int]]


def _bounds() -> Options:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ]


def client_options(
    keepalive: float = KEEPALIVE_SECONDS, keepalive_timeout: float = KEEPALIVE_TIMEOUT_SECONDS
) -> Options:
    """One connection per channel (no pool shared between channels); a silent peer is noticed. Seconds.

    gRPC's own reconnection backs off to two minutes; ours decides when to try again, so it is kept short.
    """
    return [
        *_bounds(),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", round(keepalive * 1000)),
        ("grpc.keepalive_timeout_ms", round(keepalive_timeout * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def server_options(min_ping_interval: float = MIN_PING_INTERVAL_SECONDS) -> Options:
    """A port belongs to one process. Seconds."""
    return [
        *_bounds(),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", round(min_ping_interval * 1000)),
    ]
