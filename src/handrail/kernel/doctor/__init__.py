"""The checks of ``handrail doctor``: the machine, the workspace's state, unavailable tools, and remedies.

:func:`run_doctor_checks` only reads: it takes no lease, opens no kernel and writes nothing. It therefore works next to a running
Handrail, and on a machine where Handrail cannot start. Each check is independent, and reports what it could not determine.
"""

from __future__ import annotations

from handrail.kernel.doctor.machine_checks import DoctorCheck, check_machine
from handrail.kernel.doctor.workspace_checks import check_kernel, check_open_kernel, run_doctor_checks

__all__ = ["DoctorCheck", "check_kernel", "check_machine", "check_open_kernel", "run_doctor_checks"]
