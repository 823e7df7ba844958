"""Whether a session's rules allow the tools that the model's provider carries out itself.

No call of it ever comes here to be judged, so only a rule that speaks of all its calls can say anything: a deny of the
tool, of its side effect, or of the network that a search or a fetch is about.
"""

from __future__ import annotations

from handrail.contract.tool.native import NativeOffer
from handrail.contract.tool.requires import CapabilitySet
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.questions import Prepared
from handrail.policy.rules.rules import RuleBook

_REACHES_OUT = ("native.web_search", "native.web_fetch")


def ruled(spec: ToolSpec, rules: RuleBook, held_by: str | None = None) -> NativeOffer:
    """``spec`` as a session under ``rules`` may offer it.

    :param held_by: an agent above that passes on hosts by their names alone
    """
    verdict = Prepared(spec, rules, CapabilitySet()).judge_targets({}, ())
    if verdict.action == "deny":
        return NativeOffer(spec, verdict.reason)
    if spec.id in _REACHES_OUT:
        if held_by is not None:
            why = f"the agent {held_by} passes on hosts by name, and what a provider reaches cannot be held to them"
            return NativeOffer(spec, why)
        for rule in rules.chain:
            if rule.action == "deny" and rule.permission in ("net.fetch", "net.*") and rule.unconditional:
                return NativeOffer(spec, f"{rule.text!r} denies what reaches the network")
    return NativeOffer(spec)
