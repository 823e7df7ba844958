"""Where Handrail was installed from, and the command that adds one of its extras from there."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any
from urllib.parse import unquote, urlsplit


def build_extra_install_command(extra: str) -> str:
    """Return the shell command that installs an extra for the running Python, from where Handrail was installed.

    An installer records a folder, an archive or an address in ``direct_url.json`` (PEP 610), and nothing for an index.
    """
    words = [sys.executable, "-m", "pip", "install"]
    record = _read_source_record()
    url, vcs = str(record.get("url", "")), record.get("vcs_info")
    if url.startswith("file://") and not vcs:
        words += ["-e"] if record.get("dir_info", {}).get("editable") else []
        words.append(f"{unquote(urlsplit(url).path)}[{extra}]")
    else:
        address = f"{vcs['vcs']}+{url}" if vcs else url
        words.append(f"handrail[{extra}] @ {address}" if address else f"handrail[{extra}]")
    return shlex.join(words)


def _read_source_record() -> dict[str, Any]:
    from importlib import metadata  # only for a message: it takes long to import

    try:
        return json.loads(metadata.distribution("handrail").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return {}
