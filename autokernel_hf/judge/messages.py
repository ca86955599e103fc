"""The wire between the referee and a child: JSON in frames over a private socket.

Nothing that comes from a child is unpickled: a child may be hostile, and unpickling runs code. Tensors do not travel
here; they lie in the arena.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

_HEADER = struct.Struct("!I")
MAX_BYTES = 8 << 20


class PeerGone(Exception):  # noqa: N818 - an event, not an error
    """The other side closed the socket, or sent what is no frame."""


class TooLate(Exception):  # noqa: N818
    """Nothing whole arrived before the deadline."""


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        PeerGone: The other side is gone.
    """
    body = json.dumps(message, allow_nan=True).encode()
    try:
        channel.sendall(_HEADER.pack(len(body)) + body)
    except OSError as error:
        raise PeerGone(str(error)) from error


def receive(channel: socket.socket, *, timeout_s: float | None = None) -> dict[str, Any]:
    """Receive one message.

    Raises:
        PeerGone: The other side is gone, or does not keep to the format.
        TooLate: It did not arrive in time.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _HEADER.unpack(_exactly(channel, _HEADER.size, deadline))
    if length > MAX_BYTES:
        raise PeerGone(f"a message of {length} bytes was announced")
    try:
        message = json.loads(_exactly(channel, length, deadline))
    except ValueError as error:
        raise PeerGone(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise PeerGone("a message that is no object")
    return message


def _exactly(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([channel], [], [], left)[0]:
                raise TooLate
        try:
            part = channel.recv(min(count - len(parts), 1 << 20))
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not part:
            raise PeerGone("closed")
        parts += part
    return bytes(parts)
