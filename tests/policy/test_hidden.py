"""What rules keep from every program, whichever command was allowed."""

from __future__ import annotations

import pytest
from tests.policy.desk import Desk, book

from handrail.policy.authority import Hidden, HiddenNow, hidden

pytestmark = pytest.mark.proves("P-01")


def of(desk: Desk, *rules: str) -> Hidden:
    return hidden(book(*rules), desk.roots.workspace)


@pytest.mark.parametrize("name", [".env", "a/.env.local", "server.key", "sub/.npmrc", ".aws/credentials", "id_other"])
def test_what_looks_like_a_secret_is_hidden_unless_a_rule_allows_reading_it(desk: Desk, name: str) -> None:
    assert of(desk).hides(desk.path(name))
    assert of(desk, "allow bash", "allow shell.run", f"allow bash cat {name}", f"allow read {name}").hides(
        desk.path(name)
    )
    assert not of(desk, f"allow fs.read {name}").hides(desk.path(name))
    assert not of(desk, "allow *").hides(desk.path(name))
    assert of(desk, "allow *", f"deny fs.read {name}").hides(desk.path(name))
    assert of(desk, "allow fs.read", f"ask fs.read {name}").hides(desk.path(name))


def test_what_a_rule_denies_or_names_to_be_asked_about_is_hidden(desk: Desk) -> None:
    rules = of(desk, "deny fs.read private/**", "ask fs.read customers/**", "allow fs.read private/public.txt")
    assert rules.hides(desk.path("private/x")) and rules.hides(desk.path("customers/y"))
    assert not rules.hides(desk.path("private/public.txt")) and not rules.hides(desk.path("src/a.py"))


@pytest.mark.parametrize("pattern", ["", " **", " *", " ."])
def test_asking_about_all_reading_does_not_blind_every_program(desk: Desk, pattern: str) -> None:
    rules = of(desk, f"ask fs.read{pattern}")
    assert not rules.hides(desk.path("src/a.py")) and rules.hides(desk.path(".env"))


def test_denying_all_reading_does(desk: Desk) -> None:
    assert of(desk, "deny fs.read").hides(desk.path("src/a.py"))


def test_installed_packages_keep_their_certificates_and_keys_stay_hidden_whatever_rules_say(desk: Desk) -> None:
    assert not of(desk).hides(desk.path(".venv/lib/python3.12/site-packages/certifi/cacert.pem"))
    assert of(desk, "deny fs.read **/*.pem").hides(desk.path("node_modules/x/test.pem"))
    assert of(desk, "allow fs.read", "allow *").hides(desk.path("keys/id_rsa"))


def test_what_a_rule_denies_writing_is_fixed(desk: Desk) -> None:
    rules = of(desk, "deny fs.write migrations/**", "allow fs.write migrations/draft.sql", "ask fs.write src/**")
    assert rules.fixes_any and rules.fixes(desk.path("migrations/1.sql"))
    assert not rules.fixes(desk.path("migrations/draft.sql")) and not rules.fixes(desk.path("src/a.py"))
    assert not of(desk, "allow fs.write").fixes_any
    assert of(desk, "manifest: deny fs.write", "allow fs.write src/**").fixes(desk.path("src/a.py"))


def test_books_that_say_the_same_of_paths_share_what_was_found(desk: Desk) -> None:
    assert of(desk, "allow bash ls") is of(desk, "allow bash git status")
    now = HiddenNow(desk.roots.workspace)
    first = book("allow bash ls")
    assert now.of(first) is now.of(first) and now.of(first) is of(desk)
    assert now.of(book("deny fs.read x")) is not now.of(first)
