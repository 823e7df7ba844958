"""Who is at the other end of a socket, by the operating system's own word."""

from __future__ import annotations

import os
import socket
import struct
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the operating system knows it. ``pid`` is 0 in another pid namespace."""

    pid: int
    uid: int


if sys.platform == "linux":

    def peer_of(connected: socket.socket) -> Peer:
        """Who is at the other end.

        :raises OSError: when the system does not say
        """
        pid, uid, _gid = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return Peer(pid, uid)

else:  # pragma: no cover - exercised elsewhere only

    def peer_of(connected: socket.socket) -> Peer:
        """Who is at the other end. Not known on this system, so nobody joins."""
        raise OSError("this system does not tell who is at the other end of a socket")


def foreign(peer: Peer) -> str | None:
    """Why this peer is not spoken to; None for the same user."""
    if peer.uid == os.geteuid():
        return None
    return f"it belongs to user {peer.uid}, this process to user {os.geteuid()}; only the same user can join"
