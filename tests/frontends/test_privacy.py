"""Commands open no connection: each attempt to connect or resolve a name is counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.frontends.conftest import Program

WATCHED = """
import json, socket, sys
tried = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        if arguments[0].family != socket.AF_UNIX:
            tried.append([event, repr(arguments[1:])])
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "http.client.connect"):
        tried.append([event, repr(arguments)])
sys.addaudithook(watch)
from handrail.frontends.cli.command_group import run_command_line as run
codes = [run(line) for line in json.loads(sys.argv[1])]
if sys.argv[2] == "and-one":
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    except OSError:
        pass
print("TRIED", json.dumps([codes, tried]))
"""


def tried(handrail: Program, lines: list[list[str]], more: str = "") -> tuple[list[int], list[object]]:
    given = [[line[0], *handrail.common, *line[1:]] for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, json.dumps(given), more], capture_output=True, text=True, cwd=handrail.workspace
    )
    assert done.returncode == 0, done.stderr
    codes, found = json.loads(done.stdout.rpartition("TRIED ")[2])
    return codes, found


@pytest.mark.proves("F-12")
def test_no_command_connects_to_the_network(handrail: Program) -> None:
    codes, found = tried(
        handrail,
        [
            ["doctor"],
            ["tools"],
            ["call", "read", '{"path": "note.txt"}'],
            ["explain", "bash", '{"command": "curl https://example.org"}'],
            ["log"],
            ["log", "verify"],
            ["config"],
            ["state"],
            ["log", "purge", "--before", "0", "--yes"],
            ["state", "remove", "--yes"],
        ],
    )
    assert found == []
    assert set(codes) <= {0, 5} and codes[2] == 0


def test_the_network_check_detects_a_deliberate_attempt(handrail: Program) -> None:
    _, found = tried(handrail, [["state"]], "and-one")
    assert found != []
