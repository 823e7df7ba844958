"""What the two agents are, and what their scripts have them do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demos.demonstration import put
from demos.tour import project
from demos.tour.project import PRICING_BUG, PRICING_FIX, RECEIPT_BUG, RECEIPT_FIX, Project
from handrail.testing import ModelScript

REVIEWER, FIXER = "reviewer", "fixer"
WORK, REPORTS = "shared/work", "shared/reports"
"""The channels: to the fixer, and back."""
WATCH = "work"
"""The fixer's trigger."""
TESTS = "python3 -m unittest"
REVIEW = "The tests of this shop fail. Have it mended, look at each change, and commit what is right."
MEND = f"Mend what comes over {WORK}."

MANIFESTS = {
    REVIEWER: f'''id = "{REVIEWER}"
description = "Finds what is wrong, hands it on, and judges what comes back. It changes no file itself."
tools = ["read", "grep", "bash", "git.*", "send_message", "wait_channel"]
rules = [
  "allow bash {TESTS}",
  "allow git.commit",
  "allow send_message channel={WORK} *",
  "allow wait_channel channel={REPORTS} *",
]
''',
    FIXER: f'''id = "{FIXER}"
description = "Mends and tests what it is given, one thing at a time."
tools = ["read", "edit", "bash", "send_message", "watch_channel"]
rules = [
  "allow edit shop/**",
  "allow bash {TESTS} *",
  "allow send_message channel={REPORTS} *",
  "allow watch_channel channel={WORK} *",
]
''',
}

FIRST = (
    "shop/pricing.py: ten pieces are a bulk order (BULK_FROM is 10), and total(10, 200) gives 2000, not 1700. "
    "Test: test_ten_pieces_are_a_bulk_order"
)
SECOND = (
    "Good. Now shop/receipt.py: a receipt loses its cents, 250 reads as 2 EUR instead of 2.50 EUR. "
    "Test: test_a_receipt_shows_the_cents"
)


def make(folder: Path) -> Project:
    """The tour's repository with its two bugs, and the two agents, beneath ``folder``.

    :raises StartError: where there is no git
    """
    place = project.make(folder)
    put(place.config, "# the agents bring their own rules\n")
    for name, text in MANIFESTS.items():
        manifest = place.config.parent / "agents" / name / "agent.toml"
        put(manifest, text)
        for path in (manifest.parent.parent, manifest.parent):
            path.chmod(0o700)
        manifest.chmod(0o600)
    return place


def scripts() -> dict[str, ModelScript]:
    """By agent."""
    return {name: ModelScript.model_validate({"version": 1, "turns": turns}) for name, turns in _TURNS.items()}


def _call(label: str, tool: str, **arguments: Any) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments, "label": label}


def _expect(of: str, at: str, **check: Any) -> dict[str, Any]:
    return {"result": [{"call": of, "path": at, **check}]}


def _turn(text: str, *calls: dict[str, Any], **expect: Any) -> dict[str, Any]:
    return {"text": text, "calls": calls, "expect": expect}


def _handed(label: str, says: str, message: str, **expect: Any) -> list[dict[str, Any]]:
    """What the reviewer does to have one piece of work done."""
    back = _call(f"{label}-back", "wait_channel", channel=REPORTS, sender=FIXER, timeout_ms=120_000)
    return [
        _turn(says, _call(f"{label}-out", "send_message", channel=WORK, message=message), **expect),
        _turn("I wait for its report.", back, **_expect(f"{label}-out", "data.sent", equals=True)),
    ]


def _mended(label: str, path: str, bug: str, fix: str, test: str) -> list[dict[str, Any]]:
    """What the fixer does with one piece of work."""
    report = f"{path}: {json.dumps(fix)} now. {test} ends with exit code ${{{label}-test.data.exit_code}}"
    return [
        _turn(
            "Somebody has work for me. I look at it first.",
            _call(f"{label}-read", "read", path=path),
            task=f'"notice":"trigger".*{test}',
        ),
        _turn(
            "I see it. I mend it, and run its test.",
            _call(f"{label}-edit", "edit", path=path, old=bug, new=fix),
            _call(f"{label}-test", "bash", command=f"{TESTS} tests.test_shop.Shop.{test}"),
            **_expect(f"{label}-read", "data.text", contains=bug),
        ),
        _turn(
            "I report what came of it.",
            _call(f"{label}-report", "send_message", channel=REPORTS, message=report),
            **_expect(f"{label}-test", "data.exit_code", equals=0),
        ),
        _turn("Done with that."),
    ]


_TURNS: dict[str, list[dict[str, Any]]] = {
    REVIEWER: [
        _turn("The tests first.", _call("before", "bash", command=TESTS)),
        _turn(
            "Two fail. Where does the price come from?",
            _call("search", "grep", pattern="BULK_FROM|EUR", path="shop"),
            _call("look", "read", path="shop/pricing.py"),
            **_expect("before", "data.exit_code", equals=1),
        ),
        _turn(
            "That is one wrong sign. Perhaps I can change it myself.",
            _call("own", "edit", path="shop/pricing.py", old=PRICING_BUG, new=PRICING_FIX),
            **_expect("look", "data.text", contains=PRICING_BUG),
        ),
        *_handed(
            "first", "That is not mine to do. The fixer gets it.", FIRST, **_expect("own", "type", equals="error")
        ),
        _turn(
            "It says that it is done. I look for myself.",
            _call("first-diff", "git.diff"),
            _call("second-look", "read", path="shop/receipt.py"),
            **_expect("first-back", "data.message", contains="exit code 0"),
        ),
        *_handed(
            "second",
            "Right. And the receipt is the next thing.",
            SECOND,
            **_expect("first-diff", "data.patch", contains=f"+    {PRICING_FIX}"),
        ),
        _turn(
            "Now all of the tests.",
            _call("after", "bash", command=TESTS),
            **_expect("second-back", "data.message", contains="exit code 0"),
        ),
        _turn(
            "They pass. This can be kept.",
            _call("commit", "git.commit", message="Bulk price from ten pieces on, cents on the receipt", all=True),
            **_expect("after", "data.exit_code", equals=0),
        ),
        _turn("Both mended by the fixer, tested, and committed.", **_expect("commit", "type", equals="output")),
    ],
    FIXER: [
        _turn(
            "I have what comes over that channel wake me.",
            _call("watch", "watch_channel", channel=WORK, filter_sender=REVIEWER, name=WATCH, prompt=MEND),
        ),
        _turn("I wait.", **_expect("watch", "data.trigger_id", equals=WATCH)),
        *_mended("first", "shop/pricing.py", PRICING_BUG, PRICING_FIX, "test_ten_pieces_are_a_bulk_order"),
        *_mended("second", "shop/receipt.py", RECEIPT_BUG, RECEIPT_FIX, "test_a_receipt_shows_the_cents"),
    ],
}
