"""Executable tools: a program in any language that reads JSON and answers with JSON.

The protocol of a call: the arguments, one JSON object, on stdin, and then its end; one JSON object on stdout;
exit code 0. Diagnostics go to stderr. The answer may be plain data, an envelope
(``{"type": "output", "data": …}``, ``{"type": "error", "error_text": …}``) or a status
(``{"status": "success", "summary": …}``). The environment holds ``HANDRAIL_TOOL``, ``HANDRAIL_CALL_ID``,
``HANDRAIL_SESSION_ID``, ``HANDRAIL_AGENT`` and ``HANDRAIL_WORKSPACE``; nothing of the kernel's own.

The secrets that a tool declared are one JSON object, name to value, to be read from the descriptor whose number is in
``HANDRAIL_SECRETS_FD``; without declared secrets there is no such descriptor.

Each call is a separate process group in the sandbox of that call's capability set, with the tool's folder mounted
read-only, and nothing of it outlives the call.
"""

from __future__ import annotations

import asyncio
import json
import os
import posixpath
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from handrail.contract.errors import ToolError
from handrail.contract.result_conversions import convert_known_result_shape
from handrail.contract.sandbox_protocol import ProgramSpec, Sandbox, SandboxProfile
from handrail.contract.services.tool_runtime import Runtime, resolve_intended_path
from handrail.contract.struct import Struct
from handrail.contract.text.strict_json import InvalidJsonTextError, parse_json_object
from handrail.contract.tool.requires import CapabilitySet
from handrail.contract.tool.spec import ToolSpec, find_path_arguments
from handrail.contract.tool.tool_protocol import Tool
from handrail.runtime.guard.guarded_sandbox import GuardedProcess, ProtectedPathViolation
from handrail.sandbox.filters.resource_limits import infer_reached_limit

MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_ANSWER_DEPTH = 128
MAX_TAIL_BYTES = 2_000


class ToolConfinement(Struct, frozen=True):
    """The sandbox for an executable, as the kernel sets it up.

    :param profile_for: returns the session's folders, for one call
    :param tool_profile: returns the capability set and the folders of a tool that stays running between the calls of all sessions
    """

    sandbox: Sandbox
    profile_for: Callable[[Runtime], SandboxProfile]
    tool_profile: Callable[[ToolSpec], tuple[CapabilitySet, SandboxProfile]]


class PerCallExecutableTool(Tool):
    """A program that starts for each call.

    :param executable: absolute, canonical
    :param folder: the tool's own folder, mounted read-only
    """

    trusted = False

    def __init__(self, spec: ToolSpec, executable: str, folder: str, confinement: ToolConfinement) -> None:
        self.spec = spec
        self.executable = executable
        self.folder = folder
        self.confinement = confinement
        self.command: tuple[str, ...] = (executable,)
        self.unbuilt = bool(spec.build) and not os.path.lexists(executable)
        """Whether its executable is still to be built by ``handrail build``."""

    def __repr__(self) -> str:
        return f"<tool {self.spec.id}: {self.executable}>"

    def build_program_input(self, args: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
        return args

    def parse_program_answer(self, answer: dict[str, Any]) -> object:
        """Return the program's answer as data, or as a result if it has a known shape."""
        return convert_known_result_shape(answer) or answer

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        args = await spell_paths_as_on_disk(self.spec, args, runtime)
        profile = self.adapt_profile(
            self.confinement.profile_for(runtime),
            {
                "HANDRAIL_CALL_ID": runtime.call_id,
                "HANDRAIL_SESSION_ID": runtime.session_id,
                "HANDRAIL_AGENT": runtime.agent,
            },
            runtime.config,
        )
        process = await self.confinement.sandbox.start(runtime.capabilities, profile, ProgramSpec(self.command))
        kept = bytearray()

        def keep(piece: bytes) -> None:
            kept.extend(piece)
            del kept[: -2 * MAX_TAIL_BYTES]
            runtime.set_partial_result({"stdout_tail": extract_output_tail(kept)})

        try:
            output, errors, _dropped = await process.communicate(
                encode_json_line(self.build_program_input(args, runtime)) + b"\n", MAX_ANSWER_BYTES + 1, keep
            )
            try:
                code = await process.wait()
            except ProtectedPathViolation as veto:
                fields = {
                    "stdout": extract_output_tail(output),
                    **_evidence(veto.exit_code or 0, extract_output_tail(errors)),
                }
                raise ToolError(veto.text, kind="denied", data=fields) from None
        except asyncio.CancelledError:
            await process.kill()
            if isinstance(process, GuardedProcess) and process.violation is not None:
                runtime.set_partial_result(
                    {"stdout_tail": kept.decode("utf-8", "replace"), "handrail": process.violation.text}
                )
            raise
        finally:
            await process.kill()
        return parse_program_result(output, errors, code, self.parse_program_answer)

    def adapt_profile(
        self, profile: SandboxProfile, environment: Mapping[str, str], config: Mapping[str, str]
    ) -> SandboxProfile:
        """Return a profile with the tool's folder and environment, read-only for tools that only read.

        :param config: the values of the tool's settings
        """
        fields = {"HANDRAIL_TOOL": self.spec.id, "HANDRAIL_WORKSPACE": profile.workspace}
        if self.spec.config:
            fields["HANDRAIL_CONFIG"] = encode_json_line(dict(config)).decode()
        return replace(
            profile,
            tool=self.spec.id,
            readable=(*profile.readable, self.folder),
            workspace_writable=profile.workspace_writable and self.spec.side_effect != "read",
            environment={**profile.environment, **fields, **environment},
        )


def encode_json_line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def parse_program_result(
    output: bytes,
    errors: bytes,
    code: int,
    recognised: Callable[[dict[str, Any]], object] = lambda answer: convert_known_result_shape(answer) or answer,
) -> object:
    """Return the answer of a finished program.

    :param recognised: parses the answer
    :return: data, or a :class:`~handrail.contract.calls_and_results.Result` if the answer has a known shape
    :raises ToolError: ``failed`` for an exit code, ``limit`` for too much output, ``backend`` if the program broke the
        protocol; ``data`` has its stderr
    """
    error_tail = extract_output_tail(errors)
    if len(output) > MAX_ANSWER_BYTES:
        raise ToolError(
            f"The tool's answer is too large. The limit is {MAX_ANSWER_BYTES:,} bytes. Request less, or "
            "have the tool write a file in the workspace.",
            kind="limit",
            data=_evidence(code, error_tail),
        )
    answer: dict[str, Any] | None = None
    problem = "stdout is empty"
    if output.strip():
        try:
            answer = parse_json_object(
                output, what="the contents of its stdout", max_bytes=MAX_ANSWER_BYTES, max_depth=MAX_ANSWER_DEPTH
            )
        except InvalidJsonTextError as error:
            problem = str(error)
    if code != 0:
        result = convert_known_result_shape(answer)
        if result is not None and not result.ok:
            return result
        evidence = _evidence(code, error_tail) | ({} if answer is None else {"answer": answer})
        if (bound := infer_reached_limit(code, errors)) is not None:
            text = f"The tool failed: {describe_exit(code)}: {bound.text}{_last_line(error_tail)}"
            raise ToolError(text, kind="limit" if bound.is_certain else "failed", data=evidence)
        raise ToolError(
            f"The tool failed: {describe_exit(code)}{_last_line(error_tail)}",
            kind="failed" if code > 0 else "backend",
            data=evidence,
        )
    if answer is None:
        raise ToolError(
            f"The tool sent an invalid answer: {problem}. Expected one JSON object on stdout{_last_line(error_tail)}",
            kind="backend",
            data=_evidence(code, error_tail),
        )
    return recognised(answer)


def describe_exit(code: int) -> str:
    """Return how a process ended, as a clause for a text."""
    if code >= 0:
        return f"the program ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"signal {-code} ({name}) ended the program"


def extract_output_tail(errors: bytes | bytearray) -> str:
    """Return the end of a program's output, from the beginning of a line or word.

    A cut secret would not match its registered form, so the text never begins in the middle of a word.
    """
    end = errors[-MAX_TAIL_BYTES:]
    if len(errors) > MAX_TAIL_BYTES:
        begins = re.search(rb"\n|\s", end)
        end = end[begins.end() :] if begins else b""
    return end.decode("utf-8", "replace").strip()


def _last_line(text: str) -> str:
    return f". The last line of its stderr: {text.splitlines()[-1]}" if text else "."


def _evidence(code: int, text: str) -> dict[str, Any]:
    return {"exit_code": code, "stderr": text} if text else {"exit_code": code}


async def spell_paths_as_on_disk(spec: ToolSpec, args: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Return the arguments of a program with each path as the file is named, also if the model spelled it as a result shows it."""
    spelled = dict(args)
    for name in find_path_arguments(spec.parameters):
        value = args.get(name)
        if isinstance(value, str):
            spelled[name] = await _spell_path(runtime, value)
        elif isinstance(value, list):
            every = cast("list[object]", value)
            spelled[name] = [await _spell_path(runtime, one) if isinstance(one, str) else one for one in every]
    return spelled


async def _spell_path(runtime: Runtime, path: str) -> str:
    found = await resolve_intended_path(runtime, path)
    return found if path.startswith("/") or not found.startswith("/") else posixpath.relpath(found, runtime.workdir)
