"""An approval of a command covers the files that it runs with their content at the time of the request."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from handrail.arbiter.approvals.run_file_binding import MAX_HASHED_FILE_BYTES, ExecutedFileFinder, explain_file_changes
from handrail.contract.approval_requests import Approval, ApprovalAnswer, ApprovalRequest
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.policy.call_targets import CallTarget
from handrail.policy.shell.parser import parse_script
from handrail.runtime.files.session_roots import SessionRoots
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("P-07", "P-09")

ASKED = ("ask bash",)
"""Without this rule, these commands would run unasked, because they stay confined."""


class ApprovingUser:
    """Says yes once, after ``meanwhile`` has had its turn."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None, answer: ApprovalAnswer | None = None) -> None:
        self.meanwhile = meanwhile
        self.given = answer or ApprovalAnswer("once")
        self.requests: list[ApprovalRequest] = []

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        self.requests.append(request)
        self.meanwhile()
        return self.given

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]]:
        return [["yes"]] * len(questions)


def put(workspace: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def find_run_files(workspace: Path, command: str, **arguments: Any) -> set[str]:
    target = CallTarget("shell.run", command, command, parse_script(command))
    return set(
        ExecutedFileFinder(SessionRoots(workspace), None).fingerprint_executed_files(
            (target,), {"command": command, **arguments}
        )
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "ws"
    folder.mkdir()
    return folder


async def refused(place: Path, command: str, meanwhile: Callable[[], object], tool: str = "bash") -> Result:
    async with temporary_kernel(place, rules=ASKED) as kernel:
        session = await kernel.session(approval_handler=ApprovingUser(meanwhile))
        return await session.call(tool, {"command": command})


_COMMANDS = [
    ("./run.sh", "run.sh"),
    ("bash run.sh", "run.sh"),
    ("bash -eux run.sh now", "run.sh"),
    ("sh ./run.sh && true", "run.sh"),
    ("true; /bin/sh run.sh", "run.sh"),
    ("python tool.py --fast", "tool.py"),
    ("python3.11 -W error tool.py", "tool.py"),
    ("python -m pkg", "pkg/__main__.py"),
    ("python -m pkg.sub.mod", "pkg/sub/mod.py"),
    ("python -mpkg.sub.mod", "pkg/__init__.py"),
    ("python pkg", "pkg/__main__.py"),
    ("node x.js", "x.js"),
    ("node x", "x.js"),
    ("node .", "index.js"),
    ("perl x.pl", "x.pl"),
    ("ruby -w x.rb", "x.rb"),
    ("source run.sh", "run.sh"),
    (". ./run.sh", "run.sh"),
    ("make", "Makefile"),
    ("make -C sub all", "sub/Makefile"),
    ("make -f build.mk", "build.mk"),
    ("make --file=build.mk", "build.mk"),
    ("env X=1 ./run.sh", "run.sh"),
    ("env -S './run.sh a'", "run.sh"),
    ("timeout 5 ./run.sh", "run.sh"),
    ("nice -n 5 timeout 5 bash run.sh", "run.sh"),
    ("xargs ./run.sh", "run.sh"),
    ("echo a | xargs -n1 -I{} sh -c './run.sh {}'", "run.sh"),
    ("find . -name x -exec ./run.sh {} ;", "run.sh"),
    ("cd sub && ./inner.sh", "sub/inner.sh"),
    ("cd sub; cd deep; sh last.sh", "sub/deep/last.sh"),
    ("pushd sub && bash inner.sh", "sub/inner.sh"),
    ("bash -c 'cd sub && ./inner.sh'", "sub/inner.sh"),
    ("bash -c \"sh run.sh\"", "run.sh"),
    ("eval ./run.sh", "run.sh"),
    ("sudo ./run.sh", "run.sh"),
    ("strange-runner run.sh", "run.sh"),
    ("./link.sh", "run.sh"),
    ("bash link.sh", "run.sh"),
    ("npm run x", "package.json"),
    ("npm --prefix sub test", "sub/package.json"),
    ("cd sub/deep && npm test", "package.json"),
    ("just", "justfile"),
    ("pytest -q", "conftest.py"),
    ("python -m pytest sub/test_a.py::test_b", "sub/test_a.py"),
    ("cargo build", "build.rs"),
    ("cat run.sh | bash", "run.sh"),
    ("bash < run.sh", "run.sh"),
    ("cp run.sh other.sh && bash other.sh", "run.sh"),
    ("for f in *.sh; do bash $f; done", "run.sh"),
    ("X=1 ./run.sh", "run.sh"),
    ("(./run.sh)", "run.sh"),
    ("if true; then ./run.sh; fi", "run.sh"),
    ("bash \"$(pwd)/run.sh\"", "run.sh"),
    ("bash $PWD/run.sh", "run.sh"),
    ("./run.sh & wait", "run.sh"),
    ("bash ru''n.sh $UNKNOWN", "run.sh"),
    ("bash r?n.sh", "run.sh"),
    ("D=sub; sh $D/inner.sh", "sub/inner.sh"),
    ("D=sub; sh \"$D/inner.sh\"", "sub/inner.sh"),
    ("pytest", "tests/conftest.py"),
    ("go run ./cmd", "cmd/main.go"),
    ("cargo run", "src/main.rs"),
    ("docker build .", "Dockerfile"),
    ("awk -f x.awk data", "x.awk"),
    ("sed -f x.sed data", "x.sed"),
    ("git -c core.fsmonitor=./run.sh status", "run.sh"),
    ("git bisect run ./run.sh", "run.sh"),
    ("tar -I ./run.sh -xf a.tar", "run.sh"),
    ("gunicorn pkg.sub.mod:app", "pkg/sub/mod.py"),
    ("pip install ./sub", "sub/setup.py"),
    ("tool", ".venv/bin/tool"),
    ("npx thing", "node_modules/.bin/thing"),
    ("python -c 'import tool'", "tool.py"),
    ("python3.11 -c 'from pkg.sub import mod'", "pkg/sub/__init__.py"),
    ("python -c 'import runpy; runpy.run_module(\"tool\")'", "tool.py"),
    ("PYTHONPATH=pkg/sub python -c 'import mod'", "pkg/sub/mod.py"),
    ("python -im pkg.sub.mod", "pkg/sub/mod.py"),
    ("python -Bsm tool", "tool.py"),
    ("python -Bm tool", "tool.py"),
    ("python -m unittest tool", "tool.py"),
    ("perl -Ilib -MEvil -e 1", "lib/Evil.pm"),
    ("perl -I lib -mMy::Evil -e 1", "lib/My/Evil.pm"),
    ("PERL5LIB=lib PERL5OPT=-MEvil perl -e 1", "lib/Evil.pm"),
    ("ruby -Ilib -revil -e 1", "lib/evil.rb"),
    ("lua -l evil -e 1", "evil.lua"),
    ("gawk -i evil 'BEGIN{}'", "evil.awk"),
    ("terraform apply", "main.tf"),
    ("cd sub && tofu apply", "sub/other.tf"),
    ("terragrunt run-all plan", "terragrunt.hcl"),
    ("dotnet build", "app.csproj"),
    ("gulp", "gulpfile.js"),
    ("npx grunt", "Gruntfile.js"),
    ("cdk deploy", "cdk.json"),
    ("act -j build", ".github/workflows/ci.yml"),
    ("cmake --build out", "out/build.ninja"),
    ("ctest --test-dir out", "out/CTestTestfile.cmake"),
    ("meson test -C out", "out/build.ninja"),
    ("locust --headless", "locustfile.py"),
    ("behave", "features/environment.py"),
    ("conan install .", "conanfile.py"),
    ("firebase deploy", "firebase.json"),
    ("go test ./sub", "sub/x_test.go"),
    ("clj -X:run", "deps.edn"),
    ("fastlane beta", "fastlane/Fastfile"),
    ("alembic upgrade head", "migrations/env.py"),
    ("pulumi up", "Pulumi.yaml"),
]  # fmt: skip


def everything(workspace: Path) -> None:
    names = (
        "tests/conftest.py",
        "cmd/main.go",
        "src/main.rs",
        "run.sh",
        "tool.py",
        "x.js",
        "index.js",
        "x.pl",
        "x.rb",
        "build.mk",
        "sub/inner.sh",
        "sub/deep/last.sh",
    )
    names += ("pkg/__init__.py", "pkg/__main__.py", "pkg/sub/__init__.py", "pkg/sub/mod.py", "Makefile", "sub/Makefile")
    names += ("package.json", "sub/package.json", "justfile", "conftest.py", "sub/test_a.py", "build.rs", "Dockerfile")
    names += ("main.tf", "sub/other.tf", "terragrunt.hcl", "app.csproj", "gulpfile.js", "Gruntfile.js", "cdk.json")
    names += (".github/workflows/ci.yml", "out/build.ninja", "out/CTestTestfile.cmake", "locustfile.py", "conanfile.py")
    names += (
        "features/environment.py",
        "firebase.json",
        "sub/x_test.go",
        "deps.edn",
        "fastlane/Fastfile",
        "Pulumi.yaml",
    )
    names += ("migrations/env.py",)
    names += ("lib/Evil.pm", "lib/My/Evil.pm", "lib/evil.rb", "evil.lua", "evil.awk")
    names += ("x.awk", "x.sed", "data", "a.tar", "sub/setup.py", ".venv/bin/tool", "node_modules/.bin/thing")
    put(workspace, {name: f"# {name}\n" for name in names})
    (workspace / "link.sh").symlink_to("run.sh")


@pytest.mark.parametrize(("command", "file"), _COMMANDS, ids=[command for command, _ in _COMMANDS])
def test_a_file_that_a_command_runs_is_bound_to_its_approval(workspace: Path, command: str, file: str) -> None:
    everything(workspace)
    assert file in find_run_files(workspace, command)


@pytest.mark.parametrize(
    "command",
    [
        "cat run.sh",
        "rm run.sh",
        "mv run.sh other.sh",
        "git add run.sh",
        "ls -l",
        "grep -n x run.sh",
        "echo run.sh",
        "true",
    ],
)
def test_a_command_that_only_handles_data_binds_nothing(workspace: Path, command: str) -> None:
    everything(workspace)
    assert find_run_files(workspace, command) == set()


def test_deep_folders_and_long_commands_do_not_hide_a_file(workspace: Path) -> None:
    path = "/".join(f"d{n}" for n in range(30))
    put(workspace, {f"{path}/x.sh": "x", "run.sh": "x", **{f"{n:03}.sh": "x" for n in range(200)}})
    assert f"{path}/x.sh" in find_run_files(workspace, "; ".join(f"cd d{n}" for n in range(30)) + "; ./x.sh")
    put(workspace, {"a/b/a/b/last.sh": "x"})
    assert "a/b/a/b/last.sh" in find_run_files(workspace, "(cd a; cd b; cd a; cd b; sh last.sh)")
    assert "a/b/a/b/last.sh" in find_run_files(workspace, "for d in a b a b; do cd $d; done; sh last.sh")
    assert "a/b/a/b/last.sh" in find_run_files(workspace, "cd a; cd b; cd a; cd b; sh last.sh")
    assert "run.sh" in find_run_files(workspace, "env " + " ".join(f"V{n}=1" for n in range(1_500)) + " ./run.sh")
    assert "199.sh" in find_run_files(workspace, "for f in *.sh; do bash $f; done")
    assert "run.sh" in find_run_files(workspace, "bash " + "./" * 1_000 + "run.sh")
    assert "run.sh" in find_run_files(workspace, "bash " + "a/../" * 700 + "run.sh")
    assert "run.sh" in find_run_files(workspace, "bash {nothing,r[t-v]n}.sh")
    put(workspace, {"a/b/c.sh": "x", "a/.h/c.sh": "x"})
    assert {"a/b/c.sh", "199.sh"} <= find_run_files(workspace, "bash */*/*.sh; bash 1*.sh")


@pytest.mark.parametrize(
    "text",
    ["python -m " + "a." * 2_000 + "b", "bash " + " ".join(f"*/*/*{n}" for n in range(3_000)), "x " + "{a,b}" * 400],
    ids=["a long module", "wildcards", "braces"],
)
def test_a_hostile_command_text_is_checked_within_limits(workspace: Path, text: str) -> None:
    put(workspace, {f"d{n}/e{m}/f": "x" for n in range(10) for m in range(10)})
    try:
        assert find_run_files(workspace, text) == set()
    except ToolError as error:
        assert error.kind == "limit"


def test_a_folder_argument_counts_as_a_possible_working_folder_of_the_command(workspace: Path) -> None:
    everything(workspace)
    assert "sub/inner.sh" in find_run_files(workspace, "./inner.sh", cwd="sub")
    assert "sub/inner.sh" not in find_run_files(workspace, "./inner.sh")


def test_deeply_nested_folders_of_the_same_name_are_searched_in_bounded_time(workspace: Path) -> None:
    deep = workspace
    for _ in range(300):
        deep /= "d"
        deep.mkdir()
    assert find_run_files(workspace, "make -C d; (cd d; npm test); rm -rf d") == set()


@pytest.mark.parametrize("command", ["bash ~/x.sh", "bash $HOME/x.sh", "cd ~ && ./x.sh", 'sh "${HOME}/x.sh"'])
def test_a_script_in_the_home_folder_of_programs_is_bound(workspace: Path, command: str) -> None:
    home = workspace.parent / "scratch"
    put(home, {"x.sh": "x"})
    target = CallTarget("shell.run", command, command, parse_script(command))
    assert list(ExecutedFileFinder(SessionRoots(workspace), str(home)).fingerprint_executed_files((target,), {})) == [
        f"{home}/x.sh"
    ]


def test_a_file_outside_the_workspace_is_not_bound(workspace: Path) -> None:
    put(workspace.parent, {"beside/run.sh": "x"})
    (workspace / "out.sh").symlink_to(workspace.parent / "beside" / "run.sh")
    assert (
        find_run_files(workspace, f"bash out.sh; bash ../beside/run.sh; bash {workspace.parent}/beside/run.sh") == set()
    )


def test_a_file_too_large_to_hash_is_identified_by_its_metadata(workspace: Path) -> None:
    large = workspace / "large.bin"
    with large.open("wb") as file:
        file.truncate(MAX_HASHED_FILE_BYTES + 1)
    target = CallTarget("shell.run", "./large.bin", "", parse_script("./large.bin"))
    files = ExecutedFileFinder(SessionRoots(workspace), None)
    before = files.fingerprint_executed_files((target,), {})
    assert before["large.bin"].startswith("identity:")
    assert explain_file_changes(before, files.fingerprint_executed_files((target,), {})) is None
    os.utime(large, (1, 1))
    assert "`large.bin` has changed" in (
        explain_file_changes(before, files.fingerprint_executed_files((target,), {})) or ""
    )


def test_a_named_pipe_does_not_block_the_search(workspace: Path) -> None:
    os.mkfifo(workspace / "pipe.sh")
    assert find_run_files(workspace, "bash pipe.sh") == set()


def test_a_command_with_too_many_possible_files_is_refused(workspace: Path) -> None:
    put(workspace, {f"d{n}/f{n}.sh": "x" for n in range(40)})
    words = " ".join(f"d{n} f{n}.sh" for n in range(40))
    assert len(find_run_files(workspace, f"strange-runner {words}")) == 40
    with pytest.raises(ToolError, match="Split the command") as refused:
        find_run_files(workspace, f"strange-runner {words} " + " ".join(f"w{n}" for n in range(4_000)))
    assert refused.value.kind == "limit"


@pytest.mark.parametrize("command", ["bash run.sh", "make", "cd sub && ./inner.sh", "python -m pkg"])
async def test_a_file_that_changes_during_the_approval_is_not_run(tmp_path: Path, command: str) -> None:
    place = tmp_path.resolve()
    everything(place / "ws")
    file = {"bash run.sh": "run.sh", "make": "Makefile", "cd sub && ./inner.sh": "sub/inner.sh"}.get(command)
    changed = file or "pkg/__main__.py"

    def rewrite() -> None:
        (place / "ws" / changed).write_text("touch planted\n")

    result = await refused(place, command, rewrite)
    assert (result.error_kind, (place / "ws" / "planted").exists()) == ("conflict", False)
    assert f"have changed since its approval: `{changed}` has changed" in (result.error_text or "")
    assert "Make the call again" in (result.error_text or "")


async def test_a_new_file_that_replaces_the_approved_one_is_not_run(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    put(place / "ws", {"Makefile": "all:\n\ttrue\n"})

    def precede() -> None:
        put(place / "ws", {"GNUmakefile": "all:\n\ttouch planted\n"})

    result = await refused(place, "make", precede)
    assert result.error_kind == "conflict"
    assert "`GNUmakefile` was added" in (result.error_text or "")


async def test_a_link_changed_to_another_file_during_the_approval_is_not_run(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    put(place / "ws", {"good.sh": "true\n", "bad.sh": "touch planted\n"})
    link = place / "ws" / "run.sh"
    link.symlink_to("good.sh")

    def turn() -> None:
        link.unlink()
        link.symlink_to("bad.sh")

    result = await refused(place, "bash run.sh", turn)
    assert result.error_kind == "conflict"
    assert "`bad.sh` was added" in (result.error_text or "")


async def test_an_unchanged_approved_script_runs(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    put(place / "ws", {"run.sh": "echo it-ran\n"})
    person = ApprovingUser()
    async with temporary_kernel(place, rules=ASKED) as kernel:
        session = await kernel.session(approval_handler=person)
        result = await session.call("bash", {"command": "bash run.sh"})
    assert result.ok and "it-ran" in repr(result.data), result
    assert list(person.requests[0].files) == ["run.sh"]
    assert person.requests[0].files["run.sh"].startswith("sha256:")


async def test_an_approval_of_a_background_job_also_covers_its_files(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    put(place / "ws", {"run.sh": "true\n"})

    def rewrite() -> None:
        (place / "ws" / "run.sh").write_text("touch planted\n")

    async with temporary_kernel(place, rules=ASKED) as kernel:
        session = await kernel.session(approval_handler=ApprovingUser(rewrite))
        begun = await session.call("bash", {"command": "bash run.sh", "background": True})
        assert begun.ok, begun
        ended = await session.call("wait", {"job_id": begun.data["job_id"], "timeout_ms": 20_000})
    assert "`run.sh` has changed" in repr(ended), ended
    assert not (place / "ws" / "planted").exists()


async def test_arguments_edited_by_the_user_bind_their_files_at_the_time_of_the_answer(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    put(place / "ws", {"run.sh": "true\n", "other.sh": "echo other-ran\n"})
    given = ApprovalAnswer("once", arguments={"command": "bash other.sh"})

    async with temporary_kernel(place, rules=ASKED) as kernel:
        session = await kernel.session(approval_handler=ApprovingUser(answer=given))
        desk = kernel.approvals
        decided: list[Approval] = []

        def rewrite(row: Approval) -> None:
            if row.state == "approved":
                decided.append(row)
                (place / "ws" / "other.sh").write_text("touch planted\n")

        desk.subscribe_to_requests(rewrite)
        result = await session.call("bash", {"command": "bash run.sh"})
    assert result.error_kind == "conflict", result
    assert "`other.sh` has changed" in (result.error_text or "")
    assert list(decided[0].changed_files or {}) == ["other.sh"]


async def test_an_approval_answered_in_another_process_covers_the_files_as_first_asked(tmp_path: Path) -> None:
    """Suspended, answered in another front end, resumed in another kernel: the file changed in between."""
    place = tmp_path.resolve()
    put(place / "ws", {"run.sh": "true\n", "same.sh": "true\n"})
    person = ApprovingUser(answer=ApprovalAnswer("defer"))
    async with temporary_kernel(place, rules=ASKED) as kernel:
        session = await kernel.session("ses_parked", approval_handler=person)
        first = await session.call("bash", {"command": "bash run.sh"}, key="k1")
        second = await session.call("bash", {"command": "bash same.sh"}, key="k2")
        assert "apr_" in repr(first) and "apr_" in repr(second)
        for row in kernel.approvals.list_pending():
            await kernel.approvals.decide(row.id, ApprovalAnswer("once"), by="test")
    (place / "ws" / "run.sh").write_text("touch planted\n")
    async with temporary_kernel(place, rules=ASKED) as kernel:
        session = await kernel.session("ses_parked", approval_handler=person)
        first = await session.call("bash", {"command": "bash run.sh"}, key="k1")
        second = await session.call("bash", {"command": "bash same.sh"}, key="k2")
    assert first.error_kind == "conflict" and "`run.sh` has changed" in (first.error_text or ""), first
    assert second.error_kind != "conflict", second
    assert not (place / "ws" / "planted").exists()


@pytest.mark.timeout(120)
async def test_a_line_typed_into_a_shell_binds_files_in_the_folder_of_the_shell(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    put(place / "ws", {"sub/deep/run.sh": "true\n"})
    rewriting = ApprovingUser()
    rules = ("allow terminal.start *", "allow terminal.read *")
    async with temporary_kernel(place, rules=(*ASKED, *rules)) as kernel:
        session = await kernel.session(approval_handler=rewriting)
        begun = await session.call("terminal.start", {"command": "bash --noprofile --norc", "cwd": "sub"})
        assert begun.ok, begun
        terminal = begun.data["id"] if "id" in begun.data else begun.data["job_id"]
        first = await session.call("terminal.send", {"id": terminal, "text": "cd deep && echo gone-there\n"})
        assert first.ok, first
        shown = ""
        while "gone-there\n" not in shown.replace("echo gone-there\n", ""):
            shown += repr((await session.call("terminal.read", {"id": terminal})).data).replace("\\n", "\n")
        rewriting.meanwhile = lambda: (place / "ws" / "sub" / "deep" / "run.sh").write_text("touch planted\n")
        result = await session.call("terminal.send", {"id": terminal, "text": "bash run.sh\n"})
        await session.call("stop_task", {"job_id": terminal})
    assert result.error_kind == "conflict", result
    assert "`sub/deep/run.sh` has changed" in (result.error_text or "")


async def test_a_call_cannot_change_a_file_that_another_approved_call_of_the_reply_runs(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    (place / "ws").mkdir()
    async with temporary_kernel(place, rules=ASKED) as kernel:
        session = await kernel.session(approval_handler=ApprovingUser())
        written, ran = await session.start_turn().call_all(
            [
                ("write", {"path": "run.sh", "content": "touch planted\n"}),
                ("bash", {"command": "bash run.sh"}),
            ]
        )
    assert written.result.ok, written
    assert ran.result.error_kind == "conflict", ran
    assert "`run.sh` was added" in (ran.result.error_text or "")
    assert not (place / "ws" / "planted").exists()
