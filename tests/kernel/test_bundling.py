"""Bundles: an agent with its tools, frozen by hash, that starts without any other configuration."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.registry.test_operator_resources import put_offering

from handrail import open_kernel
from handrail.config import load_configuration
from handrail.contract.errors import LoadError, UsageError
from handrail.contract.sandbox_protocol import Process, ProgramSpec, SandboxProfile, SandboxTier
from handrail.contract.tool.requires import CapabilitySet
from handrail.kernel.agent_bundles import AgentBundle, build_agent_bundle
from handrail.registry.agent_folders import BUNDLE_FILE
from handrail.sandbox import tier_probe
from handrail.store.state_folders import locate_folders

confined = pytest.mark.skipif(
    not tier_probe.choose_sandbox().tier.is_confining, reason=f"no sandbox: {tier_probe.choose_sandbox().tier.detail}"
)


def program(folder: Path, name: str, says: str, *, own: bool = False) -> None:
    """A tool that prints one word; with ``own``, its program is in a folder with a file that it reads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = f"{name}-files/run" if own else name
    runtime: dict[str, object] = {"exec_path": path, "side_effect": "read", "locks": []}
    llm: dict[str, object] = {
        "name": name,
        "description": "Says a word.",
        "parameters": {"type": "object", "properties": {}},
    }
    (folder / f"{name}.json").write_text(json.dumps({"llm": llm, "runtime": runtime}))
    executable = folder / path
    executable.parent.mkdir(exist_ok=True)
    executable.write_text(
        '#!/bin/sh\ncat "$(dirname "$0")/word.json"\n' if own else f'#!/bin/sh\necho \'{{"said": "{says}"}}\'\n'
    )
    executable.chmod(0o755)
    if own:
        (executable.parent / "word.json").write_text(json.dumps({"said": says}))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A configuration with an overridden global tool, one with its own files, a module, and a surplus one."""
    config = tmp_path / "config"
    tools, agent = config / "tools", config / "agents" / "speaker"
    program(tools, "greet", "everybody")
    program(tools, "whisper", "psst", own=True)
    program(tools, "shout", "not for this agent")
    program(agent / "tools", "greet", "its own")
    (tools / "words.py").write_text("WORD = 'from beside it'\n")
    (tools / "say.py").write_text(
        "METADATA = {'description': 'Says a word.', 'side_effect': 'read', 'locks': []}\n"
        "import words\ndef execute(topic, params):\n    return {'said': words.WORD}\n"
    )
    (agent / "agent.toml").write_text(
        'id = "speaker"\ntools = ["read", "greet", "whisper", "say"]\nrules = ["allow greet", "allow whisper", "allow say"]\n'
    )
    (config / "handrail.toml").write_text(
        'agent = "default"\nrules = ["deny bash"]\n\n[secrets.TOKEN]\nenv = "THE_TOKEN"\n\n[limits]\nlock_wait_ms = 7000\n'
    )
    (tmp_path / "ws").mkdir()
    return tmp_path


def built(
    place: Path, target: str = "bundle", agent: str = "speaker", told: Callable[[str], None] = lambda _: None
) -> AgentBundle:
    folders = locate_folders(place / "ws", place / "state")
    config = load_configuration(place / "config" / "handrail.toml", folders=folders, environment={})
    return build_agent_bundle(config, agent, folders, tier_probe.choose_sandbox(), place / target, told)


@confined
@pytest.mark.proves("R-15")
async def test_a_bundle_starts_without_any_other_configuration(place: Path) -> None:
    bundle = built(place)
    assert set(bundle.tools) == {"greet", "whisper", "say"}
    assert bundle.external_tools == ("read",)
    elsewhere = place / "elsewhere"
    shutil.move(bundle.folder, elsewhere)
    shutil.rmtree(place / "config")
    async with open_kernel(place / "ws", config=elsewhere / "handrail.toml", state=place / "state") as kernel:
        assert kernel.default_agent.id == "speaker"
        assert kernel.config.settings.limits.lock_wait_ms == 7000
        session = await kernel.session()
        results = await session.call_all([("greet", {}), ("whisper", {}), ("say", {})])
        assert [result.data["said"] for result in results] == ["its own", "psst", "from beside it"]


def put_agent(place: Path, name: str, text: str) -> None:
    folder = place / "config" / "agents" / name
    folder.mkdir(parents=True)
    (folder / "agent.toml").write_text(f'id = "{name}"\nrole = "subagent"\n{text}')


@confined
@pytest.mark.proves("R-15")
async def test_a_bundle_contains_every_reachable_agent_with_its_tools_and_skills(
    place: Path,
) -> None:
    config = place / "config"
    (config / "agents" / "speaker" / "agent.toml").write_text(
        'id = "speaker"\ntools = ["read", "task"]\n[delegation]\nagents = ["asker"]\n'
    )
    put_agent(place, "asker", 'tools = ["agent.crier", "greet"]\n')
    put_agent(place, "crier", 'tools = ["shout", "greet", "skill"]\nrules = ["allow greet"]\n')
    put_agent(place, "stranger", 'tools = ["whisper"]\n')
    program(config / "agents" / "crier" / "tools", "greet", "its own")
    skill = config / "skills" / "calling"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: calling\ndescription: How to call.\n---\nLoudly.\n")
    (skill / "away").symlink_to("/etc/hostname")
    bundle = built(place)
    assert bundle.agents == ("asker", "crier")
    assert set(bundle.files) == {
        *("handrail.toml", "agents/speaker/agent.toml", "agents/asker/agent.toml", "agents/crier/agent.toml"),
        *("agents/crier/tools/greet", "agents/crier/tools/greet.json", "tools/greet", "tools/greet.json"),
        *("tools/shout", "tools/shout.json", "skills/calling/SKILL.md"),
    }, "not the stranger's, nor what is linked"
    shutil.rmtree(config)
    settings = bundle.folder / "handrail.toml"
    async with open_kernel(place / "ws", config=settings, state=place / "state") as kernel:
        assert [one.id for one in (await kernel.session()).subagent_types] == ["asker"]
        crier = await kernel.session(agent="crier")
        assert (await crier.call("greet", {})).data["said"] == "its own"
        assert "Loudly." in str((await crier.call("skill", {"name": "calling"})).data)
    (bundle.folder / "skills" / "calling" / "SKILL.md").write_text("changed")
    with pytest.raises(LoadError, match=r"skills/calling/SKILL\.md"):
        async with open_kernel(place / "ws", config=settings, state=place / "state"):
            pass


@pytest.mark.proves("R-15")
def test_a_fault_of_a_reachable_agent_stops_the_build(place: Path) -> None:
    (place / "config" / "agents" / "speaker" / "agent.toml").write_text('id = "speaker"\ntools = ["agent.asker"]\n')
    put_agent(place, "asker", 'tools = ["task", "grete"]\n')
    with pytest.raises(LoadError, match="grete"):
        built(place)
    assert not (place / "bundle").exists()


@confined
@pytest.mark.proves("R-15")
async def test_a_bundle_includes_resources_with_their_files(place: Path) -> None:
    put_offering(place)
    manifest = place / "config" / "agents" / "speaker" / "agent.toml"
    manifest.write_text('id = "speaker"\ntools = ["greet", "resource.read"]\n')
    bundle = built(place)
    assert {"tools/resources.json", "tools/notes/a.md"} <= set(bundle.files)
    shutil.rmtree(place / "config")
    async with open_kernel(place / "ws", config=bundle.folder / "handrail.toml", state=place / "state") as kernel:
        read = await (await kernel.session()).call("resource.read", {"uri": "note:file"})
        assert read.data["contents"][0]["text"] == "# From a file\n"


@pytest.mark.proves("R-15")
def test_a_bundle_resolves_overrides_and_contains_only_the_agents_files(place: Path) -> None:
    bundle = built(place)
    assert bundle.files == (
        "agents/speaker/agent.toml",
        "agents/speaker/tools/greet",
        "agents/speaker/tools/greet.json",
        "handrail.toml",
        "tools/say.py",
        "tools/whisper-files/run",
        "tools/whisper-files/word.json",
        "tools/whisper.json",
        "tools/words.py",
    )


@pytest.mark.proves("R-15")
def test_a_bundle_has_a_reproducible_hash_and_no_secret_values(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", "hunter2-and-more")
    one, other = built(place, "one"), built(place, "other")
    assert one.hash == other.hash
    for file in (place / "one").rglob("*"):
        assert file.is_dir() or b"hunter2" not in file.read_bytes()
    assert 'env = "THE_TOKEN"' in (place / "one" / "handrail.toml").read_text()


def _changed(folder: Path) -> None:
    (folder / "tools" / "whisper-files" / "word.json").write_text('{"said": "other"}')


def _added(folder: Path) -> None:
    program(folder / "tools", "extra", "more")


def _taken(folder: Path) -> None:
    (folder / "tools" / "words.py").unlink()


def _made_executable(folder: Path) -> None:
    (folder / "tools" / "say.py").chmod(0o755)


def _linked(folder: Path) -> None:
    (folder / "tools" / "words.py").rename(folder / "kept.py")
    (folder / "tools" / "words.py").symlink_to(folder / "kept.py")


def _rules(folder: Path) -> None:
    (folder / "handrail.toml").write_text('agent = "speaker"\nrules = ["allow *"]\n')


def _another_agent(folder: Path) -> None:
    (folder / "agents" / "other").mkdir()
    (folder / "agents" / "other" / "agent.toml").write_text('id = "other"\n')


def _of_the_future(folder: Path) -> None:
    text = (folder / BUNDLE_FILE).read_text()
    (folder / BUNDLE_FILE).write_text(text.replace('"format": 1', '"format": 2'))


def _no_json(folder: Path) -> None:
    (folder / BUNDLE_FILE).write_text("{")


@pytest.mark.proves("R-15")
@pytest.mark.parametrize(
    ("tampered", "problem"),
    [
        (_changed, "tools/whisper-files/word.json: was changed after the bundle was built"),
        (_added, "tools/extra.json: is not part of the bundle"),
        (_taken, "tools/words.py: is missing"),
        (_made_executable, "tools/say.py: was made executable"),
        (_linked, "tools/words.py: cannot be read"),
        (_rules, "handrail.toml: was changed"),
        (_another_agent, "agents/other/agent.toml: is not part of the bundle"),
        (_of_the_future, "format: is 2, and this Handrail reads 1"),
        (_no_json, "rebuild the bundle with handrail build"),
    ],
)
async def test_a_bundle_that_differs_from_its_build_does_not_start(
    place: Path, tampered: Callable[[Path], None], problem: str
) -> None:
    bundle = built(place)
    tampered(bundle.folder)
    with pytest.raises(LoadError) as caught:
        async with open_kernel(place / "ws", config=bundle.folder / "handrail.toml", state=place / "state"):
            pass
    assert problem in str(caught.value)


@pytest.mark.proves("R-15")
def test_a_faulty_agent_is_not_built_and_all_its_faults_are_listed(place: Path) -> None:
    (place / "config" / "agents" / "speaker" / "agent.toml").write_text(
        'id = "speaker"\ntools = ["gret"]\nrules = ["allow nobody"]\n'
    )
    with pytest.raises(LoadError) as caught:
        built(place)
    assert "gret" in str(caught.value) and "nobody" in str(caught.value)
    assert not (place / "bundle").exists()


def test_a_build_does_not_overwrite_existing_files(place: Path) -> None:
    (place / "bundle").mkdir()
    (place / "bundle" / "mine").write_text("mine")
    with pytest.raises(UsageError, match="already exists and is not empty"):
        built(place)
    assert [path.name for path in (place / "bundle").iterdir()] == ["mine"]
    with pytest.raises(UsageError, match=r"'spaeker' does not exist\. Did you mean 'speaker'"):
        built(place, "other", "spaeker")


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ('"agent" = "default"\nmode = "auto"\n', 'mode = "auto"'),
        ('  agent = "default"  # who\nmode = "auto"\n', 'mode = "auto"'),
        ("  [limits]\n  lock_wait_ms = 7000\n", "lock_wait_ms = 7000"),
        ('rules = ["""\\\nagent = x"""]\nagent = "default"\n', "agent = x"),
    ],
    ids=["in quotes", "indented", "an indented table", "in a text"],
)
def test_the_settings_of_a_bundle_name_its_agent_once_and_keep_all_other_settings(
    place: Path, written: str, kept: str
) -> None:
    settings = place / "config" / "handrail.toml"
    settings.write_text(written)
    built(place)
    text = (place / "bundle" / "handrail.toml").read_text()
    assert tomllib.loads(text) == {**tomllib.loads(written), "agent": "speaker"}
    assert kept in text


# ── source folders ───────────────────────────────────────────────────────────────────────────────────


def source(place: Path, name: str, script: str, *, more: dict[str, object] | None = None, **files: str) -> Path:
    """A tool whose build command makes the program from a folder next to the manifest, for the agent."""
    config = place / "config"
    folder = config / "tools" / f"{name}-source"
    folder.mkdir(parents=True)
    (folder / "build.sh").write_text(script)
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text)
    runtime: dict[str, object] = {
        "exec_path": f"{name}-source/run",
        "build": ["sh", "build.sh"],
        "side_effect": "read",
        "locks": [],
    }
    llm: dict[str, object] = {"name": name, "description": "Says a word.", "parameters": {"type": "object"}}
    (config / "tools" / f"{name}.json").write_text(json.dumps({"llm": llm, "runtime": runtime | (more or {})}))
    (config / "agents" / "speaker" / "agent.toml").write_text(
        f'id = "speaker"\ntools = ["read", "{name}"]\nrules = ["allow {name}"]\n'
    )
    return folder


SHELL = """\
echo 'putting it together'
{ echo '#!/bin/sh'; echo "echo '{\\"said\\": \\"$(cat word.txt)\\"}'"; } > run
chmod +x run
"""
C = """\
#include <stdio.h>
int main(void) { puts("{\\"said\\": \\"compiled\\"}"); return 0; }
"""


@confined
@pytest.mark.proves("R-15")
async def test_a_source_folder_is_built_and_its_tool_runs_without_the_source(place: Path) -> None:
    folder = source(place, "hum", SHELL, word__txt="mmm")
    told: list[str] = []
    bundle = built(place, told=told.append)
    assert "".join(told) == "hum: sh build.sh\nhum: putting it together\n"
    assert bundle.built_tools == ("hum",) and "tools/hum-source/run" in bundle.files and bundle.unavailable == {}
    assert not (folder / "run").exists(), "the operator's folder is as it was"
    shutil.rmtree(place / "config")
    async with open_kernel(place / "ws", config=bundle.folder / "handrail.toml", state=place / "state") as kernel:
        assert (await (await kernel.session()).call("hum", {})).data == {"said": "mmm"}
    (bundle.folder / "tools" / "hum-source" / "run").write_text("#!/bin/sh\necho '{}'\n")
    with pytest.raises(LoadError, match=r"tools/hum-source/run: was changed after the bundle was built"):
        async with open_kernel(place / "ws", config=bundle.folder / "handrail.toml", state=place / "state"):
            pass


@confined
@pytest.mark.skipif(shutil.which("cc", path="/usr/bin:/bin") is None, reason="there is no C compiler")
@pytest.mark.proves("R-15")
async def test_a_program_in_c_is_compiled_by_the_build(place: Path) -> None:
    source(place, "hum", "cc -o run main.c\n", main__c=C)
    bundle = built(place)
    async with open_kernel(place / "ws", config=bundle.folder / "handrail.toml", state=place / "state") as kernel:
        assert (await (await kernel.session()).call("hum", {})).data == {"said": "compiled"}


@confined
@pytest.mark.proves("R-14", "R-15")
async def test_an_unbuilt_tool_is_unavailable_and_no_start_or_call_builds_it(place: Path) -> None:
    folder = source(place, "hum", f"touch {place}/started; {SHELL}", word__txt="mmm")
    settings = place / "config" / "handrail.toml"
    async with open_kernel(place / "ws", agent="speaker", config=settings, state=place / "state") as kernel:
        result = await (await kernel.session()).call("hum", {})
        assert result.error_kind == "unavailable" and "run handrail build AGENT" in str(result.error_text)
        assert kernel.generation.entries["hum"].status == "available"
    assert sorted(path.name for path in folder.iterdir()) == ["build.sh", "word.txt"]
    assert not (place / "started").exists()


@confined
@pytest.mark.proves("R-15")
def test_a_build_has_no_network_and_cannot_leave_its_folder(place: Path) -> None:
    outside = place / "outside"
    outside.mkdir(mode=0o777)
    (outside / "secret").write_text("hunter2")
    server = socket.create_server(("127.0.0.1", 0))
    try:
        script = (
            f"echo x > {outside}/new; echo x > {place}/config/handrail.toml; cat {outside}/secret > stolen\n"
            f"bash -c 'echo x > /dev/tcp/127.0.0.1/{server.getsockname()[1]}' && echo reached > reached\n"
            f"env | grep -i proxy > ways; sed 1,2d /proc/net/dev | grep -v lo: >> ways\n{SHELL}"
        )
        source(place, "hum", script, word__txt="mmm")
        settings = (place / "config" / "handrail.toml").read_text()
        bundle = built(place)
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    finally:
        server.close()
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (place / "config" / "handrail.toml").read_text() == settings
    assert (bundle.folder / "tools" / "hum-source" / "stolen").read_text() == ""
    assert "tools/hum-source/reached" not in bundle.files
    assert (bundle.folder / "tools" / "hum-source" / "ways").read_text() == "", "neither a device nor a proxy"


@confined
@pytest.mark.proves("R-15")
@pytest.mark.parametrize(
    ("script", "more", "problem"),
    [
        (
            "echo 'no such header' >&2; exit 3\n",
            {},
            "`sh build.sh` ended with exit code 3. Last line of its output: no such header",
        ),
        ("echo done\n", {}, "`sh build.sh` did not create 'hum-source/run'"),
        ("echo '#!/bin/sh' > run\n", {}, "'hum-source/run' is not executable"),
        ("while :; do :; done\n", {"build_timeout_ms": 300}, "`sh build.sh` timed out after 300 ms and was stopped"),
        ("trap '' TERM; (setsid sleep 600 &); sleep 600\n", {"build_timeout_ms": 300}, "timed out after 300 ms"),
        (f"{SHELL}ln -s /etc/passwd users\n", {}, "users is a link to a file outside the tool's folder"),
        (f"{SHELL}mkfifo pipe\n", {}, "pipe is not a regular file"),
        (f"{SHELL}ln -sf /bin/sh run\n", {}, "'hum-source/run' leads out of the tool's folder"),
    ],
    ids=["fails", "makes nothing", "no program", "never ends", "hides", "links out", "a pipe", "links its program out"],
)
def test_a_failed_build_writes_no_bundle_and_names_the_problem(
    place: Path, script: str, more: dict[str, object], problem: str
) -> None:
    source(place, "hum", script, more=more, word__txt="mmm")
    with pytest.raises((LoadError, UsageError)) as caught:
        built(place)
    assert problem in str(caught.value)
    assert not (place / "bundle").exists()


@confined
@pytest.mark.proves("R-15")
def test_tools_that_share_a_source_folder_are_built_by_one_run(place: Path) -> None:
    source(place, "hum", f"{SHELL}cp run other; echo again >> count\n", word__txt="mmm")
    tools = place / "config" / "tools"
    text = (tools / "hum.json").read_text()
    (tools / "sing.json").write_text(text.replace('"name": "hum"', '"name": "sing"').replace("/run", "/other"))
    (place / "config" / "agents" / "speaker" / "agent.toml").write_text('id = "speaker"\ntools = ["hum", "sing"]\n')
    bundle = built(place)
    assert bundle.built_tools == ("hum", "sing")
    assert (bundle.folder / "tools" / "hum-source" / "count").read_text() == "again\n"


@confined
@pytest.mark.proves("R-15")
def test_the_error_names_a_source_folder_that_cannot_be_copied(place: Path) -> None:
    folder = source(place, "hum", SHELL, word__txt="mmm")
    os.mkfifo(folder / "pipe")
    with pytest.raises(LoadError, match=r"hum-source: Cannot copy the folder for the build: .*pipe"):
        built(place)


@confined
@pytest.mark.proves("R-15")
def test_only_tools_of_the_agent_are_built(place: Path) -> None:
    source(place, "hum", "exit 1\n")
    (place / "config" / "agents" / "speaker" / "agent.toml").write_text('id = "speaker"\ntools = ["greet"]\n')
    assert built(place).built_tools == ()


class UnconfinedSandbox:
    """A sandbox on a machine that cannot confine programs."""

    tier = SandboxTier("none", "nothing is confined here")

    async def start(self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec) -> Process:
        raise AssertionError("nothing starts here")


@pytest.mark.proves("R-15")
def test_a_build_without_a_sandbox_is_refused(place: Path) -> None:
    source(place, "hum", SHELL, word__txt="mmm")
    folders = locate_folders(place / "ws", place / "state")
    config = load_configuration(place / "config" / "handrail.toml", folders=folders, environment={})
    with pytest.raises(LoadError, match=r"hum.*Cannot build without a sandbox: nothing is confined"):
        build_agent_bundle(config, "speaker", folders, UnconfinedSandbox(), place / "b")
    assert not (place / "b").exists()
