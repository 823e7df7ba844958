"""Secrets in arguments that leave: registered ones in any of their forms, and texts in the shape of well-known keys."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from handrail.contract.spec import ToolSpec
from handrail.policy.opinions import Opinion, WatchdogCall, allow
from handrail.policy.rules import Action
from handrail.policy.watchdogs.commands import parts
from handrail.policy.watchdogs.exfiltration import NETWORK
from handrail.store.encoding import encode

SHAPES: Mapping[str, str] = {
    "an AWS access key id": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "an Anthropic key": r"\bsk-ant-[A-Za-z0-9_-]{24,}",
    "an OpenAI key": r"\bsk-(?:proj-|svcacct-)?[A-Za-z0-9_-]{32,}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{20,}",
    "a Google API key": r"\bAIza[0-9A-Za-z_-]{35}",
    "a Stripe key": r"\b[rs]k_live_[A-Za-z0-9]{20,}",
    "an npm token": r"\bnpm_[A-Za-z0-9]{36}",
    "a PyPI token": r"\bpypi-AgE[A-Za-z0-9_-]{40,}",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "a SendGrid key": r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{30,}",
    "a private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
    "a JSON web token": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
}
_WHOLE = 1 << 62
"""Bytes: nothing is cut off before it is looked at."""
_SHAPE = re.compile("|".join(f"(?P<s{number}>{shape})" for number, shape in enumerate(SHAPES.values())))
_NAMES = tuple(SHAPES)
_PLACEHOLDER = re.compile(r"example|xxxx|your|placeholder|dummy|redacted|\.\.\.", re.IGNORECASE)


class OutgoingSecrets:
    """Implements :data:`~handrail.policy.watchdog.Watchdog`.

    :param registered: whether a JSON text has a registered secret in it
    :param action: what it answers to such a call
    """

    name = "secrets"

    def __init__(self, registered: Callable[[bytes], bool], action: Action = "ask") -> None:
        self._registered = registered
        self.action: Action = action

    def concerns(self, spec: ToolSpec) -> bool:
        """Whether calls of this tool leave the workspace."""
        return spec.side_effect == "external" or bool(spec.requires.net.hosts or "net.fetch" in spec.effective_targets)

    async def __call__(self, call: WatchdogCall) -> Opinion:
        arguments: Any = dict(call.arguments)
        encoded = encode(arguments, _WHOLE)
        if self._registered(encoded):
            return Opinion(self.action, "its arguments hold a registered secret, which would leave")
        commands = [value for capability, value in call.targets if capability == "shell.run"]
        if commands and not any(part.program in NETWORK | {"git"} for text in commands for part in parts(text)):
            return allow()  # nothing in it talks to anybody
        if (what := key_in(encoded.decode())) is not None:
            return Opinion(self.action, f"its arguments hold what has the shape of {what}, which would leave")
        return allow()


def key_in(text: str) -> str | None:
    """Which well-known kind of key ``text`` has in it; None for none, or for what is only an example."""
    for match in _SHAPE.finditer(text):
        assert match.lastgroup is not None
        name, shown = _NAMES[int(match.lastgroup[1:])], match[0]
        if name == "a private key" or (not _PLACEHOLDER.search(shown) and _entropy(shown) >= 3.0):
            return name
    return None


def _entropy(text: str) -> float:
    size = len(text)
    return -sum(count / size * math.log2(count / size) for count in Counter(text).values())
