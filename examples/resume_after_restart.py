"""Defer an approval, close the kernel, approve, and resume the call.

The approval request is stored, so each of the three parts could be a program and run on another day.

Output::

    the call awaits approval
    approved write plan.md
    resumed: plan.md
    the file says: 1. rest
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from handrail import ApprovalAnswer, DeferApprovals, open_kernel


async def propose(workspace: Path, state: Path) -> str:
    """Make a call that needs approval, and leave."""
    async with open_kernel(workspace, state=state) as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        result = await session.call("write", {"path": "plan.md", "content": "1. rest\n"})
        assert result.metadata["awaiting_approval"]
        print("the call awaits approval")
        return session.id


async def approve(workspace: Path, state: Path) -> None:
    """Answer every request. An answer runs nothing."""
    async with open_kernel(workspace, state=state) as kernel:
        for approval in kernel.approvals.list_pending():
            await kernel.approvals.decide(approval.id, ApprovalAnswer("once"), by="the team lead")
            print(f"approved {approval.request.tool_id} {approval.request.arguments['path']}")


async def resume(workspace: Path, state: Path, session_id: str) -> None:
    """Open the session again, and run the call."""
    async with open_kernel(workspace, state=state) as kernel:
        session = await kernel.session(session_id, approval_handler=DeferApprovals())
        for answer in await session.resume_suspended_calls():
            print(f"resumed: {answer.result.data['path']}")


async def main(folder: Path) -> None:
    workspace, state = folder / "workspace", folder / "state"
    workspace.mkdir()
    session_id = await propose(workspace, state)
    await approve(workspace, state)
    await resume(workspace, state, session_id)
    print(f"the file says: {(workspace / 'plan.md').read_text()}", end="")


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
