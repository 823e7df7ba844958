"""``[secrets]``: names for values that are stored elsewhere: in a variable, a file, or with a program.

A value itself is never in a configuration file: such files are copied, shown and committed. A message about a faulty entry
does not repeat it, since it may be a secret that the user wrote there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from handrail.config.operator_settings import SecretReference
from handrail.contract.schema.argument_validation import format_json_path
from handrail.contract.schema.locked_tool_shapes import LOCKED_SHAPES
from handrail.contract.tool.manifest import find_model_validation_faults
from handrail.contract.tool.operator_tool_settings import ToolSettings
from handrail.origins.program_lookup import ProgramRefused, build_program_environment, resolve_command_program
from handrail.runtime.secret_store import SecretStore, explain_invalid_secret_name

MAX_BYTES = 64 * 1024
COMMAND_TIMEOUT_S = 30.0
_KINDS = ("env", "file", "command")
_MANAGER_VARIABLES = (
    *("DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "SSH_AUTH_SOCK", "GNUPGHOME", "GPG_TTY"),
    *(
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
    ),
    *("KUBECONFIG", "CLOUDSDK_CONFIG", "GOOGLE_APPLICATION_CREDENTIALS", "SOPS_AGE_KEY_FILE", "TERM"),
)
_MANAGER_PREFIXES = ("PASSWORD_STORE_", "AWS_", "AZURE_", "VAULT_", "OP_", "BW_", "BWS_", "DOPPLER_", "INFISICAL_")
"""The environment variables that password managers need; a command that needs another sets it, for instance by /usr/bin/env."""
_FORM = '{ env = "VARIABLE" }, { file = "/absolute/path" } or { command = ["program", "argument"] }'
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def find_secret_table_faults(given: Any) -> Iterator[tuple[str, str]]:
    """Yield ``(place, problem)`` of a table of references, without the values, which may be secret."""
    if not isinstance(given, Mapping):
        yield "secrets", f"is not a table; expected NAME = {_FORM}"
        return
    for name, reference in cast("Mapping[str, Any]", given).items():
        place = format_json_path(("secrets", name))
        if problem := explain_invalid_secret_name(name):
            yield place, problem
        yield from ((place, problem) for problem in _faults_in_reference(name, reference))


def find_tools_table_faults(given: Any) -> Iterator[tuple[str, str]]:
    """Yield ``(place, problem)`` of the tables of tools, by their ids, without values that may be secret."""
    form = '[tools."ID"] with enabled, timeout_ms, max_output or max_entries, or [tools."ID".config] with lines such as KEY = "VALUE"'
    if not isinstance(given, Mapping):
        yield "tools", f"is not a table; expected {form}"
        return
    for tool, settings in cast("Mapping[str, Any]", given).items():
        if not isinstance(settings, Mapping):
            yield format_json_path(("tools", tool)), f"is not a table; expected {form}"
            continue
        own = cast("Mapping[str, Any]", settings)
        limits = {key: value for key, value in own.items() if key != "config"}
        for place, problem in find_model_validation_faults(ToolSettings, limits, ("tools", tool)).items():
            dotted = any(isinstance(value, Mapping) for value in limits.values())
            yield place, problem + ". Write an id with a dot in quotes" * dotted
        if "answered_by" in own and tool not in LOCKED_SHAPES:
            known = " and ".join(LOCKED_SHAPES)
            yield (
                format_json_path(("tools", tool, "answered_by")),
                f"only {known} can have another tool that answers; remove this setting",
            )
        config: Any = own.get("config", dict[str, Any]())
        if not isinstance(config, Mapping):
            yield format_json_path(("tools", tool, "config")), f"is not a table; expected {form}"
            continue
        for key, value in cast("Mapping[str, Any]", config).items():
            if (problem := _fault_in_setting(key, value)) is not None:
                yield format_json_path(("tools", tool, "config", key)), problem


def _fault_in_setting(key: str, given: Any) -> str | None:
    """Return the reason why a tool's setting cannot have a value, or None."""
    if isinstance(given, str):
        return None
    if isinstance(given, (bool, int, float)):
        return f'is not text; write the value of a setting in quotes, as in {key} = "…"'
    reference = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else dict[str, Any]()
    if isinstance(reference.get("secret"), str) and len(reference) == 1:
        return None
    return (
        f'is neither text nor a reference to a secret; expected {key} = "VALUE", or for a secret '
        f'setting {key} = {{ secret = "NAME" }} and the location of the value as NAME under [secrets]'
    )


def _faults_in_reference(name: str, given: Any) -> Iterator[str]:
    if isinstance(given, (str, int, float)):
        yield (
            "is a value, which a configuration file must not have. Put the value into a variable, a file "
            f"of mode 0600 or a password manager, and write {name} = {_FORM}. If it was a real secret, "
            "replace it, since others may know it"
        )
        return
    if not isinstance(given, Mapping):
        yield f"is not a reference; expected {_FORM}"
        return
    table = cast("Mapping[str, Any]", given)
    if unknown := [key for key in table if key not in _KINDS]:
        yield f"has the unknown key{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}; expected {_FORM}"
        return
    if len(table) != 1:
        yield f"has {' and '.join(table) or 'no key'}; expected exactly one of {_FORM}"
        return
    ((kind, where),) = table.items()
    fault = _fault_in_program(where) if kind == "command" else _fault_in_place(kind, where)
    if fault is not None:
        yield f"{kind}: {fault}"


def _fault_in_program(given: Any) -> str | None:
    parts = cast("list[Any]", given) if isinstance(given, list) else []
    if not parts or not all(isinstance(part, str) and "\0" not in part for part in parts) or not parts[0]:
        return "expected a list of strings, the program and its arguments"
    return None


def _fault_in_place(kind: str, given: Any) -> str | None:
    if not isinstance(given, str) or not given or "\0" in given:
        return "expected a string that is not empty"
    if kind == "file" and not Path(given).expanduser().is_absolute():
        return "expected an absolute path, or one that begins with ~"
    if kind == "env" and "=" in given:
        return "expected the name of an environment variable"
    return None


async def resolve_secrets(references: Mapping[str, SecretReference], environment: Mapping[str, str]) -> SecretStore:
    """Return the secrets that are available now, with the reasons why others are not."""
    outcomes = await asyncio.gather(*(_resolve_reference(one, environment) for one in references.values()))
    values: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, (value, why) in zip(references, outcomes, strict=True):
        if value is not None:
            values[name] = value
        else:
            missing[name] = why
    return SecretStore(values, missing)


async def _resolve_reference(reference: SecretReference, environment: Mapping[str, str]) -> tuple[str | None, str]:
    if reference.env is not None:
        value = environment.get(reference.env)
        return value or None, f"the variable {reference.env} is {'not set' if value is None else 'empty'}; set it"
    if reference.file is not None:
        return await asyncio.to_thread(_read_secret_file, Path(reference.file).expanduser())
    assert reference.command is not None
    return await _run_secret_command(reference.command)


def _read_secret_file(path: Path) -> tuple[str | None, str]:
    """Return the content of a file that only the operator can read, without its last line end."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        return None, (f"{path} cannot be opened: {error.strerror or error}; the file must exist and must not be a link")
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None, f"{path} is not a regular file"
        if os.name == "posix":
            if found.st_uid not in (0, os.geteuid()):
                return None, f"{path} belongs to user {found.st_uid}; run: chown {os.geteuid()} {path}"
            if found.st_mode & 0o077:
                return None, f"{path} is readable by others; run: chmod 600 {path}"
        if found.st_size > MAX_BYTES:
            return None, f"{path} is too large; the limit is {MAX_BYTES // 1024} KiB"
        content = os.read(descriptor, MAX_BYTES + 1)
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror or error}"
    finally:
        os.close(descriptor)
    return _decode_secret(content, str(path))


async def _run_secret_command(argv: tuple[str, ...]) -> tuple[str | None, str]:
    """Run the operator's program and return its stdout, without its last line end.

    Its stderr may have secrets and is dropped.
    """
    program = argv[0]
    try:
        command = resolve_command_program(argv)
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd="/",
            env=build_program_environment(_MANAGER_VARIABLES, prefixes=_MANAGER_PREFIXES),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except ProgramRefused as error:
        return None, str(error)
    except (OSError, ValueError) as error:
        return None, f"{program} cannot be started: {getattr(error, 'strerror', None) or type(error).__name__}"
    assert process.stdout is not None
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            content = b""
            while len(content) <= MAX_BYTES and (piece := await process.stdout.read(MAX_BYTES)):
                content += piece
            code = await process.wait() if len(content) <= MAX_BYTES else 0
    except TimeoutError:
        return None, f"{program} did not answer within {COMMAND_TIMEOUT_S:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if code != 0:
        return None, f"{program} ended with exit code {code}"
    return _decode_secret(content, program)


def _decode_secret(content: bytes, where: str) -> tuple[str | None, str]:
    if len(content) > MAX_BYTES:
        return None, f"the value of {where} is too large; the limit is {MAX_BYTES // 1024} KiB"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None, f"the value of {where} is not UTF-8 text"
    text = text.removesuffix("\n").removesuffix("\r")
    return text or None, f"the value of {where} is empty"
