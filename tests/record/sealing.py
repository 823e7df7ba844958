"""Recompute the hashes of a log that a test has shortened, as if it had been written so."""

from __future__ import annotations

import sqlite3

from handrail.record.hash_chain import GENESIS, compute_body_commitment, count_entry_records, hash_group


def seal_anew(connection: sqlite3.Connection) -> None:
    """Renumber and chain the remaining entries, each as its own group."""
    left = connection.execute("SELECT sequence, at_ns, kinds, session, call, seal, body FROM record ORDER BY sequence")
    previous, number = GENESIS, 1
    for sequence, at_ns, kinds, session, call, seal, body in left.fetchall():
        commitment = seal[:32] if body is None else compute_body_commitment(body)
        previous = hash_group(number, previous, [(at_ns, kinds, session, call)], [commitment])
        connection.execute(
            "UPDATE record SET sequence = ?, seal = ? WHERE sequence = ?", (number, commitment + previous, sequence)
        )
        number += count_entry_records(kinds)
