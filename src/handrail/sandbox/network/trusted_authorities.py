"""The certificate authorities that sign for hosts: those of the system, and those of a file of the operator."""

from __future__ import annotations

import os
import ssl
from functools import lru_cache
from pathlib import Path

from handrail.contract.errors import UsageError

_SYSTEM_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def load_trusted_ssl_context(ca_file: str = "") -> ssl.SSLContext:
    """Return the trusted authorities: those of the system or of ``SSL_CERT_FILE``, and those of a file.

    :raises UsageError: if the file cannot be used
    """
    return _load(ca_file, *map(os.environ.get, _SYSTEM_VARIABLES))


@lru_cache(maxsize=4)
def _load(ca_file: str, *_system: str | None) -> ssl.SSLContext:
    """Load the authorities. OpenSSL reads ``_system``, the variables of :data:`_SYSTEM_VARIABLES`, by itself."""
    context = ssl.create_default_context()
    if ca_file:
        path = str(Path(ca_file).expanduser())
        _check_authorities(path)
        try:
            context.load_verify_locations(path)
        except (ssl.SSLError, OSError) as error:
            raise UsageError(f"The `ca_file` is not valid: {path}: {error}. Use a file in PEM format.") from None
    return context


def _check_authorities(ca_file: str) -> None:
    """Check that a file of authorities can be read.

    :raises UsageError: with the reason
    """
    try:
        with open(ca_file, "rb") as file:  # noqa: PTH123 - only opened
            if b"-----BEGIN" not in file.read(16 * 1024 * 1024):
                raise UsageError(f"The `ca_file` has no certificate: {ca_file}. Use a file in PEM format.")
    except OSError as error:
        raise UsageError(
            f"The `ca_file` cannot be read: {ca_file}: {error.strerror or error}. Use a file in PEM format."
        ) from None
