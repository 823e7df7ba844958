"""``handrail run``: a model works on a task through the tools, shown live on the terminal."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

import click

from handrail.contract.struct import Struct
from handrail.frontends.cli.command_group import AWAITING_APPROVAL, ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, ModelOptions, add_call_options, add_model_options
from handrail.frontends.cli.command_runner import (
    InterruptHandler,
    apply_session_agent,
    choose_approval_handler,
    find_resumable_session,
    open_configured_kernel,
    run_on_event_loop,
)
from handrail.frontends.cli.run_view import JsonLinesRunView, TerminalRunView
from handrail.frontends.cli.shell_completion import forkable_ids, resumable_ids

if TYPE_CHECKING:
    from handrail.agent.run_events import RunOutcome
    from handrail.contract.session_protocols import Session
    from handrail.kernel.kernel_interface import Kernel

SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@click.command("run")
@click.argument("task", required=False)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[ID]",
    shell_complete=resumable_ids,
    help="Session to resume. Without ID: the last one that is not open.",
)
@click.option(
    "--fork", metavar="ID", shell_complete=forkable_ids, help="Session whose messages a new session starts with."
)
@click.option(
    "--compact",
    is_flag=True,
    help="With --resume or --fork: first compact older messages. Without TASK, stop after that.",
)
@add_model_options("")
@add_call_options
def command(
    setting: CommandOptions, task: str | None, resume: str | None, fork: str | None, compact: bool, asked: ModelOptions
) -> int:
    """Run a task with a model.

    The model works on TASK through the tools. Its text is printed on stdout, its calls on stderr. Exits with 0 only if the
    run ends with an answer, and with 4 if calls wait for approval: answer them with handrail approve, then continue with
    handrail run --resume. Messages are saved, also if the run is killed. Without TASK, a resumed session continues where it
    stopped.
    """
    if resume is not None and fork is not None:
        raise click.UsageError("`--resume` and `--fork` exclude each other. Pass only one of them.")
    if resume and task is None and not SESSION_ID.fullmatch(resume):
        task, resume = resume, ""  # handrail run --resume "a task": an ID contains no blanks
    if resume is None and fork is None:
        if task is None:
            raise click.UsageError("TASK is missing. Pass a task, or resume a session with `--resume`.")
        if compact:
            raise click.UsageError("`--compact` requires a session. Run: handrail run --resume ID --compact")
    if resume is not None:
        resume = find_resumable_session(setting, resume).id
    if before := resume or fork:
        setting = apply_session_agent(setting, before)
    begin = RunStartOptions(task, resume, fork, compact)

    return run_on_event_loop(lambda interruption: _run(setting, begin, asked, interruption))


class RunStartOptions(Struct, frozen=True):
    """The start of a run.

    :param task: the task; None to continue where a session stopped
    :param resume: the session to resume; None for a new one
    :param fork: the session whose messages a new session starts with
    :param compact: compact older messages first; without a task, stop after that
    """

    task: str | None
    resume: str | None = None
    fork: str | None = None
    compact: bool = False


async def _open_session(setting: CommandOptions, kernel: Kernel, begin: RunStartOptions) -> Session:
    """Open the session of a run.

    :raises UsageError: if the session does not exist
    """
    session_id = begin.resume if begin.fork is None else await kernel.fork_session(begin.fork)
    return await kernel.session(session_id, approval_handler=choose_approval_handler(setting))


async def _run(
    setting: CommandOptions, begin: RunStartOptions, asked: ModelOptions, interruption: InterruptHandler
) -> int:
    from handrail.agent.agent_loop import Agent
    from handrail.agent.providers import MODEL_FORMS
    from handrail.agent.run_events import RunFinished

    outcome: RunOutcome | None = None
    async with AsyncExitStack() as at_the_end, open_configured_kernel(setting) as kernel:
        manifest = kernel.default_agent
        model = asked.open_model_for(
            manifest, f"No model is set. Pass --model {MODEL_FORMS}, or set HANDRAIL_MODEL or the agent's model."
        )
        at_the_end.push_async_callback(model.aclose)  # sub-agents use the model until the kernel ends
        session = await _open_session(setting, kernel, begin)
        view = JsonLinesRunView() if setting.json else TerminalRunView(asked.resume_command_arguments)
        view.receive_session_opened(session.id)
        agent = Agent(
            session,
            model,
            workspace=session.workdir,
            instructions=manifest.prompt,
            budget=asked.make_run_budget(manifest),
        )
        interruption.stop = agent.cancel
        if begin.compact:
            view.show(await agent.compact())
            if begin.task is None:
                interruption.stop = None
                await session.suspend()
                return OUTPUT
        async with aclosing(agent.run(begin.task, until="idle")) as events:
            async for event in events:
                view.show(event)
                if isinstance(event, RunFinished):
                    outcome = event.outcome
        interruption.stop = None
        await session.suspend()
    if outcome is not None and outcome.status == "awaiting_approval":
        return AWAITING_APPROVAL
    return OUTPUT if outcome is not None and outcome.ok else ERROR
