"""The checks of ``handrail doctor``: the machine, the workspace's state, withheld tools, and remedies.

:func:`check_up` only looks: it takes no lease, opens no kernel and writes nothing, so it works next to a running Handrail,
and on a machine where nothing can start. Each check is independent, and reports the facts that it could not find out.
"""

from __future__ import annotations

from handrail.kernel.doctor.kernel import check_kernel, check_up, of_kernel
from handrail.kernel.doctor.machine import Check, of_machine

__all__ = ["Check", "check_kernel", "check_up", "of_kernel", "of_machine"]
