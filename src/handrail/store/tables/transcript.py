"""A session's latest messages, for whoever looks something up in them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from handrail.store.encoding import decode


class Said(NamedTuple):
    """A message as it is kept."""

    position: int
    at_ns: int
    data: Mapping[str, Any]


def messages_with(connection: sqlite3.Connection, session_id: str, text: str) -> Iterator[Mapping[str, Any]]:
    """The messages of a session in which ``text`` occurs, without those that are damaged.

    :raises sqlite3.Error: when the database cannot be read
    """
    sql = "SELECT body FROM message WHERE session = ? AND instr(body, ?) > 0 ORDER BY position"
    for (body,) in connection.execute(sql, (session_id, text.encode())):
        try:
            data: object = decode(body) if isinstance(body, bytes) else None
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict):
            yield cast("dict[str, Any]", data)


def latest_messages(
    connection: sqlite3.Connection, session_id: str, *, most: int, max_bytes: int
) -> tuple[list[Said], bool]:
    """The last messages of a session, in order, without those that are damaged; and whether there are older ones.

    :param most: at most so many, and at most ``max_bytes`` of them; the last one always
    :raises sqlite3.Error: when the database cannot be read
    """
    sql = "SELECT position, at_ns, body FROM message WHERE session = ? ORDER BY position DESC LIMIT ?"
    found: list[Said] = []
    rows = size = 0
    for position, at_ns, body in connection.execute(sql, (session_id, most + 1)):
        size += len(body) if isinstance(body, bytes) else 0
        rows += 1
        if rows > most or (rows > 1 and size > max_bytes):
            return found[::-1], True
        try:
            data: object = decode(body) if isinstance(body, bytes) else None
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict) and isinstance(position, int) and isinstance(at_ns, int):
            found.append(Said(position, at_ns, cast("dict[str, Any]", data)))
    return found[::-1], False
