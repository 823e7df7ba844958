"""kill -9 at each step of a job, question, approval and sub-agent: nothing runs twice, and nothing is lost."""

from __future__ import annotations

import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from tests.prefork import command as prefork
from tests.session import killed
from tests.session.killed import CALLS, SESSION, STEPS, person, workplace

from handrail.agent.agent_loop import Agent
from handrail.record.verification import verify_log
from handrail.testing.provider_request_checks import PlaybackModel, text_reply

LEAN = {
    ("job", "notice written"),
    ("job that is waited for", "told"),
    ("question", "decided"),
    ("task", "asked"),
    ("task in the background", "ended"),
    ("task whose session is left", "notice written"),
    ("task whose session is left", "notice taken"),
}
"""Those that are looked at each time; the others belong to the big counts."""
MATRIX = [
    pytest.param(case, step, id=f"{case}: {step}", marks=() if (case, step) in LEAN else pytest.mark.slow)
    for case, steps in STEPS.items()
    for step in steps
]
NOT_BEGUN = {"proposed", "backgrounded", "intended"}
"""Steps of a job before its tool has run."""


def kill(folder: Path, *how: str) -> None:
    """Have a process live until it is killed at a step, or after a while."""
    done = subprocess.run([*prefork.python(Path(killed.__file__)), str(folder), *how], capture_output=True)
    assert done.returncode == -signal.SIGKILL, (done.returncode, done.stdout, done.stderr.decode()[-2000:])


def effects(folder: Path) -> int:
    file = folder / "effects"
    return len(file.read_text().split()) if file.exists() else 0


@pytest.mark.proves("G-05", "X-06", "A-03", "P-09", "A-10")
@pytest.mark.parametrize(("case", "step"), MATRIX)
async def test_the_next_process_settles_the_work_of_a_process_killed_at_any_step(
    tmp_path: Path, case: str, step: str
) -> None:
    kill(tmp_path, case, step)
    before = effects(tmp_path)
    assert before <= 1
    asked = person()
    async with workplace(tmp_path) as kernel:
        assert verify_log(kernel.log.reader).ok
        if case.startswith("task"):
            assert not kernel.approvals.list_pending(), "what a sub-agent asked, nobody answers any more"
        session = await kernel.session(SESSION, approval_handler=asked)
        model = PlaybackModel(*(text_reply(f"On, {n}.") for n in range(5)))
        assert (await Agent(session, model).complete("And now?", until="idle")).ok
        jobs = await session.jobs.list()
        assert all(job.has_ended for job in await kernel.jobs.list()) and not kernel.approvals.list_pending()
        await kernel.log.flush()
        ended = {row.call_id: row.state for row in kernel.log.reader.calls()}
        assert not {"suspended", "running", "not-run"} & {
            state for id, state in ended.items() if id.startswith(SESSION)
        }
        below = kernel.components.store.sessions.list_open_subagent_sessions(SESSION)
    said = str(model.requests[-1].messages)
    again = case == "job that may be run again" and step not in ("ended", "row ended") and "notice" not in step
    assert effects(tmp_path) <= before + (again or case in ("approval", "question")), "nothing runs twice"
    notices = 0 if step == "answer on record" else 1  # who waited for it was told by the answer
    for job in jobs:
        assert said.count(f"Job {job.id} (") == notices, "its end is told, once"
    if case.startswith("job"):
        assert len(jobs) == (step != "proposed")
        known = step in ("ended", "row ended") or "notice" in step or case == "job that is waited for"
        assert [job.state for job in jobs] == ["done" if known or again else "interrupted"] * len(jobs)
        assert ("work is done" in said) is bool(jobs and (known or again))
        assert effects(tmp_path) == (step not in ("proposed", "backgrounded", "answered", "intended")) + again * bool(
            jobs
        )
    elif case.startswith("task"):
        of_a_job = "background" in CALLS[case][1]
        assert (len(below), len(jobs)) == (not (of_a_job and step == "detached"), of_a_job)
        assert all(row.id in said for row in below), "where it worked is told"
        known = step in ("ended", "row ended") or "notice" in step
        assert [job.state for job in jobs] == ["done" if known else "interrupted"] * len(jobs)
        assert not asked.requests, "and it does not go on"
    elif case == "question":
        assert ("blue" in said) is (step != "taken up") or '"interrupted"' in said
        assert bool(asked.questions) is (step == "asked")
    else:
        assert ("work is done" in said) is (step not in ("taken up", "running"))
        assert effects(tmp_path) == (step != "taken up") and bool(asked.requests) is (step == "asked")
    async with workplace(tmp_path) as kernel:
        session = await kernel.session(SESSION)
        model = PlaybackModel(text_reply("The end."))
        assert (await Agent(session, model).complete("And again?", until="idle")).text == "The end."
        said = str(model.requests[0].messages)
        assert all(said.count(f"Job {job.id} (") == notices for job in jobs), "and not again"
    assert CALLS[case][0] in str(model.requests[0].messages)


@pytest.mark.slow
@pytest.mark.proves("G-05", "X-06", "A-10")
async def test_repeated_kills_of_a_busy_session_run_nothing_twice_and_every_job_is_reported(
    tmp_path: Path,
) -> None:
    chance, lives = random.Random(7), 40
    for life in range(lives):
        kill(tmp_path, "awhile", str(life), f"{chance.uniform(0.0, 0.6):.3f}")
    async with workplace(tmp_path) as kernel:
        assert verify_log(kernel.log.reader).ok
        session = await kernel.session(SESSION, approval_handler=person())
        model = PlaybackModel(*(text_reply("On.") for _ in range(50)))
        assert (await Agent(session, model).complete("The last one.", until="idle")).ok
        jobs = await session.jobs.list()
        assert jobs and all(job.has_ended for job in await kernel.jobs.list()) and not kernel.approvals.list_pending()
        await kernel.log.flush()
        ended = Counter(row.state for row in kernel.log.reader.calls(limit=10_000))
        assert not {"suspended", "running"} & set(ended), ended
    ran = Counter((tmp_path / "effects").read_text().split())
    assert all(count == 1 for name, count in ran.items() if "again" not in name), ran
    assert all(count <= 5 for count in ran.values()), ran
    said = str(model.requests[-1].messages)
    assert all(said.count(f"Job {job.id} (") == 1 for job in jobs)
    assert len(ended) > 2 and ran, "they came to something, and to different things"
