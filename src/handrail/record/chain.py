"""The chain's arithmetic: what exactly is hashed, so that a record cannot change, vanish or appear unseen.

Header of record *n*, in a fixed encoding (integers big-endian, texts UTF-8 with their length in front)::

    "handrail record 1\\0"  len:4 kind  len:4 session  sequence:8  at_ns:8  len:4 call  commitment:32  previous:32

    commitment  = sha256("handrail body 1\\0" + salt:16 + body)
    hash        = sha256(header)
    previous    = hash of record n - 1; of record 1: 32 zero bytes

Body and salt are no part of the header. They can be removed together, and the commitment that stays behind
tells nothing about them, while all hashes still hold. A stored record has commitment, hash and salt in one value,
its *seal*.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Any

GENESIS = bytes(32)
SALT_BYTES = 16
_RECORD = b"handrail record 1\0"
_BODY = b"handrail body 1\0"
_pack_length = struct.Struct(">I").pack
_pack_numbers = struct.Struct(">QqI").pack


def commitment_of(salt: bytes, body: bytes) -> bytes:
    """What the header says about a body without revealing it."""
    return sha256(_BODY + salt + body).digest()


def prefix_of(kind: bytes, session: bytes) -> bytes:
    """The first part of a header, which many records share."""
    return b"".join((_RECORD, _pack_length(len(kind)), kind, _pack_length(len(session)), session))


def hash_of(prefix: bytes, sequence: int, at_ns: int, call: bytes, commitment: bytes, previous: bytes) -> bytes:
    """The hash of one record's header, which the next record names as its ``previous``."""
    return sha256(prefix + _pack_numbers(sequence, at_ns, len(call)) + call + commitment + previous).digest()


def seal_of(prefix: bytes, sequence: int, at_ns: int, call: bytes, previous: bytes, salt: bytes, body: bytes) -> bytes:
    """A new record's seal. In one function, since it is most of what recording costs in Python."""
    commitment = sha256(_BODY + salt + body).digest()
    header = prefix + _pack_numbers(sequence, at_ns, len(call)) + call + commitment + previous
    return commitment + sha256(header).digest() + salt


def hash_in(seal: object) -> bytes | None:
    """The hash in a stored seal, or None if it is none."""
    return seal[32:64] if isinstance(seal, bytes) and len(seal) in (64, 80) else None


def fault_in(row: tuple[Any, ...], previous: bytes) -> str | None:
    """What is wrong with one stored record, given its predecessor's hash; None if nothing is.

    :param row: sequence, at_ns, kind, session, call, seal, body as stored
    """
    sequence, at_ns, kind, session, call, seal, body = row
    digest = hash_in(seal)
    if (
        digest is None
        or not (isinstance(sequence, int) and isinstance(at_ns, int))
        or not all(isinstance(text, str) for text in (kind, session, call))
        or sequence < 0
    ):
        return "its header has fields of the wrong kind"
    commitment, salt = seal[:32], seal[64:]
    try:
        prefix, call_text = prefix_of(kind.encode(), session.encode()), call.encode()
    except UnicodeEncodeError:
        return "its header holds text that was never written"
    if hash_of(prefix, sequence, at_ns, call_text, commitment, previous) != digest:
        return "its header or its place in the chain was changed"
    if body is None and not salt:
        return None
    if not isinstance(body, bytes) or commitment_of(salt, body) != commitment:
        return "its body was changed"
    return None
