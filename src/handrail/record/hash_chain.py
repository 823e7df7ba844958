r"""The hash chain of the log: the exact hashed bytes, so that every changed, lost or added record is found.

An *entry* is one row: one record, or the records of one call that were written at once. Its ``kinds`` are their kinds,
separated by spaces, and its body is the JSON array of their bodies. Entries are chained in *groups* of 1 to 64 consecutive
entries that were written at once. One hash covers the headers of a group, the commitments to its bodies, and the hash of the
previous group (integers big-endian)::

    hash        = sha256("handrail group 1\0" + first:8 + count:4 + previous:32 + headers + commitments:32 each)
    headers     = [[at_ns, kinds, session, call], ...] as compact JSON in UTF-8
    commitment  = sha256("handrail body 1\0" + salt:16 + body)
    previous    = hash of the group before; of the first: 32 zero bytes

``first`` is the sequence of the group's first record, and ``count`` the number of its entries. The headers give the sequence of
every other record. Bodies and salts enter the hashes only through their commitments. A
body and its salt can be removed together: the remaining commitment reveals nothing about them, and all hashes stay valid.

Each stored entry has its commitment as its *seal*. The last seal of a group also contains the hash of the group. The end of
a group therefore follows from hashed data: if a border is moved, removed or added, a hash no longer matches.
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
"""Entries."""
CLOSING_SEAL_BYTES = 64
"""The length of a seal that ends a group."""

EntryHeader = tuple[int, str, str, str]
"""Time (nanoseconds), kinds, session and call."""

_GROUP = b"handrail group 1\0"
_COMMITMENT = 32
_pack = struct.Struct(">QI").pack
new_commitment = sha256(b"handrail body 1\0").copy
"""Return a new commitment, to be fed with salt and body. Copying a hash is faster than creating one."""


def hash_group(first: int, previous: bytes, headers: Sequence[EntryHeader], commitments: Sequence[bytes]) -> bytes:
    """Return the hash of one group, which the next group uses as its ``previous``.

    :raises TypeError: if a text is not valid Unicode (half a surrogate pair)
    """
    numbers = _pack(first, len(headers))
    return sha256(b"".join((_GROUP, numbers, previous, orjson.dumps(headers), *commitments))).digest()


def count_entry_records(kinds: str) -> int:
    return kinds.count(" ") + 1


def extract_group_hash(seal: object) -> bytes | None:
    """Return the hash of the group that a stored seal ends, or None if the seal ends no group."""
    return seal[_COMMITMENT:] if isinstance(seal, bytes) and len(seal) == CLOSING_SEAL_BYTES else None


class ChainFault(NamedTuple):
    """A fault in the stored records."""

    sequence: int
    """The first record that may be affected."""
    problem: str
    """The description for the user, without the number."""
    last: int
    """The last record that may be affected."""

    def __str__(self) -> str:
        if self.last > self.sequence:
            return f"records {self.sequence} to {self.last}: {self.problem}"
        return f"record {self.sequence}: {self.problem}"


class ChainVerifier:
    """A verifier that reads stored entries in order and finds the first one that was changed.

    It locates a changed body or commitment by entry, and any other change by group.

    :param after: the record after which it starts; it must end a group; 0 for the beginning of the log
    :param head: the hash of that group
    """

    def __init__(self, after: int = 0, head: bytes = GENESIS) -> None:
        self.sequence = after
        """The last record that was checked."""
        self.head = head
        """The hash of the last valid group."""
        self._first = after + 1
        self._headers: list[EntryHeader] = []
        self._commitments: list[bytes] = []

    def check_entry(self, row: tuple[Any, ...]) -> ChainFault | None:
        """Check the next entry, and return its fault, if any.

        :param row: sequence, at_ns, kinds, session, call, seal and body, as stored
        """
        sequence, at_ns, kinds, session, call, seal, body = row
        expected = self.sequence + 1
        if sequence > expected:
            return ChainFault(expected, f"missing; record {sequence} follows record {expected - 1}", sequence - 1)
        if sequence < expected:
            return ChainFault(sequence, "was added: the log starts with record 1", sequence)
        if (
            not isinstance(seal, bytes)
            or len(seal) not in (_COMMITMENT, CLOSING_SEAL_BYTES)
            or type(at_ns) is not int
            or not all(isinstance(text, str) for text in (kinds, session, call))
        ):
            return ChainFault(sequence, "its header has fields of the wrong type", sequence)
        last = sequence + count_entry_records(kinds) - 1
        commitment = seal[:_COMMITMENT]
        if body is not None and (not isinstance(body, bytes) or compute_body_commitment(body) != commitment):
            whose = (
                "its body or the commitment to its body"
                if last == sequence
                else "a body or the commitment to the bodies"
            )
            return ChainFault(sequence, f"{whose} was changed", last)
        self.sequence = last
        self._headers.append((at_ns, kinds, session, call))
        self._commitments.append(commitment)
        if len(seal) == CLOSING_SEAL_BYTES:
            return self._close_group(seal[_COMMITMENT:])
        if len(self._headers) >= MAX_GROUP:
            return self.check_unfinished_group()
        return None

    def check_unfinished_group(self) -> ChainFault | None:
        """Return the fault of the records after the last complete group, if there are any.

        Call it after the last record.
        """
        if not self._headers:
            return None
        return ChainFault(self._first, "the end of their group is missing", self.sequence)

    def _close_group(self, noted: bytes) -> ChainFault | None:
        try:
            found = hash_group(self._first, self.head, self._headers, self._commitments)
        except TypeError:
            return ChainFault(self._first, "one of their headers contains text that was never written", self.sequence)
        if found != noted:
            several = self.sequence > self._first
            what = "one of their headers or their" if several else "its header or its"
            return ChainFault(self._first, f"{what} place in the chain was changed", self.sequence)
        self.head = noted
        self._first = self.sequence + 1
        self._headers.clear()
        self._commitments.clear()
        return None


def compute_body_commitment(salted: bytes) -> bytes:
    commitment = new_commitment()
    commitment.update(salted)
    return commitment.digest()
