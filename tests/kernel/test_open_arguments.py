"""Invalid arguments of ``open_kernel``: the error names the value and the expected form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import Opens, by_both_doors

from handrail import UsageError, open_kernel, tool


@tool(side_effect="read", locks=[])
def one() -> int:
    """Give one."""
    return 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": one}, r"Invalid `tools`: <tool one>. Expected a list: tools=\[…\]"),
        ({"tools": None}, r"Invalid `tools`: None. Expected a list"),
        ({"settings": "limits.grace_ms=1"}, r"Invalid `settings`: 'limits.grace_ms=1'. Expected a list"),
        ({"settings": {"limits.grace_ms": 1}}, r"Invalid `settings`: \{.* Expected a list"),
        ({"rules": "allow read"}, r"expected a list, not one text"),
        ({"watchdogs": one.function}, r"Invalid `watchdogs`: <function one .* Expected a list"),
        ({"watchdogs": ["./look"]}, r"Invalid watchdog in `watchdogs`: './look'. Expected a function"),
    ],
)
async def test_a_single_value_in_place_of_a_list_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        async with open_kernel(tmp_path, **given):
            pass
    assert list(tmp_path.iterdir()) == []


kernel_in = by_both_doors()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"topc": "a letter"}, TypeError, "unexpected keyword argument 'topc'"),
        ({"headless": False}, UsageError, "has no approval handler"),
        ({"rules": "allow read"}, UsageError, "expected a list, not one text"),
        ({"mode": "fast"}, UsageError, "plan"),
    ],
)
async def test_an_invalid_session_option_is_refused_by_local_and_joined_kernels(
    tmp_path: Path, kernel_in: Opens, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    async with kernel_in(tmp_path) as kernel:
        with pytest.raises(error, match=said):
            await kernel.session(**given)
