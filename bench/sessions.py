"""A session of 10,000 messages opened again: read from the database into a conversation that a model can go on with.

Beside it, in interleaved rounds of the same run: pydantic-ai reading as many messages of the same text from one JSON
text (its own way to keep a history), and the bare decoding of our rows by orjson, without a database.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from handrail.agent.conversation import Conversation, encode_message
from handrail.agent.model_protocol import (
    AssistantMessage,
    CallResult,
    CallResultsMessage,
    HistoryCallPart,
    Message,
    TextPart,
    UserMessage,
)
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.record.artifacts import ArtifactStore
from handrail.record.commit_log import CommitLog
from handrail.session.session_store import SessionHistory
from handrail.store.tables.session_tables import SessionRow
from handrail.store.workspace_store import WorkspaceStore

TEXT = "The function reads the file line by line and counts words; an edit follows, then the tests. " * 8
RESULT = (
    '{"type":"output","data":{"path":"src/module/file.py","text":"' + "def f(x):\\n    return x + 1\\n" * 40 + '"}}'
)


def messages(count: int) -> list[Message]:
    """A task, then replies with two calls each and their results."""
    made: list[Message] = [UserMessage(TEXT)]
    while len(made) < count:
        n = len(made)
        calls = [HistoryCallPart(f"call_{n}_{k}", "read", {"path": "src/module/file.py", "offset": n}) for k in (0, 1)]
        made.append(AssistantMessage((TextPart(TEXT[:200]), *calls)))
        made.append(CallResultsMessage(tuple(CallResult(call.wire_id, RESULT, False) for call in calls)))
    return made[:count]


def pydantic_ai_reader(count: int) -> Callable[[], Any]:
    from pydantic_ai.messages import (
        ModelMessagesTypeAdapter,
        ModelRequest,
        ModelResponse,
        TextPart,
        ToolCallPart,
        ToolReturnPart,
        UserPromptPart,
    )

    made: list[Any] = [ModelRequest([UserPromptPart(TEXT)])]
    while len(made) < count:
        n = len(made)
        ids = [f"call_{n}_{k}" for k in (0, 1)]
        calls = [ToolCallPart("read", {"path": "src/module/file.py", "offset": n}, i) for i in ids]
        made.append(ModelResponse([TextPart(TEXT[:200]), *calls]))
        made.append(ModelRequest([ToolReturnPart("read", RESULT, i) for i in ids]))
    text = ModelMessagesTypeAdapter.dump_json(made[:count])
    return lambda: ModelMessagesTypeAdapter.validate_json(text)


async def measure(folder: Path, count: int, rounds: int) -> None:
    (folder / "workspace").mkdir()
    store = WorkspaceStore.open(folder / "workspace", folder / "state")
    await store.sessions.record_opened(SessionRow("ses_long", 1))
    artifacts = ArtifactStore(store.folders.artifact_folder)
    history = SessionHistory("ses_long", store.messages, SecretRedactor(), CommitLog(store.database), artifacts)
    made = messages(count)
    rows = [(n, encode_message(m, ["ses_long/1.0", "ses_long/1.1"])) for n, m in enumerate(made)]
    for start in range(0, count, 500):
        await history.store_messages(rows[start : start + 500])
    encoded = [orjson.dumps(data) for _, data in rows]
    del made, rows

    def decode() -> None:
        for row in encoded:
            orjson.loads(row)

    readers: dict[str, Callable[[], Any]] = {}
    try:
        readers["pydantic-ai"] = pydantic_ai_reader(count)
    except ImportError as error:
        print(
            f"bench: pydantic-ai is left out: {error.name} is not installed (bench/requirements.txt)", file=sys.stderr
        )
    readers["orjson alone"] = decode
    gc.collect()
    gc.freeze()  # what the benchmark itself holds is no part of a process that opens a session
    took: dict[str, list[float]] = {"handrail": [], **{name: [] for name in readers}}
    for _ in range(rounds):
        conversation = Conversation(history)
        began = time.perf_counter()
        await conversation.load_stored_messages()
        took["handrail"].append(time.perf_counter() - began)
        assert conversation.open_exchange is not None or len(conversation.messages) == count
        for name, read in readers.items():
            began = time.perf_counter()
            read()
            took[name].append(time.perf_counter() - began)
    size = sum(map(len, encoded)) / 1e6
    print(f"{count:,} messages, {size:.1f} MB as JSON, {rounds} interleaved rounds")
    peer = "pydantic-ai" if "pydantic-ai" in took else "orjson alone"
    base = took[peer]
    for name, times in took.items():
        ratio = statistics.median(mine / other for mine, other in zip(times, base, strict=True))
        print(
            f"{name:14} {statistics.median(times) * 1e3:8.1f} ms   {ratio:5.2f} × {peer}   (most {max(times) * 1e3:.1f})"
        )
    await store.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(Path(name), options.messages, options.rounds))


if __name__ == "__main__":
    main()
