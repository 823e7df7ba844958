"""Rules with examples from a joined process: the holder checks them and reports faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.kernel.guests import joined_kernel

from handrail import LoadError
from handrail.kernel.remote_kernel import RemoteKernel
from handrail.testing.scripted_kernel import temporary_kernel

WRONG = {"rule": "allow read docs/**", "match": ["src/a.py"]}
RIGHT = {"rule": "allow write notes/**", "match": ["notes/a"], "not_match": ["src/a"]}


@pytest.fixture
async def joined(tmp_path: Path) -> AsyncIterator[RemoteKernel]:
    async with temporary_kernel(tmp_path), joined_kernel(tmp_path) as kernel:
        yield kernel


@pytest.mark.proves("P-04")
async def test_a_rule_that_fails_its_own_example_prevents_a_process_from_joining(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path):
        with pytest.raises(LoadError, match=r"does not match its example 'src/a\.py'"):
            async with joined_kernel(tmp_path, rules=[WRONG]):
                pass
        async with joined_kernel(tmp_path, rules=[RIGHT]) as kernel:
            result = await (await kernel.session()).call("write", {"path": "notes/x", "content": "x"})
            assert result.ok, result.error_text


@pytest.mark.proves("P-04")
async def test_a_rule_that_fails_its_own_example_is_refused_for_sessions_and_explanations(joined: RemoteKernel) -> None:
    with pytest.raises(LoadError, match="does not match its example"):
        await joined.session(rules=[WRONG])
    with pytest.raises(LoadError, match="does not match its example"):
        await joined.explain_call("read", {"path": "a"}, rules=[WRONG])
    session = await joined.session(rules=[RIGHT])
    assert (await session.call("write", {"path": "notes/x", "content": "x"})).ok
    explained = await joined.explain_call("write", {"path": "notes/x", "content": "x"}, rules=[RIGHT])
    assert explained.action == "allow"
