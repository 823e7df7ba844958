"""A log that a test has cut short or thinned out, made whole again: as if what is left had been all that was written."""

from __future__ import annotations

import sqlite3

from handrail.record.hash_chain import GENESIS, hash_group


def seal_anew(connection: sqlite3.Connection) -> None:
    """Number what is left and chain it, each record as a group of its own."""
    left = connection.execute("SELECT sequence, at_ns, kind, session, call, seal FROM record ORDER BY sequence")
    previous = GENESIS
    for number, (sequence, at_ns, kind, session, call, seal) in enumerate(left.fetchall(), 1):
        commitment = seal[:32]
        previous = hash_group(number, previous, [(at_ns, kind, session, call)], [commitment])
        connection.execute(
            "UPDATE record SET sequence = ?, seal = ? WHERE sequence = ?", (number, commitment + previous, sequence)
        )
