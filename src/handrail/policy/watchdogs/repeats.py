"""Calls that were made before, exactly so, and only ever failed."""

from __future__ import annotations

from handrail.contract.tool.spec import ToolSpec
from handrail.policy.rules.rules import Action
from handrail.policy.watchdogs.opinions import Opinion, WatchdogCall, allow

PATIENCE = 3
"""How many times as often a call may fail where other calls succeed in between."""


class RepeatedFailures:
    """Implements :data:`~handrail.policy.watchdogs.watchdog.Watchdog`. Only asked where something has failed in the session.

    :param failures: after how many in a row; three times as many where other calls succeeded in between and none of
        them changed anything
    :param action: what it answers to such a call
    """

    name = "repeats"
    after_failures = True

    def __init__(self, failures: int = 5, action: Action = "ask") -> None:
        self.failures = failures
        self.action: Action = action

    def concerns(self, spec: ToolSpec) -> bool:
        return True

    async def __call__(self, call: WatchdogCall) -> Opinion:
        if call.failed_in_a_row < self.failures and call.failed_before < PATIENCE * self.failures:
            return allow()
        return Opinion(
            self.action,
            f"exactly this call has failed {call.failed_before} times in this session. Read what the errors said and do "
            "something else first: look at the state of things, or change the arguments",
        )
