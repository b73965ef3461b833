"""Bytes of a server-sent event stream → the data of each event. By hand: the bench client's inner loop.

One read mostly holds whole events, "data: {…}\\n\\n" each, with nothing left over: that case takes two splits.
"""

DATA = b"data: "


class EventScanner:
    """Reads of any size in, data fields out. LF and CRLF line ends; comments and other fields are skipped."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is complete now, in order; several data lines are joined by LF."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data[:-1].replace(b"\r\n", b"\n") + data[-1:]
            if data.endswith(b"\r\n"):  # the last byte was kept out of the replacement: it may end a pair
                data = data[:-2] + b"\n"
        blocks = data.split(b"\n\n")
        self._rest = blocks.pop()
        out = []
        for block in blocks:
            if block.startswith(DATA) and b"\n" not in block:
                out.append(block[6:])
            elif (payload := _payload(block)) is not None:
                out.append(payload)
        return out

    @property
    def rest(self) -> bytes:
        """What has come of an event that is not complete."""
        return self._rest


def _payload(block: bytes) -> bytes | None:
    """The data lines of one event; None when it has none."""
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
