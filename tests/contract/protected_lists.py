"""Well-known protected names, written without the table, so that a gap in the table is detected.

The lists were made from what editors, shells, hook managers, agents and tools are known to read.
"""

from __future__ import annotations

AGENTS_NEVER = """
.container-use/environment.json .xcodebuildmcp/config.yaml .vibekit/x
.eca/config.json .llxprt/settings.json .omp/x.ts .emdash.json .conductor.json .forge.yaml
.claude/settings.json .claude/settings.local.json .claude/commands/x.md .claude/agents/a.md .claude/hooks/h.sh .claude.json
.mcp.json mcp.json .vscode/mcp.json .cursor/mcp.json .cursor/rules/a.mdc .cursor/hooks.json .roo/mcp.json .amazonq/mcp.json
.amazonq/cli-agents/a.json .kiro/settings/mcp.json .kiro/hooks/h.kiro.hook .kiro/steering/a.md .codex/config.toml
.codex/hooks.json .gemini/settings.json .gemini/commands/x.toml .gemini/extensions/x/gemini-extension.json .qwen/settings.json
.windsurf/rules/a.md .windsurf/workflows/w.md .codeium/windsurf/mcp_config.json .continue/config.yaml .continue/mcpServers/a.yaml
.continuerc.json .opencode/plugin/p.ts opencode.json opencode.jsonc .crush.json crush.json .crush/x .aider.conf.yml .amp/settings.json
.factory/mcp.json .factory/droids/d.md .junie/mcp/mcp.json .junie/guidelines.md .trae/mcp.json .trae/rules/a.md .augment/settings.json
.augment/rules/a.md .zed/settings.json .kilocode/mcp.json .kilocode/rules/a.md .clinerules/hooks/TaskStart .cline/mcp.json
.github/hooks/h.json .github/mcp.json .goose/config.yaml .openhands/setup.sh .openhands/microagents/repo.md .iflow/settings.json
.grok/settings.json .vibe/config.toml .rovodev/config.yml .warp/workflows/w.yaml .agent/rules/a.md .agent/workflows/w.md .agent/skills/a/SKILL.md
.antigravity/mcp.json .idx/dev.nix .idx/mcp.json .replit .tabnine/mcp_servers.json .sourcegraph/a.rule.md .cody/commands.json .void/mcp.json
.plandex/config.json .serena/project.yml .pi/extensions/e.ts .letta/settings.json .devin/config.json .bolt/prompt .kimi/config.toml
.codebuddy/mcp.json .qoder/rules/a.md .zencoder/rules/a.md .refact/integrations.d/x.yaml codebuff.json gptme.toml firebender.json
codex.yaml mcp-config.yaml .gitlab/duo/mcp.json .mcp/servers.json mcp_config.json .rulesync/rules/a.md conductor.json .qodo/agents/a.toml
"""
AGENTS_ASK = """
.sweep.yaml
AGENTS.md AGENT.md AGENTS.override.md CLAUDE.md CLAUDE.local.md GEMINI.md QWEN.md CRUSH.md WARP.md JULES.md KIMI.md IFLOW.md GROK.md
CODEBUDDY.md OpenCode.md CONTEXT.md .cursorrules .windsurfrules .clinerules .clinerules/a.md .roorules .roorules-code/a.md .roomodes
.kilocoderules .continuerules .goosehints .aider.conf .aiderignore .aider.model.metadata.json .rules .augment-guidelines .voidrules
.boltrules replit.md airules.md .github/copilot-instructions.md .github/instructions/a.instructions.md .github/prompts/p.prompt.md
.github/chatmodes/c.chatmode.md .github/agents/a.agent.md .github/skills/s/SKILL.md .agents/skills/s/SKILL.md .agents/rules.md SKILL.md
.openhands_instructions .coderabbit.yaml .pr_agent.toml .ai/rules.md memory-bank/brief.md .specify/memory/constitution.md .prompts/p.md
.clinerules.md .github/copilot-setup-steps.yml docs/AGENTS.md packages/a/CLAUDE.md AmazonQ.md .junierules.agent.md sub/.cursorrules .blackboxrules .llmrules
"""
EDITORS = """
a.sln.DotSettings.user
.obsidian/plugins/x/main.js logseq/custom.js .foam/templates/x.js dendron.yml .config/Code/User/tasks.json .config/Cursor/User/settings.json
.config/starship.toml .config/niri/config.kdl env.nu .config/ipython/x .rbenv/rbenv.d/exec/x.bash .asdf/shims/x .gefrc .hooks.d/x
.vscode/tasks.json .vscode/settings.json .vscode/launch.json .vscode/extensions.json project.code-workspace a/x.code-workspace
.idea/workspace.xml .idea/runConfigurations/r.xml .run/r.run.xml app.iml .fleet/run.json .fleet/settings.json .vs/tasks.vs.json .vs/launch.vs.json
.vs/ProjectSettings.json a.csproj.user .vimrc .exrc _vimrc .gvimrc .nvimrc .nvim.lua .lvimrc .local.vimrc .vim/plugin/x.vim .project.vim
.projections.json Session.vim .vimspector.json .lazy.lua .neoconf.json .vim/coc-settings.json .ycm_extra_conf.py .dir-locals.el
.dir-locals-2.el .emacs .emacs.d/init.el .projectile .helix/languages.toml .helix/config.toml .kakrc kak-lsp.toml a.sublime-project
a.sublime-build a.sublime-workspace .atom/init.js .atom-build.json .zed/tasks.json .zed/debug.json .lapce/settings.toml .nova/Tasks/t.json
.project .classpath .settings/x.prefs .externalToolBuilders/b.launch .factorypath .cproject nbproject/project.properties nbactions.xml
a.xcodeproj/xcshareddata/xcschemes/a.xcscheme a.xcworkspace/contents.xcworkspacedata app.pro.user CMakeLists.txt.user .theia/tasks.json
.gitpod.yml .gitpod.Dockerfile .devcontainer/devcontainer.json .devcontainer.json devfile.yaml .idx/dev.nix .replit replit.nix
.codesandbox/tasks.json .jupyter/jupyter_notebook_config.py jupyter_server_config.py jupyter_notebook_config.json a.Rproj .Rprofile .Rproj.user/x
.spyproject/x .octaverc startup.jl startup.m .luarc.json .lldbinit .gdbinit .clangd .tmux.conf .screenrc .kateproject .buildconfig
hie.yaml .ropeproject/config.py rust-analyzer.toml .rust-analyzer.toml omnisharp.json .solargraph.yml .lsp/config.edn .metals/metals.mv.db .tern-project
.nanorc .ideavimrc a.geany .lite_project.lua .tm_properties .config/micro/init.lua .config/nvim/init.lua rust-project.json
"""
ENTERING = """
fnox.toml fnox.local.toml mise-tasks/a
.envrc a/.envrc .envrc.local .direnvrc mise.toml .mise.toml mise.local.toml .mise.local.toml mise.dev.toml .mise/config.toml .mise/tasks/t
pitchfork.toml pitchfork.local.toml .config/pitchfork.toml .gtrconfig .workmux.yaml .wtp.yml phantom.config.json .config/wt.toml .worktree.json
.lazygit.yml shortcut.url .config/mise/config.toml .config/mise.toml mise/config.toml .rtx.toml .autoenv.zsh .autoenv_leave.zsh .autoenv .env.leave .rvmrc
.versions.conf .rbenv-vars .shadowenv.d/500.lisp .ondirrc .desk/desks/d.sh Deskfile bin/activate-hermit bin/hermit .flox/env/manifest.toml
.bash_profile .bashrc .bash_aliases .bash_login .bash_logout .bash_enter .profile .zshrc .zshenv .zprofile .zlogin .zsh/x.zsh .kshrc .cshrc
.config/fish/config.fish .config/fish/conf.d/x.fish .config/powershell/profile.ps1 Microsoft.PowerShell_profile.ps1 profile.ps1
.tmuxinator.yml .tmuxinator.yaml .tmuxp.yaml .tmuxp.json .screenrc .overmind.env .wezterm.lua kitty.conf desktop.ini autorun.inf
.profile.ps1 PSProfile.ps1 .aliases .functions .smartcd/scripts/x .inputrc .xonshrc .config/nushell/config.nu .devenv/x .oh-my-zsh/custom/x.zsh .localrc
"""
ENTERING_ASK = """
.tool-versions .asdfrc .prototools .sdkmanrc flake.nix shell.nix devenv.nix devenv.yaml devbox.json .env .in .out .pkgx.yaml aqua.yaml
.venv/bin/activate .venv/bin/activate.fish default.nix .pixi/config.toml .vfox.toml .foreman a/.env app.desktop
"""
HOOKS = """
.hk.pkl .hk.local.pkl .vite-hooks/pre-commit .githook/pre-commit .captain/x .autohook/x
.husky/pre-commit .huskyrc .huskyrc.json .huskyrc.js husky.config.js .husky/_/husky.sh lefthook.yml lefthook.yaml lefthook.toml lefthook.json
.lefthook.yml .lefthook/pre-commit/x.sh lefthook-local.yml .lefthook-local.yml .config/lefthook.yml .pre-commit-config.yaml .pre-commit-config.yml
.captainhook.json .pre-commit.yaml prek.toml .overcommit.yml .git-hooks/pre_commit/x.rb .githooks/pre-commit captainhook.json grumphp.yml .lintstagedrc .lintstagedrc.json
.lintstagedrc.mjs lint-staged.config.js .simple-git-hooks.json simple-git-hooks.js simple-git-hooks.cjs .cargo-husky/hooks/pre-commit
.rusty-hook.toml hk.pkl hk.local.pkl commitlint.config.js .commitlintrc.json .commitlintrc.yml .nano-staged.json .gitlint .trunk/trunk.yaml
.hg/hgrc .hgrc .gitconfig .config/git/config .config/git/hooks/x .pijul/config _darcs/prefs/defaults .fossil-settings/x .subversion/config
.config/jj/config.toml .bazaar/plugins/x.py .p4config .sl/config .git-templates/hooks/post-checkout
"""
HOOKS_ASK = "hooks/pre-commit scripts/hooks/commit-msg hooks/post-checkout git-template/hooks/x .npm-init.js .vscode-test.mjs .corepack.env hooks/hooks.json .mrconfig .config/nix/nix.conf .pre-commit-hooks.yaml .czrc .cz.toml .cz.json .gitattributes .gitmodules .lfsconfig .hgsub .arcconfig .gclient a/.gitattributes"
REPL = """
.pdbrc .pdbrc.py .pythonrc .pythonrc.py .ipython/profile_default/startup/x.py .jupyter/custom.js ipython_config.py .irbrc .pryrc .iex.exs
.erlang .ghci .ghcid .ocamlinit .sbclrc .eclrc .guile .racketrc .tclshrc .wishrc .octaverc .Rprofile .Renviron .gnuplot .psysh.php .psqlrc
.sqliterc .mongorc.js .mongoshrc.js .lldbinit .gdbinit .gdbearlyinit .byebugrc .rdbgrc .perldb .swiplrc .juliarc.jl .mailcap .lesskey
.lessfilter .nanorc .xinitrc .muttrc .procmailrc .inputrc .sagerc .gaprc .mc.menu
"""
TOOLS = """
.eslintrc .eslintrc.js .eslintrc.cjs .eslintrc.json .eslintrc.yml eslint.config.js eslint.config.mjs eslint.config.ts .prettierrc .prettierrc.js
prettier.config.js prettier.config.mjs babel.config.js babel.config.json .babelrc .babelrc.js jest.config.js jest.config.ts jest.config.json
vitest.config.ts vitest.workspace.ts playwright.config.ts cypress.config.js cypress.json webpack.config.js vite.config.ts vite.config.mjs
rollup.config.mjs next.config.js next.config.mjs nuxt.config.ts svelte.config.js astro.config.mjs tailwind.config.js tailwind.config.ts
postcss.config.js .postcssrc .postcssrc.js .npmrc .yarnrc .yarnrc.yml .yarn/releases/yarn-4.cjs .yarn/plugins/p.cjs .pnpmfile.cjs bunfig.toml
deno.json deno.jsonc pip.conf .pypirc setup.cfg tox.ini pytest.ini .cargo/config.toml .cargo/config rust-toolchain.toml rust-toolchain
.bazelrc .bazelversion tools/bazel gradle/wrapper/gradle-wrapper.jar gradle/wrapper/gradle-wrapper.properties gradlew gradlew.bat
gradle.properties init.gradle .mvn/jvm.config .mvn/extensions.xml .mvn/maven.config .mvn/wrapper/maven-wrapper.properties mvnw .sbtopts
.jvmopts .jvm-opts nuget.config NuGet.Config Directory.Build.props Directory.Build.targets Directory.Build.rsp global.json .config/dotnet-tools.json
.bundle/config .rspec .rubocop.yml .perltidyrc .perlcriticrc .proverc phpunit.xml phpunit.xml.dist .php-cs-fixer.php .php-cs-fixer.dist.php
phpstan.neon .user.ini .ansible.cfg ansible.cfg .terraformrc terraform.rc docker-compose.override.yml Vagrantfile .vagrant/x .ackrc .ripgreprc
.ctags .ctags.d/x.ctags .wgetrc .curlrc .netrc .my.cnf .pylintrc pylintrc mypy.ini .coveragerc .flake8 .stylelintrc .stylelintrc.js .swcrc
.travis.yml .github/workflows/ci.yml .github/actions/a/action.yml .gitlab-ci.yml .circleci/config.yml Jenkinsfile renovate.json
.goreleaser.yml .goreleaser.yaml .air.toml nodemon.json .mocharc.js .mocharc.yml .nycrc .nycrc.json .sentryclirc firebase.json .clasp.json
sitecustomize.py usercustomize.py venv/lib/python3.12/site-packages/x.pth .latexmkrc latexmkrc .asoundrc .dircolors azure-pipelines.yml
bitbucket-pipelines.yml .buildkite/pipeline.yml .drone.yml .woodpecker.yml netlify.toml vercel.json wrangler.toml serverless.yml metro.config.js
.readthedocs.yaml mkdocs.yml .luacheckrc .busted config.nims CMakePresets.json CMakeUserPresets.json platformio.ini .lintr renv/activate.R
.formatter.exs .credo.exs analysis_options.yaml foundry.toml hardhat.config.ts truffle-config.js karma.conf.js wdio.conf.ts .storybook/main.js
gulp.config.js tsup.config.ts drizzle.config.ts .releaserc .releaserc.json release.config.js .swiftpm/x .xcode.env poetry.toml uv.toml
pants.toml .buckconfig .sequelizerc codegen.yml .graphqlrc.yml .mega-linter.yml .golangci.yml .valgrindrc .htaccess .condarc node.config.json
.bsp/sbt.json .devbox/x .kube/config kubeconfig .aws/config .docker/config.json .tflint.hcl terragrunt.hcl .kitchen.yml cdk.json .sqlfluff
"""
ORDINARY = """
hooks/useThing.ts src/hooks/index.ts src/hooks/update/index.ts app/hooks/pre_commit.py src/config.py docs/obsidian.md src/foam.ts
README.md src/main.py src/index.ts src/app/app.config.ts lib/config.rb package.json pyproject.toml Cargo.toml go.mod Makefile GNUmakefile
justfile Taskfile.yml Dockerfile docker-compose.yml compose.yaml Procfile Rakefile Gemfile pom.xml build.gradle settings.gradle build.gradle.kts
tests/conftest.py conftest.py noxfile.py setup.py build.rs CMakeLists.txt tsconfig.json tsconfig.build.json jsconfig.json ruff.toml biome.json
.editorconfig .gitignore .dockerignore .npmignore .prettierignore .nvmrc .node-version .python-version .ruby-version .git-blame-ignore-revs
.mailmap .vscodeignore .browserslistrc .clang-format compile_commands.json docs/index.md docs/agents.html docs/claude/notes.txt agents/base.py
src/agents.py src/cursor.ts src/mcp/server.ts src/mcp.py src/settings.json src/config.json src/hooks/useThing.ts scripts/release.sh bin/run
tools/gen.py config/app.yml project/src/x.scala gradle/libs.versions.toml data/model.pth weights.pth .github/CODEOWNERS .github/dependabot.yml
.github/ISSUE_TEMPLATE/bug.md .github/pull_request_template.md LICENSE CHANGELOG.md src/environment.ts src/.hidden/x.py .env.example .env.sample
.env.template .env.dist static/robots.txt Cargo.lock package-lock.json yarn.lock poetry.lock flake.lock k8s/deployment.yaml main.tf
migrations/0001.sql notebooks/a.ipynb .config/app/fish docs/ssh id_rsa.pub tests/fixtures/data.json node_modules/x/.eslintrc.js
node_modules/x/AGENTS.md .venv/lib/python3.12/site-packages/x/AGENTS.md .venv/lib/python3.12/site-packages/x/.pylintrc vendor/x/a.go
src/vite-env.d.ts src/jest.setup.ts tests/setup.ts cmake/toolchain.cmake public/manifest.json app/models/user.rb spec/spec_helper.rb
"""
