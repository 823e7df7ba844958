"""What does the operating system enforce? The confinement of programs: view, filters, network and start.

For programs, this package exports the types and checks for writing a sandbox provider. It loads each name at its first use.
Everything that is not in ``__all__`` is private by convention, all its modules included.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.contract.sandbox import (
        Attempt,
        Completed,
        Denials,
        Limits,
        Mechanism,
        Process,
        Profile,
        Program,
        Sandbox,
        TerminalProcess,
        TerminalSize,
        Tier,
    )
    from handrail.contract.tool.requires import CapabilitySet
    from handrail.origins.programs import ProgramRefused, clean_path, find_program, program_environment
    from handrail.sandbox.selfcheck import Outcome, self_check
    from handrail.sandbox.tiers import choose, probe

_HOME = {
    "Attempt": "contract.sandbox",
    "CapabilitySet": "contract.tool.requires",
    "Completed": "contract.sandbox",
    "Denials": "contract.sandbox",
    "Limits": "contract.sandbox",
    "Mechanism": "contract.sandbox",
    "Outcome": "sandbox.selfcheck",
    "Process": "contract.sandbox",
    "Profile": "contract.sandbox",
    "Program": "contract.sandbox",
    "ProgramRefused": "origins.programs",
    "Sandbox": "contract.sandbox",
    "TerminalProcess": "contract.sandbox",
    "TerminalSize": "contract.sandbox",
    "Tier": "contract.sandbox",
    "choose": "sandbox.tiers",
    "clean_path": "origins.programs",
    "find_program": "origins.programs",
    "probe": "sandbox.tiers",
    "program_environment": "origins.programs",
    "self_check": "sandbox.selfcheck",
}

__all__ = [
    "Attempt",
    "CapabilitySet",
    "Completed",
    "Denials",
    "Limits",
    "Mechanism",
    "Outcome",
    "Process",
    "Profile",
    "Program",
    "ProgramRefused",
    "Sandbox",
    "TerminalProcess",
    "TerminalSize",
    "Tier",
    "choose",
    "clean_path",
    "find_program",
    "probe",
    "program_environment",
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
