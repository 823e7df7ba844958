"""What does the operating system enforce? The confinement of programs: view, filters, network and start.

For programs, this package exports the types and checks for writing a sandbox provider. It loads each name at its first use.
Everything that is not in ``__all__`` is private by convention, all its modules included.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.contract.sandbox_protocol import (
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
    from handrail.origins.program_lookup import (
        ProgramRefused,
        build_clean_path,
        build_program_environment,
        find_program,
    )
    from handrail.sandbox.selfcheck import CheckOutcome, self_check
    from handrail.sandbox.tier_probe import choose_sandbox, probe_tier

_HOME = {
    "ConnectionAttempt": "contract.sandbox_protocol",
    "CapabilitySet": "contract.tool.requires",
    "CompletedProcess": "contract.sandbox_protocol",
    "PathDenials": "contract.sandbox_protocol",
    "SandboxLimits": "contract.sandbox_protocol",
    "SandboxMechanism": "contract.sandbox_protocol",
    "CheckOutcome": "sandbox.selfcheck",
    "Process": "contract.sandbox_protocol",
    "SandboxProfile": "contract.sandbox_protocol",
    "ProgramSpec": "contract.sandbox_protocol",
    "ProgramRefused": "origins.program_lookup",
    "Sandbox": "contract.sandbox_protocol",
    "TerminalProcess": "contract.sandbox_protocol",
    "TerminalSize": "contract.sandbox_protocol",
    "SandboxTier": "contract.sandbox_protocol",
    "choose_sandbox": "sandbox.tier_probe",
    "build_clean_path": "origins.program_lookup",
    "find_program": "origins.program_lookup",
    "probe_tier": "sandbox.tier_probe",
    "build_program_environment": "origins.program_lookup",
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
