"""JSON-RPC errors for requests that the kernel itself cannot serve: its log is damaged, its disk full.

The SDK would say "Internal server error". A call is answered with a result, which a model reads; any other request with
an error that has the same words.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any

from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR

from handrail.contract.envelopes import to_content
from handrail.contract.errors import ErrorKind, HandrailError, ToolError
from handrail.contract.result import Result

Handler = Callable[[Any, Any], Awaitable[Any]]


def told(method: str, answer: Handler) -> Handler:
    """The same, with what the kernel refuses in its own words.

    :param method: of the protocol
    """

    async def said(context: Any, params: Any) -> Any:
        try:
            return await answer(context, params)
        except HandrailError as error:
            kind: ErrorKind = error.kind if isinstance(error, ToolError) else "unavailable"
            text = str(error)
        except sqlite3.Error as error:
            kind, text = "unavailable", f"the log cannot be read: {error}. Its operator would run handrail doctor"
        if method != "tools/call":
            raise MCPError(INTERNAL_ERROR, text, {"handrail/error_kind": kind})
        result = Result.error(kind, text)
        about = {f"handrail/{key}": value for key, value in result.metadata.items()}
        return {**to_content(result, {}), "resultType": "complete", "_meta": about}

    return said
