"""Files that look like secrets: tools ask, programs do not see them; sources and examples are exempt."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.desk import READ, WRITE, AuthorizerFixture, book

from handrail.contract.text.glob_patterns import find_glob_pattern_fault
from handrail.policy.path_denials import build_hidden_path_rules
from handrail.policy.rules.matchers import PathSubject, RuleRanking
from handrail.policy.rules.rules_and_modes import (
    SECRET_FILE_NAMES,
    SECRET_NAME_EXCEPTIONS,
    SECRET_NAME_ROWS,
    Rule,
    with_mode,
)

pytestmark = pytest.mark.proves("P-03")

SECRETS = """
.env .env.local .env.production a/.env server.pem tls.key cert.p12 cert.pfx a.jks a.keystore db.kdbx putty.ppk secret.asc secret.gpg
id_rsa id_ed25519 id_work .netrc _netrc .pgpass .my.cnf .mylogin.cnf .npmrc .pypirc .yarnrc.yml .aws/credentials .aws/config
.azure/accessTokens.json .config/gcloud/x my-service-account-1.json gcp_credentials.json application_default_credentials.json
client_secret_1.json .boto .s3cfg .docker/config.json .dockercfg .kube/config kubeconfig prod.kubeconfig
.terraform.d/credentials.tfrc.json terraform.tfstate terraform.tfstate.backup terraform.tfvars prod.auto.tfvars .vault-token
.ansible-vault vault_pass.txt .vault_pass .htpasswd .git-credentials .gitcookies .config/gh/hosts.yml .config/hub .glab/x
.subversion/auth/x .cargo/credentials.toml .cargo/credentials .gem/credentials .composer/auth.json auth.json .nuget/NuGet.Config
NuGet.Config nuget.config .m2/settings.xml .gradle/gradle.properties .sbt/credentials .ivy2/.credentials wp-config.php
config/master.key config/credentials.yml.enc secrets.yml secrets.yaml secrets.toml secrets.json .streamlit/secrets.toml
local.settings.json appsettings.Production.json .microsoft/usersecrets/x/secrets.json .rclone.conf rclone.conf .mc/config.json
.databrickscfg .snowflake/config.toml .snowsql/config .kaggle/kaggle.json kaggle.json .huggingface/token .cache/huggingface/token
.openai/key .anthropic/key .config/op/config .1password/x client.ovpn wg0.conf .cloudflared/x.json cert.json .fly/config.yml
.netlify/config.json .vercel/auth.json .heroku/x .stripe/config.toml .twilio-cli/config.json .sentryclirc keys.txt
.password-store/x.gpg .gnupg/x .ssh/config Login?Data cookies.sqlite key4.db logins.json wallet.dat keystore/UTC--2020 .bitcoin/x
.ethereum/x login.keychain-db a.mobileprovision a.p8 AuthKey_A1.p8 etc/shadow .bash_history .zsh_history .python_history
.psql_history .node_repl_history .lesshst .mysql_history .sqlite_history .irb_history .viminfo x-firebase-adminsdk-abc.json
token.json token.pickle .credentials.json oauth_creds.json .pulumi/credentials.json vault.yml .authinfo clouds.yaml openrc.sh
.config/rclone/rclone.conf ngrok.yml .smbcredentials .terraformrc .dockerconfigjson k3s.yaml user_accessKeys.csv key.properties
krb5.keytab .p4tickets .msmtprc .fetchmailrc .muttrc passwords.txt sftp-config.json .ftpconfig filezilla.xml pgpass.conf
.envs/.production/.django .env.d/x prod.env.bak env.local .secrets.toml .secrets.yaml secrets.prod.json secrets-dev.yaml app-secrets.json
jwt_secret.txt db_password.txt db-credentials.yml credentials.bak api-keys.json openai_api_key.txt github_token slack-token.txt
deploy_key github_rsa work_id_rsa host.key.bak ca.pem.old privkey .npmrc.bak .netrc~ sa-key.json vault-keys.json unseal_keys.txt
pull-secret.json playwright/.auth/user.json storageState.json .local/share/keyrings/x.keyring .purple/accounts.xml .claude.json
.erlang.cookie master_key.txt .config/glab-cli/config.yml .pg_service.conf prod.env cookies.txt .codex/auth.json .claude/.credentials.json
key.pem.enc x.pkcs8 x.pk8 x.bcfks cwallet.sso keys.age x.age .passage/x bitwarden_export.json 1password-export.csv lastpass.csv passwd.txt secret-key
secrets/prod.yaml secrets/db.txt mysecrets.yaml flask_secret secret_key_base.txt pgpass connections.toml .bigqueryrc users.acl cqlshrc odbc.ini .config/influx/x
.npmrc.local pypirc .twine/x .gh_token gh-token .gitlab-token .git-credentials-store rootkey.csv adc.json msal_token_cache.json azureProfile.json .cf/config.json
.s3cmd passwd-s3fs doctl.yaml .vaultpass ansible-vault-pass vault-token vault-unseal.txt docker-config.json regcred.yaml .config/helm/registry/config.json
kube.config kubeconfig-prod cluster.rkestate .rancher/cli2.json .argocd/config htdigest tomcat-users.xml my_creds.json cred.json login.txt pw.txt bearer_token
.api-token oauth2_token.pickle .session x.session cookie.txt db.password .master_key deploykey slack.token hf_token recovery-codes.txt backup-codes.txt otp.txt
.google_authenticator .jira-token ftp.json cifs.creds x.rdp mRemoteNG.xml .copilot/token huggingface.token sentry.properties newrelic.ini ssmtp.conf sasldb2
.config/himalaya/config.toml .cookie-jar cert8.db keystore.json seed_phrase.txt smbpasswd pc-api-1-2.json .zhistory .erlang-history main.shada
.ipython/profile_default/history.sqlite .config/nushell/history.txt .julia/logs/repl_history.jl .mongosh/mongosh_repl_history
"""
ORDINARY = """
src/secrets.py src/test_credentials.py src/tokens.ts docs/secrets.md src/token/token.go src/credentials/base.py src/auth.py src/auth.ts
lib/keys.js id_utils.py src/id_generator.ts .env.example .env.sample .env.template .env.dist example.tfvars src/secret/manager.rs
design/tokens.json package.json src/cookies.ts src/history.py src/vault.go src/wallet.ts README.md src/shadow/css.ts
tests/test_tokens.py k8s/configmap.yaml appsettings.json appsettings.Development.json gradle.properties settings.xml
src/private_key.py src/privatekey.go src/access_token.py id_map.sql config.json src/Secrets.java src/passwords.py
src/secrets/__init__.py oauth.py src/api_key.py .gitignore src/key.ts keyboard.json monkey.py cert.py src/environment.ts src/env.d.ts
.secrets.baseline templates/reset_password.txt src/deploy_key.rb app/deploy_keys/x.rb src/privkey.go modules/ssh-key/main.tf locales/en/cookies.json
app/api-key/page.tsx src/envs/x.py Env.tsx src/Secret.java Token.java Cookies.tsx Vault.sol Wallet.tsx src/auth/state.ts
node_modules/x/a.pem google-services.json src/oauth.ts config/database.yml docs/keys.md public/token.svg src/keystore/store.go
"""


def names(text: str) -> list[str]:
    return [name.replace("?", " ") for name in text.split()]


def test_each_secret_name_row_has_a_source_and_each_name_is_unique() -> None:
    counted = Counter(name for row in SECRET_NAME_ROWS for name in row.names.split())
    assert [name for name, count in counted.items() if count > 1] == []
    for row in SECRET_NAME_ROWS:
        assert row.program and len(row.source) > 8
    for name in (*counted, *SECRET_NAME_EXCEPTIONS):
        assert find_glob_pattern_fault(f"**/{name}") is None and not name.startswith("/") and "**" not in name


@pytest.mark.parametrize("name", names(SECRETS))
def test_a_secret_looking_file_is_asked_about_or_denied_and_hidden_from_programs(
    desk: AuthorizerFixture, name: str
) -> None:
    for path in (name, f"a/b/{name}"):
        assert build_hidden_path_rules(book(), desk.roots.workspace).is_hidden(desk.path(path))
        assert desk.judge(READ, {"path": path}).action in ("ask", "deny")
        assert desk.judge(WRITE, {"path": path}, with_mode(book(), "auto")).action in ("ask", "deny")


@pytest.mark.parametrize("name", names(SECRETS))
def test_a_secret_like_name_is_recognised_in_any_letter_case(desk: AuthorizerFixture, name: str) -> None:
    for path in (name.upper(), name.title(), f"A/{name.swapcase()}"):
        assert build_hidden_path_rules(book(), desk.roots.workspace).is_hidden(desk.path(path)), path
        assert build_hidden_path_rules(book(), desk.roots.workspace).is_hidden(f"/elsewhere/{path}"), path
        assert desk.judge(READ, {"path": path}).action in ("ask", "deny"), path
        assert desk.judge(WRITE, {"path": path}, with_mode(book(), "auto")).action in ("ask", "deny"), path


def test_example_files_match_in_any_letter_case_but_user_rules_are_case_sensitive(desk: AuthorizerFixture) -> None:
    assert desk.judge(READ, {"path": "ID_Utils.PY"}).action == "allow"
    assert desk.judge(READ, {"path": ".ENV.Example"}).action == "allow"
    assert desk.judge(READ, {"path": ".ENV"}, "allow fs.read .env").action == "ask"
    assert desk.judge(READ, {"path": ".ENV"}, "allow fs.read .ENV").action == "allow"


@pytest.mark.parametrize("name", names(ORDINARY))
def test_source_and_example_files_with_secret_like_names_are_not_hidden(desk: AuthorizerFixture, name: str) -> None:
    assert not build_hidden_path_rules(book(), desk.roots.workspace).is_hidden(desk.path(name))
    if "node_modules" not in name:  # there, programs read it, and tools ask
        assert desk.judge(READ, {"path": name}).action == "allow"


def test_auto_mode_writes_source_files_with_secret_like_names(desk: AuthorizerFixture) -> None:
    for name in ("src/id_utils.py", "src/private_key.py"):
        assert desk.judge(WRITE, {"path": name}, with_mode(book(), "auto")).action == "allow"


def test_a_secret_name_with_a_folder_matches_only_in_that_folder(desk: AuthorizerFixture) -> None:
    found = build_hidden_path_rules(book(), desk.roots.workspace)
    assert found.is_hidden(desk.path("home/.cargo/credentials")) and not found.is_hidden(
        desk.path("src/credentials/x.py")
    )
    assert tuple(name for row in SECRET_NAME_ROWS for name in row.names.split()) == SECRET_FILE_NAMES


_PARTS = [
    "a",
    "ab",
    "abc",
    "*",
    "a*",
    "*c",
    "?b",
    "[ab]",
    "**",
    "a[/]b",
    "[]x]",
    "[*]",
    "*b*",
    "abcd*",
    "*abcd",
    "a**c",
    "x[",
    "]",
]
_PATTERN = st.lists(st.sampled_from(_PARTS), min_size=1, max_size=3).map("/".join)
_NAMES = st.lists(
    st.sampled_from(["a", "ab", "abc", "abcd", "xabcd", "b", "*", "]", "x", "x[", "]x", "abcdx"]),
    min_size=1,
    max_size=4,
)


@given(st.lists(st.tuples(st.sampled_from(["allow", "ask", "deny"]), _PATTERN), max_size=6), _NAMES, st.booleans())
def test_the_indexed_rule_lookup_agrees_with_a_linear_search(
    rules: list[tuple[str, str]], parts: list[str], inside: bool
) -> None:
    ranking = RuleRanking((Rule(action, "fs.read", pattern) for action, pattern in rules), "path")  # type: ignore[arg-type]
    path = "/".join(parts)
    subject = PathSubject(f"/ws/{path}", path if inside else None)
    wanted = next((one for one in ranking.ranked if one.matches(subject)), None)
    found = ranking.find_winner(subject)
    assert (None if found is None else found.rank) == (None if wanted is None else wanted.rank)
