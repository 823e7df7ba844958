"""How often an hour of a coding agent asks its user: one played session, in each mode, with and without the developer set.

    python bench/session_questions.py            prints a table; exit code 1 if a target is missed
    python bench/session_questions.py --list     also prints each question

A scripted model makes the calls below in a small repository with tests. All of them run for real, in the sandbox. The user
approves each request once and stores no rule, so a repeated request counts each time. Targets: with ``@developer``, at most 8
questions in every mode but plan, and none of them about reading or testing.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handrail import Agent, ApprovalAnswer
from handrail.agent.run_budget import Budget
from handrail.contract.approval_requests import ApprovalRequest
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.testing import PlaybackModel, call_reply, temporary_kernel, text_reply

MODES = ("plan", "ask", "accept-edits", "auto")
SET = "@developer"
MOST_QUESTIONS = 8
FILES = {
    "shop/__init__.py": "",
    "shop/cart.py": "class Cart:\n    def __init__(self):\n        self.items = []\n\n    def add(self, price):\n        self.items.append(price)\n\n    def total(self):\n        return sum(self.items)\n",
    "shop/tax.py": "RATE = 0.2\n\n\ndef with_tax(amount):\n    return amount * (1 + RATE)\n",
    "tests/__init__.py": "",
    "tests/test_cart.py": "import unittest\n\nfrom shop.cart import Cart\n\n\nclass CartTest(unittest.TestCase):\n    def test_total(self):\n        cart = Cart()\n        cart.add(2)\n        cart.add(3)\n        self.assertEqual(cart.total(), 5)\n",
    "Makefile": "test:\n\tpython3 -m unittest -q\nbuild:\n\tmkdir -p build && cp -r shop build/\nclean:\n\trm -rf build\n",
    "README.md": "# Shop\n\nA cart with tax.\n",
    ".gitignore": "build/\n__pycache__/\n.env\n",
    ".env": "TOKEN=0\n",
}
READING, TESTING = "reading", "testing"


def bash(command: str, kind: str = "") -> tuple[str, dict[str, Any], str]:
    return "bash", {"command": command}, kind


def read(path: str) -> tuple[str, dict[str, Any], str]:
    return "read", {"path": path}, READING


SESSION: tuple[tuple[str, dict[str, Any], str], ...] = (
    # Looking around.
    bash("ls -la", READING),
    bash("git status && git log --oneline -10", READING),
    ("glob", {"pattern": "**/*.py"}, READING),
    read("README.md"),
    read("shop/cart.py"),
    read("shop/tax.py"),
    read("tests/test_cart.py"),
    ("grep", {"pattern": "def "}, READING),
    bash("cat Makefile | head -20", READING),
    bash("find . -name '*.py' -not -path './build/*' | xargs wc -l", READING),
    bash("rg -n 'RATE' shop 2>/dev/null || grep -rn 'RATE' shop", READING),
    bash("git log -p -1", READING),
    bash("git show HEAD --stat", READING),
    bash("git blame shop/cart.py", READING),
    bash("wc -l shop/*.py", READING),
    bash("sed -n '1,5p' shop/cart.py", READING),
    bash("python3 --version && which python3 make git", READING),
    ("todo", {"todos": [{"content": "Tax in the cart", "status": "in_progress"}]}, ""),
    # The first change, and its tests.
    bash("python3 -m unittest -q", TESTING),
    bash("make test", TESTING),
    bash("git switch -c tax-in-cart"),
    ("edit", {"path": "shop/cart.py", "old": "    def total(self):\n        return sum(self.items)", "new": "    def total(self):\n        return with_tax(sum(self.items))"}, ""),
    ("edit", {"path": "shop/cart.py", "old": "class Cart:", "new": "from shop.tax import with_tax\n\n\nclass Cart:"}, ""),
    bash("python3 -m unittest tests.test_cart -v 2>&1 | tail -20", TESTING),
    ("edit", {"path": "tests/test_cart.py", "old": "cart.total(), 5)", "new": "cart.total(), 6)"}, ""),
    bash("python3 -m unittest -q 2>&1 | tail -5", TESTING),
    bash("git diff", READING),
    bash("git diff --stat HEAD", READING),
    ("write", {"path": "tests/test_tax.py", "content": "import unittest\n\nfrom shop.tax import with_tax\n\n\nclass TaxTest(unittest.TestCase):\n    def test_rate(self):\n        self.assertAlmostEqual(with_tax(10), 12)\n"}, ""),
    bash("for t in tests/test_*.py; do python3 -m unittest -q \"$t\"; done", TESTING),
    bash("timeout 60 python3 -m unittest discover -s tests -q", TESTING),
    bash("python3 -m compileall -q shop tests", TESTING),
    bash("git add -A && git commit -q -m 'Add tax to the total of a cart'"),
    bash("git log --oneline -3", READING),
    # A bug, looked into with scripts.
    bash("python3 -c 'from shop.cart import Cart; c = Cart(); c.add(1.1); print(c.total())'", TESTING),
    bash("python3 - <<'END'\nfrom shop.cart import Cart\nc = Cart()\nfor n in range(3):\n    c.add(n)\nprint(c.total())\nEND", TESTING),
    ("python", {"code": "from shop.tax import with_tax\nprint(with_tax(3))"}, TESTING),
    bash("PYTHONDONTWRITEBYTECODE=1 python3 -m unittest -q tests.test_tax", TESTING),
    ("edit", {"path": "shop/tax.py", "old": "return amount * (1 + RATE)", "new": "return round(amount * (1 + RATE), 2)"}, ""),
    bash("python3 -m unittest -q && echo passed", TESTING),
    bash("git diff shop/tax.py", READING),
    bash("git add shop && git commit -qm 'Round amounts with tax'"),
    # A refactoring over several files.
    ("grep", {"pattern": "with_tax"}, READING),
    bash("grep -rln with_tax shop tests | xargs sed -i 's/with_tax/add_tax/g'"),
    bash("git diff --stat && python3 -m unittest -q", TESTING),
    bash("mkdir -p shop/money && touch shop/money/__init__.py"),
    bash("git mv shop/tax.py shop/money/tax.py"),
    bash("sed -i 's/shop.tax/shop.money.tax/' shop/cart.py tests/test_tax.py"),
    bash("python3 -m unittest -q", TESTING),
    bash("git status --short", READING),
    bash("git add -A && git commit -qm 'Move tax to money'"),
    # Building, generated files, documents.
    bash("make build", TESTING),
    bash("ls -R build | head", READING),
    bash("du -sh build; df -h . | tail -1", READING),
    bash("make clean", TESTING),
    bash("python3 -m unittest -q > test-output.txt 2>&1; cat test-output.txt", TESTING),
    bash("rm test-output.txt"),
    ("edit", {"path": "README.md", "old": "A cart with tax.", "new": "A cart with tax. `Cart.total` adds it."}, ""),
    bash("cat > CHANGELOG.md <<'END'\n# Changes\n\n- Tax in the cart\nEND"),
    bash("date +%F >> CHANGELOG.md && tail -2 CHANGELOG.md"),
    bash("git add -A && git commit -qm 'Describe the tax'"),
    bash("if python3 -m unittest -q; then echo ok; else echo broken; fi", TESTING),
    bash("git stash list; git branch -a; git tag", READING),
    bash("(cd shop && ls) && cd tests && ls", READING),
    bash("git -C . log --format=%s -5", READING),
    bash("diff <(git show HEAD:README.md) README.md", READING),
    bash("test -f pyproject.toml || echo none", READING),
    bash("jq --version 2>/dev/null; node --version 2>/dev/null; true", READING),
    ("read", {"path": "shop/money/tax.py"}, READING),
    ("glob", {"pattern": "tests/**"}, READING),
    bash("N=3; python3 -c \"print($N * 2)\"", TESTING),
    bash("export PYTHONPATH=. && python3 -m unittest -q tests.test_cart", TESTING),
    bash("python3 -m unittest -q & wait", TESTING),
    bash("ps aux | head -3", READING),
    ("bash", {"command": "python3 -m unittest -q", "background": True}, TESTING),
    # What a user should be asked about: the network, what is sent, what is destroyed, secrets.
    bash("pip download --no-deps requests"),
    bash("curl -s https://docs.python.org/3/library/unittest.html | head"),
    bash("git push origin tax-in-cart"),
    bash("git reset --hard HEAD~1"),
    bash("cat .env", "secret"),
    # The end.
    bash("git log --oneline | wc -l", READING),
    bash("python3 -m unittest -q", TESTING),
    ("todo", {"todos": [{"content": "Tax in the cart", "status": "completed"}]}, ""),
)  # fmt: skip


@dataclass
class AskedUser:
    """A user who approves every request once, and counts them."""

    asked: list[ApprovalRequest] = field(default_factory=list[ApprovalRequest])

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        self.asked.append(request)
        return ApprovalAnswer("once")

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        return None


@dataclass(frozen=True)
class PlayedSession:
    """The questions of one session, each with the kind of its call."""

    questions: list[tuple[str, str]]

    @property
    def needless(self) -> list[tuple[str, str]]:
        """The questions about reading or testing."""
        return [(text, kind) for text, kind in self.questions if kind in (READING, TESTING)]


def make_repository(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for words in (
        ("init", "-q", "-b", "main"),
        ("config", "user.name", "A"),
        ("config", "user.email", "a@example.org"),
        ("add", "."),
        ("commit", "-qm", "Begin a shop"),
    ):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


def _describe(tool: str, arguments: dict[str, Any]) -> str:
    return str(arguments["command"]) if tool == "bash" else f"{tool} {arguments}"


async def play(mode: str, rules: Sequence[str]) -> PlayedSession:
    """Play the session in one mode, and return its questions."""
    user = AskedUser()
    kinds = {_describe(tool, arguments): kind for tool, arguments, kind in SESSION}
    with tempfile.TemporaryDirectory(prefix="handrail-session-") as made:
        workspace = Path(made, "ws")
        workspace.mkdir()
        make_repository(workspace)
        async with temporary_kernel(Path(made), rules=rules) as kernel:
            session = await kernel.session(mode=mode, approval_handler=user)
            model = PlaybackModel(
                *(call_reply((tool, arguments)) for tool, arguments, _ in SESSION), text_reply("Done.")
            )
            agent = Agent(session, model, budget=Budget(turns=len(SESSION) + 1))
            outcome = await agent.complete("Add tax to the cart.")
            assert outcome.ok, outcome.detail
    asked = [_describe(one.tool_id, dict(one.arguments)) for one in user.asked]
    return PlayedSession([(text, kinds.get(text, "")) for text in asked])


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--list", action="store_true", help="print each question")
    shown = given.parse_args()
    missed = False
    print(f"{len(SESSION)} calls of one session\n")
    print(f"{'mode':<14}{'rules':<14}{'questions':>10}{'about reading or testing':>27}")
    for mode in MODES:
        for rules in ((), (SET,)):
            played = asyncio.run(play(mode, rules))
            print(f"{mode:<14}{' '.join(rules) or '-':<14}{len(played.questions):>10}{len(played.needless):>27}")
            if shown.list:
                for text, kind in played.questions:
                    print(f"    {kind or '-':<8} {text.splitlines()[0][:110]}")
            if rules and mode != "plan":
                missed = missed or len(played.questions) > MOST_QUESTIONS or bool(played.needless)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
