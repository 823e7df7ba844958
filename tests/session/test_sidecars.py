"""The file of a truncated output: its session reads and searches it, and no other session does."""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail.contract.calls_and_results import Result
from handrail.contract.session_protocols import Session
from handrail.kernel.kernel_interface import Kernel
from handrail.testing.scripted_kernel import temporary_kernel

LINES = 500


async def _truncated(kernel: Kernel) -> tuple[Session, Result]:
    Path(kernel.workdir, "many.txt").write_text("".join(f"needle {n}\n" for n in range(LINES)))
    session = await kernel.session()
    result = await session.call("grep", {"pattern": "needle"})
    assert result.metadata["truncated"] is True
    return session, result


@pytest.mark.proves("O-01")
async def test_the_rest_of_a_truncated_output_is_read_from_its_sidecar() -> None:
    async with temporary_kernel() as kernel:
        session, cut = await _truncated(kernel)
        shown = len(cut.data["head"])
        rest = await session.call("read", {"path": cut.metadata["output_path"], "offset": shown + 1})
        assert rest.error_text is None
        expected = [f"many.txt:{n + 1}:needle {n}" for n in range(shown, LINES)]
        assert rest.data["text"].splitlines() == expected


@pytest.mark.proves("O-01")
async def test_an_output_file_is_kept_outside_the_state_until_its_session_is_closed(
    tmp_path: Path,
) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session, cut = await _truncated(kernel)
        path = Path(cut.metadata["output_path"])
        assert path.stat().st_size == cut.metadata["output_bytes"]
        assert kernel.log.database.path.parent not in path.parents
        await session.suspend()
        assert path.is_file()
        again = await kernel.session(session.id)
        assert (await again.call("read", {"path": str(path), "limit": 1})).ok
        await again.close()
        assert not path.exists()


async def test_a_sidecar_can_be_searched() -> None:
    async with temporary_kernel() as kernel:
        session, cut = await _truncated(kernel)
        path = cut.metadata["output_path"]
        found = await session.call("grep", {"pattern": "needle 499$", "path": path})
        assert found.error_text is None
        assert [match["text"] for match in found.data["matches"]] == ["many.txt:500:needle 499"]


async def test_a_forked_session_reads_only_sidecars_from_before_the_fork(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session, cut = await _truncated(kernel)
        path = cut.metadata["output_path"]
        history = session.history
        assert history is not None
        await history.store_messages([(0, {"role": "results", "text": f"the rest is in {path}", "n": 1.5})])
        forked = await kernel.session(await kernel.fork_session(session.id))
        assert forked.history is not None
        ((_, said),) = await forked.history.read_stored_messages()
        its = str(said["text"]).removeprefix("the rest is in ")
        assert its != path and Path(its).read_text() == Path(path).read_text() and said["n"] == 1.5
        rest = await forked.call("read", {"path": its, "offset": 1})
        assert rest.ok and rest.data["text"].startswith("many.txt:1:needle 0")
        assert (await forked.call("read", {"path": path})).error_kind in ("denied", "not_found")
        later = (await session.call("grep", {"pattern": "needl"})).metadata["output_path"]
        assert not Path(later.replace(session.id, forked.id)).exists()
        await session.close()
        assert (await forked.call("read", {"path": its})).ok


async def test_only_the_kernel_writes_a_sidecar() -> None:
    async with temporary_kernel(rules=["allow write", "allow edit", "allow fs.*"]) as kernel:
        session, cut = await _truncated(kernel)
        path = cut.metadata["output_path"]
        before = Path(path).read_text()
        refused = await session.call("write", {"path": path, "content": "something else"})
        assert refused.error_kind == "denied"
        assert Path(path).read_text() == before


@pytest.mark.parametrize("rules", [[], ["allow read", "allow fs.read"], ["allow fs.read /**"]])
async def test_another_session_cannot_read_a_sidecar_under_any_rules(rules: list[str]) -> None:
    async with temporary_kernel(rules=rules) as kernel:
        _, cut = await _truncated(kernel)
        other = await kernel.session()
        for tool, arguments in (("read", {}), ("grep", {"pattern": "needle"})):
            refused = await other.call(tool, {"path": cut.metadata["output_path"], **arguments})
            assert refused.error_kind == "denied", refused
