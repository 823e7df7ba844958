"""Files that rules hide from every program, whichever command is allowed."""

from __future__ import annotations

import pytest
from tests.policy.desk import AuthorizerFixture, book

from handrail.policy.path_denials import HiddenPathRules, HiddenPathRulesCache, build_hidden_path_rules

pytestmark = pytest.mark.proves("P-01")


def of(desk: AuthorizerFixture, *rules: str) -> HiddenPathRules:
    return build_hidden_path_rules(book(*rules), desk.roots.workspace)


@pytest.mark.parametrize("name", [".env", "a/.env.local", "server.key", "sub/.npmrc", ".aws/credentials", "id_other"])
def test_files_that_look_like_secrets_are_hidden_unless_a_rule_allows_reading_them(
    desk: AuthorizerFixture, name: str
) -> None:
    assert of(desk).is_hidden(desk.path(name))
    assert of(desk, "allow bash", "allow shell.run", f"allow bash cat {name}", f"allow read {name}").is_hidden(
        desk.path(name)
    )
    assert not of(desk, f"allow fs.read {name}").is_hidden(desk.path(name))
    assert not of(desk, "allow *").is_hidden(desk.path(name))
    assert of(desk, "allow *", f"deny fs.read {name}").is_hidden(desk.path(name))
    assert of(desk, "allow fs.read", f"ask fs.read {name}").is_hidden(desk.path(name))


def test_files_that_a_rule_denies_or_asks_about_are_hidden(desk: AuthorizerFixture) -> None:
    rules = of(desk, "deny fs.read private/**", "ask fs.read customers/**", "allow fs.read private/public.txt")
    assert rules.is_hidden(desk.path("private/x")) and rules.is_hidden(desk.path("customers/y"))
    assert not rules.is_hidden(desk.path("private/public.txt")) and not rules.is_hidden(desk.path("src/a.py"))


@pytest.mark.parametrize("pattern", ["", " **", " *", " ."])
def test_an_ask_rule_for_all_reads_hides_only_secret_like_files_from_programs(
    desk: AuthorizerFixture, pattern: str
) -> None:
    rules = of(desk, f"ask fs.read{pattern}")
    assert not rules.is_hidden(desk.path("src/a.py")) and rules.is_hidden(desk.path(".env"))


def test_a_deny_rule_for_all_reads_hides_every_file_from_programs(desk: AuthorizerFixture) -> None:
    assert of(desk, "deny fs.read").is_hidden(desk.path("src/a.py"))


def test_package_certificates_stay_visible_and_key_files_stay_hidden_despite_broad_allow_rules(
    desk: AuthorizerFixture,
) -> None:
    assert not of(desk).is_hidden(desk.path(".venv/lib/python3.12/site-packages/certifi/cacert.pem"))
    assert of(desk, "deny fs.read **/*.pem").is_hidden(desk.path("node_modules/x/test.pem"))
    assert of(desk, "allow fs.read", "allow *").is_hidden(desk.path("keys/id_rsa"))


def test_files_that_a_rule_denies_writing_are_read_only(desk: AuthorizerFixture) -> None:
    rules = of(desk, "deny fs.write migrations/**", "allow fs.write migrations/draft.sql", "ask fs.write src/**")
    assert rules.has_read_only and rules.is_read_only(desk.path("migrations/1.sql"))
    assert not rules.is_read_only(desk.path("migrations/draft.sql")) and not rules.is_read_only(desk.path("src/a.py"))
    assert not of(desk, "allow fs.write").has_read_only
    assert of(desk, "manifest: deny fs.write", "allow fs.write src/**").is_read_only(desk.path("src/a.py"))


def test_rule_books_with_equal_path_rules_share_the_cached_denials(desk: AuthorizerFixture) -> None:
    assert of(desk, "allow bash ls") is of(desk, "allow bash git status")
    now = HiddenPathRulesCache(desk.roots.workspace)
    first = book("allow bash ls")
    assert now.get_hidden_path_rules(first) is now.get_hidden_path_rules(first) and now.get_hidden_path_rules(
        first
    ) is of(desk)
    assert now.get_hidden_path_rules(book("deny fs.read x")) is not now.get_hidden_path_rules(first)
