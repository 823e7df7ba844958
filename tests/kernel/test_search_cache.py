"""The stored search index: shared by all workspaces of a user, and inaccessible from each."""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail.testing.scripted_kernel import temporary_kernel


@pytest.mark.proves("D-05")
async def test_workspaces_of_one_state_folder_share_the_stored_search_index(tmp_path: Path) -> None:
    settings = '[search]\nembedder = "none"\n'
    kept: list[list[str]] = []
    for name in ("one", "two"):
        place = tmp_path / name
        place.mkdir()
        (tmp_path / "state").mkdir(exist_ok=True)
        (place / "state").symlink_to(tmp_path / "state")
        async with temporary_kernel(place, settings=settings) as kernel:
            session = await kernel.session()
            assert (await session.call("find_tools", {"query": "what changed in the repository"})).ok
        kept.append(sorted(path.name for path in (tmp_path / "state" / "search").iterdir()))
    assert kept[0] == kept[1] and len(kept[0]) == 1
    assert not list((tmp_path / "state" / "ws").glob("*/search"))
