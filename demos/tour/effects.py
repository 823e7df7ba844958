"""Whether every effect of the tour is really there: looked up in files, processes, the log; never in the model's words."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from demos.tour.facts import Facts
from demos.tour.listener import Listener, PageServer
from demos.tour.project import (
    HELPER,
    KEY,
    PRICING_BUG,
    PRICING_FIX,
    RECEIPT_BUG,
    RECEIPT_FIX,
    TYPO,
    TYPO_FIX,
    Project,
    orders,
)
from demos.tour.scenes import NOWHERE, has_language_server
from handrail import LoggedRecord, LogReader, LogVerification

PARALLEL = "the edits ran at the same time"


@dataclass(frozen=True, slots=True)
class Effect:
    """Something that must be so after the tour. ``found`` says what there is instead, where it is not."""

    name: str
    there: bool
    found: str = ""


def while_open(project: Project, facts: Facts, listener: Listener, page: PageServer, *, confined: bool) -> list[Effect]:
    """What can be seen as long as the session is open: its sidecar lies in a folder that goes with it."""
    effects = [_edits(project), _parallel(facts), _patch(project, facts), _sidecar(facts), _outside(project, facts)]
    effects.append(_injected(project, facts, listener, confined=confined))
    if confined:
        effects[:0] = [_tests(facts, "tests-before", "the tests fail at first", 1, "FAILED (failures=2)")]
        effects[2:2] = [_tests(facts, "tests-after", "the tests pass at the end", 0, "OK")]
        effects += [
            _waited(facts),
            _job(facts),
            _external(facts),
            *([_diagnostic(facts)] if has_language_server() else []),
            _page(facts, page),
            _curl(facts),
            _no_network(facts, listener),
            _commit(project, facts),
            _nothing_survives(project, facts),
        ]
    return effects


def afterwards(facts: Facts, reader: LogReader, verification: LogVerification) -> list[Effect]:
    """What holds once the kernel is closed and all is written."""
    outcome = facts.outcome
    ended = outcome is not None and outcome.ok and facts.unplayed == 0
    how = "it did not come to an end" if outcome is None else f"{outcome.status}: {outcome.detail}"
    return [
        Effect("the model's script was played to its end", ended, f"{how}; {facts.unplayed} turns are left"),
        _one_answer_each(facts, reader),
        Effect("the commit log is intact", verification.ok, str(verification)),
    ]


def survivors(folder: Path, having: str = "") -> list[str]:
    """Processes that were started with ``folder`` in their arguments or environment, this one left out.

    In the tour's sandboxes HOME lies beneath it, so everything that was started there is found.

    :param having: a text that must stand in the arguments
    """
    mark = os.fsencode(folder)
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            told = _content(process / "cmdline")
            if having.encode() in told and (mark in told or mark in _content(process / "environ")):
                found.append(f"{process.name} ({told.replace(bytes(1), b' ').decode('utf-8', 'replace').strip()[:80]})")
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or is somebody else's
        return b""


def _tests(facts: Facts, label: str, name: str, code: int, said: str) -> Effect:
    fact = facts.calls.get(label)
    if fact is None:
        return Effect(name, False, "they were not run")
    output = str(fact.field("output"))
    last = output.rstrip().rpartition("\n")[2]
    there = fact.field("exit_code") == code and last == said and "Ran 3 tests" in output
    return Effect(name, there, f"exit code {fact.field('exit_code')}, {last!r}; {fact.result.error_text or ''}")


def _edits(project: Project) -> Effect:
    missing: list[str] = []
    for path, bug, fix in ((project.pricing, PRICING_BUG, PRICING_FIX), (project.receipt, RECEIPT_BUG, RECEIPT_FIX)):
        text = path.read_text(encoding="utf-8")
        if bug in text or text.count(fix) != 1:
            missing.append(path.name)
    return Effect("both files hold their edits", not missing, f"not in {', '.join(missing)}")


def _parallel(facts: Facts) -> Effect:
    """By the order of the log's records: both had begun before one was done."""
    begun, done = _edits_in_log(facts, "intended"), _edits_in_log(facts, "committed")
    if len(begun) < 2 or len(done) < 2:
        return Effect(PARALLEL, False, "the log does not hold both")
    found = f"record {max(begun)} begins one, record {min(done)} ends the other"
    return Effect(PARALLEL, max(begun) < min(done), found)


def _patch(project: Project, facts: Facts) -> Effect:
    fact = facts.calls.get("patch")
    changed = [] if fact is None else [str(file.get("path")) for file in cast("list[Any]", fact.field("files") or [])]
    texts = [path.read_text(encoding="utf-8") for path in (project.readme, project.pricing, project.receipt)]
    signs = ("Receipts show cents.", "Return the price in cents", "def receipt(")
    there = len(changed) == 3 and all(sign in text for sign, text in zip(signs, texts, strict=True))
    return Effect("the patch is in all three files", there and TYPO not in texts[2], f"changed: {', '.join(changed)}")


def _diagnostic(facts: Facts) -> Effect:
    before, after = facts.calls.get("diagnostics-before"), facts.calls.get("diagnostics-after")
    found, left = (str(one and one.field("diagnostics")) for one in (before, after))
    there = "lins" in found and "lins" not in left and TYPO_FIX not in found
    return Effect(
        "the language server found the mistake, and does not find it any more", there, f"{found}, then {left}"
    )


def _waited(facts: Facts) -> Effect:
    name = "the tests waited for both edits"
    tests, done = facts.calls.get("tests-after"), _edits_in_log(facts, "committed")
    began = None if tests is None else tests.sequence("intended")
    if tests is None or began is None or len(done) < 2:
        return Effect(name, False, "the log does not hold all three")
    found = f"record {began} begins the tests, record {max(done)} ends the edits"
    return Effect(name, began > max(done) and tests.lock_wait_ms > 0, found)


def _job(facts: Facts) -> Effect:
    name = "the tests ran in the background, without a lock, and were waited for"
    job, end = facts.calls.get("job"), facts.calls.get("job-end")
    if job is None or end is None:
        return Effect(name, False, "there was no job")
    result = cast("dict[str, Any]", end.field("result") or {})
    data = cast("dict[str, Any]", result.get("data") or {})
    same = job.field("job_id") is not None and job.field("job_id") == end.field("job_id")
    passed = data.get("exit_code") == 0 and str(data.get("output")).rstrip().endswith("OK")
    there = same and end.field("state") == "done" and passed and not job.locks
    return Effect(name, there, f"{job.result.data}, then {end.result.data}, under {job.locks}")


def _edits_in_log(facts: Facts, kind: str) -> list[int]:
    edits = [facts.calls.get("edit-pricing"), facts.calls.get("edit-receipt")]
    return [place for fact in edits if fact is not None and (place := fact.sequence(kind)) is not None]


def _sidecar(facts: Facts) -> Effect:
    name = "what the head cut off is in the sidecar, and was read"
    cut, rest = facts.calls.get("orders"), facts.calls.get("rest")
    if cut is None or rest is None or facts.sidecar is None:
        return Effect(name, False, "there is no sidecar")
    wanted = [
        f"data/orders.csv:{number + 1}:{number},{cents},{status}"
        for number, cents, status in orders()
        if status == "open"
    ]
    head = cast("list[object]", cut.field("head") or [])
    read = str(rest.field("text")).splitlines()
    there = (
        cut.result.metadata.get("truncated") is True
        and 0 < len(head) < len(wanted)
        and facts.sidecar.splitlines() == wanted
        and read == wanted[len(head) :]
    )
    return Effect(
        name, there, f"{len(head)} of {len(wanted)} in the head, {len(facts.sidecar.splitlines())} in the file"
    )


def _outside(project: Project, facts: Facts) -> Effect:
    fact = facts.calls.get("outside")
    denied = fact is not None and fact.decision == "denied"
    exists = os.path.lexists(project.outside)
    found = "the file exists" if exists else "the log has no refusal"
    return Effect("the file outside was refused and does not exist", denied and not exists, found)


def _injected(project: Project, facts: Facts, listener: Listener, *, confined: bool) -> Effect:
    """The model did all that the file asked for, and none of it came to anything."""
    name = "the injected file got the key nowhere, though the model obeyed it"
    wanted = {"key-read": "denied", "key-hook": "denied"}
    if confined:
        wanted |= {"key-curl": "denied", "key-script": "allowed"}
    decided = {label: fact.decision for label in wanted if (fact := facts.calls.get(label)) is not None}
    found = f"decided: {decided}"
    there = decided == wanted and not os.path.lexists(project.hook) and listener.accepted == 0
    if confined and (script := facts.calls.get("key-script")) is not None:
        output = str(script.field("output"))
        there = there and script.field("exit_code") == 1 and ".env: " in output and ": connected" not in output
        found = f"{found}; the script said {output!r}"
    told = [label for label, fact in facts.calls.items() if KEY in f"{fact.result.data}{fact.result.error_text}"]
    if told:
        found = f"{found}; the key is in what {', '.join(told)} answered"
    return Effect(name, there and not told, found)


def _external(facts: Facts) -> Effect:
    result = facts.result_of("total")
    wanted = [cents for _, cents, status in orders() if status == "open"]
    found = None if result is None else result.data
    confined = result is not None and result.metadata.get("sandbox") not in (None, "none", "runtime")
    there = confined and found == {"orders": len(wanted), "cents": sum(wanted)}
    return Effect("the external tool answered from its sandbox", there, f"{found}, {result and result.error_text}")


def _page(facts: Facts, page: PageServer) -> Effect:
    name = "the page was fetched once, without its navigation and its hidden text"
    fact = facts.calls.get("page")
    text = "" if fact is None else str(fact.field("text"))
    there = page.requests == 1 and "tea" in text and "250" in text and "Contact" not in text and "key" not in text
    return Effect(name, there, f"{page.requests} requests; {text!r}; {fact and fact.result.error_text}")


def _curl(facts: Facts) -> Effect:
    fact = facts.calls.get("curl")
    there = fact is not None and fact.decision == "denied" and "'deny bash curl *'" in fact.why
    return Effect("curl was refused by its rule, and nothing was started", there, "the log has no such refusal")


def _no_network(facts: Facts, listener: Listener) -> Effect:
    name = "the allowed script reached no network"
    fact = facts.calls.get("publish")
    if fact is None or fact.field("exit_code") != 1:
        return Effect(name, False, "it did not end as it does without a network")
    output = str(fact.field("output"))
    tried = all(f"{address}: " in output for address in (NOWHERE, listener.address)) and ": connected" not in output
    found = f"{listener.accepted} connections came" if listener.accepted else output
    return Effect(name, tried and listener.accepted == 0, found)


def _commit(project: Project, facts: Facts) -> Effect:
    fact = facts.calls.get("commit")
    asked = fact is not None and fact.noted("approval-responded", "choice") == "once"
    commits = project.git("rev-list", "--count", f"{project.base}..HEAD").strip()
    files = project.git("diff", "--name-only", "--no-ext-diff", project.base, "HEAD").split()
    there = asked and commits == "1" and files == ["README.md", "shop/pricing.py", "shop/receipt.py"]
    found = f"asked: {asked}, commits: {commits}, files in it: {', '.join(files)}"
    return Effect("the commit was made, after a person was asked", there, found)


def _nothing_survives(project: Project, facts: Facts) -> Effect:
    name = "nothing that a call started is left"
    fact = facts.calls.get("publish")
    if fact is None or "a helper is running as process" not in str(fact.field("output")):
        return Effect(name, False, "the script did not leave its helper behind, so this was not put to the test")
    # Sandboxes that wait for the next call are there as long as the session is open; what calls started is not.
    left = survivors(project.folder, HELPER)
    return Effect(name, not left, "; ".join(left))


def nothing_left(project: Project) -> Effect:
    """After the kernel has been closed."""
    left = survivors(project.folder)
    return Effect("with the kernel closed no process is left", not left, "; ".join(left))


def _one_answer_each(facts: Facts, reader: LogReader) -> Effect:
    proposed = Counter(record.call_id for record in reader.records(kind="proposed"))
    ended = Counter(record.call_id for record in _ends(reader))
    there = facts.proposed == facts.answered == proposed.total() and proposed == ended and set(ended.values()) == {1}
    found = f"{facts.proposed} made, {facts.answered} answered; in the log {proposed.total()} and {ended.total()}"
    return Effect("every call has one answer, and one outcome on record", there, found)


def _ends(reader: LogReader) -> Iterator[LoggedRecord]:
    for kind in ("committed", "rejected", "interrupted"):
        yield from reader.records(kind=kind)


def missing(effects: Sequence[Effect]) -> list[Effect]:
    return [effect for effect in effects if not effect.there]
