"""Secrets in arguments that leave: registered ones in any of their forms, and texts in the shape of well-known keys."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping

from handrail.contract.tool.spec import ToolSpec
from handrail.policy.rules.rules import Action
from handrail.policy.watchdogs.commands import parts, read
from handrail.policy.watchdogs.exfiltration import NETWORK
from handrail.policy.watchdogs.opinions import Opinion, WatchdogCall, allow

_KEY = "[A-Za-z0-9_-]"
SHAPES: Mapping[str, tuple[str, str]] = {
    "an AWS access key id": ("AKIA", r"[0-9A-Z]{16}\b"),
    "a temporary AWS access key id": ("ASIA", r"[0-9A-Z]{16}\b"),
    "a GitHub token": ("gh", r"[pousr]_[A-Za-z0-9]{36,}"),
    "a fine-grained GitHub token": ("github_pat_", r"[A-Za-z0-9_]{40,}"),
    "a GitLab token": ("glpat-", _KEY + "{20,}"),
    "an Anthropic key": ("sk-ant-", _KEY + "{24,}"),
    "an OpenAI key": ("sk-", rf"(?:proj-|svcacct-)?{_KEY}{{32,}}"),
    "a Slack token": ("xox", r"[abprs]-[A-Za-z0-9-]{20,}"),
    "a Google API key": ("AIza", _KEY + "{35}"),
    "a Stripe key": ("rk_live_", r"[A-Za-z0-9]{20,}"),
    "a secret Stripe key": ("sk_live_", r"[A-Za-z0-9]{20,}"),
    "an npm token": ("npm_", r"[A-Za-z0-9]{36}"),
    "a PyPI token": ("pypi-AgE", _KEY + "{40,}"),
    "a Hugging Face token": ("hf_", r"[A-Za-z0-9]{30,}"),
    "a SendGrid key": ("SG.", rf"{_KEY}{{16,}}\.{_KEY}{{30,}}"),
    "a private key": ("-----BEGIN ", r"(?:[A-Z]+ )*PRIVATE KEY-----"),
    "a JSON web token": (".eyJ", rf"(?<={_KEY}{{10}}\.eyJ){_KEY}{{10,}}\.{_KEY}{{10,}}"),
}
"""Kind of key to how it begins, at the beginning of a word where that is a letter, and how it goes on. The text is searched
for the beginnings, and each is followed by few characters or by one run of them: so any text is looked through once."""


def _compiled(begins: str, goes_on: str) -> re.Pattern[str]:
    start = re.escape(begins)
    return re.compile(start + (rf"(?<!\w{start})" if begins[0].isalpha() else "") + goes_on)


_COMPILED = tuple((name, begins, _compiled(begins, rest)) for name, (begins, rest) in SHAPES.items())
_PLACEHOLDER = re.compile(r"example|xxxx|your|placeholder|dummy|redacted|\.\.\.", re.IGNORECASE)


class OutgoingSecrets:
    """Implements :data:`~handrail.policy.watchdogs.watchdog.Watchdog`.

    :param encode: a value as JSON, whatever it holds, with nothing cut off
    :param registered: whether a JSON text has a registered secret in it
    :param action: what it answers to such a call
    """

    name = "secrets"

    def __init__(
        self, encode: Callable[[object], bytes], registered: Callable[[bytes], bool], action: Action = "ask"
    ) -> None:
        self._encode = encode
        self._registered = registered
        self.action: Action = action

    def concerns(self, spec: ToolSpec) -> bool:
        """Whether calls of this tool leave the workspace."""
        return spec.side_effect == "external" or bool(spec.requires.net.hosts or "net.fetch" in spec.effective_targets)

    async def __call__(self, call: WatchdogCall) -> Opinion:
        encoded = self._encode(dict(call.arguments))
        if self._registered(encoded):
            return Opinion(self.action, "its arguments hold a registered secret, which would leave")
        commands = [value for capability, value in call.targets if capability == "shell.run"]
        if commands and not any([await read(_talks, text) for text in commands]):
            return allow()
        if (what := key_in(encoded.decode())) is not None:
            return Opinion(self.action, f"its arguments hold what has the shape of {what}, which would leave")
        return allow()


def _talks(text: str) -> bool:
    """Whether a command of a shell text may talk to another machine."""
    programs = NETWORK | {"git"}
    return any(part.program in programs for part in parts(text))


def key_in(text: str) -> str | None:
    """Which well-known kind of key ``text`` has in it; None for none, or for what is only an example."""
    for name, begins, shape in _COMPILED:
        if begins not in text:
            continue
        for match in shape.finditer(text):
            if name == "a private key" or (not _PLACEHOLDER.search(match[0]) and _entropy(match[0]) >= 3.0):
                return name
    return None


def _entropy(text: str) -> float:
    size = len(text)
    return -sum(count / size * math.log2(count / size) for count in Counter(text).values())
