"""The second program in the outer sandbox: creates a home with secrets, opens Handrail, and attacks.

Gives one JSON object a line: what came of each case, then ``{"end": true}``. Nothing is tried before it has been seen
again that every namespace is another than the machine's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, replace
from typing import Any

from tests.attacks.outer import NAMESPACES, NotApplicable, Outcome

_CASE_S = 120


def main() -> int:
    plan = json.loads(sys.argv[1])
    same = [name for name in NAMESPACES if os.readlink(f"/proc/self/ns/{name}") == plan["host"][name]]
    if same:
        print(f"refused: the namespaces {', '.join(same)} are the machine's own", file=sys.stderr)
        return 3
    if plan["suite"] == "none":
        return asyncio.run(_nested())
    asyncio.run(_attacked(plan))
    print(json.dumps({"end": True}), flush=True)
    return 0


async def _nested() -> int:
    """Whether Handrail can confine programs in here."""
    from handrail.sandbox import tier_probe

    tier = tier_probe.probe_tier()
    if not tier.is_confining:
        print(tier.detail, file=sys.stderr)
        return 4
    print(json.dumps({"end": True}), flush=True)
    return 0


async def _attacked(plan: dict[str, Any]) -> None:
    from tests.attacks.cases import suite_of
    from tests.attacks.victim import robbed_home

    cases = [case for case in suite_of(plan["suite"]) if not plan["cases"] or case.id in plan["cases"]]
    home = robbed_home(plan["home"], plan["mode"])
    async with home.opened():
        for case in cases:
            if plan["mode"] == "real root" and not case.harmless:
                continue
            outcome, began = Outcome(case.id, "held"), time.monotonic()
            try:
                async with asyncio.timeout(_CASE_S):
                    if (breach := await case.tried(home)) is not None:
                        outcome = Outcome(case.id, "broken", breach)
            except NotApplicable as reason:
                outcome = Outcome(case.id, "not applicable", str(reason))
            except TimeoutError:
                outcome = Outcome(case.id, "broken", f"no answer within {_CASE_S} s")
            except Exception:
                outcome = Outcome(case.id, "broken", traceback.format_exc(limit=-4)[-1500:])
            told = replace(outcome, ms=round((time.monotonic() - began) * 1000))
            print(json.dumps(asdict(told)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
