"""Reports about long outputs whose end, with the summary of a test run, was cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from handrail.contract.calls_and_results import Result
from handrail.testing.scripted_kernel import temporary_kernel

RUN = "seq -f 'test %06g passed' 40000; echo FAILED é: 3 of 40000; exit 1"


@pytest.mark.parametrize("background", [False, True], ids=["call", "job"])
async def test_a_long_output_is_returned_with_its_beginning_and_its_end(background: bool, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("megabytes", [3, 70], ids=["kept", "dropped"])
@pytest.mark.parametrize("tool", ["bash", "python"])
async def test_a_very_long_output_keeps_its_beginning_and_its_end(tool: str, megabytes: int, tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow bash", "allow python", "allow bash *"]) as kernel:
        session = await kernel.session()
        arguments = {
            "bash": {
                "command": f"echo first; yes 0123456789abcde | head -c {megabytes}M; echo; echo FAILED: 3; exit 1"
            },
            "python": {
                "code": f"print('first')\nprint('0123456789abcde\\n' * ({megabytes} << 16))\nprint('FAILED: 3')\nexit(1)"
            },
        }
        result = await session.call(tool, arguments[tool])
        data, metadata = result.data, result.metadata
        assert data["exit_code"] == 1 and data["head"].startswith("first\n0123456789abcde\n")
        assert data["tail"].endswith("\n0123456789abcde\n\nFAILED: 3\n")
        assert len(data["head"]) + len(data["tail"]) <= 204_800
        file = Path(metadata["output_path"])
        assert file.stat().st_size == metadata["output_bytes"] <= 64 << 20
        assert file.read_bytes().endswith(data["tail"].encode())
        printed = len("first\n") + (megabytes << 20) + len("\nFAILED: 3\n")
        note = f"\n[{data['dropped_bytes']:,} bytes are left out here]\n" if megabytes == 70 else ""
        assert metadata["output_bytes"] == printed - data.get("dropped_bytes", 0) + len(note)
        await session.suspend()


async def test_a_truncated_list_keeps_only_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    for number in range(30):
        (tmp_path / "ws" / f"{number:02}.txt").write_text("")
    settings = "[tools.glob]\nmax_entries = 5\n"
    async with temporary_kernel(tmp_path, settings=settings) as kernel:
        session = await kernel.session()
        found = await session.call("glob", {"pattern": "*"})
        assert found.data == {"head": [f"{number:02}.txt" for number in range(5)]}
        await session.suspend()
