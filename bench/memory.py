"""How well a question finds the turns of a long conversation that answer it, and how fast stored facts are found.

    python bench/memory.py --data FILE [--json] [--limit N]
    python bench/memory.py [--json]
    python bench/memory.py --speed [--entries N] [--json]

``FILE`` has dialogues in the form of LoCoMo: a JSON list of objects with ``conversation`` (``session_1``, ``session_1_date_time``, …,
each a list of turns with ``dia_id``, ``speaker`` and ``text``) and ``qa`` (``question``, ``evidence``: ids of turns). Questions without
an answer in the dialogue (category 5) are left out. Each dialogue becomes the stored messages of one session, at its dates, and each
question a call of ``search_memory`` and of ``memory.query`` with the store ``session``, with and without the extra ``search``.
recall@k is the part of a question's evidence that is among the first k hits. "FTS5" is SQLite's full-text index with the words of the
turn alone, with any of the question's words, in the same run.

Without ``FILE``, made-up dialogues show that everything runs. Their figures say nothing.

``--speed`` measures a query among 100,000 made-up facts, and ``search_memory`` in sessions of 100 to 10,000 messages: p50 and p95.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import sqlite3
import statistics
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from handrail import open_kernel
from handrail.catalog.embedders.minilm import explain_model_unavailable
from handrail.kernel.local_kernel import LocalKernel
from handrail.store.memory.knowledge_store import KnowledgeEntry, KnowledgeStore
from handrail.store.memory.passage_index import parse_query

_CUTS = (5, 10)
_DATE_FORMS = ("%I:%M %p on %d %B, %Y", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d", "%d %B, %Y")


class Turn(NamedTuple):
    """A turn of a dialogue."""

    id: str
    at: datetime
    speaker: str
    text: str


class Dialogue(NamedTuple):
    """A dialogue with questions, each with the ids of the turns that answer it."""

    turns: list[Turn]
    questions: list[tuple[str, set[str]]]


Find = Callable[[str], Awaitable[Sequence[str]]]
"""The ids of the turns that a question finds, best first."""


def read_dialogues(path: Path) -> Iterator[Dialogue]:
    """Yield the dialogues of a file in LoCoMo's form."""
    for one in json.loads(path.read_text()):
        conversation: dict[str, Any] = one["conversation"]
        numbers = sorted(int(found[1]) for key in conversation if (found := re.fullmatch(r"session_(\d+)", key)))
        turns = [
            Turn(turn["dia_id"], at + timedelta(seconds=20 * place), turn["speaker"], _get_text(turn))
            for number in numbers
            for at in [_parse_date(str(conversation.get(f"session_{number}_date_time", "")), number)]
            for place, turn in enumerate(conversation[f"session_{number}"])
        ]
        known = {turn.id for turn in turns}
        questions: list[tuple[str, set[str]]] = []
        for asked in one["qa"]:
            named = re.findall(r"D\d+:\d+", " ".join(map(str, asked.get("evidence", ()))))
            evidence = {re.sub(r":0+", ":", id) for id in named} & known
            evidence |= {str(id) for id in asked.get("evidence", ())} & known
            if evidence and asked.get("category") != 5:
                questions.append((str(asked["question"]), evidence))
        yield Dialogue(turns, questions)


def _get_text(turn: dict[str, Any]) -> str:
    caption = turn.get("blip_caption")
    return f"{turn['text']} [shares {caption}]" if caption else str(turn["text"])


def _parse_date(text: str, number: int) -> datetime:
    for form in _DATE_FORMS:
        try:
            return datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError:
            continue
    return datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=number)


def make_dialogues() -> Iterator[Dialogue]:
    """Yield two made-up dialogues, for a run without data."""
    people, places = ("Ada", "Ben", "Cleo"), ("Lisbon", "Oslo", "Kyoto", "Lima", "Accra", "Perth")
    things = ("piano", "kayak", "telescope", "bakery", "greenhouse", "novel")
    chance = random.Random(7)
    for number in range(2):
        turns: list[Turn] = []
        questions: list[tuple[str, set[str]]] = []
        start = datetime(2024, 3, 1, tzinfo=UTC)
        for place, (where, what) in enumerate(itertools.product(places, things)):
            who, at = chance.choice(people), start + timedelta(days=place)
            id = f"D{place + 1}:{{}}"
            turns += [
                Turn(id.format(1), at, "Ben", f"Hello {who}, how have you been? Any news about the {what}?"),
                Turn(id.format(2), at, who, f"I have started to work on it in {where}, with {number + place} friends."),
                Turn(id.format(3), at, "Ben", "That is wonderful, tell me more the next time."),
            ]
            questions.append((f"Where does {who} work on the {what} with {number + place} friends?", {id.format(2)}))
        yield Dialogue(turns, questions)


async def store_dialogue(kernel: LocalKernel, dialogue: Dialogue) -> Any:
    """Return a session whose conversation is a dialogue, at its dates."""
    session = await kernel.session(headless=True)
    messages = kernel.components.store.messages  # with times of the past
    for position, turn in enumerate(dialogue.turns):
        entry = (position, {"role": "user", "text": f"{turn.speaker}: {turn.text}"})
        messages.queue_message_writes(session.id, [entry], round(turn.at.timestamp()) * 1_000_000_000)
    await kernel.components.store.database.writer.flush()
    return session


def make_finders(session: Any, dialogue: Dialogue) -> dict[str, Find]:
    """Return the ways to find turns, by name."""
    ids = {f"message/{position}": turn.id for position, turn in enumerate(dialogue.turns)}

    async def search(question: str) -> list[str]:
        result = await session.call("search_memory", {"query": question[:400], "limit": _CUTS[-1]})
        return [ids.get(hit["id"], "") for hit in result.data["hits"]] if result.ok else []

    async def query(question: str) -> list[str]:
        arguments = {"query": question, "store": "session", "limit": _CUTS[-1]}
        result = await session.call("memory.query", arguments)
        return [ids.get(hit["id"], "") for hit in result.data["hits"]] if result.ok else []

    words = sqlite3.connect(":memory:")
    words.execute("CREATE VIRTUAL TABLE turn USING fts5(text, tokenize = 'porter unicode61')")
    words.executemany("INSERT INTO turn VALUES (?)", [(f"{turn.speaker}: {turn.text}",) for turn in dialogue.turns])

    async def match(question: str) -> list[str]:
        match = " OR ".join(f'"{word}"' for word in parse_query(question).words)
        sql = "SELECT rowid FROM turn WHERE turn MATCH ? ORDER BY rank LIMIT ?"
        rows = words.execute(sql, (match, _CUTS[-1])) if match else ()
        return [dialogue.turns[number - 1].id for (number,) in rows]

    return {"search_memory": search, "memory.query": query, "FTS5": match}


async def measure_recall(dialogues: Sequence[Dialogue], *, with_model: bool) -> dict[str, dict[str, float]]:
    """Return the recall of each way at each cut, in per cent."""
    totals: dict[str, list[float]] = {}
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder, "ws")
        workspace.mkdir()
        config = Path(folder, "handrail.toml")
        config.write_text(f'[search]\nembedder = "{"local" if with_model else "none"}"\n')
        async with open_kernel(workspace, state=Path(folder, "state"), config=config) as kernel:
            assert isinstance(kernel, LocalKernel)
            kernel.components.comparer.patience_s = 600.0  # a loaded machine must not change the figures
            for number, dialogue in enumerate(dialogues, 1):
                session = await store_dialogue(kernel, dialogue)
                finders = make_finders(session, dialogue)
                for question, evidence in dialogue.questions:
                    count += 1
                    for name, find in finders.items():
                        found = await find(question)
                        for place, cut in enumerate(_CUTS):
                            sums = totals.setdefault(name, [0.0] * len(_CUTS))
                            sums[place] += len(evidence & set(found[:cut])) / len(evidence)
                print(f"{number} of {len(dialogues)} dialogues", file=sys.stderr)
                await session.close()
    shown = {
        name: {f"recall@{k}": 100 * v / count for k, v in zip(_CUTS, sums, strict=True)}
        for name, sums in totals.items()
    }
    return {**shown, "questions": {"count": count}}


def make_text(chance: random.Random, words: Sequence[str], weights: Sequence[float], count: int) -> str:
    """Return a text whose words are as frequent as those of a language."""
    return " ".join(words[bisect(weights, chance.random() * weights[-1])] for _ in range(count))


async def measure_speed(entries: int) -> dict[str, dict[str, float]]:
    """Return the times of a query among ``entries`` facts, and of a search in sessions of several lengths, in ms."""
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choices(letters, k=chance.randint(3, 9))) for _ in range(30_000)]
    weights = [*itertools.accumulate(1 / (place + 3) for place in range(len(words)))]
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = KnowledgeStore(Path(folder, "state"))
        facts = (
            KnowledgeEntry(f"mem_{n}", make_text(chance, words, weights, 25), None, (), n, "/w", "s", "c", "a")
            for n in range(entries)
        )
        store.add_missing_entries(facts)
        store.close()
        workspace = Path(folder, "ws")
        workspace.mkdir()
        config = Path(folder, "handrail.toml")
        config.write_text('[search]\nembedder = "none"\n')
        async with open_kernel(workspace, state=Path(folder, "state"), config=config) as kernel:
            assert isinstance(kernel, LocalKernel)
            session = await kernel.session(headless=True)

            async def time_calls(tool: str, of: Any) -> dict[str, float]:
                times: list[float] = []
                for _ in range(200):
                    query = make_text(chance, words, weights, 6)
                    begin = time.perf_counter()
                    await of.call(tool, {"query": query})
                    times.append((time.perf_counter() - begin) * 1000)
                return {"p50 ms": statistics.median(times), "p95 ms": sorted(times)[int(len(times) * 0.95)]}

            await session.call("memory.query", {"query": "warm"})
            found[f"memory.query, {entries:,} facts"] = await time_calls("memory.query", session)
            at = datetime(2024, 1, 1, tzinfo=UTC)
            for length in (100, 1_000, 10_000):
                turns = [Turn("", at, "", make_text(chance, words, weights, 40)) for _ in range(length)]
                long = await store_dialogue(kernel, Dialogue(turns, []))
                await long.call("search_memory", {"query": "warm"})
                found[f"search_memory, {length:,} messages"] = await time_calls("search_memory", long)
    return found


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="dialogues in the form of LoCoMo")
    parser.add_argument("--limit", type=int, help="only the first N dialogues")
    parser.add_argument("--speed", action="store_true", help="measure times instead")
    parser.add_argument("--entries", type=int, default=100_000, help="facts for --speed")
    parser.add_argument("--words", action="store_true", help="measure without a model only")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any]
    if given.speed:
        found = asyncio.run(measure_speed(given.entries))
    else:
        dialogues = [*(make_dialogues() if given.data is None else read_dialogues(given.data))][: given.limit]
        found = {"words": asyncio.run(measure_recall(dialogues, with_model=False))}
        if not given.words and explain_model_unavailable() is None:
            found["words and meaning"] = asyncio.run(measure_recall(dialogues, with_model=True))
        if given.data is None:
            found["note"] = "made-up dialogues: not a measurement. Pass --data FILE."
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        rows = value if isinstance(value, dict) and not given.speed else {name: value}
        print(name if rows is value else "")
        for row, figures in rows.items():
            shown = (
                "  ".join(f"{key} {figure:.1f}" for key, figure in figures.items())
                if isinstance(figures, dict)
                else figures
            )
            print(f"  {row:36} {shown}")


if __name__ == "__main__":
    main()
