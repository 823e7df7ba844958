"""Anthropic's server tools in a reply and in the history: what they were asked, and what they gave.

https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/web-search-tool
A use is a ``server_tool_use`` block, what came of it a block whose type ends in ``_tool_result``. Both go back unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from handrail.agent.model import BlockEvent, Kept, NativeGiven
from handrail.agent.providers.fields import plain
from handrail.contract.text.json import MAX_ARGUMENT_BYTES, ArgumentText, parse_object

_USE, _RESULT = "server_tool_use", "_tool_result"


class NativeReader:
    """The blocks of one reply that are server tools'."""

    def __init__(self) -> None:
        self._open: dict[int, dict[str, Any]] = {}
        self._input: dict[int, list[str]] = {}
        self._asked: dict[str, tuple[str, dict[str, Any]]] = {}
        """By the provider's id: name and arguments."""

    def has(self, index: int) -> bool:
        """Whether that block is one."""
        return index in self._open

    def start(self, index: int, kind: object, block: object) -> None:
        """A block begins whose ``kind`` is no other's."""
        if isinstance(kind, str) and (kind == _USE or kind.endswith(_RESULT)) and (data := plain(block)) is not None:
            self._open[index] = data
            self._input[index] = []

    def add(self, index: int, piece: str) -> None:
        """A piece of a use's arguments."""
        pieces = self._input[index]
        if sum(map(len, pieces)) + len(piece) <= MAX_ARGUMENT_BYTES:
            pieces.append(piece)

    def stop(self, index: int) -> Iterator[BlockEvent]:
        block, text = self._open.pop(index), "".join(self._input.pop(index))
        if block["type"] == _USE:
            if text:
                try:
                    block["input"] = parse_object(text)
                except ArgumentText:
                    block["input"] = {}
            given = block.get("input")
            asked = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
            block["input"] = asked
            self._asked[str(block.get("id"))] = str(block.get("name") or ""), asked
            yield Kept("anthropic", block, said=True)
            return
        used = str(block.get("tool_use_id") or "")
        name, asked = self._asked.get(used, (str(block["type"]).removesuffix(_RESULT), {}))
        content: Any = block.get("content")
        yield NativeGiven(name, used, asked, content, _failed(content), Kept("anthropic", block, said=True))


def matched(content: Sequence[dict[str, Any]], *, last: bool) -> list[dict[str, Any]]:
    """Blocks of one message in which every result has its use before it, and every use its result.

    :param last: the message is the history's last, where a use may wait for its provider
    """
    uses = {block.get("id") for block in content if block.get("type") == _USE}
    results = {block.get("tool_use_id") for block in content if _is_result(block)}
    return [
        block
        for block in content
        if not (_is_result(block) and block.get("tool_use_id") not in uses)
        and not (block.get("type") == _USE and not last and block.get("id") not in results)
    ]


def _is_result(block: dict[str, Any]) -> bool:
    kind = str(block.get("type"))
    return kind.endswith(_RESULT) and kind != "tool_result"


def _failed(content: object) -> bool:
    if not isinstance(content, dict):
        return False
    inner = cast("dict[str, Any]", content)
    return str(inner.get("type", "")).endswith("_error") or bool(inner.get("error_code"))
