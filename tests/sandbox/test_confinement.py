"""Resources that a sandboxed program cannot reach. Each attack first checks its namespaces."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec, SandboxLimits
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, PathVariables, Requires, expand_requires
from handrail.sandbox.view import mount_options
from handrail.sandbox.view.mount_comparison import ExpectedMount, ExpectedMounts

pytestmark = pytest.mark.proves("S-01")


async def test_a_confined_program_has_only_its_private_loopback_network(confined: SandboxFolders) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        ran = await confined.bash(
            f"cut -d: -f1 /proc/net/dev | tail -n +3; exec 3<>/dev/tcp/127.0.0.1/{port} && echo REACHED"
        )
    assert ran.out.split() == ["lo"]
    assert "REACHED" not in ran.out


async def test_abstract_sockets_of_the_machine_are_not_visible(confined: SandboxFolders) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0handrail-test-{os.getpid()}")
        server.listen()
        ran = await confined.bash("cat /proc/net/unix")
    assert "handrail-test" not in ran.out


async def test_a_confined_program_writes_only_in_the_workspace_and_scratch_folder(confined: SandboxFolders) -> None:
    targets = ["/", "/etc", "/usr", "/usr/bin", "/root", "/home", "/dev", str(confined.outside), "/proc/sys/kernel"]
    script = "; ".join(f"(: > {shlex.quote(t)}/handrail-probe) 2>/dev/null && echo WROTE {t}" for t in targets)
    ran = await confined.bash(f"{script}; : > here && : > $HOME/there && : > /tmp/tmp && echo fine")
    assert ran.out.strip() == "fine"
    assert (confined.workspace / "here").exists()
    assert (confined.scratch / "there").exists()
    assert list(confined.outside.iterdir()) == [confined.outside / "key"]


async def test_other_workspaces_and_home_folders_are_not_readable(confined: SandboxFolders) -> None:
    homes = [str(Path.home()), "/root", "/home"]
    looks = "; ".join(f"ls -A {shlex.quote(home)} 2>/dev/null" for home in homes)
    ran = await confined.bash(f"cat {shlex.quote(str(confined.outside / 'key'))}; {looks}")
    assert "TOP-SECRET" not in ran.out
    listed = set(ran.out.split())
    # Of a home only the way to a toolchain in it may be there, as empty folders.
    assert not listed & {".ssh", ".bashrc", ".bash_history", ".gitconfig", ".profile", ".netrc", ".aws"}


async def test_links_out_of_the_workspace_expose_no_outside_file(confined: SandboxFolders) -> None:
    (confined.workspace / "out").symlink_to(confined.outside / "key")
    (confined.workspace / "up").symlink_to("../ws_other/key")
    ran = await confined.bash("cat out up ../ws_other/key /proc/self/root/../ws_other/key /proc/1/root/etc/shadow")
    assert "TOP-SECRET" not in ran.out
    assert ran.code != 0


async def test_kernel_settings_cannot_be_written_even_by_root(confined: SandboxFolders) -> None:
    ran = await confined.bash(
        "for f in /proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sys/vm/swappiness /proc/sysrq-trigger; do"
        '  [ -e $f ] && (true >> "$f") 2>/dev/null && echo OPENED $f; done; grep " /proc\\(/sys\\)\\? " /proc/mounts | tail -n 1 | cut -d" " -f4'
    )
    assert "OPENED" not in ran.out
    assert ran.out.startswith("ro,")


def test_a_masked_configuration_file_deleted_before_the_start_is_dropped_from_the_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for name in ("first", "second"):
        (tmp_path / name).touch(0o600)
    monkeypatch.setattr(mount_options, "_PRIVATE_CONFIGURATION", (str(tmp_path),))
    monkeypatch.setattr(mount_options, "_configuration", configuration := mount_options._ConfigurationFolderView())  # pyright: ignore[reportPrivateUsage]
    options = configuration.get_last_scanned_mount_options(0.0)
    masks = tuple(ExpectedMount(str(tmp_path / name), read_only=True, content="1:2") for name in ("first", "second"))
    table = ExpectedMounts(masks)
    assert mount_options.refresh_mount_options(options, table) == (list(options), table)
    (tmp_path / "first").unlink()
    left = [*options[:3], "--ro-bind", "/dev/null", str(tmp_path / "second")]
    assert mount_options.refresh_mount_options(options, table) == (left, ExpectedMounts(masks[1:]))


async def test_a_confined_program_cannot_read_root_only_files_in_etc(confined: SandboxFolders) -> None:
    ran = await confined.bash("cat /etc/shadow /etc/gshadow /etc/shadow- /etc/ssh/ssh_host_*_key; ls /etc/ssl/private/")
    assert ran.out == ""
    assert "ermission denied" in ran.errors or "No such file" in ran.errors
    assert (await confined.bash("head -c 4 /etc/passwd")).out == "root"


async def test_a_confined_program_has_no_capabilities_and_cannot_create_user_namespaces(
    confined: SandboxFolders,
) -> None:
    ran = await confined.bash(
        "grep CapEff /proc/self/status; unshare -U true 2>/dev/null && echo NAMESPACE; mount -t tmpfs t /tmp"
    )
    assert ran.out.split() == ["CapEff:", "0000000000000000"]
    assert ran.code != 0


async def test_processes_of_the_machine_are_invisible(confined: SandboxFolders) -> None:
    ran = await confined.bash(f"ls -d /proc/[0-9]*; kill -0 {os.getpid()} && echo SEEN; kill -9 -1")
    assert "SEEN" not in ran.out
    assert len(ran.out.split()) <= 5


@pytest.mark.proves("S-06")
async def test_the_environment_is_limited_and_home_is_the_scratch_folder(
    confined: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_TEST_TOKEN", "leak")
    monkeypatch.setenv("LD_PRELOAD", "/nonexistent.so")
    monkeypatch.setenv("BASH_ENV", "/nonexistent")
    ran = await confined.bash("env -0 | cut -z -d= -f1 | tr '\\0' ' '; echo; echo $HOME", environment={"MORE": "1"})
    names, home = ran.out.splitlines()
    allowed = {"LANG", "LC_ALL", "LC_CTYPE", "TZ", "PATH", "HOME", "TMPDIR", "SHELL", "TERM", "MORE"}
    allowed |= {f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    allowed |= {"RUSTUP_HOME", "PYENV_ROOT", "PWD", "SHLVL", "_", "OLDPWD"}
    assert set(names.split()) <= allowed
    assert "MORE" in names.split()
    assert home == str(confined.scratch)
    whole = await confined.bash("cat /proc/1/environ /proc/self/environ | tr '\\0' '\\n'")
    assert "leak" not in whole.out


@pytest.mark.parametrize(
    ("name", "value", "there"),
    [
        ("LC_ALL", "zh_CN.GBK", "C.UTF-8"),
        ("LC_CTYPE", "zh_TW.Big5", "C.UTF-8"),
        ("LANG", "zh_TW", "C.UTF-8"),
        ("LC_ALL", "ja_JP.SJIS\nC.UTF-8", "C.UTF-8"),
        ("LC_ALL", "C", "C"),
        ("LANG", "de_DE.utf8@euro", "de_DE.utf8@euro"),
    ],
)
async def test_a_shell_drops_a_locale_whose_character_set_changes_backslashes(
    confined: SandboxFolders, monkeypatch: pytest.MonkeyPatch, name: str, value: str, there: str
) -> None:
    monkeypatch.setenv(name, value)
    ran = await confined.bash(f'printf %s "${name}"')
    assert ran.out == there


async def test_a_read_only_workspace_cannot_be_written(confined: SandboxFolders) -> None:
    (confined.workspace / "f").write_text("as it was")
    ran = await confined.bash("cat f; echo changed > f", workspace_writable=False)
    assert ran.out == "as it was"
    assert "Read-only" in ran.errors
    assert (confined.workspace / "f").read_text() == "as it was"


async def test_hidden_files_and_folders_are_unreadable(confined: SandboxFolders) -> None:
    (confined.workspace / ".env").write_text("TOKEN=1")
    (confined.workspace / "private").mkdir()
    (confined.workspace / "private" / "note").write_text("TOKEN=2")
    hidden = (str(confined.workspace / ".env"), str(confined.workspace / "private"), str(confined.workspace / "absent"))
    script = "cat .env; cat private/note; mv private other; rm -f .env; cat other/note; ls private; echo over"
    ran = await confined.bash(script, hidden=hidden)
    assert ran.out.strip() == "over"
    assert (confined.workspace / ".env").read_text() == "TOKEN=1"
    assert (confined.workspace / "private" / "note").read_text() == "TOKEN=2"


async def test_an_extra_readable_folder_is_mounted_read_only(ground: SandboxFolders) -> None:
    ran = await ground.bash(
        f"cat {ground.outside}/key && echo x > {ground.outside}/new", readable=(str(ground.outside),)
    )
    assert ran.out == "TOP-SECRET"
    assert not (ground.outside / "new").exists()


async def test_a_program_sees_only_the_folders_of_its_capability_set(ground: SandboxFolders) -> None:
    for name in ("src", "docs", "secret"):
        (ground.workspace / name).mkdir()
        (ground.workspace / name / "f").write_text(name)
    root = str(ground.workspace)
    requires = Requires.model_validate({"fs": {"read": ["{workspace}/docs"], "write": ["{workspace}/src/**"]}})
    layer = expand_requires(requires, PathVariables(workspace=(root,)), "tool")
    agent = CapabilityLayer("agent", (f"{root}/**",), (f"{root}/**",))
    process = await ground.sandbox.start(
        CapabilitySet((layer, agent)),
        ground.profile(),
        ProgramSpec(["/bin/bash", "-c", f"cd {root}; ls; echo w > src/f; echo w > docs/f; cat secret/f; cat docs/f"]),
    )
    out, _, _ = await process.communicate(b"", 1000)
    assert out.split() == [b"docs", b"src", b"docs"]
    assert (ground.workspace / "src" / "f").read_text() == "w\n"
    assert (ground.workspace / "docs" / "f").read_text() == "docs"


@pytest.mark.parametrize("pattern", ["{workspace}/**/*.md", "{workspace}/*"])
async def test_a_capability_set_that_names_single_files_of_a_folder_is_refused(
    ground: SandboxFolders, pattern: str
) -> None:
    requires = Requires.model_validate({"fs": {"write": [pattern]}})
    layer = expand_requires(requires, PathVariables(workspace=(str(ground.workspace),)), "tool")
    with pytest.raises(ToolError, match="whole folders") as caught:
        await ground.sandbox.start(CapabilitySet((layer,)), ground.profile(), ProgramSpec(["true"]))
    assert caught.value.kind == "unavailable"


async def test_a_folder_that_became_a_link_is_not_mounted(ground: SandboxFolders) -> None:
    (ground.workspace / "out").symlink_to(ground.outside)
    layer = CapabilityLayer("tool", fs_read=(f"{ground.workspace}/out",))
    with pytest.raises(ToolError, match="symbolic link") as caught:
        await ground.sandbox.start(CapabilitySet((layer,)), ground.profile(), ProgramSpec(["true"]))
    assert caught.value.kind == "conflict"


async def test_a_program_with_an_empty_capability_set_does_not_see_the_workspace(ground: SandboxFolders) -> None:
    process = await ground.sandbox.start(
        CapabilitySet(()), ground.profile(), ProgramSpec(["/bin/bash", "-c", f"pwd; ls {ground.workspace}"])
    )
    out, _, _ = await process.communicate(b"", 1000)
    assert out.decode().strip() == str(ground.scratch)


async def test_a_working_directory_outside_the_capability_set_is_refused(ground: SandboxFolders) -> None:
    with pytest.raises(ToolError) as caught:
        await ground.start("true", cwd=str(ground.outside))
    assert caught.value.kind == "denied"


async def test_temporary_storage_is_limited_and_private(confined: SandboxFolders) -> None:
    ran = await confined.bash(
        "head -c 3000000 /dev/zero > /tmp/big; stat -c %s /tmp/big; touch /tmp/mine",
        limits=SandboxLimits(tmp_bytes=1 << 20),
    )
    assert int(ran.out) <= 1 << 20
    assert "No space left" in ran.errors
    assert not (Path("/tmp") / "mine").exists()
