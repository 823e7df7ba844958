"""Names of files that tend to hold secrets, each with the program that keeps them there and where its makers say so.

A name is a pattern of rules, compared at any depth: ``a/b`` is an entry ``b`` of a folder ``a``, ``*`` and ``?`` stand
within one name, and a folder's name covers what is in it. A name that a folder of sources might have as well is only
listed together with its folder.
"""

from __future__ import annotations

from typing import NamedTuple


class SecretNames(NamedTuple):
    """The files of one program.

    :param names: patterns, with spaces between them
    :param source: the manual, or the address of the document, that says so
    """

    program: str
    names: str
    source: str


ROWS: tuple[SecretNames, ...] = (
    SecretNames("environment files", ".envs .env.d *.env.bak *.env.old *.env.local *.env.production env.local env.prod env.production env.staging .env* .flaskenv .dev.vars *.env", "https://12factor.net/config, https://github.com/motdotla/dotenv"),
    SecretNames("private keys and certificates", "*.key.bak *.key.old *.key.orig *.key~ *.pem.bak *.pem.old *.pem.orig *.pem~ privkey privkey.der privkey.txt private.der *.pem *.key *.p12 *.pfx *.p8 *.pvk *.pkcs12 *.snk "
        "private_key* private-key* privatekey* *.jwk",
        "https://www.rfc-editor.org/rfc/rfc7468"),
    SecretNames("Java", "*.jks *.keystore *.jceks *.bks *.truststore keystore.properties key.properties signing.properties", "man keytool(1)"),
    SecretNames("OpenSSH and PuTTY", "*_id_rsa *_id_ed25519 *_id_ecdsa deploy_key deploy-key *_deploy_key *-deploy-key github_rsa gitlab_rsa bitbucket_rsa .ssh id_* ssh_host_*_key *.ppk", "man ssh(1), https://www.chiark.greenend.org.uk/~sgtatham/putty/"),
    SecretNames("GnuPG and age", ".gnupg *.gpg *.pgp *.asc secring.* keys.txt *.agekey age-key* .config/sops/age", "man gpg(1), https://age-encryption.org/"),
    SecretNames("Kerberos", "*.keytab krb5cc_* *.ccache", "https://web.mit.edu/kerberos/krb5-latest/doc/basic/keytab_def.html"),
    SecretNames("password managers", ".local/share/keyrings .gnome2/keyrings .local/share/kwalletd *.kwl login.keyring *.kdbx *.kdb *.psafe3 *.agilekeychain *.opvault *.1pif *.1pux .password-store .config/op .1password .op .lastpass "
        "*.keychain *.keychain-db login.keychain* .config/bitwarden* .config/keepassxc password.txt passwords.txt passwords.csv passwords.json "
        "passwords.y*ml password.y*ml", "https://keepass.info/help/base/repair.html, https://www.passwordstore.org/"),
    SecretNames("files named for it", "*-secrets.json *_secrets.json *.secrets.json secrets-*.y*ml secrets-*.json secrets.*.y*ml secrets.*.json secrets.hcl secrets.sh secrets.bash secrets.zsh secrets.fish secrets.enc secrets.zip "
        ".secrets.toml .secrets.y*ml .secrets.json .secrets.env .secret.toml .secret.y*ml .secret.json *_secret.txt *-secret.txt secret_key.json secret-key.txt *_secret_key.txt secrets.y*ml secrets.json secrets.toml secrets.ini "
        "secrets.properties secrets.xml secrets.txt secrets.env "
        "secret.y*ml secret.json secret.toml secret.txt secret.ini *.secret *.secrets *-secret.y*ml *-secrets.y*ml *_secrets.y*ml .secrets .secret "
        "secrets.enc.* secrets.sops.* secret_token* secret_key.txt secret_key_base .secret_key", "the names say so"),
    SecretNames("netrc", ".netrc.bak .netrc.old .netrc~ .netrc _netrc .authinfo .authinfo.gpg", "man netrc(5)"),
    SecretNames("databases", ".pgpass pgpass.conf .pg_service.conf .my.cnf my.cnf .mylogin.cnf .snowsql .snowflake .databrickscfg .dbt/profiles.yml .cqlshrc "
        "*.dbvis .robomongo .odbc.ini .influxdbv2 .clickhouse-client/config.xml",
        "https://www.postgresql.org/docs/current/libpq-pgpass.html, https://dev.mysql.com/doc/refman/en/mysql-config-editor.html"),
    SecretNames("packages of JavaScript", ".npmrc.bak .npmrc.old .npmrc~ .npmrc .yarnrc.yml .yarnrc.yaml .config/configstore", "https://docs.npmjs.com/cli/configuring-npm/npmrc#auth-related-configuration"),
    SecretNames("packages of Python", ".pypirc pip.conf pip.ini pypoetry/auth.toml auth.toml .config/uv/credentials .local/share/uv/credentials",
        "https://packaging.python.org/en/latest/specifications/pypirc/"),
    SecretNames("packages of Rust, Ruby and PHP", ".cargo/credentials .cargo/credentials.toml .gem/credentials .gem/*credentials* auth.json",
        "https://doc.rust-lang.org/cargo/reference/config.html#credentials, https://getcomposer.org/doc/articles/authentication-for-private-packages.md"),
    SecretNames("packages of the JVM and .NET", ".m2/settings.xml settings-security.xml .gradle/gradle.properties .sbt/credentials .sbt/.credentials .ivy2/.credentials "
        ".sbt/*/sonatype.sbt [Nn]u[Gg]et.[Cc]onfig .nuget/nuget.config", "https://maven.apache.org/settings.html#servers, https://learn.microsoft.com/nuget/reference/nuget-config-file"),
    SecretNames("packages of other languages", ".hex/hex.config .pub-cache/credentials.json pub-credentials.json .pause .luarocks/upload_config.lua .vsce .julia/servers .cocoapods/trunk "
        ".opam/github .swiftpm/security", "https://hex.pm/docs/usage, https://metacpan.org/dist/CPAN-Uploader/view/bin/cpan-upload"),
    SecretNames("Git and its hosts", ".git-credentials .gitcookies .git-credential-cache .config/git/credentials .config/gh .config/hub .config/glab-cli .glab .glab-cli .config/tea .gist "
        ".github_token .gitlab_token .git_token .arcrc .config/github-copilot .lab.hcl .config/lab", "https://git-scm.com/docs/git-credential-store"),
    SecretNames("other version control", ".subversion/auth .bazaar/authentication.conf .config/breezy/authentication.conf .p4tickets .cvspass .hgkeyring .fossil",
        "https://svnbook.red-bean.com/en/1.8/svn.serverconfig.netmodel.html"),
    SecretNames("AWS", ".aws .aws-vault .saml2aws *accesskeys*.csv *accessKeys*.csv .boto .s3cfg .s3curl .passwd-s3fs .passwd .aws-credentials aws-credentials*",
        "https://docs.aws.amazon.com/cli/latest/userguide/cli-configure-files.html"),
    SecretNames("Google Cloud and Firebase", "sa-key.json sa_key.json service-key.json service_key.json .config/gcloud *service-account*.json *service_account*.json *serviceaccount*.json *serviceAccount*.json *credentials*.json client_secret*.json "
        "client-secret*.json *-adminsdk-*.json firebase-adminsdk*.json gha-creds-*.json .gsutil gcp-key*.json gcloud-key*.json gcp*key.json google-key.json .config/configstore/firebase-tools.json",
        "https://cloud.google.com/docs/authentication/application-default-credentials"),
    SecretNames("Azure", ".azure *.publishsettings *.azureauth *.PublishSettings *.pubxml.user local.settings.json .config/azure", "https://learn.microsoft.com/cli/azure/azure-cli-configuration"),
    SecretNames("other clouds", ".oci .aliyun .ossutilconfig .bluemix .ibmcloud .config/doctl .config/scw .scwrc .config/linode-cli .linode-cli .config/hcloud .vultr-cli.yaml .config/exoscale .civo.json "
        ".tccli .huaweicloud .hcloud clouds.yaml clouds.yml openrc openrc.sh *-openrc.sh *openrc*.sh .novarc .config/openstack .yandex .config/yandex-cloud .packet.yml .ovh.conf ovh.conf .gandi.yaml "
        ".cloudflare .config/cloudflare cloudflare.ini", "https://docs.openstack.org/python-openstackclient/latest/configuration/index.html"),
    SecretNames("Terraform and Pulumi", "*.tfstate* *.tfvars *.tfvars.json .terraform.d .terraformrc terraform.rc .tofurc .pulumi/credentials.json *.tfplan",
        "https://developer.hashicorp.com/terraform/language/state/sensitive-data"),
    SecretNames("Vault, Ansible, Chef and SOPS", "vault-keys* vault_keys* vault-init.json cluster-keys.json unseal-key* unseal_key* root_token root-token .vault-token .ansible-vault .vault_pass* .vault-pass* .vault_password* "
        ".vault-password* vault_pass* vault-pass* vault_password* vault-password* vault.y*ml "
        ".ansible_vault* .chef .puppetlabs/etc/puppet/ssl encrypted_data_bag_secret", "https://developer.hashicorp.com/vault/docs/commands/token-helper, https://docs.ansible.com/ansible/latest/vault_guide/"),
    SecretNames("containers", "pull-secret pull-secret.json pull-secret.txt .pull-secret .docker/config.json .dockercfg .dockerconfigjson .docker/*.json .config/helm/registry.json .helm/repository/repositories.yaml",
        "https://docs.docker.com/reference/cli/docker/login/#credential-stores"),
    SecretNames("Kubernetes", ".kube kubeconfig kubeconfig.* *.kubeconfig *-kubeconfig *-kubeconfig.y*ml kubeconfig*.y*ml kube_config_*.yml k3s.yaml talosconfig .talos etc/kubernetes admin.conf kubelet.conf sealed-secrets-key*",
        "https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig/"),
    SecretNames("web servers and sites", "app/config/parameters.yml .htpasswd htpasswd .htdigest wp-config.php wp-config-*.php wp-config.php.* LocalSettings.php settings.local.php config.inc.php", "https://httpd.apache.org/docs/current/programs/htpasswd.html"),
    SecretNames("Rails and Streamlit", "master.key credentials.yml.enc credentials/*.yml.enc .streamlit/secrets.toml", "https://guides.rubyonrails.org/security.html#custom-credentials"),
    SecretNames("ASP.NET and PHP frameworks", "appsettings.[Pp]roduction.json appsettings.[Ss]taging.json appsettings.[Ll]ocal.json appsettings.[Ss]ecrets.json .microsoft/usersecrets user-secrets [Uu]ser[Ss]ecrets .config/user-secrets",
        "https://learn.microsoft.com/aspnet/core/security/app-secrets"),
    SecretNames("other credentials", "*-credentials.y*ml *_credentials.y*ml *-credentials.txt *_credentials.txt credentials.bak credentials.old credential.json credential.txt aws_credentials creds.csv creds.ini creds.env pass.txt "
        ".password .passwords password.json .passphrase passphrase.txt db_password db_password.txt db-password.txt db_root_password.txt mysql_password.txt mysql_root_password.txt postgres_password.txt postgres-password.txt "
        "admin_password.txt admin-password.txt root_password.txt root-password.txt redis_password.txt api-key.txt api-keys.txt api-keys.json api_key.json apikey.json *_api_key.txt *-api-key.txt *_apikey.txt .openai_api_key "
        ".anthropic_api_key openai_api_key anthropic_api_key openai_key.txt anthropic_key.txt access-token.txt auth-token.txt bearer.txt bearer_token.txt github_token github_token.txt github-token.txt gh_token gitlab_token "
        "npm_token slack_token slack_token.txt slack-token.txt bot_token.txt telegram_token.txt discord_token.txt encryption_key.txt encryption-key.txt master_key.txt master-key.txt signing_key.txt .erlang.cookie .rediscli_auth "
        ".dropbox_uploader credentials.json credentials.y*ml credentials.toml credentials.ini credentials.cfg credentials.xml credentials.csv credentials.txt credentials.db credentials.properties credentials.conf "
        "credentials.tfrc.json .credentials .credentials.json *.credentials creds.json creds.txt creds.y*ml .creds token.json token.txt token.pickle .token tokens.txt .tokens oauth_creds.json oauth_token* oauth.json access_token* "
        "refresh_token* api_key.txt api_keys.txt api_key apikey.txt api_keys.json apikeys.json .api_key .apikey .smbcredentials .api_token .access_token auth_token.txt cert.json", "the names say so"),
    SecretNames("copying and mounting", ".rclone.conf rclone.conf .config/rclone .mc/config.json .mcli/config.json .davfs2/secrets .config/filezilla filezilla.xml sitemanager.xml recentservers.xml WinSCP.ini .ftpconfig .ftppass "
        ".ftprc .lftprc .sftp-config.json sftp-config.json sftp.json .remote-sync.json .remotesync *.remmina .restic-password .resticpw .borg/keys .config/borg .duplicity", "https://rclone.org/docs/#configuration-encryption"),
    SecretNames("private networks", "*.ovpn wg*.conf .cloudflared .config/cloudflared etc/wireguard *.nmconnection wpa_supplicant.conf *.mobileconfig ipsec.secrets chap-secrets pap-secrets tailscaled.state .tailscale .ngrok2 ngrok.yml .config/ngrok .netbird",
        "man wg-quick(8), https://openvpn.net/community-resources/reference-manual-for-openvpn-2-6/"),
    SecretNames("models and data sets", ".claude.json .copilot/config.json .kaggle kaggle.json .huggingface huggingface/token .cache/huggingface/token .cache/huggingface/stored_tokens .openai .anthropic .config/openai "
        ".config/anthropic .cohere .replicate .modal.toml .runpod "
        ".together .mistral .config/wandb .wandb .comet.config .neptune .clearml clearml.conf .llm/keys.json io.datasette.llm/keys.json .config/litellm .groq .ollama/id_* .perplexity .xai",
        "https://www.kaggle.com/docs/api, https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables"),
    SecretNames("hosted services", ".fly .netlify .config/netlify .vercel/auth.json com.vercel.cli .heroku .config/heroku .stripe .config/stripe .twilio-cli .twilio .sentryclirc .sentryrc .surgerc .now .circleci/cli.yml .travis/config.yml .railway "
        ".config/railway .render .config/.wrangler .wrangler/config .supabase/access-token .planetscale .config/planetscale .slack .slackrc .jira.d .config/.jira .pagerduty .datadog* .dogrc .newrelic .doppler .infisical "
        ".clasprc.json .expo/state.json .eas .appcenter .lacework.toml .snyk/config .config/configstore/snyk.json .sonar .ossindexrc .codacy .postman .insomnia .hasura .auth0 .okta .okta.yaml .config/okta",
        "https://fly.io/docs/flyctl/auth/, https://docs.stripe.com/cli"),
    SecretNames("chat", ".purple/accounts.xml .weechat/sec.conf .irssi/config .znc/configs", "man irssi(1), https://weechat.org/doc/"),
    SecretNames("mail", ".msmtprc .fetchmailrc .mbsyncrc .offlineimaprc .muttrc .mutt .getmail .getmailrc .imapfilter .esmtprc .mailrc .nmhrc etc/postfix/sasl_passwd sasl_passwd", "man msmtp(1), man mbsync(1)"),
    SecretNames("browsers", "playwright/.auth .auth/*.json storageState.json storage-state.json storage_state.json auth-state.json auth_state.json cookies.pkl Login?Data Login?Data?For?Account Web?Data Default/Cookies "
        "Network/Cookies cookies.sqlite key3.db key4.db logins.json signons.sqlite cert9.db cookies.txt .cookies cookiejar .cookiejar *.binarycookies Local?State "
        "formhistory.sqlite", "https://support.mozilla.org/kb/profiles-where-firefox-stores-user-data"),
    SecretNames("wallets", "wallet.dat *.wallet UTC--* .bitcoin .ethereum .electrum .solana .config/solana .near-credentials .foundry/keystores .brownie/accounts .aptos .sui .litecoin .dogecoin .monero .ethash keypair.json mnemonic mnemonic.txt seed.txt "
        "seed-phrase* wallet.json .lnd/admin.macaroon *.macaroon", "https://bitcoin.org/en/secure-your-wallet, https://geth.ethereum.org/docs/developers/dapp-developer/native-accounts"),
    SecretNames("Apple and Android", "*.mobileprovision *.provisionprofile AuthKey_* play-store-credentials* google-play*.json *.keystore.base64", "https://developer.apple.com/documentation/appstoreconnectapi/creating-api-keys-for-app-store-connect-api"),
    SecretNames("accounts of the system", "etc/shadow etc/shadow- etc/gshadow etc/gshadow- etc/sudoers etc/sudoers.d master.passwd etc/security/opasswd etc/ppp/chap-secrets NTDS.dit SAM.hive .pam_environment shadow.bak passwd.bak", "man shadow(5)"),
    SecretNames("histories of what was typed", ".*_history .*_hist .lesshst .viminfo .[Rr]history .[Hh]istfile fish_history ConsoleHost_history.txt .dbshell .rediscli_history .node_repl_history .mysqlsh/history",
        "https://www.gnu.org/software/bash/manual/html_node/Bash-History-Facilities.html"),
)  # fmt: skip

EXCEPT: tuple[str, ...] = (
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
