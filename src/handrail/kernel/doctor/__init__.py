"""A check-up: what this machine and this workspace's state are like, what is withheld, and what to do about it.

:func:`check_up` only looks: it takes no lease, opens no kernel and writes nothing, so it works beside a running Handrail
and where nothing can start. Each check stands alone, and says what it could not find out.
"""

from __future__ import annotations

from handrail.kernel.doctor.kernel import check_kernel, check_up, of_kernel
from handrail.kernel.doctor.machine import Check, of_machine

__all__ = ["Check", "check_kernel", "check_up", "of_kernel", "of_machine"]
