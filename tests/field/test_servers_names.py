"""Tool names that are not valid IDs: their IDs stay distinct, readable and stable."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.field.odd_servers import odd_server

from handrail.contract.tool.tool_ids_and_wire_names import ID_PATTERN, wire_name
from handrail.upstream.mcp_tool import make_tool_ids

GROUPS = {
    "chinese": ["查询", "更新", "查询数据", "获取user"],
    "signs": ["get.user", "get_user", "get/user", "get user", "get:user", "get-user", "getUser", "get__user"],
    "cases": ["Get", "get", "GET"],
    "accents": ["größe", "grosse", "größe2", "café", "cafe"],
    "long": ["x" * 200, "x" * 200 + "y", "x" * 44, "x" * 43 + "y", "a_long_name_that_says_what_it_does_" * 3],
    "only signs": ["...", "///", "🚀", "🔥", "_", "-"],
    "digits": ["1", "2fa", "3.5"],
    "cyrillic": ["поиск", "удалить"],
    "spelled": ["u67e5", "查"],
}


@pytest.mark.parametrize("prefix", ["s", "", "a-server-with-a-long-name_of-forty-signs"])
@pytest.mark.parametrize("names", GROUPS.values(), ids=GROUPS)
def test_tool_ids_are_distinct_and_fit_the_name_limit_with_the_client_prefix(names: list[str], prefix: str) -> None:
    ids = make_tool_ids(prefix, names)
    assert len({wire_name(one) for one in ids.values()}) == len(names)
    for one in ids.values():
        assert ID_PATTERN.match(one) and len("mcp__handrail__" + wire_name(one)) <= 64
        assert one.startswith(prefix) and "___" not in one
    assert ids == make_tool_ids(prefix, reversed(names)), "the order of the list does not matter"


def test_a_valid_name_becomes_the_tool_id_and_other_names_get_readable_ids() -> None:
    ids = make_tool_ids("s", ["get_user", "get.user", "查询", "获取user", "café", "a" * 80])
    assert ids["get_user"] == "s_get_user" and ids["get.user"].startswith("s_get_user_")
    assert ids["查询"] == "s_u67e5_u8be2" and ids["获取user"] == "s_u83b7_u53d6_user" and ids["café"] == "s_cafe"
    assert ids["a" * 80].startswith("s_" + "a" * 30)
    assert make_tool_ids("s", ["get.user"]) == {"get.user": "s_get_user"}


async def test_each_tool_id_calls_the_server_tool_of_its_original_name(tmp_path: Path) -> None:
    names = ["查询", "更新", "get.user", "get_user", "n" * 200]
    habit = f"""
sys.stdout.reconfigure(encoding="utf-8")
TOOLS = [dict(TOOLS[0], name=name) for name in {names!r}]
def result(name, args):
    return text(name)
"""
    for _ in range(2):  # the second kernel starts from the stored listing
        async with odd_server(tmp_path, habit) as (_, session):
            for name, tool_id in make_tool_ids("t", names).items():
                assert (await session.call(tool_id, {})).data == name


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["_" * 100_000 + "!", "_u0000" * 20_000, "a__" * 30_000 + "u00e9_"])
def test_a_long_name_is_spelled_in_one_pass(name: str) -> None:
    assert len(make_tool_ids("server", [name])[name]) < 200
