"""Run an agent with a scripted model, and read the log.

Output::

    The list is sorted.
    turns: 3, calls: 2
    read output
    edit output
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from handrail import Agent, Budget, open_kernel
from handrail.testing import PlaybackModel, call_reply, text_reply

EDIT = {"path": "list.txt", "old": "milk\nbread\n", "new": "bread\nmilk\n"}


async def main(folder: Path) -> None:
    workspace = folder / "workspace"
    workspace.mkdir()
    (workspace / "list.txt").write_text("milk\nbread\n")

    # With an API key, use open_model("openai:NAME"), "anthropic:NAME" or "gemini:NAME" instead.
    model = PlaybackModel(
        call_reply(("read", {"path": "list.txt"})),
        call_reply(("edit", EDIT)),
        text_reply("The list is sorted."),
    )
    async with open_kernel(workspace, state=folder / "state", rules=["allow edit list.txt"]) as kernel:
        session = await kernel.session(headless=True)
        agent = Agent(session, model, workspace=session.workdir, budget=Budget(turns=10, calls=20, seconds=60))
        outcome = await agent.complete("Sort my shopping list.")
        print(outcome.text)
        print(f"turns: {outcome.turns}, calls: {outcome.calls}")

        await kernel.log.flush()
        for call in sorted(kernel.log.reader.calls(session=session.id), key=lambda call: call.first):
            print(call.tool, call.state)
    await model.aclose()
    assert (workspace / "list.txt").read_text() == "bread\nmilk\n"


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
