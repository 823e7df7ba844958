"""The command that installs an extra works for a checkout, a built wheel, an address and a package index."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from handrail.origins.installed_package import build_extra_install_command

URL = "https://example.org/handrail.git"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"url": "file:///src/my%20code", "dir_info": {}}, ["/src/my code[mcp]"]),
        ({"url": "file:///src/handrail", "dir_info": {"editable": True}}, ["-e", "/src/handrail[mcp]"]),
        (
            {"url": "file:///dist/handrail-1-py3-none-any.whl", "archive_info": {}},
            ["/dist/handrail-1-py3-none-any.whl[mcp]"],
        ),
        ({"url": "https://example.org/h.whl", "archive_info": {}}, ["handrail[mcp] @ https://example.org/h.whl"]),
        ({"url": URL, "vcs_info": {"vcs": "git", "commit_id": "1"}}, [f"handrail[mcp] @ git+{URL}"]),
        (None, ["handrail[mcp]"]),
    ],
)
def test_an_extra_is_installed_from_where_handrail_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any] | None, words: list[str]
) -> None:
    (info := tmp_path / "handrail-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: handrail\nVersion: 1\n")
    if record is not None:
        (info / "direct_url.json").write_text(json.dumps(record))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert shlex.split(build_extra_install_command("mcp")) == [sys.executable, "-m", "pip", "install", *words]
