"""The certificate authorities that sign for hosts: those of the system, and those of a file of the operator."""

from __future__ import annotations

import ssl
from functools import lru_cache
from pathlib import Path

from handrail.contract.errors import UsageError


@lru_cache(maxsize=4)
def load_trusted_authorities(ca_file: str = "") -> ssl.SSLContext:
    """Return the trusted authorities: those of the system, and those of a file.

    :raises UsageError: if the file cannot be used
    """
    context = ssl.create_default_context()
    if ca_file:
        path = str(Path(ca_file).expanduser())
        _check_authorities(path)
        try:
            context.load_verify_locations(path)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(f"The `ca_file` is not valid: {path}: {error}. Give a file in PEM format.") from None
    return context


def _check_authorities(ca_file: str) -> None:
    """Check that a file of authorities can be read.

    :raises UsageError: with the reason
    """
    try:
        with open(ca_file, "rb") as file:  # noqa: PTH123 - only opened
            if b"-----BEGIN" not in file.read(16 * 1024 * 1024):
                raise UsageError(f"The `ca_file` has no certificate: {ca_file}. Give a file in PEM format.")
    except OSError as error:
        raise UsageError(
            f"The `ca_file` cannot be read: {ca_file}: {error.strerror or error}. Give a file in PEM format."
        ) from None
