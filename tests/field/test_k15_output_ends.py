"""Reports about long outputs whose end, with the verdict of a test run, was cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail.contract.calls_and_results import Result
from handrail.testing.scripted_kernel import temporary_kernel

RUN = "seq -f 'test %06g passed' 40000; echo FAILED é: 3 of 40000; exit 1"


@pytest.mark.parametrize("background", [False, True], ids=["call", "job"])
async def test_the_verdict_at_the_end_of_a_long_output_is_cut_off(background: bool, tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow bash", "allow bash *"]) as kernel:
        session = await kernel.session()
        result = await session.call("bash", {"command": RUN, "background": background})
        if background:
            result = await session.call("wait", {"job_id": result.data["job_id"]})
            result = Result.from_dict(result.data["result"])
        data, metadata = result.data, result.metadata
        assert data["exit_code"] == 1 and data["tail"].endswith("passed\nFAILED é: 3 of 40000\n")
        assert data["head"].startswith("test 000001 passed\n")
        whole = Path(metadata["output_path"]).read_bytes()
        start, end = metadata["omitted_at"], metadata["omitted_at"] + metadata["omitted_bytes"]
        assert whole[:start].decode() == data["head"] and whole[end:].decode() == data["tail"]
        assert len(whole) == metadata["output_bytes"]
        await session.suspend()


async def test_a_list_and_json_keep_only_their_beginning(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    for number in range(30):
        (tmp_path / "ws" / f"{number:02}.txt").write_text("")
    settings = "[tools.glob]\nmax_entries = 5\n"
    async with temporary_kernel(tmp_path, settings=settings) as kernel:
        session = await kernel.session()
        found = await session.call("glob", {"pattern": "*"})
        assert found.data == {"head": [f"{number:02}.txt" for number in range(5)]}
        await session.suspend()
