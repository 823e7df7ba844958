"""Rows of the protected names that a tool writes only with an approval, or a rule that names them.

Other agents follow the text of some of these files. Programs take settings, or code that they load, from the others when
a person starts them. The form of a row is that of :mod:`handrail.contract.protected.never_written`. ``UNPROTECTED`` holds names that
were considered and left to the rules, with the reason in the place of a source.
"""

from __future__ import annotations

from handrail.contract.protected.never_written import ProtectedProgramFiles

APPROVAL_REQUIRED: tuple[ProtectedProgramFiles, ...] = (
    # ── what other agents read as instructions ───────────────────────────────────────────────────
    ProtectedProgramFiles("instructions", "agents that follow AGENTS.md", ".agents.md .agents.* agents.md agents.*.md agent.md .agent.md .agents .agentrules context.md "
        "agents.local.md agents.override.md", "https://agents.md/"),
    ProtectedProgramFiles("instructions", "agent skills", "skill.md .skills skills.md", "https://agentskills.io/specification"),
    ProtectedProgramFiles("instructions", "Claude Code", "claude.md claude.*.md .claude.md .clauderules .claudeignore", "https://code.claude.com/docs/en/memory"),
    ProtectedProgramFiles("instructions", "Cursor", ".cursorrules .cursorrules.* cursor.md *.mdc .cursorprompt", "https://cursor.com/docs/context/rules"),
    ProtectedProgramFiles("instructions", "Codex", "codex.md codex.*.md .codexrules", "https://developers.openai.com/codex/guides/agents-md"),
    ProtectedProgramFiles("instructions", "Gemini CLI and Firebase Studio", "gemini.md gemini.*.md airules.md .airules .geminirules",
        "https://geminicli.com/docs/cli/gemini-md/"),
    ProtectedProgramFiles("instructions", "Jules", "jules.md .jules.md", "https://jules.google/docs/"),
    ProtectedProgramFiles("instructions", "Windsurf", ".windsurfrules .windsurfrules.* windsurf.md .codeiumrules",
        "https://docs.windsurf.com/windsurf/cascade/memories"),
    ProtectedProgramFiles("instructions", "Cline", ".clinerules.* .clinerules .clinerules-* memory-bank cline.md .clineignore", "https://docs.cline.bot/features/cline-rules"),
    ProtectedProgramFiles("instructions", "Roo Code", ".roomodes .roorules .roorules-* .rooprompts roo.md", "https://docs.roocode.com/features/custom-instructions"),
    ProtectedProgramFiles("instructions", "Kilo Code", ".kilocoderules .kilocoderules-* .kilocodemodes", "https://kilo.ai/docs/customize/custom-rules"),
    ProtectedProgramFiles("instructions", "Continue", ".continuerules", "https://docs.continue.dev/customize/deep-dives/rules"),
    ProtectedProgramFiles("instructions", "Aider", ".aider* aider.md", "https://aider.chat/docs/usage/conventions.html"),
    ProtectedProgramFiles("instructions", "Amp", "amp.md", "https://ampcode.com/manual#AGENTS.md"),
    ProtectedProgramFiles("instructions", "Goose", ".goosehints .goosehints.* goose.md", "https://block.github.io/goose/docs/guides/context-engineering/using-goosehints/"),
    ProtectedProgramFiles("instructions", "OpenCode", "opencode.md opencode.*.md", "https://opencode.ai/docs/rules/"),
    ProtectedProgramFiles("instructions", "Crush", "crush.md crush.*.md", "https://github.com/charmbracelet/crush"),
    ProtectedProgramFiles("instructions", "Qwen Code, Kimi, iFlow, Grok and CodeBuddy", "qwen.md qwen.*.md kimi.md iflow.md grok.md codebuddy.md qoder.md trae.md "
        ".traerules", "https://qwenlm.github.io/qwen-code-docs/"),
    ProtectedProgramFiles("instructions", "Kiro and Amazon Q", "amazonq.md kiro.md .amazonqrules", "https://docs.aws.amazon.com/amazonq/latest/qdeveloper-ug/context-project-rules.html"),
    ProtectedProgramFiles("instructions", "Junie", "junie.md ", "https://junie.jetbrains.com/docs/guidelines-and-memory.html"),
    ProtectedProgramFiles("instructions", "GitHub Copilot", "copilot-instructions.md .copilot-instructions.md .github/instructions "
        ".github/prompts .github/chatmodes .github/agents .github/skills .github/copilot-* .copilot-*.md *.instructions.md "
        "*.prompt.md *.chatmode.md *.agent.md *.toolsets.jsonc .github/git-commit-instructions.md .git-commit-instructions.md "
        "copilot.md", "https://docs.github.com/copilot/how-tos/configure-custom-instructions/add-repository-instructions"),
    ProtectedProgramFiles("instructions", "Zed", ".rules", "https://zed.dev/docs/ai/rules"),
    ProtectedProgramFiles("instructions", "Augment", ".augment-guidelines augment.md", "https://docs.augmentcode.com/setup-augment/guidelines"),
    ProtectedProgramFiles("instructions", "Factory and Warp", "droid.md warp.md .warprules", "https://docs.warp.dev/knowledge-and-collaboration/rules"),
    ProtectedProgramFiles("instructions", "OpenHands, Devin and SWE-agent", ".openhands_instructions openhands.md devin.md sweep.yaml .sweep.yaml swe-agent.yaml",
        "https://docs.openhands.dev/openhands/usage/prompting/repository"),
    ProtectedProgramFiles("instructions", "Tabnine, Cody, Void and Bolt", ".tabninerules .codyrules .voidrules .boltrules .v0rules .lovablerules cody.md",
        "https://docs.tabnine.com/main/getting-started/tabnine-agent/guidelines"),
    ProtectedProgramFiles("instructions", "Replit and Codebuff", "replit.md .replitrules *.knowledge.md", "https://docs.replit.com/replitai/replit-dot-md"),
    ProtectedProgramFiles("instructions", "Mistral Vibe, Letta and Rovo Dev", "vibe.md .vibe-rules .letta.md rovodev.yml .rovodev.yml rovo.md .agent.local.md",
        "https://support.atlassian.com/rovo/docs/use-memory-in-rovo-dev-cli/"),
    ProtectedProgramFiles("instructions", "other agents", ".ai-context .aicontext .aiconfig .codiumai.toml .antigravityrules .system-prompt.md system_prompt.md .systemprompt .copilotrc .cursor.md .claude.*.md .agent-instructions.md .ai.md ai_instructions.md ai-instructions.md conventions.aider.md ai_rules.md ai-rules.md .claude_rules project_rules.md user_rules.md .gptrules .chatgpt .github/aw .sweeprules .pochirules .agentignore .memory.md .blackboxrules .pearai-rules .aiderules .airules.* .ai .ai-rules .airc .prompts .prompt .cosine.toml "
        ".zencoderrules .qodorules .refactrules .traycerrules .instructions.md .llmrules .llm-rules .copilotrules readme.pochi.md "
        "soul.md heartbeat.md .melderrules .monica .tongyirules .codestralrules .superrules .codegenrules "
        ".aiassistantrules .agent-rules .agentic .agent_rules .agentinstructions .agentsrc .rulesrc .bugbot.md bugbot.md",
        "https://github.com/intellectronica/ruler#supported-ai-agents"),
    ProtectedProgramFiles("instructions", "what sets agents up", ".taskmaster .taskmasterconfig .specify .bmad .bmad-core .superdesign .memory .memories "
        ".memory-bank .memorybank .cursor-rules .task-master", "https://github.com/github/spec-kit"),
    ProtectedProgramFiles("instructions", "agents that review", ".coderabbit.yaml .coderabbit.yml .pr_agent.toml best_practices.md .sourcery.yaml greptile.json "
        ".greptile ellipsis.yaml .ellipsis .bito.yaml .gemini-review.yml .korbit.yml .macroscope", "https://docs.coderabbit.ai/reference/configuration"),
    ProtectedProgramFiles("settings", "agents that a platform starts", "smithery.yaml .smithery.yaml langgraph.json promptfooconfig.*",
        "https://smithery.ai/docs/build/project-config"),
    # ── a folder that is entered ─────────────────────────────────────────────────────────────────
    ProtectedProgramFiles("settings", "asdf, mise and vfox", ".tool-versions .asdfrc .default-npm-packages .default-gems .vfox.toml .config/vfox",
        "https://asdf-vm.com/manage/configuration.html"),
    ProtectedProgramFiles("settings", "proto, sdkman, pkgx, aqua and others", ".prototools .sdkmanrc .pkgx.yaml pkgx.yaml pkgx.yml .pkgx.yml .tea.yaml tea.yaml "
        "aqua.yaml aqua.yml .aqua.yaml .aqua.yml .jabbarc .jenvrc .nenvrc .rtx-version .foreman .gvmrc ",
        "https://moonrepo.dev/docs/proto/config, https://sdkman.io/usage#env-command"),
    ProtectedProgramFiles("settings", "Nix, devenv, devbox and lorri", "nix.conf .config/nix .config/nixpkgs .nixpkgs .config/home-manager .config/guix guix.scm manifest.scm .guix-authorizations distrobox.ini spack.yaml .spackenv flake.nix shell.nix devenv.nix devenv.yaml devbox.json devbox.d .devbox devshell.toml "
        "devshell.nix ", "https://direnv.net/man/direnv-stdlib.1.html, https://www.jetify.com/docs/devbox/configuration/"),
    ProtectedProgramFiles("settings", "pixi and conda", ".config/conda .pixi/config.toml .pixi.toml .condarc condarc .mambarc .anaconda anaconda-project.yml",
        "https://pixi.sh/latest/reference/pixi_manifest/#the-activation-table"),
    ProtectedProgramFiles("code", "autoenv and dotenv plug-ins of shells", ".env.* .flaskenv .dev.vars .denv .env .in .out", "https://github.com/hyperupcall/autoenv, "
        "https://github.com/ohmyzsh/ohmyzsh/tree/master/plugins/dotenv"),
    # ── version control and continuous integration ───────────────────────────────────────────────
    ProtectedProgramFiles("settings", "git", ".gitattributes .gitmodules .lfsconfig", "https://git-scm.com/docs/gitattributes, https://git-scm.com/docs/gitmodules"),
    ProtectedProgramFiles("settings", "Mercurial, depot_tools, repo, West and Arcanist", ".mrconfig .repo .west .hgsub .hgsubstate .hgeol .gclient .arcconfig .arclint .arcrc .arcunit .gitreview",
        "https://chromium.googlesource.com/chromium/tools/depot_tools.git/, https://secure.phabricator.com/book/arcanist/"),
    ProtectedProgramFiles("settings", "commitizen and cocogitto", ".czrc .cz.* cz.toml cz.json cz.yaml .cz-config.* cog.toml .cog.toml .cocogitto .commitizen.* .czvrc "
        ".config/cz.json .opencommit .aicommits .gitmojirc.json", "https://commitizen-tools.github.io/commitizen/config/configuration_file/"),
    ProtectedProgramFiles("settings", "folders of hooks without a dot", "hooks/applypatch-msg hooks/pre-applypatch hooks/post-applypatch hooks/pre-commit hooks/pre-merge-commit hooks/prepare-commit-msg hooks/commit-msg hooks/post-commit hooks/pre-rebase hooks/post-checkout hooks/post-merge hooks/pre-push hooks/pre-receive hooks/proc-receive hooks/post-receive hooks/post-update hooks/reference-transaction hooks/push-to-checkout hooks/pre-auto-gc hooks/post-rewrite hooks/sendemail-validate hooks/fsmonitor-watchman git-template git-templates githooks git-hooks git_hooks", "https://git-scm.com/docs/git-config#Documentation/git-config.txt-corehooksPath"),
    ProtectedProgramFiles("code", "pre-commit, for the repositories that use this one", ".pre-commit-hooks.yaml .pre-commit-hooks.yml",
        "https://pre-commit.com/#new-hooks"),
    ProtectedProgramFiles("code", "GitHub", ".github/workflows .github/actions", "https://docs.github.com/actions/reference/workflows-and-actions/workflow-syntax"),
    ProtectedProgramFiles("code", "GitLab", ".gitlab-ci.yml .gitlab-ci.* .gitlab-ci .gitlab/ci", "https://docs.gitlab.com/ci/yaml/"),
    ProtectedProgramFiles("code", "other continuous integration", ".spacelift .qlty codefresh.yml .codefresh .styleci.yml .deployment .gitlab-ci-local-* .argo .flux.yaml .sail .nevercode .circleci .travis.yml appveyor.yml .appveyor.yml azure-pipelines.yml azure-pipelines.yaml "
        "azure-pipelines-*.yml azure-pipelines.*.yml .azure-pipelines .azuredevops .pipelines bitbucket-pipelines.yml .buildkite .drone.yml .drone.yaml "
        ".drone.star .drone.jsonnet .woodpecker .woodpecker.yml .woodpecker.yaml .semaphore .cirrus.yml .cirrus.star jenkinsfile "
        "jenkinsfile.* *.jenkinsfile .jenkins .teamcity .harness cloudbuild.yaml cloudbuild.yml cloudbuild.json buildspec.yml "
        "buildspec.yaml .tekton .gitea/workflows .forgejo/workflows .builds .build.yml wercker.yml .scrutinizer.yml codeship-*.yml "
        "screwdriver.yaml .packit.yaml .packit.yml .copr codemagic.yaml bitrise.yml .bitrise.yml .ci .zuul.yaml .zuul.d zuul.d "
        "zuul.yaml .taskcluster.yml .evergreen.yml .gocd .lgtm.yml .shippable.yml shippable.yml jitpack.yml .vsts-ci.yml .prow.yaml "
        ".cloudbuild .dagger dagger.json .onedev-buildspec.yml .kokoro .sr.ht .agola magnum.yml .hound.yml ",
        "https://circleci.com/docs/configuration-reference/, https://www.jenkins.io/doc/book/pipeline/jenkinsfile/"),
    ProtectedProgramFiles("code", "hosts that build and run a project", "dockerrun.aws.json cron.json .binder .scalingo .symfony.cloud.yaml netlify.toml vercel.json vercel.ts now.json .platform.app.yaml .platform .upsun render.yaml "
        "fly.toml railway.json railway.toml nixpacks.toml heroku.yml .do/app.yaml .do/deploy.template.yaml .readthedocs.yml "
        ".readthedocs.yaml readthedocs.yml apprunner.yaml amplify.yml .ebextensions .elasticbeanstalk .platform/hooks captain-definition "
        "dokku.json zeabur.json .koyeb.yaml .buildpacks staticwebapp.config.json",
        "https://docs.netlify.com/build/configure-builds/file-based-configuration/, https://vercel.com/docs/project-configuration"),
    ProtectedProgramFiles("code", "bots that change dependencies and make releases", "renovate.json renovate.json5 .renovaterc .renovaterc.* renovate.js .releaserc "
        ".releaserc.* .goreleaser.* goreleaser.yml goreleaser.yaml .release-it.* .mergify.yml .mergify .bulldozer.yml .kodiak.toml "
        ".jreleaser.* jreleaser.yml release-plz.toml .release-plz.toml", "https://docs.renovatebot.com/configuration-options/#postupgradetasks"),
    # ── settings of tools ────────────────────────────────────────────────────────────────────────
    ProtectedProgramFiles("settings", "npm and Node", ".npm-init.js .npm-global .npmrc node.config.json .nodemonrc ",
        "https://docs.npmjs.com/cli/configuring-npm/npmrc, https://nodejs.org/api/cli.html#--experimental-config-filefilepath"),
    ProtectedProgramFiles("settings", "Yarn", ".yarnrc .yarnrc.yml .yarnrc.yaml .yarn/releases .yarn/plugins .yarn/sdks  ",
        "https://yarnpkg.com/configuration/yarnrc#yarnPath"),
    ProtectedProgramFiles("settings", "pnpm, Bun and Rush", ".corepack.env .pnpmfile.* pnpmfile.js pnpmfile.cjs bunfig.toml .bunfig.toml .bunrc common/config/rush common/git-hooks "
        "common/autoinstallers", "https://pnpm.io/pnpmfile, https://bun.sh/docs/runtime/bunfig"),
    ProtectedProgramFiles("settings", "pip, uv, Poetry and PDM", "pip.conf pip.ini .pip .pypirc uv.toml .config/uv poetry.toml .pdm.toml pdm.toml .pdm-python "
        ".pydistutils.cfg pydistutils.cfg distutils.cfg .easy_install .buildout buildout.cfg .config/pip .config/pypoetry",
        "https://pip.pypa.io/en/stable/topics/configuration/, https://docs.astral.sh/uv/concepts/configuration-files/"),
    ProtectedProgramFiles("settings", "Python, as it starts", "sitecustomize.py usercustomize.py sitecustomize usercustomize python*._pth  ",
        "https://docs.python.org/3/library/site.html"),
    ProtectedProgramFiles("settings", "linters of Python that run code of their settings", ".pylintrc pylintrc .pylintrc.toml pylintrc.toml mypy.ini .mypy.ini "
        ".pyre_configuration .pyre_configuration.local .flake8 .pylint.d .prospector.yml .prospector.yaml .landscape.yml ",
        "https://pylint.readthedocs.io/en/stable/user_guide/configuration/all-options.html#init-hook, "
        "https://mypy.readthedocs.io/en/stable/extending_mypy.html"),
    ProtectedProgramFiles("settings", "Cargo and rustup", ".cargo/config .cargo/config.toml .cargo/env .cargo/bin .rustup/settings.toml rust-toolchain rust-toolchain.toml .config/nextest.toml cargo-generate.toml",
        "https://doc.rust-lang.org/cargo/reference/config.html, https://rust-lang.github.io/rustup/overrides.html"),
    ProtectedProgramFiles("settings", "Go", "go.env ", "https://go.dev/doc/toolchain#GOTOOLCHAIN"),
    ProtectedProgramFiles("settings", "Bazel, Buck, Pants and Please", ".bazelrc *.bazelrc bazel.rc .bazelversion .bazeliskrc tools/bazel .buckconfig .buckconfig.* "
        ".buckversion .buckjavaargs .buckargs pants.toml pants.ini .pants.rc pants.*.toml .pants.bootstrap .plzconfig .plzconfig.* pleasew "
        "pantsw .watchmanconfig", "https://bazel.build/run/bazelrc, https://github.com/bazelbuild/bazelisk#configuration"),
    ProtectedProgramFiles("settings", "Gradle", "gradlew gradlew.bat gradle/wrapper gradle.properties gradle-daemon-jvm.properties init.gradle init.gradle.kts "
        ".gradle/init.d .gradle/init.gradle .gradle/gradle.properties init.d/*.gradle local.properties",
        "https://docs.gradle.org/current/userguide/build_environment.html, https://docs.gradle.org/current/userguide/init_scripts.html"),
    ProtectedProgramFiles("settings", "Maven", ".m2/settings.xml .m2/toolchains.xml .m2/extensions.xml .m2/settings-security.xml .mvn mvnw mvnw.cmd .mavenrc mavenrc_pre.* ", "https://maven.apache.org/configure.html"),
    ProtectedProgramFiles("settings", "sbt, Mill, Leiningen and other tools of the JVM", ".sbt/repositories .sbt/1.0 .sbt/0.13 .sbtopts .jvmopts .jvm-opts .scalaopts .sbtrc project/build.properties "
        ".mill-version .mill-jvm-opts .mill-opts millw .bsp .scala-build profiles.clj .javarc .antrc "
        ".ant .antopts .groovy .groovyrc grailsw .jbang jbang.properties .jbangrc",
        "https://www.scala-sbt.org/1.x/docs/Command-Line-Reference.html, https://build-server-protocol.github.io/docs/overview/server-discovery"),
    ProtectedProgramFiles("settings", ".NET", "nuget.config global.json directory.build.rsp msbuild.rsp .config/dotnet-tools.json dotnet-tools.json "
        "launchsettings.json runtimeconfig.template.json .paket .nuke .csharpierrc .fake",
        "https://learn.microsoft.com/nuget/reference/nuget-config-file, https://learn.microsoft.com/dotnet/core/tools/global-json"),
    ProtectedProgramFiles("settings", "RubyGems and Bundler", ".bundle .gemrc gemrc .autotest .aprc .railsrc .bundler .rbenvrc .pronto.yml .rakerc",
        "https://bundler.io/man/bundle-config.1.html, https://guides.rubygems.org/command-reference/#gem-environment"),
    ProtectedProgramFiles("settings", "PHP", ".user.ini .htaccess php.ini php-cli.ini .phprc .phpbrewrc php.ini-development ",
        "https://www.php.net/manual/en/configuration.file.per-user.php"),
    ProtectedProgramFiles("settings", "Perl", ".tidyallrc tidyall.ini .yath.rc .yath.user.rc .cpan/cpan/myconfig.pm .modulebuildrc .perlcriticrc .perltidyrc .proverc .perlrc .perlbrew .minilla",
        "https://perldoc.perl.org/prove#.proverc, https://metacpan.org/dist/Perl-Tidy/view/bin/perltidy"),
    ProtectedProgramFiles("settings", "servers and sites of PHP", ".symfony.local.yaml .valetrc .valetphprc localvaletdriver.php .lando.yml .lando.*.yml .ddev .docksal .warden "
        "wp-cli.yml wp-cli.local.yml .wp-cli .drush drush.yml .drushrc.php .rr.yaml rr.yaml homestead.yaml", "https://docs.lando.dev/config/events.html, "
        "https://make.wordpress.org/cli/handbook/references/config/"),
    ProtectedProgramFiles("settings", "renv and packrat", "renv/activate.r packrat/init.r renv/settings.json .rprofile.site .radian_profile .lintr",
        "https://rstudio.github.io/renv/articles/renv.html"),
    ProtectedProgramFiles("settings", "Haskell and OCaml", ".cabal/config .stack/config.yaml cabal.config cabal.project.local .opam .opamrc .config/cabal .ocp-index",
        "https://cabal.readthedocs.io/en/stable/config.html"),
    ProtectedProgramFiles("settings", "Swift", ".swiftpm .xcode.env .xcode.env.local .xcode.env.*", "https://reactnative.dev/docs/environment-setup"),
    ProtectedProgramFiles("settings", "compilers and their caches", ".ccache/ccache.conf ccache.conf .ccache.conf .config/sccache config.site .autom4te.cfg .distcc "
        ".spack .easybuild .clang_complete ",
        "https://ccache.dev/manual/latest.html#_configuration, https://www.gnu.org/software/autoconf/manual/autoconf.html#Site-Defaults"),
    ProtectedProgramFiles("settings", "PlatformIO", "platformio.ini platformio_override.ini ", "https://docs.platformio.org/en/latest/scripting/index.html"),
    ProtectedProgramFiles("settings", "Ansible", ".ansible.cfg ansible.cfg ", "https://docs.ansible.com/ansible/latest/reference_appendices/config.html"),
    ProtectedProgramFiles("settings", "Terraform, Packer and Pulumi", ".terraformrc terraform.rc .terraform.d .tofurc tofu.rc .packer.d .packerconfig packer.rc "
        ".tflint.hcl .tflint.d .terragrunt-cache .checkov.yaml .checkov.yml .pulumi atlantis.yaml .atlantis.yaml .infracost",
        "https://developer.hashicorp.com/terraform/cli/config/config-file"),
    ProtectedProgramFiles("settings", "Docker, Podman and Vagrant", ".docker/config.json .docker/daemon.json .docker/cli-plugins docker-compose.override.yml docker-compose.override.yaml compose.override.yml "
        "compose.override.yaml docker-bake.override.* .vagrant .vagrant.d .config/containers containers.conf .dockercfg vagrantfile "
        "vagrantfile.* .lima .colima .orbstack mirrord.json .mirrord",
        "https://docs.docker.com/compose/how-tos/multiple-compose-files/merge/, https://developer.hashicorp.com/vagrant/docs/vagrantfile"),
    ProtectedProgramFiles("settings", "Kubernetes", ".kube kubeconfig *.kubeconfig kubeconfig.* .krew .config/helm .helm .k9s .config/k9s .kubie.yaml ",
        "https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins"),
    ProtectedProgramFiles("settings", "clouds", ".aws .azure .config/gcloud .saml2aws .aws-vault .boto .s3cfg .ossutilconfig .oci .aliyun .config/doctl .bluemix ",
        "https://docs.aws.amazon.com/sdkref/latest/guide/feature-process-credentials.html"),
    ProtectedProgramFiles("settings", "hosts of repositories", ".config/gh .config/hub .config/glab-cli .glab-cli .config/tea .gh",
        "https://cli.github.com/manual/gh_config"),
    ProtectedProgramFiles("settings", "what copies and downloads", ".curlrc _curlrc .wgetrc wgetrc .wget2rc .netrc _netrc .lftprc .lftp .aria2 .ncftp .rclone.conf rclone.conf "
        ".config/rclone .rsyncrc .ytdlp yt-dlp.conf .config/yt-dlp .httpie .config/httpie .digrc ",
        "https://curl.se/docs/manpage.html#-K, https://rclone.org/docs/#password-command"),
    ProtectedProgramFiles("settings", "search and tags", ".ackrc _ackrc .ripgreprc .rgrc .ctags .ctags.d .uctags .globalrc gtags.conf .gtagsrc .cscoperc .fzfrc .fdrc "
        ".config/ripgrep .bat .config/bat .agrc", "https://github.com/BurntSushi/ripgrep/blob/master/GUIDE.md#configuration-file, man ack(1)"),
    ProtectedProgramFiles("settings", "databases", ".my.cnf my.cnf .mylogin.cnf .odbc.ini .odbcinst.ini odbc.ini odbcinst.ini .freetds.conf .pg_service.conf .pgpass "
        ".snowsql .snowflake .dbt .databrickscfg .hadoop .beeline", "https://dev.mysql.com/doc/refman/en/option-files.html"),
    ProtectedProgramFiles("settings", "TeX", ".latexmkrc latexmkrc texmf.cnf .texmf .arararc.yaml .arararc llmk.toml .texliveonfly .chktexrc indentconfig.yaml",
        "https://ctan.org/pkg/latexmk, https://tug.org/texinfohtml/kpathsea.html"),
    ProtectedProgramFiles("settings", "sound, colours and profilers", ".asoundrc .asoundrc.* asound.conf .dircolors .dir_colors .valgrindrc .perfconfig .ltrace.conf .stracerc "
        ".config/pulse .pulse .fonts.conf .gtkrc-2.0 .gtkrc ", "https://www.alsa-project.org/alsa-doc/alsa-lib/conf.html, man valgrind(1)"),
    ProtectedProgramFiles("settings", "process managers", ".procfilerc .mprocs.yaml mprocs.yaml process-compose.yaml process-compose.yml process-compose.override.* "
        "ecosystem.config.* .pm2 supervisord.conf .supervisord.conf uwsgi.ini circus.ini gunicorn.conf.py .monitrc monitrc .runit .s6 "
        "pm2.json pm2.config.* ", "https://pm2.keymetrics.io/docs/usage/application-declaration/, http://supervisord.org/configuration.html"),
    ProtectedProgramFiles("settings", "command-line programs of services", ".sentryclirc .sentryrc .clasp.json .clasprc.json  "
        ".netlifyrc .ngrok2 ngrok.yml .config/ngrok .cloudflared .tunnel  "
        ".sops.yaml .sops.yml .config/sops .teller.yml .chamber .infisical.json doppler.yaml .doppler",
        "https://docs.sentry.io/cli/configuration/, https://dvc.org/doc/user-guide/project-structure/configuration"),
    # ── what tools load as code ──────────────────────────────────────────────────────────────────
    ProtectedProgramFiles("code", "tools of JavaScript with a configuration module", "*.config.js *.config.cjs *.config.mjs *.config.ts *.config.cts *.config.mts *.config.jsx "
        "*.config.tsx *.conf.js *.conf.cjs *.conf.mjs *.conf.ts", "https://eslint.org/docs/latest/use/configure/configuration-files, "
        "https://vite.dev/config/, https://jestjs.io/docs/configuration"),
    ProtectedProgramFiles("code", "ESLint and other linters of JavaScript", "eslint-local-rules eslint-local-rules.* .eslintplugin .eslintplugin.js .eslintrc .eslintrc.* .jscsrc .oxlintrc.json oxlintrc.json .xo-config .xo-config.* tslint.json tslint.* "
        ".standardrc .jshintrc.js .solhint.json .solcover.js .ls-lint.yml .flowconfig", "https://eslint.org/docs/latest/use/configure/configuration-files-deprecated"),
    ProtectedProgramFiles("code", "Prettier, Stylelint and other formatters", ".prettierrc .prettierrc.* .stylelintrc .stylelintrc.* .remarkrc .remarkrc.* .textlintrc .textlintrc.* "
        ".markdownlint.cjs .markdownlint.mjs .markdownlint-cli2.* .cspell.* cspell.json cspell.yaml .alexrc .alexrc.* .htmlhintrc .pugrc .svgo*",
        "https://prettier.io/docs/configuration, https://stylelint.io/user-guide/configure"),
    ProtectedProgramFiles("code", "Babel, SWC, PostCSS and bundlers", "webpack.* webpackfile.* config-overrides.js .eleventy.js .eleventy.* gatsby-*.js gatsby-*.ts .vuepress .vitepress brunch-config.js .angular-cli.json ember-cli-build.js .vuerc .craco.* .fusebox rush.json .nuxtrc .pnp.cjs .pnp.loader.mjs .pnp.js .yarn/unplugged .babelrc .babelrc.* babel.config.* .swcrc .swcrc.* .postcssrc .postcssrc.* .parcelrc .terserrc .umirc.* .fatherrc.* "
        ".dumirc.* .linaria* .esbuildrc .rolluprc* .metrorc .ember-cli .ember-cli.js .snowpackrc .microbundlerc .kktrc.* .roadhogrc*",
        "https://babeljs.io/docs/config-files, https://swc.rs/docs/configuration/swcrc"),
    ProtectedProgramFiles("code", "test runners of JavaScript", ".vscode-test.* jest.preset.js jest.preset.cjs mocha.opts cucumber.js cucumber.mjs cucumber.cjs .cucumberrc .puppeteerrc .puppeteerrc.* nightwatch.json backstop.json stryker.conf.json stryker-config.json .stryker* .mocharc .mocharc.* .nycrc .nycrc.* .c8rc .c8rc.* .taprc .jasmine.json jasmine.json .jestrc .jestrc.* jest.config.* "
        "vitest.config.* vitest.workspace.* cypress.json cypress.env.json playwright-ct.config.* testem.js testem.json testem.cjs wallaby.* "
        ".testcaferc.* .wdio* .nightwatchrc .avarc .lostpixelrc .storybook .ladle .cosmos cosmos.config.* .percy.* .lighthouserc.* "
        "lighthouserc.* .hintrc .pa11yci .size-limit.* .intern.json", "https://mochajs.org/#configuring-mocha-nodejs, https://github.com/istanbuljs/nyc#configuration-files"),
    ProtectedProgramFiles("code", "watchers and task runners", "hooks/hooks.json trunk.toml dioxus.toml tauri.conf.json tauri.conf.json5 tauri.*.conf.json release.toml .tarpaulin.toml tarpaulin.toml treefmt.toml .treefmt.toml treefmt.nix dprint.json .dprint.json dprint.jsonc .dprint.jsonc precious.toml .precious.toml nfpm.yaml nfpm.yml .cargo/mutants.toml .dist.toml nodemon.json .nodemon.json .air.toml air.toml .air.conf .realize.yaml modd.conf .reflex reflex.conf bacon.toml "
        ".watchexec watchexec.toml .guard.rb .foremanrc .plop* .hygen.js .bumpversion.cfg .bumpversion.toml .versionrc .versionrc.* cliff.toml .autorc "
        ".autorc.* .changeset/config.json .syncpackrc* .ncurc .ncurc.*", "https://github.com/remy/nodemon#config-files, https://github.com/air-verse/air"),
    ProtectedProgramFiles("code", "data, code and derivation generators", "default.nix .graphqlrc .graphqlrc.* codegen.yml codegen.yaml codegen.ts .sequelizerc .kyselyrc ormconfig.* knexfile.* .orvalrc "
        "buf.gen.yaml sqlc.yaml sqlc.yml .sqlfluff .openapi-generator* openapitools.json copier.yml copier.yaml .jsdoc.* .jsdocrc jsdoc.json jsdoc.conf "
        "typedoc.json .typedoc.json .mikro-orm.json hardhat.config.* truffle-config.js truffle.js foundry.toml brownie-config.yaml slither.config.json",
        "https://the-guild.dev/graphql/codegen/docs/config-reference/codegen-config, https://book.getfoundry.sh/reference/config/"),
    ProtectedProgramFiles("code", "Deno", "deno.json deno.jsonc import_map.json", "https://docs.deno.com/runtime/fundamentals/configuration/"),
    ProtectedProgramFiles("code", "deployment of JavaScript", ".vercel .netlify firebase.json .firebase serverless.yml serverless.yaml serverless.js serverless.ts serverless.json samconfig.toml "
        "samconfig.yaml cdk.json cdk.context.json sst.json sst.config.* pulumi.yaml pulumi.yml wrangler.toml wrangler.json wrangler.jsonc "
        "ionic.config.json capacitor.config.* architect.json app.arc .arc arc.json claudia.json up.json",
        "https://firebase.google.com/docs/cli#hooks, https://developers.cloudflare.com/workers/wrangler/custom-builds/"),
    ProtectedProgramFiles("code", "test runners of Python", "pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini tox.toml setup.cfg .coveragerc .coveragerc.* nose.cfg  "
        ".nose2.cfg nose2.cfg hatch.toml .hypothesis.ini .behaverc behave.ini robot.toml .testr.conf .stestr.conf .mutmut* ward.toml",
        "https://docs.pytest.org/en/stable/reference/customize.html, https://tox.wiki/en/latest/config.html"),
    ProtectedProgramFiles("code", "other tools of Python", "bin/activate bin/activate.* bin/activate_this.py scripts/activate scripts/activate.* invoke.yaml invoke.json invoke.py .invoke.yaml fabric.yaml asv.conf.json nextflow.config airflow.cfg luigi.cfg luigi.toml .pylama.ini pylama.ini .guild.yml .snakemake activate.d deactivate.d .dvc/config .bandit .bandit.yml .pyup.yml mkdocs.yml mkdocs.yaml pixi.toml scrapy.cfg celeryconfig.py alembic.ini .isort.cfg .style.yapf "
        ".yapf .pydocstyle .darglint .importlinter .dmypy.json .pyoxidizer .nuitka* cibuildwheel.toml .briefcase zest.cfg",
        "https://www.mkdocs.org/user-guide/configuration/#hooks, https://alembic.sqlalchemy.org/en/latest/tutorial.html"),
    ProtectedProgramFiles("code", "paths that Python adds as it starts", "site-packages/*.pth dist-packages/*.pth", "https://docs.python.org/3/library/site.html"),
    ProtectedProgramFiles("code", "tools of Ruby", ".rspec_parallel sorbet/config .jrubyrc .chef .puppet-lint.rc .mdlrc .mdl_style.rb thorfile .rspec .rspec-local .rubocop.yml .rubocop.yaml .rubocop-*.yml .rubocop .standard.yml .simplecov .yardopts .document .erb-lint.yml "
        ".erb_lint.yml .haml-lint.yml .slim-lint.yml cucumber.yml cucumber.yaml .cucumber .reek.yml .fasterer.yml .rubycritic.yml .steep .mutant.yml "
        ".slather.yml .guard .brakeman.yml", "https://rspec.info/features/3-13/rspec-core/configuration/read-options-from-file/, "
        "https://docs.rubocop.org/rubocop/extensions.html"),
    ProtectedProgramFiles("code", "tools of PHP", ".php_cs.* .sami.php .doctum.php easy-coding-standard.php easy-coding-standard.yml kahlan-config.php .atoum.php .bootstrap.atoum.php .env.local.php .churn.yml duster.json phpunit.xml phpunit.xml.dist phpunit.dist.xml .php-cs-fixer.php .php-cs-fixer.dist.php .php-cs-fixer.* .php_cs .php_cs.dist phpcs.xml "
        ".phpcs.xml phpcs.xml.dist .phpcs.xml.dist phpstan.neon phpstan.neon.dist phpstan.dist.neon phpstan.php psalm.xml psalm.xml.dist rector.php "
        "ecs.php infection.json infection.json5 infection.json.dist infection.json5.dist .phan behat.yml behat.yml.dist behat.dist.yml codeception.yml "
        "codeception.dist.yml phpbench.json phpspec.yml box.json pint.json pest.php tlint.json robo.yml deptrac.yaml phpmd.xml .phpmd",
        "https://docs.phpunit.de/en/12.3/configuration.html, https://phpstan.org/config-reference#bootstrap"),
    ProtectedProgramFiles("code", "tools of .NET", "directory.build.props directory.build.targets directory.packages.props directory.solution.props directory.solution.targets "
        "before.*.sln.targets after.*.sln.targets cake.config stylecop.json .runsettings *.runsettings",
        "https://learn.microsoft.com/visualstudio/msbuild/customize-by-directory"),
    ProtectedProgramFiles("code", "tools of the JVM", "liquibase.properties flyway.conf flyway.toml ivysettings.xml .ammonite mill.bat user.clj .scalafix.conf lombok.config .mega-linter.yml .mega-linter.yaml detekt.yml spotless.* .editorconfig-checker.json "
        ".clj-kondo .cljfmt.edn .zprint.edn .kibit bnd.bnd ", "https://megalinter.io/latest/config-precommands/"),
    ProtectedProgramFiles("code", "tools of Elixir and Dart", ".formatter.exs .credo.exs .dialyzer_ignore.exs .sobelow-conf .doctor.exs .check.exs coveralls.json analysis_options.yaml "
        "build.yaml melos.yaml dart_test.yaml", "https://hexdocs.pm/mix/Mix.Tasks.Format.html, https://dart.dev/tools/analyzer-plugins"),
    ProtectedProgramFiles("code", "tools of Lua, Nim, Haskell and Go", ".busted .luacheckrc .luacov .luacov.* config.nims nim.cfg nimble.paths .nimble .golangci.* golangci.yml .hspec "
        ".ghc.environment.* .hlint.hs .ko.yaml .custom-gcl.yml .mockery.* ", "https://lunarmodules.github.io/busted/, "
        "https://golangci-lint.run/docs/plugins/module-plugins/"),
    ProtectedProgramFiles("code", "CMake, cross builds and desktop entries", "*.launch .qmake.conf *.terminal *.inetloc *.fileloc *.command *.dproj *.groupproj *.desktop cmakepresets.json cmakeuserpresets.json .cmake-format.py .cmake-format .gersemirc cross.toml .cargo-make "
        ".clang-tidy .clang-tidy.* xmake.conf", "https://cmake.org/cmake/help/latest/manual/cmake-presets.7.html"),
    ProtectedProgramFiles("code", "tools of containers and clouds", ".terraform .ansible .kitchen.yml .kitchen.*.yml kitchen.yml terragrunt.hcl helmfile.yaml helmfile.yml helmfile.yaml.gotmpl devspace.yaml "
        "skaffold.yaml skaffold.yml garden.yml garden.yaml okteto.yml okteto.yaml tilt_config.json .molecule molecule.yml  "
        "dist.ini .earthly earthly.yml ", "https://helmfile.readthedocs.io/en/latest/#hooks, https://skaffold.dev/docs/lifecycle-hooks/"),
    ProtectedProgramFiles("code", "Xcode and Android projects", "*.xcodeproj *.xcconfig .swiftlint.yml .sourcery.yml .swiftgen.yml swiftgen.yml .slather .periphery.yml "
        "", "https://developer.apple.com/documentation/xcode/running-custom-scripts-during-a-build"),
)  # fmt: skip

UNPROTECTED: tuple[ProtectedProgramFiles, ...] = (
    ProtectedProgramFiles("free", "tasks of the project", "makefile gnumakefile makefile.* *.mk justfile .justfile taskfile.yml taskfile.yaml rakefile tasks.py dodo.py fabfile.py noxfile.py "
        "gulpfile.js gruntfile.js procfile magefile.go sconstruct wscript tiltfile guardfile dangerfile capfile fastfile podfile brewfile berksfile",
        "the project's own commands: a person who runs one reads it as code"),
    ProtectedProgramFiles("free", "what a project is and needs", "package.json pyproject.toml setup.py cargo.toml build.rs go.mod go.work composer.json gemfile pom.xml build.xml build.gradle "
        "build.gradle.kts settings.gradle settings.gradle.kts build.sbt deps.edn project.clj mix.exs package.swift cmakelists.txt meson.build configure.ac "
        "conanfile.py conanfile.txt vcpkg.json requirements.txt pipfile environment.yml dune-project pubspec.yaml build.zig module.bazel workspace.bazel "
        "build.bazel app.config.ts project.json nx.json turbo.json angular.json lerna.json pnpm-workspace.yaml flake.lock",
        "it changes with every feature, and is code of the project"),
    ProtectedProgramFiles("free", "tests and containers", "conftest.py dockerfile dockerfile.* *.dockerfile containerfile docker-compose.yml docker-compose.yaml compose.yml compose.yaml "
        "docker-bake.hcl chart.yaml main.tf", "the project's own code"),
    ProtectedProgramFiles("free", "names of versions", ".nvmrc .node-version .python-version .ruby-version .ruby-gemset .java-version .go-version .terraform-version .swift-version "
        ".perl-version .php-version .elixir-version .crystal-version", "a version's name, which runs nothing"),
    ProtectedProgramFiles("free", "settings that name no program", ".editorconfig .gitignore .gitkeep .mailmap .git-blame-ignore-revs .gitmessage .dockerignore .npmignore .eslintignore "
        ".prettierignore .stylelintignore .vscodeignore .helmignore .slugignore .gcloudignore .hgignore .ignore .fdignore .rgignore .cursorignore .aiexclude "
        ".aiignore .geminiignore .rooignore .browserslistrc .jshintrc .yamllint .yamllint.yml .shellcheckrc .clang-format .rubocop_todo.yml .hadolint.yaml "
        "ruff.toml .ruff.toml rustfmt.toml .rustfmt.toml clippy.toml taplo.toml biome.json tsconfig.json jsconfig.json pyrightconfig.json "
        "tsconfig.*.json .markdownlint.json .markdownlint.yaml codecov.yml codeowners compile_commands.json compile_flags.txt .lcovrc .bowerrc .luaurc "
        ".snyk .trivyignore .gitleaks.toml .codespellrc .typos.toml _typos.toml .vale.ini .watchmanignore .scalafmt.conf .swiftformat ",
        "read as data"),
    ProtectedProgramFiles("free", "data beside code", ".ds_store thumbs.db license readme.md changelog.md contributing.md robots.txt llms.txt .nojekyll cname .keep .env.example .env.sample .env.template .env.dist .env.defaults .env.schema "
        "", "read by people, or by no program"),
)  # fmt: skip
"""Names that were considered and left to the rules. An entry outweighs a pattern with ``*``, such as ``*.config.ts``."""
