"""What does the operating system enforce? The confinement of programs: view, filters, network and start.

For programs, this package exports the types and checks for writing a sandbox provider. It loads each name at its first use.
Everything that is not in ``__all__`` is private by convention, all its modules included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.contract import make_lazy_exports

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

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "contract.sandbox_protocol": """
            CompletedProcess ConnectionAttempt PathDenials Process ProgramSpec Sandbox SandboxLimits
            SandboxMechanism SandboxProfile SandboxTier TerminalProcess TerminalSize
        """,
        "contract.tool.requires": "CapabilitySet",
        "origins.program_lookup": "ProgramRefused build_clean_path build_program_environment find_program",
        "sandbox.selfcheck": "CheckOutcome self_check",
        "sandbox.tier_probe": "choose_sandbox probe_tier",
    },
)
