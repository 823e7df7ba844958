"""Rules: their syntax, the shipped ones, modes, and names of secret files.

The syntax is ``ACTION PERMISSION [PATTERN]``, as in ``allow bash git status`` or ``deny fs.write secrets/**``. The permission
is a tool's id, a glob over ids, ``mcp:server:tool``, a capability, or ``*``. The kind of tool decides what a pattern is
compared with (see :mod:`handrail.policy.rules.matchers`). A rule without a pattern is about every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args
from weakref import WeakValueDictionary

from handrail.contract.errors import UsageError
from handrail.contract.permission_modes import DEFAULT_MODE, MODES, Mode
from handrail.contract.text.glob_patterns import (
    WILDCARDS,
    compile_text_glob,
    escape_glob_literal,
    find_glob_pattern_fault,
)
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.requires import CAPABILITIES, Capability
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import (
    ID_PATTERN,
    RESOURCE_IDS,
    SESSION_INTERNAL,
    is_session_internal_tool,
    nearest_names,
)
from handrail.policy.rules.pattern_faults import (
    CONFINED_VARIABLE,
    READ_ONLY_VARIABLE,
    expand_home,
    explain_command_pattern_fault,
    explain_host_pattern_fault,
    explain_path_pattern_fault,
)
from handrail.policy.rules.pattern_lexer import ANY_ARGUMENTS

Action = Literal["allow", "ask", "deny"]
Scope = Literal["default", "manifest", "mode", "project", "session"]

ACTIONS: tuple[Action, ...] = get_args(Action)
STRICTNESS: dict[Action, int] = {"allow": 0, "ask": 1, "deny": 2}
FINAL_SCOPES: frozenset[Scope] = frozenset({"manifest", "mode"})
"""The scopes with final denies, which no more specific rule outweighs."""

EFFECT_PREFIX = "effect:"
CONFINED_RULE_TEXTS = (f"allow bash {CONFINED_VARIABLE}", f"allow python {CONFINED_VARIABLE}")
"""The rules for commands and code that stay confined. They are part of the shipped rules, of the mode ``auto`` and of rule sets."""
_CLAUDE_RULE = compile_regex_lazily(r"(?P<tool>[A-Za-z]+)\((?P<inner>.*)\)")
_CLAUDE_PERMISSIONS = {
    "Read": "fs.read",
    "Edit": "fs.write",
    "Write": "fs.write",
    "MultiEdit": "fs.write",
    "WebFetch": "net.fetch",
}
"""The permissions for the tools of that program whose rules name a path or a host."""
_PROGRAM = compile_regex_lazily(r"[a-z][a-z0-9+-]*")
_MCP_NAME = compile_regex_lazily(r"mcp__(?P<server>.+?)__(?P<tool>.+)")
_EFFECTS = ("effect:read", "effect:write", "effect:external")
_FAMILIES = frozenset(name.partition(".")[0] for name in CAPABILITIES)
_PERMISSION_CHARACTERS = compile_regex_lazily(r"[A-Za-z0-9_.:*?\[\]!/-]+")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the policy.

    :param pattern: ``""`` if the rule applies to every call of its permission
    :param source: where an operator finds the rule: a file, ``--rule``, "answered for this session"
    :param narrows: the rule comes from untrusted content, so its ask never replaces a deny
    :param any_case: the pattern of paths ignores the case of ASCII letters
    """

    action: Action
    permission: str
    pattern: str = ""
    scope: Scope = "session"
    source: str = ""
    narrows: bool = False
    any_case: bool = False
    text: str = field(init=False, repr=False, compare=False)
    """The rule as text, which :func:`parse_rule` parses to the same rule, except for ``any_case``."""
    _hash: int = field(init=False, repr=False, compare=False, default=0)
    """The hash, computed on first use: a book has more than a thousand rules."""

    def __post_init__(self) -> None:
        bare = f"{self.action} {self.permission}"
        object.__setattr__(self, "text", f"{bare} {self.pattern}" if self.pattern else bare)

    def __hash__(self) -> int:
        if not self._hash:
            fields = (self.text, self.scope, self.source, self.narrows, self.any_case)
            object.__setattr__(self, "_hash", hash(fields) or 1)
        return self._hash

    @property
    def is_final(self) -> bool:
        return self.action == "deny" and self.scope in FINAL_SCOPES

    @property
    def governed_side_effect(self) -> str:
        """The side effect that the rule names, for a permission like ``effect:write``; else ``""``."""
        return self.permission[len(EFFECT_PREFIX) :] if self.permission.startswith(EFFECT_PREFIX) else ""

    @property
    def is_unconditional(self) -> bool:
        """Whether the rule applies to every call of its permission, whatever the arguments."""
        return not self.pattern

    def __str__(self) -> str:
        where = f"{self.scope} scope, {self.source}" if self.source else f"{self.scope} scope"
        return f"{self.text!r} ({where})"


def parse_rule(text: str, *, scope: Scope, source: str = "", known: Iterable[str] | None = None) -> Rule:
    """Parse ``ACTION PERMISSION [PATTERN]``.

    :param known: every known tool id and alias; if given, a permission that names none of them is an error
    :raises ValueError: names the faulty word, what was expected, and the nearest valid word
    """
    parts = text.strip(" \t").split(None, 2)
    written = text.strip().removeprefix("allow ").removeprefix("deny ").removeprefix("ask ")
    if (other := _CLAUDE_RULE.fullmatch(written)) is not None:
        action = parts[0] if parts[0] in ACTIONS else "allow"
        permission = _CLAUDE_PERMISSIONS.get(other["tool"], other["tool"].lower())
        meant = (
            f"{action} {permission} {other['inner'].removeprefix('domain:').replace(':*', f' {ANY_ARGUMENTS}')}".strip()
        )
        raise ValueError(f"Invalid rule {text!r}: a permission has no parentheses. Write {meant!r}.")
    if len(parts) < 2:
        raise ValueError(f"Invalid rule: {text!r}. Write ACTION PERMISSION [PATTERN], as in 'allow bash git status'.")
    action, permission = parts[0], parts[1]
    pattern = parts[2] if len(parts) == 3 else ""
    if action not in ACTIONS:
        near = nearest_names(action.lower(), ACTIONS, 1)
        names_tool = action == "bash" or action in CAPABILITIES or action in (known or ())
        hint = f"Write {f'allow {text.strip()}'!r}." if names_tool else f"Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"Invalid rule {text!r}: {action!r} is not an action. A rule begins with allow, ask or deny. {hint}".rstrip()
        )
    if problem := _fault_in_permission(permission, known):
        if pattern and _PROGRAM.fullmatch(permission):
            problem = f"{problem} For a command, write {f'{action} bash {permission} {pattern}'!r}."
        raise ValueError(f"Invalid rule {text!r}: {problem}")
    if permission in _PATH_PERMISSIONS:
        pattern = expand_home(pattern)
    if problem := _fault_in_pattern(permission, pattern):
        raise ValueError(f"Invalid rule {text!r}: {problem}")
    if pattern == CONFINED_VARIABLE and action != "allow":
        raise ValueError(
            f"Invalid rule {text!r}: only allow rules have {CONFINED_VARIABLE}. Deny or ask about a command by its words."
        )
    return Rule(action, permission, pattern, scope, source)


def is_glob(permission: str) -> bool:
    return not WILDCARDS.isdisjoint(permission)


def is_permission_tool_id(permission: str) -> bool:
    """Return whether a permission is the id of one tool."""
    is_other = permission in CAPABILITIES or permission.startswith((EFFECT_PREFIX, "mcp:"))
    return not is_other and not is_glob(permission)


def is_capability_glob(permission: str) -> bool:
    """Return whether a glob is also about capabilities.

    Such a glob names the family of capabilities in full (``fs.*``, never ``f*``).
    """
    head, dot, rest = permission.partition(".")
    return bool(dot) and head in _FAMILIES and is_glob(rest)


def _fault_in_permission(permission: str, known: Iterable[str] | None) -> str | None:
    if not _PERMISSION_CHARACTERS.fullmatch(permission):
        return f"{permission!r} is not a permission. Use a tool's id, a glob over ids, mcp:SERVER:TOOL, a capability or '*'."
    if problem := find_glob_pattern_fault(permission):
        return problem
    if permission.startswith("mcp:"):
        parts = permission.split(":")
        return None if len(parts) == 3 and all(parts) else f"{permission!r} is not of the form mcp:SERVER:TOOL."
    if "/" in permission:
        return f"{permission!r} is not a tool's id. A '/' is only allowed in a method, as in mcp:SERVER:resources/read."
    if permission.startswith(EFFECT_PREFIX):
        return _fault_in_effect(permission)
    if permission in CAPABILITIES or is_glob(permission):
        return None
    return _fault_in_id(permission, known)


def _fault_in_effect(permission: str) -> str | None:
    if permission in _EFFECTS:
        return None
    near = nearest_names(permission, _EFFECTS, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{permission!r} is not a side effect. Valid ones: {', '.join(_EFFECTS)}.{hint}"


def _fault_in_id(permission: str, known: Iterable[str] | None) -> str | None:
    if not ID_PATTERN.match(permission):
        return f"{permission!r} is not a tool's id. Use letters, digits, '_' and '-', in parts joined by '.'."
    names = list(known) if known is not None else []
    if permission in names:
        return None
    if known is None and permission.partition(".")[0] not in _FAMILIES:
        return None
    near = [] if permission in _FAMILIES else nearest_names(permission, (*CAPABILITIES, *names), 1)
    what = "a capability" if known is None else "a tool or a capability"
    if (upstream := _MCP_NAME.fullmatch(permission)) is not None:
        return f"{permission!r} is not {what}. Write {'mcp:{server}:{tool}'.format_map(upstream.groupdict())!r}."
    hint = f"Did you mean {near[0]!r}?" if near else f"Capabilities are {', '.join(CAPABILITIES)}."
    return f"{permission!r} is not {what}. {hint}"


def _fault_in_pattern(permission: str, pattern: str) -> str | None:
    if "\0" in pattern:
        return "the pattern contains a NUL character. Remove it."
    if not pattern:
        return None
    if permission.startswith(EFFECT_PREFIX):
        return f"a side effect takes no pattern. Remove {pattern!r}."
    if permission == "net.fetch":
        return explain_host_pattern_fault(pattern)
    if permission in ("bash", "shell.run"):
        return explain_command_pattern_fault(pattern)
    return explain_path_pattern_fault(pattern) if permission in _PATH_PERMISSIONS else None


_PATH_PERMISSIONS = frozenset({"fs.read", "fs.write", "fs.*"})


_FEW = 10
"""Up to this number, new rules are compared with each known rule. For more, a set of all rules is faster."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RuleBook:
    """The rules of a session, as an immutable value. Their order does not matter, only their specificity.

    Books that were made from others by equal changes, or that have equal rules, are one object. So sessions share what is
    prepared for a book.

    :param mode: the mode whose rules the book contains
    :param parent: for a sub-agent's session, the rule book of its parent session. Each question goes to both books. A rule of
        this book never allows what the parent's book denies or asks about, however specific it is
    :param folder_rule: the shipped rule that allows reading in the session's own folder. It is the only rule in which equal
        sessions differ
    """

    rules: tuple[Rule, ...] = ()
    mode: str = "ask"
    parent: RuleBook | None = None
    folder_rule: Rule | None = None
    _shared: RuleBook | None = field(default=None, repr=False)
    _prepared: dict[Any, Any] = field(init=False, repr=False, default_factory=dict[Any, Any])

    @property
    def shared(self) -> RuleBook:
        """The book without its folder rule, which sessions with equal rules share."""
        return self._shared or self

    @property
    def session_folder_name(self) -> str:
        """The name of the session's own folder, which is the session's id; empty without a folder rule."""
        rule = self.folder_rule
        return "" if rule is None else rule.pattern.removesuffix("/**").rpartition("/")[2]

    def with_folder_rule(self, rule: Rule | None) -> RuleBook:
        """Return the book with this rule about the session's own folder in place of the current one."""
        shared = self.shared
        return shared if rule is None else RuleBook(shared.rules, shared.mode, shared.parent, rule, shared)

    def with_rules(self, *rules: Rule) -> RuleBook:
        """Return the book with further rules."""
        known = self.rules if len(rules) <= _FEW else frozenset(self.rules)
        new = tuple(rule for rule in rules if rule not in known and rule != self.folder_rule)
        if not new:
            return self
        shared = self.shared
        book = shared.derive(("with", *new), lambda: (*shared.rules, *new), shared.mode)
        return book.with_folder_rule(self.folder_rule)

    def with_replaced_rules(self, *rules: Rule) -> RuleBook:
        """Return the book with these rules in place of its own."""
        folder = self.folder_rule
        own = tuple(rule for rule in rules if rule != folder)
        book = _share_equal_book(own, self.mode, self.parent)
        return book.with_folder_rule(folder if len(own) < len(rules) else None)

    def derive(self, change: tuple[Any, ...], rules: Callable[[], tuple[Rule, ...]], mode: str) -> RuleBook:
        """Return the book after a change, or the one that an equal change has made before."""
        derived = self.prepare("derived", WeakValueDictionary[tuple[Any, ...], RuleBook])
        found = derived.get(change)
        if found is None:
            found = derived[change] = _share_equal_book(rules(), mode, self.parent)
        return found

    def prepare(self, key: Any, make: Callable[[], T]) -> T:
        """Return what ``make`` makes of this book's rules for ``key``. It is made once."""
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = make()
        return cast("T", found)

    def list_rules_about_tool(self, spec: ToolSpec, origin: str | None) -> list[Rule]:
        """Return the rules about calls of this tool, in the book's order; see :func:`rule_applies_to_tool`."""
        named, others = self.shared.prepare("rules by tool", self.shared._index_by_tool)
        found = [one for one in (*named.get(spec.id, ()), *others) if rule_applies_to_tool(one[1], spec, origin)]
        return [rule for _, rule in sorted(found, key=lambda one: one[0])]

    def _index_by_tool(self) -> tuple[dict[str, list[tuple[int, Rule]]], list[tuple[int, Rule]]]:
        """Return the rules that name one tool, by its id, and those about several tools, each with its place."""
        named: dict[str, list[tuple[int, Rule]]] = {}
        others: list[tuple[int, Rule]] = []
        for place, rule in enumerate(self.rules):
            if is_permission_tool_id(rule.permission):
                named.setdefault(rule.permission, []).append((place, rule))
            elif rule.permission not in CAPABILITIES:
                others.append((place, rule))
        return named, others

    def list_rules_about_capability(self, capability: Capability) -> tuple[Rule, ...]:
        """Return the rules about a capability, in the book's order; see :func:`rule_applies_to_capability`."""
        key, rules = ("rules by capability", capability), self.rules
        found = self.shared.prepare(key, lambda: tuple(r for r in rules if rule_applies_to_capability(r, capability)))
        folder = self.folder_rule
        return (*found, folder) if folder is not None and rule_applies_to_capability(folder, capability) else found

    @property
    def inheritable_rule_book(self) -> RuleBook:
        """The part of the book that also binds the sessions below.

        Left out are the shipped rules, which every book has, and what the mode asks about: the mode of a session below is never
        wider, and a narrower one asks less.
        """
        kept = (rule for rule in self.rules if rule.scope not in ("default", "mode") or _applies_to_subagents(rule))
        return self.shared.prepare("inherited rules", lambda: _share_equal_book(tuple(kept), self.mode, self.parent))

    @property
    def own_and_parent_rules(self) -> Iterator[Rule]:
        """The rules of the book, and those of its parents that bind it."""
        yield from self
        if self.parent is not None:
            yield from self.parent.inheritable_rule_book.own_and_parent_rules

    def list_rules_of_scope(self, scope: Scope) -> tuple[Rule, ...]:
        return tuple(rule for rule in self if rule.scope == scope)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules) if self.folder_rule is None else chain(self.rules, (self.folder_rule,))

    def __len__(self) -> int:
        return len(self.rules) + (self.folder_rule is not None)


_equal_books: WeakValueDictionary[tuple[int, str, int], RuleBook] = WeakValueDictionary()
"""The books in use, by a hash of their rules. A book keeps its parent alive, so no other book gets the parent's id."""


def _share_equal_book(rules: tuple[Rule, ...], mode: str, parent: RuleBook | None) -> RuleBook:
    """Return the book with these rules, which is the one in use if there is an equal one."""
    content = frozenset(rules)
    key = (hash(content), mode, id(parent))
    found = _equal_books.get(key)
    if found is not None and found.parent is parent and content == frozenset(found.rules):
        return found
    made = _equal_books[key] = RuleBook(rules, mode, parent)
    return made


def _applies_to_subagents(rule: Rule) -> bool:
    return rule.scope == "mode" and rule.action != "ask"


# Names of files that often contain secrets, each with the program that stores them there and its documentation.
#
# A name is a rule pattern, compared at any depth: ``a/b`` is an entry ``b`` of a folder ``a``, ``*`` and ``?`` match within
# one name, and a folder's name covers its content. A name that may also occur in a source folder is listed only together
# with its parent folder.


class SecretFileNames(NamedTuple):
    """The secret files of one program.

    :param names: patterns, separated by spaces
    :param source: the manual or address that documents them
    """

    program: str
    names: str
    source: str


SECRET_NAME_ROWS: tuple[SecretFileNames, ...] = (
    SecretFileNames("environment files", ".envs .env.d *.env.bak *.env.old *.env.local *.env.production env.local env.prod env.production env.staging .env* .flaskenv .dev.vars *.env", "https://12factor.net/config, https://github.com/motdotla/dotenv"),
    SecretFileNames("private keys and certificates", "*.key.bak *.key.old *.key.orig *.key~ *.key.enc *.pem.enc *.pkcs8 *.pk8 *.pem.bak *.pem.old *.pem.orig *.pem~ privkey privkey.der privkey.txt private.der *.pem *.key *.p12 *.pfx *.p8 *.pvk *.pkcs12 *.snk "
        "private_key* private-key* privatekey* *.jwk",
        "https://www.rfc-editor.org/rfc/rfc7468"),
    SecretFileNames("Java", "*.jks *.keystore *.jceks *.bks *.bcfks cwallet.sso ewallet.* *.truststore keystore.properties key.properties signing.properties", "man keytool(1)"),
    SecretFileNames("OpenSSH and PuTTY", "*_id_rsa *_id_ed25519 *_id_ecdsa deploy_key deploy-key *_deploy_key *-deploy-key github_rsa gitlab_rsa bitbucket_rsa .ssh id_* ssh_host_*_key *.ppk", "man ssh(1), https://www.chiark.greenend.org.uk/~sgtatham/putty/"),
    SecretFileNames("GnuPG and age", ".gnupg *.gpg *.pgp *.asc secring.* keys.txt *.agekey *.age keys.age age-key* .config/sops/age", "man gpg(1), https://age-encryption.org/"),
    SecretFileNames("Kerberos", "*.keytab krb5cc_* *.ccache", "https://web.mit.edu/kerberos/krb5-latest/doc/basic/keytab_def.html"),
    SecretFileNames("password managers", ".local/share/keyrings .gnome2/keyrings .local/share/kwalletd *.kwl login.keyring *.kdbx *.kdb *.psafe3 *.agilekeychain *.opvault *.1pif *.1pux .password-store .config/op .1password .op .lastpass "
        "*.keychain *.keychain-db login.keychain* .config/bitwarden* .config/keepassxc .passage keepass.xml *1password*export*.csv bitwarden*export*.json lastpass*.csv *.dashlane passwd.txt mypasswords.* password.txt passwords.txt passwords.csv passwords.json "
        "passwords.y*ml password.y*ml", "https://keepass.info/help/base/repair.html, https://www.passwordstore.org/"),
    SecretFileNames("files named for it", "*-secrets.json *_secrets.json *.secrets.json secrets-*.y*ml secrets-*.json secrets.*.y*ml secrets.*.json secrets.hcl secrets.sh secrets.bash secrets.zsh secrets.fish secrets.enc secrets.zip "
        ".secrets.toml .secrets.y*ml .secrets.json .secrets.env .secret.toml .secret.y*ml .secret.json *_secret.txt *-secret.txt secret_key.json secret-key.txt *_secret_key.txt secrets.y*ml secrets.json secrets.toml secrets.ini "
        "secrets.properties secrets.xml secrets.txt secrets.env "
        "secret.y*ml secret.json secret.toml secret.txt secret.ini *.secret *.secrets *-secret.y*ml *-secrets.y*ml *_secrets.y*ml .secrets .secret "
        "secrets.enc.* secrets.sops.* secret_token* secret_key.txt secret_key_base secret_key_base.txt secret-key .secret_key secrets/*.txt secrets/*.y*ml secrets/*.json *secrets.y*ml *secrets.json *_secret.key flask_secret django_secret", "the names say so"),
    SecretFileNames("netrc", ".netrc.bak .netrc.old .netrc~ .netrc _netrc .authinfo .authinfo.gpg", "man netrc(5)"),
    SecretFileNames("databases", ".pgpass pgpass.conf .pg_service.conf .my.cnf my.cnf .mylogin.cnf pgpass connections.toml .bigqueryrc redis.acl users.acl .config/influx .cockroach-certs cqlshrc odbc.ini .snowsql .snowflake .databrickscfg .dbt/profiles.yml .cqlshrc "
        "*.dbvis .robomongo .odbc.ini .influxdbv2 .clickhouse-client/config.xml",
        "https://www.postgresql.org/docs/current/libpq-pgpass.html, https://dev.mysql.com/doc/refman/en/mysql-config-editor.html"),
    SecretFileNames("packages of JavaScript", ".npmrc.local .yarnrc.local .npmrc.bak .npmrc.old .npmrc~ .npmrc .yarnrc.yml .yarnrc.yaml .config/configstore", "https://docs.npmjs.com/cli/configuring-npm/npmrc#auth-related-configuration"),
    SecretFileNames("packages of Python", ".pypirc pypirc .pypirc.bak .twine pip.conf pip.ini pypoetry/auth.toml auth.toml .config/uv/credentials .local/share/uv/credentials",
        "https://packaging.python.org/en/latest/specifications/pypirc/"),
    SecretFileNames("packages of Rust, Ruby and PHP", ".cargo/credentials .cargo/credentials.toml .gem/credentials .gem/*credentials* auth.json",
        "https://doc.rust-lang.org/cargo/reference/config.html#credentials, https://getcomposer.org/doc/articles/authentication-for-private-packages.md"),
    SecretFileNames("packages of the JVM and .NET", ".m2/settings.xml settings-security.xml .gradle/gradle.properties .sbt/credentials .sbt/.credentials .ivy2/.credentials "
        ".sbt/*/sonatype.sbt [Nn]u[Gg]et.[Cc]onfig .nuget/nuget.config", "https://maven.apache.org/settings.html#servers, https://learn.microsoft.com/nuget/reference/nuget-config-file"),
    SecretFileNames("packages of other languages", ".hex/hex.config .pub-cache/credentials.json pub-credentials.json .pause .luarocks/upload_config.lua .vsce .julia/servers .cocoapods/trunk "
        ".opam/github .swiftpm/security", "https://hex.pm/docs/usage, https://metacpan.org/dist/CPAN-Uploader/view/bin/cpan-upload"),
    SecretFileNames("Git and its hosts", ".git-credentials .gitcookies .git-credential-cache .git-credentials-* .gh_token gh-token .gitlab-token gitlab-token .hub hub.yml .config/git/credentials .config/gh .config/hub .config/glab-cli .glab .glab-cli .config/tea .gist "
        ".github_token .gitlab_token .git_token .arcrc .config/github-copilot .lab.hcl .config/lab", "https://git-scm.com/docs/git-credential-store"),
    SecretFileNames("other version control", ".subversion/auth .bazaar/authentication.conf .config/breezy/authentication.conf .p4tickets .cvspass .hgkeyring .fossil",
        "https://svnbook.red-bean.com/en/1.8/svn.serverconfig.netmodel.html"),
    SecretFileNames("AWS", ".aws .aws-vault .saml2aws *accesskeys*.csv *accessKeys*.csv .boto .s3cfg .s3curl .passwd-s3fs .passwd .aws-credentials aws-credentials* rootkey.csv",
        "https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-files.html"),
    SecretFileNames("Google Cloud and Firebase", "sa-key.json sa_key.json service-key.json service_key.json .config/gcloud *service-account*.json *service_account*.json *serviceaccount*.json *serviceAccount*.json *credentials*.json client_secret*.json "
        "client-secret*.json adc.json *-adminsdk-*.json firebase-adminsdk*.json gha-creds-*.json .gsutil gcp-key*.json gcloud-key*.json gcp*key.json google-key.json .config/configstore/firebase-tools.json",
        "https://cloud.google.com/docs/authentication/application-default-credentials"),
    SecretFileNames("Azure", ".azure azureauth.json azureprofile.json az-creds.json msal_token_cache.* *.publishsettings *.azureauth *.PublishSettings *.pubxml.user local.settings.json .config/azure", "https://learn.microsoft.com/cli/azure/azure-cli-configuration"),
    SecretFileNames("other clouds", ".oci .cf/config.json .minio .s3cmd .config/s3cmd passwd-s3fs doctl.yaml .aliyun .ossutilconfig .bluemix .ibmcloud .config/doctl .config/scw .scwrc .config/linode-cli .linode-cli .config/hcloud .vultr-cli.yaml .config/exoscale .civo.json "
        ".tccli .huaweicloud .hcloud clouds.yaml clouds.yml openrc openrc.sh *-openrc.sh *openrc*.sh .novarc .config/openstack .yandex .config/yandex-cloud .packet.yml .ovh.conf ovh.conf .gandi.yaml "
        ".cloudflare .config/cloudflare cloudflare.ini", "https://docs.openstack.org/python-openstackclient/latest/configuration/index.html"),
    SecretFileNames("Terraform and Pulumi", "*.tfstate* *.tfvars *.tfvars.json .terraform.d .terraformrc terraform.rc .tofurc .pulumi/credentials.json *.tfplan",
        "https://developer.hashicorp.com/terraform/language/state/sensitive-data"),
    SecretFileNames("Vault, Ansible, Chef and SOPS", ".vaultpass *-vault-pass vault-token .vault vault.txt vault-unseal* vault-keys* vault_keys* vault-init.json cluster-keys.json unseal-key* unseal_key* root_token root-token .vault-token .ansible-vault .vault_pass* .vault-pass* .vault_password* "
        ".vault-password* vault_pass* vault-pass* vault_password* vault-password* vault.y*ml "
        ".ansible_vault* .chef .puppetlabs/etc/puppet/ssl encrypted_data_bag_secret", "https://developer.hashicorp.com/vault/docs/commands/token-helper, https://docs.ansible.com/ansible/latest/vault_guide/"),
    SecretFileNames("containers", "pull-secret pull-secret.json pull-secret.txt .pull-secret .docker/config.json .dockercfg .dockerconfigjson .docker/*.json docker-config.json regcred.y*ml registry-auth.json .config/helm/registry .config/helm/registry.json .helm/repositories.yaml .helm/repository/repositories.yaml",
        "https://docs.docker.com/reference/cli/docker/login/#credential-stores"),
    SecretFileNames("Kubernetes", ".kube kubeconfig kubeconfig.* *.kubeconfig kube.config kubeconfig-* *.rkestate rke.y*ml k0s.y*ml rancher.y*ml .rancher .argocd .config/argocd argocd.token *-kubeconfig *-kubeconfig.y*ml kubeconfig*.y*ml kube_config_*.yml k3s.yaml talosconfig .talos etc/kubernetes admin.conf kubelet.conf sealed-secrets-key*",
        "https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig/"),
    SecretFileNames("web servers and sites", "app/config/parameters.yml .htpasswd htpasswd .htdigest htdigest tomcat-users.xml jboss-users.properties mgmt-users.properties application-users.properties wp-config.php wp-config-*.php wp-config.php.* LocalSettings.php settings.local.php config.inc.php", "https://httpd.apache.org/docs/current/programs/htpasswd.html"),
    SecretFileNames("Rails and Streamlit", "master.key credentials.yml.enc credentials/*.yml.enc .streamlit/secrets.toml", "https://guides.rubyonrails.org/security.html#custom-credentials"),
    SecretFileNames("ASP.NET and PHP frameworks", "appsettings.[Pp]roduction.json appsettings.[Ss]taging.json appsettings.[Ll]ocal.json appsettings.[Ss]ecrets.json .microsoft/usersecrets user-secrets [Uu]ser[Ss]ecrets .config/user-secrets",
        "https://learn.microsoft.com/aspnet/core/security/app-secrets"),
    SecretFileNames("other credentials", "*-credentials.y*ml *_credentials.y*ml *-credentials.txt *_credentials.txt *_creds.json *-creds.json cred.json login.txt logins.txt auth.txt *.creds pw.txt bearer_token .api-token oauth2_token* .session *.session cookie.txt dbpass.txt db.password master.password .master_key deploykey slack.token telegram_token discord_token openai.key openai.txt hf_token .hf_token *.token recovery.txt recovery-codes* recovery_codes* backup-codes* backup_codes* 2fa.txt otp.txt totp.txt .google_authenticator authenticator.json .jira-token credentials.bak credentials.old credential.json credential.txt aws_credentials creds.csv creds.ini creds.env pass.txt "
        ".password .passwords password.json .passphrase passphrase.txt db_password db_password.txt db-password.txt db_root_password.txt mysql_password.txt mysql_root_password.txt postgres_password.txt postgres-password.txt "
        "admin_password.txt admin-password.txt root_password.txt root-password.txt redis_password.txt api-key.txt api-keys.txt api-keys.json api_key.json apikey.json *_api_key.txt *-api-key.txt *_apikey.txt .openai_api_key "
        ".anthropic_api_key openai_api_key anthropic_api_key openai_key.txt anthropic_key.txt access-token.txt auth-token.txt bearer.txt bearer_token.txt github_token github_token.txt github-token.txt gh_token gitlab_token "
        "npm_token slack_token slack_token.txt slack-token.txt bot_token.txt telegram_token.txt discord_token.txt encryption_key.txt encryption-key.txt master_key.txt master-key.txt signing_key.txt .erlang.cookie .rediscli_auth "
        ".dropbox_uploader credentials.json credentials.y*ml credentials.toml credentials.ini credentials.cfg credentials.xml credentials.csv credentials.txt credentials.db credentials.properties credentials.conf "
        "credentials.tfrc.json .credentials .credentials.json *.credentials creds.json creds.txt creds.y*ml .creds token.json token.txt token.pickle .token tokens.txt .tokens oauth_creds.json oauth_token* oauth.json access_token* "
        "refresh_token* api_key.txt api_keys.txt api_key apikey.txt api_keys.json apikeys.json .api_key .apikey .smbcredentials .api_token .access_token auth_token.txt cert.json", "the names say so"),
    SecretFileNames("copying and mounting", ".rclone.conf rclone.conf .config/rclone .mc/config.json .mcli/config.json .davfs2/secrets .config/filezilla filezilla.xml sitemanager.xml recentservers.xml WinSCP.ini .ftpconfig .ftppass "
        ".ftprc ftp.json .ftpsync.settings .deploy.json davfs2.conf cifs.creds *.rdp *.rdg mremoteng.xml confcons.xml putty.reg securecrt.ini .lftprc .sftp-config.json sftp-config.json sftp.json .remote-sync.json .remotesync *.remmina .restic-password .resticpw .borg/keys .config/borg .duplicity", "https://rclone.org/docs/#configuration-encryption"),
    SecretFileNames("private networks", "*.ovpn *.wg openvpn.auth vpn.auth .openconnect wg*.conf .cloudflared .config/cloudflared etc/wireguard *.nmconnection wpa_supplicant.conf *.mobileconfig ipsec.secrets chap-secrets pap-secrets tailscaled.state .tailscale .ngrok2 ngrok.yml .config/ngrok .netbird",
        "man wg-quick(8), https://openvpn.net/community-resources/reference-manual-for-openvpn-2-6/"),
    SecretFileNames("models and data sets", ".claude.json .copilot/config.json .copilot/token huggingface.token .kaggle kaggle.json .huggingface huggingface/token .cache/huggingface/token .cache/huggingface/stored_tokens .openai .anthropic .config/openai "
        ".config/anthropic .cohere .replicate .modal.toml .runpod "
        ".together .mistral .config/wandb .wandb .comet.config .neptune .clearml clearml.conf .llm/keys.json io.datasette.llm/keys.json .config/litellm .groq .ollama/id_* .perplexity .xai",
        "https://www.kaggle.com/docs/api, https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables"),
    SecretFileNames("hosted services", ".fly .netlify .config/netlify .vercel/auth.json com.vercel.cli .heroku .config/heroku .stripe .config/stripe .twilio-cli .twilio .sentryclirc sentry.properties .bugsnag newrelic.ini datadog.y*ml .honeycomb .opsgenie .confluence .discord .telegram-cli .sentryrc .surgerc .now .circleci/cli.yml .travis/config.yml .railway "
        ".config/railway .render .config/.wrangler .wrangler/config .supabase/access-token .planetscale .config/planetscale .slack .slackrc .jira.d .config/.jira .pagerduty .datadog* .dogrc .newrelic .doppler .infisical "
        ".clasprc.json .expo/state.json .eas .appcenter .lacework.toml .snyk/config .config/configstore/snyk.json .sonar .ossindexrc .codacy .postman .insomnia .hasura .auth0 .okta .okta.yaml .config/okta",
        "https://fly.io/docs/flyctl/auth/, https://docs.stripe.com/cli"),
    SecretFileNames("chat", ".purple/accounts.xml .weechat/sec.conf .irssi/config .znc/configs", "man irssi(1), https://weechat.org/doc/"),
    SecretFileNames("mail", ".msmtprc .ssmtp ssmtp.conf sasldb2 .config/aerc/accounts.conf .config/himalaya .fetchmailrc .mbsyncrc .offlineimaprc .muttrc .mutt .getmail .getmailrc .imapfilter .esmtprc .mailrc .nmhrc etc/postfix/sasl_passwd sasl_passwd", "man msmtp(1), man mbsync(1)"),
    SecretFileNames("browsers", "playwright/.auth .auth/*.json storageState.json storage-state.json storage_state.json auth-state.json auth_state.json cookies.pkl Login?Data Login?Data?For?Account Web?Data Default/Cookies "
        "Network/Cookies cookies.sqlite key3.db key4.db logins.json signons.sqlite cert9.db cookies.txt .cookies .cookie-jar cookie-jar cookiejar.txt cert8.db keychain.db cookiejar .cookiejar *.binarycookies Local?State "
        "formhistory.sqlite", "https://support.mozilla.org/kb/profiles-where-firefox-stores-user-data"),
    SecretFileNames("wallets", "wallet.dat *.wallet UTC--* .bitcoin .ethereum .electrum .solana .config/solana .near-credentials .foundry/keystores .brownie/accounts .aptos .sui .litecoin .dogecoin .monero .ethash keypair.json keystore.json seed_phrase* mnemonic mnemonic.txt seed.txt "
        "seed-phrase* wallet.json .lnd/admin.macaroon *.macaroon", "https://bitcoin.org/en/secure-your-wallet, https://geth.ethereum.org/docs/developers/dapp-developer/native-accounts"),
    SecretFileNames("Apple and Android", "pc-api-*.json *.mobileprovision *.provisionprofile AuthKey_* play-store-credentials* google-play*.json *.keystore.base64", "https://developer.apple.com/documentation/appstoreconnectapi/creating-api-keys-for-app-store-connect-api"),
    SecretFileNames("accounts of the system", "smbpasswd passwd.db etc/shadow etc/shadow- etc/gshadow etc/gshadow- etc/sudoers etc/sudoers.d master.passwd etc/security/opasswd etc/ppp/chap-secrets NTDS.dit SAM.hive .pam_environment shadow.bak passwd.bak", "man shadow(5)"),
    SecretFileNames("histories of what was typed", ".zhistory .*-history *_history.txt .wget-hsts .nviminfo main.shada history.sqlite nushell/history.* .julia/logs .ghc/ghci_history mongosh_repl_history .*_history .*_hist .lesshst .viminfo .[Rr]history .[Hh]istfile fish_history ConsoleHost_history.txt .dbshell .rediscli_history .node_repl_history .mysqlsh/history",
        "https://www.gnu.org/software/bash/manual/html_node/Bash-History-Facilities.html"),
)  # fmt: skip

SECRET_NAME_EXCEPTIONS: tuple[str, ...] = (
    *(f".env.{kind}" for kind in ("example", "sample", "template", "dist", "defaults", "schema")),
    *(f"{kind}.env" for kind in ("example", "sample", "template")),
    *(f"*.{kind}.tfvars" for kind in ("example", "sample")),
    *("terraform.tfvars.example", "example.tfvars", "*.env.example", "*.env.sample", "*.env.template"),
    *(f"id_*.{end}" for end in ("py", "pyi", "ts", "tsx", "js", "jsx", "go", "rs", "java", "kt", "rb", "php", "cs")),
    *(f"id_*.{end}" for end in ("c", "h", "cc", "cpp", "hpp", "swift", "sql", "md", "rst", "html", "css", "vue")),
    *(f"private_key*.{end}" for end in ("py", "ts", "js", "go", "rs", "java", "rb", "md", "c", "h", "cpp")),
    *(f"privatekey*.{end}" for end in ("py", "ts", "js", "go", "rs", "java", "rb", "md", "c", "h", "cpp")),
    *(f"{word}*.{end}" for word in ("access_token", "refresh_token", "oauth_token", "secret_token") for end in ("py", "ts", "js", "go", "rs", "rb", "java", "md")),
)  # fmt: skip
"""Names of examples and sources that a pattern above would match. Each is longer than that pattern, so its rule wins."""


# The shipped rules: they are visible like all others, and answer only if no other rule matches.

DEFAULT_SOURCE = "shipped with Handrail"

SECRET_FILE_NAMES: tuple[str, ...] = tuple(
    dict.fromkeys(name for row in SECRET_NAME_ROWS for name in row.names.split())
)
"""Names of files that often contain secrets. Without another rule, they require approval, at any depth and in any case."""


def build_default_rules(readable: Iterable[str] = ()) -> tuple[Rule, ...]:
    """Return the shipped rules.

    :param readable: absolute folders outside the workspace that the session may read, such as its saved outputs
    """
    texts = [f"allow {permission}" for permission in (*SESSION_INTERNAL, *RESOURCE_IDS)]
    texts += [f"allow bash {READ_ONLY_VARIABLE}", *CONFINED_RULE_TEXTS]
    names: list[str] = []
    texts += [
        f"ask {tool} channel=shared/*" for tool in ("send_message", "wait_channel")
    ]  # also other sessions use these
    texts.append("allow terminal.send id=* keys=ctrl-c")  # this only interrupts a program
    for root in ("", *(escape_glob_literal(folder.rstrip("/")) + "/" for folder in readable)):
        texts.append(f"allow fs.read {root.rstrip('/') or '**'}")  # the folder itself and all in it
        names += [f"ask fs.read {root}**/{name}" for name in SECRET_FILE_NAMES]
        names += [f"allow fs.read {root}**/{name}" for name in SECRET_NAME_EXCEPTIONS]
    # Built as rules rather than parsed from text: the name of a folder may contain characters that a text cannot.
    return (*map(_rule, texts), *(replace(_rule(text), any_case=True) for text in names))


def make_folder_reading_rule(folder: str) -> Rule:
    """Return the shipped rule to read in an absolute ``folder`` outside the workspace."""
    return _rule(f"allow fs.read {escape_glob_literal(folder.rstrip('/'))}/**")


def build_folder_limited_reading_rules(folder: str) -> list[Rule]:
    """Return the shipped rules for reading, applied to an absolute ``folder`` outside the workspace only."""
    own = escape_glob_literal(folder.rstrip("/"))
    rules = (rule for rule in build_default_rules((folder,)) if rule.permission == "fs.read")
    return [rule for rule in rules if rule.pattern == own or rule.pattern.startswith(f"{own}/")]


def build_default_rule_book(readable: Iterable[str] = ()) -> RuleBook:
    """Return a book with the shipped rules only."""
    return RuleBook(build_default_rules(readable))


def _rule(text: str) -> Rule:
    action, permission, pattern = (*text.split(" ", 2), "")[:3]
    return Rule("allow" if action == "allow" else "ask", permission, pattern, "default", DEFAULT_SOURCE)


# Modes: how much a session does without approval. Each is a visible set of rules with a scope for that mode.
#
# A deny of a mode is final, like a deny of the agent's manifest. All other rules of a mode are ordinary: a more specific
# one of the project or the session wins. Protected paths, watchdogs, capabilities and the policies for single programs
# apply in every mode.

_FILE_TOOLS = ("write", "edit", "multi_edit", "file.patch", "apply_patch", "json_write", "file.move")
"""The built-in tools that change files of the workspace. None loses a file unasked."""
_GIT_TOOLS = ("git.add", "git.commit", "git.create_branch", "git.checkout", "git.merge", "git.stash", "git.init")
"""The built-in git tools that change only the workspace, like the commands that this mode allows."""
_SECRETS = tuple(f"ask fs.write **/{name}" for name in SECRET_FILE_NAMES)
_EXAMPLES = tuple(f"allow fs.write **/{name}" for name in SECRET_NAME_EXCEPTIONS)
EXAMPLE_DENIALS = tuple(f"deny fs.write **/{name}" for name in SECRET_NAME_EXCEPTIONS)
"""The rules that deny to write the files for which the mode ``auto`` has rules that allow it."""
_NAMES = frozenset((*_SECRETS, *_EXAMPLES, *EXAMPLE_DENIALS))

MODE_DESCRIPTIONS: Mapping[Mode, str] = {
    "plan": "Read only: denies tools that write or have external effects. Runs commands that provably change nothing, and tools that "
    "only read and reach hosts that a rule allows.",
    "ask": "Reads in the workspace, and runs commands that stay confined: no network, writes in the workspace only, nothing destroyed. "
    "File tools that change something and all other calls require approval, unless a rule allows them. Adds no rules.",
    "accept-edits": "Also allows file tools that change files in the workspace. Other calls require approval.",
    "auto": "Also allows local git tools, and keeps confined commands unasked next to rules about side effects. Other calls require "
    "approval.",
}
MODE_RULE_TEXTS: Mapping[Mode, tuple[str, ...]] = {
    "plan": ("deny effect:write", "deny effect:external", "deny fs.write"),
    "ask": (),
    "accept-edits": (*(f"allow {tool} **" for tool in _FILE_TOOLS), *_SECRETS),
    "auto": (
        "allow fs.write **",
        "allow file.move **",
        "ask file.delete **",
        *_SECRETS,
        *_EXAMPLES,
        *CONFINED_RULE_TEXTS,
        *(f"allow {tool}" for tool in _GIT_TOOLS),
        "ask effect:external",
    ),
}
"""The rules of each mode."""


def format_mode_rules(mode: Mode) -> list[str]:
    """Return the rules of a mode as lines for people."""
    return format_shipped_rules(MODE_RULE_TEXTS[mode])


def format_shipped_rules(texts: Sequence[str]) -> list[str]:
    """Return shipped rules as lines for people. Rules about secret names become one line."""
    lines = [text for text in texts if text not in _NAMES]
    if not _NAMES.isdisjoint(texts):
        about = "names of secret files (--json lists them)"
        denies = not set(EXAMPLE_DENIALS).isdisjoint(texts)
        lines.append(
            f"deny fs.write **/NAME, for each of {len(EXAMPLE_DENIALS)} examples of {about}"
            if denies
            else f"ask fs.write **/NAME, for each of {len(_SECRETS)} {about}"
        )
    return lines


def parse_mode(text: str) -> Mode:
    """Parse the name of a mode.

    :raises ValueError: names the valid modes
    """
    for mode in MODES:
        if mode == text:
            return mode
    near = nearest_names(text, MODES, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"Unknown mode: {text[:40]!r}. Valid modes: {', '.join(MODES)}.{hint}")


@lru_cache(maxsize=len(MODES))
def mode_rules(mode: Mode) -> tuple[Rule, ...]:
    """Return the rules of a mode, with scope ``mode``."""
    return tuple(parse_shipped_rule(text, "mode", f"mode {mode}") for text in MODE_RULE_TEXTS[mode])


def parse_shipped_rule(text: str, scope: Scope, source: str) -> Rule:
    """Return the rule of a shipped text, which is not checked. Names of secret files are compared in any case."""
    action, permission, pattern = (*text.split(" ", 2), "")[:3]
    return Rule(cast("Action", action), permission, pattern, scope, source, any_case=text in _NAMES)


def with_mode(book: RuleBook, mode: Mode) -> RuleBook:
    """Return the same book in another mode."""
    kept = (rule for rule in book.rules if rule.scope != "mode")
    shared = book.shared.derive(("mode", mode), lambda: (*kept, *mode_rules(mode)), mode)
    return shared.with_folder_rule(book.folder_rule)


def limit_to_parent(book: RuleBook, above: RuleBook) -> RuleBook:
    """Return ``book`` for the session of a sub-agent, bounded by the book of its parent session.

    The mode of the result is no wider than the parent's, and it allows nothing that the parent's book restricts.
    """
    bound = parse_mode(above.mode)
    if MODES.index(parse_mode(book.mode)) > MODES.index(bound):
        book = with_mode(book, bound)
    return _share_equal_book(book.rules, book.mode, above.shared).with_folder_rule(book.folder_rule)


def parse_optional_mode(text: str | None) -> Mode | None:
    """Parse the name of a mode that a program passes, or return None for None.

    :raises UsageError: names the valid modes
    """
    if text is None:
        return None
    try:
        return parse_mode(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


__all__ = [
    "DEFAULT_MODE",
    "MODES",
    "MODE_DESCRIPTIONS",
    "MODE_RULE_TEXTS",
    "Mode",
    "limit_to_parent",
    "mode_rules",
    "parse_mode",
    "parse_optional_mode",
    "with_mode",
]


def rule_applies_to_tool(rule: Rule, spec: ToolSpec, origin: str | None) -> bool:
    """Return whether a rule applies to calls of this tool, whatever their arguments."""
    permission, tool_id = rule.permission, spec.id
    if permission in CAPABILITIES:  # most rules are about files
        return False
    if rule.governed_side_effect:
        return rule.governed_side_effect == spec.side_effect and not is_session_internal_tool(tool_id)
    if permission.startswith("mcp:"):
        return origin is not None and _matches_origin(permission, origin)
    if origin is not None and rule.scope == "default":
        return False  # a shipped rule is about shipped tools, not about the tools of a server
    if is_glob(permission):
        return permission == "*" or compile_text_glob(permission).match(tool_id) is not None
    return permission == tool_id


def rule_limits_call_effects(rule: Rule, spec: ToolSpec) -> bool:
    """Return whether a call that this rule allows does no more than the rule says.

    A ``{read-only}`` rule holds only for a call that runs read-only. Only a call that just runs its command does. A
    ``{confined}`` rule is compared with a whole call, after all others.
    """
    if rule.pattern == CONFINED_VARIABLE:
        return False
    return rule.pattern != READ_ONLY_VARIABLE or rule.action != "allow" or spec.single_command


def _matches_origin(permission: str, origin: str) -> bool:
    wanted, have = permission.split(":"), origin.split(":", 2)
    return len(wanted) == len(have) and all(compile_text_glob(w).match(h) for w, h in zip(wanted, have, strict=True))


def rule_applies_to_capability(rule: Rule, capability: Capability) -> bool:
    """Return whether a rule names this capability, by its name or a pattern."""
    permission = rule.permission
    if is_capability_glob(permission):
        return compile_text_glob(permission).match(capability) is not None
    return cast("str", capability) == permission
