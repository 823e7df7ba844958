"""What starting costs: ``handrail --help`` and ``import handrail`` beside ``import pydantic``, interleaved.

Run in the environment a user has (``.venv``), not in the one of the peers.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, WARMING = 25, 2
BOUND = 2.0
"""``handrail --help`` may take this many times as long as ``python -c "import pydantic"``."""


def commands() -> dict[str, list[str]]:
    users = ROOT / ".venv" / "bin"
    folder = users if (users / "handrail").exists() else Path(sys.executable).parent
    python = str(folder / "python")
    return {
        'python -c "pass"': [python, "-c", "pass"],
        'python -c "import pydantic"': [python, "-c", "import pydantic; pydantic.BaseModel"],
        'python -c "import handrail"': [python, "-c", "import handrail"],
        "handrail --help": [str(folder / "handrail"), "--help"],
    }


def main() -> int:
    taken: dict[str, list[float]] = {name: [] for name in commands()}
    for number in range(ROUNDS + WARMING):
        for name, command in commands().items():
            began = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            if number >= WARMING:  # the first ones fill the caches
                taken[name].append(time.perf_counter() - began)
    base = statistics.median(taken['python -c "import pydantic"'])
    print(f"{'':32} {'ms p50':>8} {'ms min':>8}   × import pydantic")
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"{name:32} {median * 1e3:8.1f} {min(times) * 1e3:8.1f}   {median / base:.2f}")
    ratio = statistics.median(taken["handrail --help"]) / base
    print(
        f"\nhandrail --help: {ratio:.2f} × import pydantic (bound {BOUND:.1f}): {'met' if ratio <= BOUND else 'MISSED'}"
    )
    return 0 if ratio <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
