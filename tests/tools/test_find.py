"""``glob`` and ``grep`` as a model calls them."""

from __future__ import annotations

import pytest
from tests.tools.desk import BuiltinToolFixture, refused

pytestmark = pytest.mark.proves("T-08")


async def test_files_are_listed_by_pattern(desk: BuiltinToolFixture) -> None:
    for name in ("a.py", "src/b.py", ".github/ci.yml"):
        desk.put(name, "")
    assert await desk.call("glob", pattern="**/*.py") == {"paths": ["a.py", "src/b.py"]}
    assert await desk.call("glob", pattern="*.py", path="src") == {"paths": ["src/b.py"]}
    assert await desk.call("glob", pattern=".github/*") == {"paths": [".github/ci.yml"]}
    assert await desk.call("glob", pattern="*.none") == {"paths": [], "searched_files": 2}


async def test_matches_are_listed_with_path_line_and_text(desk: BuiltinToolFixture) -> None:
    desk.put("a.py", "import os\n")
    desk.put("b.md", "IMPORT\n")
    assert await desk.call("grep", pattern="import", ignore_case=True) == {
        "matches": [{"path": "a.py", "line": 1, "text": "import os"}, {"path": "b.md", "line": 1, "text": "IMPORT"}]
    }
    only = await desk.call("grep", pattern="i.*", glob="*.py")
    assert [match["path"] for match in only["matches"]] == ["a.py"]
    assert await desk.call("grep", pattern="i.", literal=True) == {"matches": [], "searched_files": 2}


async def test_grep_reports_when_more_matches_exist_than_the_limit(desk: BuiltinToolFixture) -> None:
    desk.put("big", "x\n" * 10_001)
    answer = await desk.call("grep", pattern="x")
    assert len(answer["matches"]) == 10_000
    assert "narrower" in answer["has_more"]


async def test_paths_that_no_rule_allows_are_left_out_and_counted(desk: BuiltinToolFixture) -> None:
    desk.refuse[str(desk.put("key.pem", "secret\n"))] = "denied"
    desk.put("a.txt", "secret\n")
    assert await desk.call("glob", pattern="*") == {"paths": ["a.txt"], "skipped": 1}
    assert [match["path"] for match in (await desk.call("grep", pattern="secret"))["matches"]] == ["a.txt"]
    await refused(desk.call("grep", pattern="secret", path="key.pem"), "denied")


async def test_a_search_outside_the_workspace_is_denied(desk: BuiltinToolFixture) -> None:
    await refused(desk.call("grep", pattern="x", path=".."), "denied")
    await refused(desk.call("glob", pattern="*", path="/etc"), "denied")
    await refused(desk.call("glob", pattern="../**"), "denied")
    await refused(desk.call("grep", pattern="x", glob="/etc/**"), "denied")
