r"""The hash chain of the log: the exact hashed bytes, so that every changed, lost or added record is found.

Records are chained in *groups*, the 1 to 64 neighbours that were written at once. One hash covers the headers of a group,
the commitments to its bodies, and by them the group before it (integers big-endian)::

    hash        = sha256("handrail group 1\0" + first:8 + count:4 + previous:32 + headers + commitments:32 each)
    headers     = [[at_ns, kind, session, call], ...] as compact JSON in UTF-8
    commitment  = sha256("handrail body 1\0" + salt:16 + body)
    previous    = hash of the group before; of the first: 32 zero bytes

``first`` is the sequence of the group's first record. Bodies and salts enter the hashes only by their commitment. They can
be removed together: the commitment that remains reveals nothing about them, while all hashes still hold.

Each stored record has its commitment as its *seal*, the last one of a group the group's hash after it. So the end of a group
follows from hashed data: a border that was moved, removed or added leaves a hash that fits nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import orjson

GENESIS = bytes(32)
SALT_BYTES = 16
MAX_GROUP = 64
"""Records."""
CLOSING_BYTES = 64
"""Of a seal that ends a group."""

Header = tuple[int, str, str, str]
"""When (nanoseconds), kind, session and call."""

_GROUP = b"handrail group 1\0"
_COMMITMENT = 32
_pack = struct.Struct(">QI").pack
new_commitment = sha256(b"handrail body 1\0").copy
"""A commitment that takes salt and body: a copy is quicker to have than a new hash."""


def hash_of(first: int, previous: bytes, headers: Sequence[Header], commitments: Sequence[bytes]) -> bytes:
    """The hash of one group, which the next one names as its ``previous``.

    :raises TypeError: for a text that is no Unicode (half a surrogate pair)
    """
    numbers = _pack(first, len(headers))
    return sha256(b"".join((_GROUP, numbers, previous, orjson.dumps(headers), *commitments))).digest()


def hash_in(seal: object) -> bytes | None:
    """The hash of the group that a stored seal ends, or None if it ends none."""
    return seal[_COMMITMENT:] if isinstance(seal, bytes) and len(seal) == CLOSING_BYTES else None


class Fault(NamedTuple):
    """What is wrong with stored records, and from which on."""

    sequence: int
    problem: str
    """For a person, without the number."""
    last: int
    """The last record that it may be in."""

    def __str__(self) -> str:
        if self.last > self.sequence:
            return f"records {self.sequence} to {self.last}: {self.problem}"
        return f"record {self.sequence}: {self.problem}"


class Walk:
    """Goes along stored records in their order, and finds the first that is not as it was written.

    A changed body or commitment is found at its record, anything else at its group.

    :param after: the record it begins behind, which ends a group; 0 for the beginning
    :param head: the hash of that group
    """

    def __init__(self, after: int = 0, head: bytes = GENESIS) -> None:
        self.sequence = after
        """The last record that was gone by."""
        self.head = head
        """The hash of the last group that holds."""
        self._first = after + 1
        self._headers: list[Header] = []
        self._commitments: list[bytes] = []

    def step(self, row: tuple[Any, ...]) -> Fault | None:
        """Go by the next record.

        :param row: sequence, at_ns, kind, session, call, seal, body as stored
        """
        sequence, at_ns, kind, session, call, seal, body = row
        expected = self.sequence + 1
        if sequence > expected:
            return Fault(expected, f"missing; record {sequence} follows record {expected - 1}", sequence - 1)
        if sequence < expected:
            return Fault(sequence, "was added: the log begins with record 1", sequence)
        if (
            not isinstance(seal, bytes)
            or len(seal) not in (_COMMITMENT, CLOSING_BYTES)
            or type(at_ns) is not int
            or not all(isinstance(text, str) for text in (kind, session, call))
        ):
            return Fault(sequence, "its header has fields of the wrong kind", sequence)
        commitment = seal[:_COMMITMENT]
        if body is not None and (not isinstance(body, bytes) or _commitment_to(body) != commitment):
            return Fault(sequence, "its body was changed, or the commitment to it", sequence)
        self.sequence = sequence
        self._headers.append((at_ns, kind, session, call))
        self._commitments.append(commitment)
        if len(seal) == CLOSING_BYTES:
            return self._close(seal[_COMMITMENT:])
        if len(self._headers) >= MAX_GROUP:
            return self.end()
        return None

    def end(self) -> Fault | None:
        """Nothing comes after the last step: what is wrong with the records that no group's end was found for."""
        if not self._headers:
            return None
        return Fault(self._first, "the end of their group is missing", self.sequence)

    def _close(self, noted: bytes) -> Fault | None:
        try:
            found = hash_of(self._first, self.head, self._headers, self._commitments)
        except TypeError:
            return Fault(self._first, "a header among them holds text that was never written", self.sequence)
        if found != noted:
            several = self.sequence > self._first
            what = "a header among them or their" if several else "its header or its"
            return Fault(self._first, f"{what} place in the chain was changed", self.sequence)
        self.head = noted
        self._first = self.sequence + 1
        self._headers.clear()
        self._commitments.clear()
        return None


def _commitment_to(salted: bytes) -> bytes:
    commitment = new_commitment()
    commitment.update(salted)
    return commitment.digest()
