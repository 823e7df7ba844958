"""What does the operating system enforce? The confinement of programs: view, filters, network and start.

For programs, this package exports the types and checks for writing a sandbox provider. It loads each name at its first use.
Everything that is not in ``__all__`` is private by convention, all its modules included.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.contract.sandbox import (
        CompletedProcess,
        ConnectionAttempt,
        PathDenials,
        Process,
        ProgramSpec,
        Sandbox,
        SandboxLimits,
        SandboxMechanism,
        SandboxProfile,
        SandboxTier,
        TerminalProcess,
        TerminalSize,
    )
    from handrail.contract.tool.requires import CapabilitySet
    from handrail.origins.programs import ProgramRefused, build_clean_path, build_program_environment, find_program
    from handrail.sandbox.selfcheck import CheckOutcome, self_check
    from handrail.sandbox.tiers import choose_sandbox, probe_tier

_HOME = {
    "ConnectionAttempt": "contract.sandbox",
    "CapabilitySet": "contract.tool.requires",
    "CompletedProcess": "contract.sandbox",
    "PathDenials": "contract.sandbox",
    "SandboxLimits": "contract.sandbox",
    "SandboxMechanism": "contract.sandbox",
    "CheckOutcome": "sandbox.selfcheck",
    "Process": "contract.sandbox",
    "SandboxProfile": "contract.sandbox",
    "ProgramSpec": "contract.sandbox",
    "ProgramRefused": "origins.programs",
    "Sandbox": "contract.sandbox",
    "TerminalProcess": "contract.sandbox",
    "TerminalSize": "contract.sandbox",
    "SandboxTier": "contract.sandbox",
    "choose_sandbox": "sandbox.tiers",
    "build_clean_path": "origins.programs",
    "find_program": "origins.programs",
    "probe_tier": "sandbox.tiers",
    "build_program_environment": "origins.programs",
    "self_check": "sandbox.selfcheck",
}

__all__ = [
    "CapabilitySet",
    "CheckOutcome",
    "CompletedProcess",
    "ConnectionAttempt",
    "PathDenials",
    "Process",
    "ProgramRefused",
    "ProgramSpec",
    "Sandbox",
    "SandboxLimits",
    "SandboxMechanism",
    "SandboxProfile",
    "SandboxTier",
    "TerminalProcess",
    "TerminalSize",
    "build_clean_path",
    "build_program_environment",
    "choose_sandbox",
    "find_program",
    "probe_tier",
    "self_check",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"handrail.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
