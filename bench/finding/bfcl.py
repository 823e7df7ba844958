"""BFCL v4's single-turn requests as a corpus for retrieval, out of the package ``bfcl-eval`` (Apache-2.0).

The package needs half of machine learning to run and nothing to be read: its wheel is fetched alone, once, and never
installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

VERSION = "2026.3.23"

SPLITS = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)


def bfcl() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every function of these splits, one of a name, and every request with the names its answer calls."""
    tools: dict[str, dict[str, Any]] = {}
    queries: list[dict[str, Any]] = []
    with zipfile.ZipFile(fetched("bfcl-eval", VERSION)) as wheel:
        for split in SPLITS:
            answers = {row["id"]: row["ground_truth"] for row in _rows(wheel, f"possible_answer/BFCL_v4_{split}.json")}
            for row in _rows(wheel, f"BFCL_v4_{split}.json"):
                for function in row["function"]:
                    tools.setdefault(function["name"], {"id": function["name"], **function})
                said = [message["content"] for message in row["question"][0] if message["role"] == "user"]
                gold = sorted({name for call in answers[row["id"]] for name in call})
                if said and gold and all(name in tools for name in gold):
                    queries.append({"query": said[-1], "gold": gold, "split": split})
    return list(tools.values()), queries


def _rows(wheel: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in wheel.read(f"bfcl_eval/data/{name}").decode().splitlines() if line.strip()]


def fetched(package: str, version: str) -> Path:
    """The wheel of ``package``, in the user's cache."""
    place = user_cache_path("handrail-bench") / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
            subprocess.run([*command, f"{package}=={version}"], check=True)
            next(Path(folder).glob("*.whl")).replace(place)
    return place
