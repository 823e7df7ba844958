"""The ``mcpServers`` object that other programs keep in their own files, read as upstream servers of ours.

What such a file says of rights (``autoApprove``, ``alwaysAllow`` and the like) gives none here. ``${VARIABLE}`` and
``${VARIABLE:-default}`` stand for variables of this process, as in those programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pydantic

from handrail.config.mcp import NAME, McpServer
from handrail.contract.errors import Fault

MAX_BYTES = 4 * 1024 * 1024
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_TRANSPORTS = {
    "stdio": "stdio",
    "local": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamableHttp": "http",
    "streamable_http": "http",
    "remote": "http",
    "sse": "sse",
}


def servers_in(
    path: Path, environment: Mapping[str, str], learn: Callable[[str], None] = lambda value: None
) -> tuple[dict[str, McpServer], list[Fault]]:
    """The servers of one file, by name, and everything that is wrong with it.

    :param environment: the variables that it may name
    :param learn: told each value that came from a variable: it may be a secret
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        return {}, [Fault(str(path), "", f"cannot be read: {error.strerror or error}")]
    if len(content) > MAX_BYTES:
        return {}, [Fault(str(path), "", f"is larger than {MAX_BYTES // 2**20} MiB")]
    try:
        whole: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        return {}, [Fault(str(path), "", f"is no JSON: {error}")]
    table: Any = cast("dict[str, Any]", whole).get("mcpServers") if isinstance(whole, dict) else None
    if table is None and isinstance(whole, dict):
        table = cast("dict[str, Any]", whole).get("servers")
    if not isinstance(table, dict):
        return {}, [Fault(str(path), "mcpServers", "is missing; expected an object with a server under each name")]
    found: dict[str, McpServer] = {}
    faults: list[Fault] = []
    for name, said in cast("dict[str, Any]", table).items():
        where = f"mcpServers.{name[:60]}"
        if re.fullmatch(NAME, name) is None:
            faults.append(
                Fault(str(path), where, "is no name: letters, digits, '-' and '_', a letter first, at most 40")
            )
        elif not isinstance(said, dict):
            faults.append(Fault(str(path), where, "is no object"))
        else:
            try:
                found[name] = _server(cast("dict[str, Any]", said), environment, learn)
            except pydantic.ValidationError as error:
                problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
                faults.append(Fault(str(path), where, problems))
            except ValueError as error:
                faults.append(Fault(str(path), where, str(error)))
    return found, faults


def _server(said: Mapping[str, Any], environment: Mapping[str, str], learn: Callable[[str], None]) -> McpServer:
    """:raises ValueError: for what cannot be a server; a pydantic error is one"""

    def filled(value: object) -> object:
        if isinstance(value, str):
            return _VARIABLE.sub(lambda match: _value(match, environment, learn), value)
        if isinstance(value, list):
            return [filled(one) for one in cast("list[object]", value)]
        if isinstance(value, dict):
            return {key: filled(one) for key, one in cast("dict[str, object]", value).items()}
        return value

    given: dict[str, Any] = {}
    url = said.get("url", said.get("serverUrl", said.get("httpUrl")))
    kind = _TRANSPORTS.get(str(said.get("type", said.get("transport", "http" if url else "stdio"))))
    if kind is None:
        raise ValueError(f"type is {said.get('type')!r}; expected stdio, http or sse")
    command: Any = said.get("command")
    if isinstance(command, list) and command:  # some write the whole argv there
        given["command"], given["args"] = cast("list[Any]", command)[0], [*cast("list[Any]", command)[1:]]
    elif command is not None:
        given["command"] = command
    if url is not None and kind != "stdio":
        given |= {"url": url, "transport": kind}
        if said.get("headers"):
            given["headers"] = said["headers"]
    elif command is not None:
        if said.get("args"):
            given["args"] = said["args"]
        env = said.get("env", said.get("environment"))
        if env:
            given["env"] = env
    else:
        raise ValueError("has neither command nor url")
    given = {key: filled(value) for key, value in given.items()}
    if said.get("disabled") is True or said.get("enabled") is False:
        given["enabled"] = False
    return McpServer.model_validate_json(json.dumps(given), strict=True)


def _value(match: re.Match[str], environment: Mapping[str, str], learn: Callable[[str], None]) -> str:
    name, default = match.groups()
    if name in environment:
        learn(environment[name])
        return environment[name]
    if default is None:
        raise ValueError(f"names the variable {name}, which is not set")
    return default
