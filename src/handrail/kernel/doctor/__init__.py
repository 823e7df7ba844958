"""The checks of ``handrail doctor``: the machine, the workspace's state, unavailable tools, and remedies.

:func:`check_up` only reads: it takes no lease, opens no kernel and writes nothing. It therefore works next to a running
Handrail, and on a machine where Handrail cannot start. Each check is independent, and reports what it could not determine.
"""

from __future__ import annotations

from handrail.kernel.doctor.kernel import check_kernel, check_up, of_kernel
from handrail.kernel.doctor.machine import Check, of_machine

__all__ = ["Check", "check_kernel", "check_up", "of_kernel", "of_machine"]
