"""Rows of the protected names that no tool writes: a program reads these files unasked and runs their content.

A row names the program that reads the files, and the page of its makers that says so. Names are in lower case, with spaces
between them. ``a/b`` is an entry ``b`` of a folder ``a``. ``*`` matches any characters of the last name. A name covers
everything below it. :mod:`handrail.contract.protected.path_protection` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

# One row of the table of protected names.

ProtectionKind = Literal[
    "rules", "start-up", "key", "hook", "vcs", "state", "editor", "instructions", "settings", "code", "free"
]

KIND_DESCRIPTIONS: Mapping[ProtectionKind, str] = {
    "rules": "contains the rules and settings of the workspace",
    "start-up": "is read by shells, interpreters or sessions at their start, and can run any command",
    "key": "is a place for keys",
    "hook": "is run by version control automatically",
    "vcs": "is version-control configuration that can make git run any command",
    "state": "is internal state of version control, which only its programs write",
    "editor": "is configuration that editors and agents use to run programs",
    "instructions": "contains instructions for agents",
    "settings": "is tool configuration that can make the tool run any command",
    "code": "is configuration from which a tool loads or runs code",
}
"""What a file of each kind is, as a predicate."""


class ProtectedProgramFiles(NamedTuple):
    """The names that one program reads.

    :param program: the program, as a document names it
    :param names: as :mod:`handrail.contract.protected.path_protection` compares them, with spaces between them
    :param source: the manual, or the address of the document, that says so
    """

    kind: ProtectionKind
    program: str
    names: str
    source: str


NEVER_WRITTEN: tuple[ProtectedProgramFiles, ...] = (
    # ── keys ─────────────────────────────────────────────────────────────────────────────────────
    ProtectedProgramFiles("key", "OpenSSH", ".ssh id_rsa id_dsa id_ecdsa id_ecdsa_sk id_ed25519 id_ed25519_sk id_xmss", "man ssh(1)"),
    ProtectedProgramFiles("key", "GnuPG", ".gnupg secring.gpg", "https://www.gnupg.org/documentation/manuals/gnupg/GPG-Configuration.html"),
    ProtectedProgramFiles("key", "rlogin and Kerberos logins", ".rhosts .shosts .k5login .k5users", "man rhosts(5), man k5login(5)"),
    # ── shells ───────────────────────────────────────────────────────────────────────────────────
    ProtectedProgramFiles("start-up", "bash", ".bash.env .config/bash .config/shell .profile.local .aliases .exports .functions .bashenv .bashrc .bashrc.* .bashrc.d .bash_* .profile .bash-it .bash.d",
        "https://www.gnu.org/software/bash/manual/html_node/Bash-Startup-Files.html"),
    ProtectedProgramFiles("start-up", "readline", ".inputrc", "https://tiswww.case.edu/php/chet/readline/rluserman.html"),
    ProtectedProgramFiles("start-up", "zsh and its frameworks", ".zsh.local .config/zsh .zsh* .zlogin .zlogout .zprofile .oh-my-zsh .antigenrc .zimrc .zim "
        ".p10k.zsh .zpreztorc .zprezto .zplug .zinit .zinit.zsh .antidote", "man zsh(1), STARTUP/SHUTDOWN FILES"),
    ProtectedProgramFiles("start-up", "ksh and mksh", ".yashrc .config/yash .oshrc .oilrc .config/oils .esrc .kshenv .kshrc .mkshrc .shrc .shinit", "man ksh(1), ENV"),
    ProtectedProgramFiles("start-up", "csh and tcsh", ".cshrc .tcshrc .login .logout .cshdirs", "man tcsh(1), Startup and shutdown"),
    ProtectedProgramFiles("start-up", "Starship", "starship.toml .config/starship.toml", "https://starship.rs/config/#custom-commands"),
    ProtectedProgramFiles("start-up", "fish", ".config/fish config.fish .fishrc",
        "https://fishshell.com/docs/current/language.html#configuration-files"),
    ProtectedProgramFiles("start-up", "PowerShell", "*profile.ps1 .config/powershell",
        "https://learn.microsoft.com/powershell/module/microsoft.powershell.core/about/about_profiles"),
    ProtectedProgramFiles("start-up", "nushell", "config.nu env.nu .nushell .config/nushell .nu", "https://www.nushell.sh/book/configuration.html"),
    ProtectedProgramFiles("start-up", "xonsh", ".xonshrc.* .xonshrc .xonsh .config/xonsh", "https://xon.sh/xonshrc.html"),
    ProtectedProgramFiles("start-up", "elvish", ".elvish .config/elvish", "https://elv.sh/ref/command.html#rc-file"),
    ProtectedProgramFiles("start-up", "login sessions", ".local/bin .local/share/applications .local/share/dbus-1 .dbus .sshrc .sshrc.d .vnc .modulerc .lmodrc.lua .modules .wayland-session .profile.d .pam_environment .config/environment.d .config/systemd .config/autostart "
        ".local/share/systemd .config/plasma-workspace library/launchagents library/launchdaemons .crontab .forward",
        "https://specifications.freedesktop.org/autostart-spec/latest/, man systemd.unit(5), man launchd.plist(5)"),
    ProtectedProgramFiles("start-up", "the X server and window managers", ".config/uwsm .config/kanshi .config/niri .config/swaync .config/mako .config/eww .config/leftwm .config/herbstluftwm .config/spectrwm .dwm .config/ags .config/quickshell .config/wayfire.ini .xbindkeysrc.scm .config/labwc .config/river .config/waybar .config/polybar .config/dunst .config/rofi .yabairc .skhdrc .chunkwmrc .aerospace.toml .amethyst.yml .hammerspoon .config/karabiner .phoenix.js .slate .xprofile .xinitrc .xsession .xsessionrc .xserverrc .xbindkeysrc "
        ".xmonad .fluxbox .i3 .config/i3 .config/sway .config/openbox .config/xmonad .config/hypr .config/awesome "
        ".fvwm .fvwm2rc .icewm .wmii .sxhkdrc .config/sxhkd .config/bspwm .config/qtile .dmrc .conkyrc "
        ".config/conky",
        "man startx(1), man Xsession(5)"),
    ProtectedProgramFiles("start-up", "Windows Explorer", "desktop.ini autorun.inf *.lnk *.url *.website *.scf *.library-ms *.searchconnector-ms",
        "https://learn.microsoft.com/windows/win32/shell/how-to-customize-folders-with-desktop-ini"),
    # ── a folder that is entered ─────────────────────────────────────────────────────────────────
    ProtectedProgramFiles("start-up", "direnv", ".envrc .envrc.* .direnv .direnvrc .config/direnv", "https://direnv.net/man/direnv.1.html"),
    ProtectedProgramFiles("start-up", "mise and rtx", "mise.toml mise.local.toml mise.*.toml .mise.toml .mise.local.toml .mise.*.toml .mise "
        "mise/config.toml mise/config.*.toml mise/conf.d mise/tasks .config/mise .config/mise.toml .config/mise.*.toml "
        ".mise-tasks mise-tasks fnox.toml fnox.*.toml .config/fnox .rtx.toml .rtx.*.toml .rtx .config/rtx .miserc.toml", "https://mise.jdx.dev/configuration.html"),
    ProtectedProgramFiles("start-up", "autoenv and zsh-autoenv", ".autoenv .autoenv.* .autoenv_* .env.leave .envrc.leave",
        "https://github.com/hyperupcall/autoenv, https://github.com/Tarrasch/zsh-autoenv"),
    ProtectedProgramFiles("start-up", "smartcd, ondir, desk and dirrc", ".cdenv.sh .cdenv .lazyenv .envset .quickenv .cdrc.sh .smartcd .smartcd_config .ondirrc .desk deskfile .dirrc .localrc "
        ".cdrc .workonrc .onenter .onexit", "https://github.com/cxreg/smartcd, https://github.com/alecthomas/ondir"),
    ProtectedProgramFiles("start-up", "pitchfork", "pitchfork.toml pitchfork.local.toml .config/pitchfork.toml .config/pitchfork.local.toml .config/pitchfork",
        "https://pitchfork.jdx.dev/"),
    ProtectedProgramFiles("start-up", "managers of work trees", ".gtrconfig .workmux.yaml .workmux.yml .wtp.yml phantom.config.json .config/wt.toml .worktree.json .wt.lua",
        "https://github.com/coderabbitai/git-worktree-runner, https://worktrunk.dev/hook/, https://github.com/satococoa/wtp"),
    ProtectedProgramFiles("start-up", "shadowenv", ".shadowenv.d .shadowenv.lisp", "https://shopify.github.io/shadowenv/"),
    ProtectedProgramFiles("start-up", "hermit", "bin/hermit bin/activate-hermit bin/hermit.hcl bin/activate-hermit.fish .hermit",
        "https://cashapp.github.io/hermit/usage/user-config-schema/"),
    ProtectedProgramFiles("start-up", "rvm and rbenv-vars", ".rvm/hooks .rbenv/rbenv.d .rbenv/shims .pyenv/pyenv.d .pyenv/shims .asdf/shims .asdf/plugins .rvmrc .versions.conf .rbenv-vars .pyenv-vars .nodenv-vars .powrc .powenv",
        "https://rvm.io/workflow/projects"),
    ProtectedProgramFiles("start-up", "flox and devenv", ".flox .devenv .devenv.flake.nix devenv.local.nix devenv.local.yaml",
        "https://flox.dev/docs/concepts/environments/, https://devenv.sh/files-and-variables/"),
    ProtectedProgramFiles("start-up", "tmux, screen and what sets them up", ".zellij tmuxp.yaml tmuxp.yml tmuxinator.yml .tmux-sessionizer .zellij.kdl .sesh.toml .mux.yml .twm.yaml .kitty-session .tmux .tmux.conf .tmux.conf.* .tmux.*.conf tmux.conf .byobu "
        ".tmuxinator .tmuxinator.* .tmuxp .tmuxp.* .tmuxifier .tmuxomatic .screenrc .teamocil .config/tmux .config/zellij "
        ".overmind.env .smug.yml .config/tmuxinator .config/tmuxp", "man tmux(1), https://github.com/tmuxinator/tmuxinator"),
    ProtectedProgramFiles("start-up", "terminal emulators", ".wezterm.lua wezterm.lua .config/wezterm .config/kitty kitty.conf kitty-session "
        ".alacritty.* .config/alacritty .config/ghostty .hyper.js .terminalizer .config/foot .config/terminator .xresources "
        ".xdefaults .urxvt", "https://sw.kovidgoyal.net/kitty/conf/, https://wezterm.org/config/files.html"),
    # ── interpreters, debuggers and other prompts ────────────────────────────────────────────────
    ProtectedProgramFiles("start-up", "R", ".rprofile .renviron rprofile.site .rprofile.d",
        "https://stat.ethz.ch/R-manual/R-devel/library/base/html/Startup.html"),
    ProtectedProgramFiles("start-up", "Python and pdb", ".config/python .pdbrc .pdbrc.py .pythonrc .pythonrc.py .pystartup .pythonstartup .python_startup.py "
        ".ptpython .config/ptpython .bpython .config/bpython", "https://docs.python.org/3/library/pdb.html"),
    ProtectedProgramFiles("start-up", "IPython and Jupyter", ".config/ipython .ipython .jupyter ipython_config.py ipython_*_config.py jupyter_config.py "
        "jupyter_config.json jupyter_*_config.py jupyter_*_config.json jupyter_*_config.d",
        "https://jupyter-server.readthedocs.io/en/latest/users/configuration.html"),
    ProtectedProgramFiles("start-up", "Ruby", ".irbrc .irbrc.rb irb.rc _irbrc .pryrc .pry .rdbgrc .rdbgrc.rb .byebugrc .rdebugrc .config/irb",
        "https://docs.ruby-lang.org/en/master/IRB.html, https://github.com/pry/pry/wiki/Pry-rc"),
    ProtectedProgramFiles("start-up", "Elixir and Erlang", ".iex.exs .erlang .erlang.crypt", "https://hexdocs.pm/iex/IEx.html#module-the-iex-exs-file"),
    ProtectedProgramFiles("start-up", "GHCi", ".ghci .ghcid .ghc/ghci.conf",
        "https://downloads.haskell.org/ghc/latest/docs/users_guide/ghci.html#the-ghci-files"),
    ProtectedProgramFiles("start-up", "OCaml", ".ocamlinit .utoprc .config/utop", "https://v2.ocaml.org/manual/toplevel.html"),
    ProtectedProgramFiles("start-up", "Lisp and Scheme", ".sbclrc .eclrc .clisprc .clisprc.lisp .ccl-init.lisp ccl-init.lisp .cmucl-init "
        ".cmucl-init.lisp .abclrc .lispworks .guile .racketrc .gracketrc .schemerc .scheme.init .csirc .swank.lisp",
        "http://www.sbcl.org/manual/#Initialization-Files"),
    ProtectedProgramFiles("start-up", "Clojure", ".nrepl.edn .rebel_readline .clojure .lein .boot/profile.boot",
        "https://clojure.org/reference/repl_and_main"),
    ProtectedProgramFiles("start-up", "Tcl, Expect and gnuplot", ".tclshrc .wishrc .expect.rc .expectrc .gnuplot gnuplotrc",
        "man tclsh(1), man wish(1), http://gnuplot.info/docs/Startup.html"),
    ProtectedProgramFiles("start-up", "Octave, MATLAB and Scilab", ".octaverc octaverc startup.m matlabrc.m finish.m .scilab scilab.ini "
        ".scilab.ini", "https://docs.octave.org/latest/Startup-Files.html, https://www.mathworks.com/help/matlab/ref/startup.html"),
    ProtectedProgramFiles("start-up", "Julia", "startup.jl .juliarc.jl .julia/config .config/julia",
        "https://docs.julialang.org/en/v1/manual/command-line-interface/#Startup-file"),
    ProtectedProgramFiles("start-up", "computer algebra", ".maximarc maxima-init.mac maxima-init.lisp .maxima .sagerc .sage init.sage .gaprc .gap "
        ".gprc .magmarc .singularrc", "https://doc.sagemath.org/html/en/reference/repl/startup.html"),
    ProtectedProgramFiles("start-up", "PHP, Perl, Node and Prolog prompts", ".psysh.php .config/psysh .boris .replyrc .perldb .perldbrc .noderc "
        ".noderepl .swiplrc .plrc .config/swi-prolog .kx .j_init.ijs .arturorc .luainit .croissantrc",
        "https://github.com/bobthecow/psysh/wiki/Configuration, man perldebug(1)"),
    ProtectedProgramFiles("start-up", "gdb", ".pwndbgrc .gefrc .peda .gdbinit .gdbinit.* .gdbearlyinit gdbinit .config/gdb .cgdb .gef.rc",
        "https://sourceware.org/gdb/current/onlinedocs/gdb.html/Initialization-Files.html"),
    ProtectedProgramFiles("start-up", "lldb and other debuggers", ".r2rc .lldbinit .lldbinit-* lldbinit .lldb .dbxrc .jdbrc jdb.ini .radare2rc .radare2 "
        ".config/radare2 .rizinrc .delve .config/dlv .windbg .pwndbg", "https://lldb.llvm.org/man/lldb.html#configuration-files"),
    ProtectedProgramFiles("start-up", "database prompts", ".psqlrc .psqlrc-* psqlrc .sqliterc .duckdbrc .mysqlrc .myclirc .config/mycli "
        ".config/pgcli .config/litecli .mongorc.js .mongoshrc.js .mongosh .cqlshrc .usqlrc .redisclirc login.sql glogin.sql",
        "https://www.postgresql.org/docs/current/app-psql.html, https://www.mongodb.com/docs/mongodb-shell/mongoshrc/"),
    ProtectedProgramFiles("start-up", "mail and news programs", ".procmailrc .maildroprc .mailfilter .mailrc .muttrc .mutt .neomuttrc .neomutt "
        ".config/mutt .config/neomutt .fetchmailrc .getmailrc .getmail .mbsyncrc .offlineimaprc .msmtprc .mailcap mailcap "
        ".config/aerc .gnus .gnus.el .newsboat .slrnrc .tin", "man procmailrc(5), man mailcap(5), man muttrc(5)"),
    ProtectedProgramFiles("start-up", "pagers and file managers", ".lesskey .lessfilter .lesskey.* .mc.menu .config/mc .config/ranger .config/lf "
        ".lfrc .config/yazi .vifm .vifmrc .config/vifm .config/nnn .toprc .config/procps .w3m .elinks .lynxrc",
        "man lesskey(1), man mc(1), man lesspipe(1)"),
    ProtectedProgramFiles("start-up", "chat, music and notes", ".rtorrent.rc .config/rtorrent .tigrc .tig .config/tig .config/lazygit .lazygit.yml .config/gitui .irssi .config/weechat .weechat .config/mpv .mplayer .taskrc .task/hooks .todo.cfg "
        ".todo .config/newsboat .calcurse .config/calcurse", "https://irssi.org/documentation/startup/, man task(1)"),
    # ── version control ──────────────────────────────────────────────────────────────────────────
    ProtectedProgramFiles("vcs", "git", ".gitconfig .gitconfig.* .gitconfig-* gitconfig .config/git .git-template .git-templates .git_template "
        ".gittemplate", "https://git-scm.com/docs/git-config#FILES"),
    ProtectedProgramFiles("vcs", "Mercurial", ".hgrc .config/hg .hgext", "https://www.mercurial-scm.org/doc/hgrc.5.html"),
    ProtectedProgramFiles("vcs", "Jujutsu", ".jjconfig.toml .config/jj", "https://jj-vcs.github.io/jj/latest/config/"),
    ProtectedProgramFiles("vcs", "Sapling", ".sapling .config/sapling .eden", "https://sapling-scm.com/docs/introduction/configuration/"),
    ProtectedProgramFiles("vcs", "Pijul and Darcs", ".pijul/config .config/pijul _darcs/prefs .darcs",
        "https://pijul.org/manual/configuration.html, http://darcs.net/manual/"),
    ProtectedProgramFiles("vcs", "Fossil", ".fossil-settings .fossil .config/fossil.db _fossil", "https://fossil-scm.org/home/doc/trunk/www/settings.wiki"),
    ProtectedProgramFiles("vcs", "Subversion and CVS", ".subversion .cvsrc .cvspass",
        "https://svnbook.red-bean.com/en/1.8/svn.advanced.confarea.html"),
    ProtectedProgramFiles("vcs", "Bazaar and Breezy", ".bazaar .config/breezy .config/bazaar", "https://www.breezy-vcs.org/doc/en/user-reference/"),
    ProtectedProgramFiles("vcs", "Perforce", ".p4config .p4enviro p4config.txt", "https://help.perforce.com/helix-core/server-apps/cmdref/current/"),
    # ── hooks and what manages them ──────────────────────────────────────────────────────────────
    ProtectedProgramFiles("hook", "git hooks in a folder", ".githooks.d .hooks.d .git.hooks .githooks.* .githooks .git-hooks .git_hooks .hooks .config/git-hooks",
        "https://git-scm.com/docs/githooks"),
    ProtectedProgramFiles("hook", "Husky", ".husky .huskyrc .huskyrc.* husky.config.* .husky.*", "https://typicode.github.io/husky/"),
    ProtectedProgramFiles("hook", "Lefthook", "lefthook.* .lefthook lefthook-local.* .lefthook.* .lefthook-local .lefthook-local.* "
        ".config/lefthook.* .config/lefthook-local.*", "https://lefthook.dev/configuration/"),
    ProtectedProgramFiles("hook", "pre-commit and prek", ".pre-commit-config.* .pre-commit.yaml .pre-commit.yml prek.toml", "https://pre-commit.com/"),
    ProtectedProgramFiles("hook", "Overcommit", ".overcommit.* .overcommit_gems.rb .overcommit.yml .overcommit.yaml .local-overcommit.yml .overcommit",
        "https://github.com/sds/overcommit#configuration"),
    ProtectedProgramFiles("hook", "simple-git-hooks and simple-pre-commit", ".simple-git-hooks.* simple-git-hooks.* .simple-pre-commit.*",
        "https://github.com/toplenboren/simple-git-hooks"),
    ProtectedProgramFiles("hook", "lint-staged and nano-staged", ".lintstagedrc .lintstagedrc.* lint-staged.config.* .lint-staged.* "
        ".nano-staged.* nano-staged.* .nanostagedrc", "https://github.com/lint-staged/lint-staged#configuration"),
    ProtectedProgramFiles("hook", "commitlint", ".commitlint.* commitlint.yaml commitlint.yml commitlint.json commitlint.toml commitlint.config.* .commitlintrc .commitlintrc.*",
        "https://commitlint.js.org/reference/configuration.html"),
    ProtectedProgramFiles("hook", "CaptainHook and GrumPHP", ".captainhook.json captainhook.json captainhook.*.json captainhook.config.json grumphp.yml grumphp.*.yml "
        "grumphp.yml.dist grumphp.yaml", "https://captainhook.info/configure.html, https://github.com/phpro/grumphp"),
    ProtectedProgramFiles("hook", "cargo-husky and rusty-hook", ".cargo-husky .rusty-hook.toml rusty-hook.toml",
        "https://github.com/rhysd/cargo-husky, https://github.com/swellaby/rusty-hook"),
    ProtectedProgramFiles("hook", "hk", "hk.pkl .hk.pkl hk.local.pkl .hk.local.pkl hk.toml hk.yaml hk.json .hk .hkrc.pkl .config/hk.pkl", "https://hk.jdx.dev/configuration.html"),
    ProtectedProgramFiles("hook", "other managers of hooks", ".conform.yaml .conform.yml .commit-check.yml commit-check.toml .php-git-hooks php-git-hooks.yml .vcs-hooks .git-hooks-config .gitlint .trunk .ghooks .ghooksrc .yorkie .pre-git .precommit .precommitrc "
        ".git-hooks.* git-hooks.config.* git-hooks.json .mookme .mookme.json .gookme .hooky .komondor .autohooks "
        ".vite-hooks .githook .captain .autohook .pre-commit.json .dotnet-husky .goodcop .rustyhook.toml .pre-commit.sh", "https://docs.trunk.io/cli/configuration/actions"),
    # ── editors ──────────────────────────────────────────────────────────────────────────────────
    ProtectedProgramFiles("editor", "Obsidian, Logseq, Foam and Dendron", ".obsidian logseq/custom.js logseq/config.edn .foam dendron.yml",
        "https://help.obsidian.md/plugin-security, https://docs.logseq.com/"),
    ProtectedProgramFiles("editor", "Visual Studio Code", ".config/code .config/code-oss .config/vscodium .vscode *.code-workspace .vscode-server .vscode-insiders .vscode-oss .vscodium",
        "https://code.visualstudio.com/docs/editor/workspace-trust"),
    ProtectedProgramFiles("editor", "development containers", ".devcontainer .devcontainer.json devcontainer.json",
        "https://containers.dev/implementors/json_reference/"),
    ProtectedProgramFiles("editor", "cloud workspaces", ".gitpod .gitpod.* .ona .idx .replit replit.nix .config/replit .codesandbox .stackblitzrc "
        "devfile.yaml .devfile.yaml devfile.yml .devfile.yml .che .theia .c9 .coder .codeanywhere .glitch.json .daytona",
        "https://www.gitpod.io/docs/references/gitpod-yml, https://devfile.io/docs/2.3.0/what-is-a-devfile"),
    ProtectedProgramFiles("editor", "JetBrains IDEs and Fleet", ".idea .run *.iml *.ipr *.iws .fleet .ideavimrc .space.kts *.run.xml",
        "https://www.jetbrains.com/help/idea/project-security.html"),
    ProtectedProgramFiles("editor", "Visual Studio", "cmakesettings.json *.dotsettings *.dotsettings.user *.ncrunchproject *.userprefs .monodevelop .vs *.suo *.csproj.user *.vcxproj.user *.fsproj.user *.vbproj.user .vsconfig .vsvimrc "
        "tasks.vs.json launch.vs.json cppproperties.json",
        "https://learn.microsoft.com/visualstudio/ide/customize-build-and-debug-tasks-in-visual-studio"),
    ProtectedProgramFiles("editor", "Vim and Neovim", "init.vim .vimlocal .vim-project .vim.* .neovim .vimrc .vimrc.* .vimrc_* _vimrc .gvimrc _gvimrc .exrc _exrc .nexrc .exrc.lua .nvimrc "
        ".nvimrc.* .nvim.lua .nvim .nvim.* .lvimrc .local.vimrc .localvimrc .local.vim .project.vim "
        ".projections.json .vim .config/nvim .config/vim .vimspector.json .vimprj .vimproject session.vim "
        ".session.vim .neoconf.json .nlsp-settings .nlsp.json coc-settings.json .ycm_extra_conf.py "
        "ycm_extra_conf.py .lazy.lua .spacevim.d .spacevim .ctrlp .neomakerc .vintrc .overseer .nvim-dap.lua "
        ".nvim-tasks .vsnip .lvim .config/lvim",
        "https://neovim.io/doc/user/options.html#'exrc', https://github.com/embear/vim-localvimrc"),
    ProtectedProgramFiles("editor", "Emacs", "early-init.el .dir-locals.el .dir-locals-2.el .emacs .emacs.* .emacs-* .emacs_* .projectile .doom.d .spacemacs "
        ".spacemacs.d .config/emacs .config/doom .eshell .emacs-project .eproject .dir-config.el .custom.el",
        "https://www.gnu.org/software/emacs/manual/html_node/emacs/Directory-Variables.html"),
    ProtectedProgramFiles("editor", "Helix", ".helix .config/helix", "https://docs.helix-editor.com/configuration.html"),
    ProtectedProgramFiles("editor", "Kakoune and other modal editors", ".kakrc kakrc .kak .config/kak kak-lsp.toml .vis visrc.lua .config/vis "
        ".vrapperrc .xvimrc .vilerc", "https://github.com/mawww/kakoune/wiki/Configuration"),
    ProtectedProgramFiles("editor", "nano, micro, joe and jed", ".nanorc nanorc .config/nano .config/micro .joerc .jedrc .jed .mg .ne",
        "https://www.nano-editor.org/dist/latest/nanorc.5.html"),
    ProtectedProgramFiles("editor", "Sublime Text", "*.sublime-project *.sublime-workspace *.sublime-build *.sublime-settings *.sublime-commands",
        "https://www.sublimetext.com/docs/projects.html"),
    ProtectedProgramFiles("editor", "Zed, Lapce, Nova, Atom and Lite XL", ".zed .lapce .nova .atom .atom-build.* .pulsar .lite-xl .lite_project.lua "
        ".lite_project .brackets.json .tm_properties .config/zed *.novaproject .positron .pearai .textadept .cudatext",
        "https://zed.dev/docs/configuring-zed, https://help.nova.app/projects/"),
    ProtectedProgramFiles("editor", "Eclipse and NetBeans", ".project .classpath .settings .externaltoolbuilders .factorypath .cproject "
        ".pydevproject .buildpath .ajsyntax nbproject nb-configuration.xml nbactions.xml nbactions-*.xml .nbproject",
        "https://help.eclipse.org/latest/topic/org.eclipse.platform.doc.isv/guide/resAdv_builders.htm"),
    ProtectedProgramFiles("editor", "Xcode", "xcshareddata xcuserdata *.xcscheme *.xcworkspace *.xcuserstate",
        "https://developer.apple.com/documentation/xcode/customizing-the-build-schemes-for-a-project"),
    ProtectedProgramFiles("editor", "Qt Creator and KDE", "*.pro.user cmakelists.txt.user cmakelists.txt.user.* *.creator.user "
        "*.qbs.user *.creator .qtcreator *.kdev4 .kdev4 .kateproject .kateproject.*",
        "https://doc.qt.io/qtcreator/creator-project-settings.html"),
    ProtectedProgramFiles("editor", "GNOME Builder and small IDEs", "*.anjuta .anjuta *.wpr *.wpu *.e4p *.epj .eric6project .eric7project *.nja .thonny scite.properties sciteuser.properties scitelocal.properties scitedirectory.properties .scite* *.kilepr *.txss *.bbprojectd .zbstudio .howl .lem .buildconfig .gnome-builder *.geany *.codelite .codelite *.cbp *.workspace "
        "*.komodoproject .komodotools .dprj", "https://builder.readthedocs.io/, https://www.geany.org/manual/#project-management"),
    ProtectedProgramFiles("editor", "RStudio and Spyder", ".matlab .matlab7rc.sh *.rproj .rproj.user .spyproject .spyder-py3 .spyderproject .spyder2",
        "https://docs.posit.co/ide/user/ide/guide/environments/r/renv.html"),
    ProtectedProgramFiles("editor", "language servers", ".clang-complete .luarc.json .luarc.jsonc .luarc .clangd .config/clangd .ccls .cquery hie.yaml .hie-bios "
        ".bloop .metals .rust-analyzer.toml rust-analyzer.toml .rust-analyzer rust-project.json .solargraph.yml "
        ".ruby-lsp omnisharp.json .omnisharp .lsp .lsp.json .tern-project .tern-config .ropeproject .phpactor.json "
        ".phpactor.yml .jedi .elixir_ls .elixir-tools .ionide .kotlin-lsp .nixd.json .typos-lsp .efm-langserver "
        ".pylsp .als.json .gopls .jdtls .config/efm-langserver .expert .lexical .zls.json zls.json .sourcekit-lsp "
        ".config/rust-analyzer",
        "https://luals.github.io/wiki/plugins/, https://build-server-protocol.github.io/docs/overview/server-discovery"),
    # ── agents: what they start by themselves ────────────────────────────────────────────────────
    ProtectedProgramFiles("editor", "MCP clients", "mcp-config.yaml mcp-config.yml mcp_config.yaml mcp_config.yml .mcp.json mcp.json mcp.jsonc .mcp mcp.toml mcp.yaml mcp.yml .mcp.* .mcprc mcp_config.json "
        "mcp-config.json mcp_settings.json mcp-settings.json cline_mcp_settings.json mcp.config.json mcp_servers.json "
        "mcp-servers.json mcpservers.json .mcphost.* .mcphost claude_desktop_config.json mcp.local.json mcphub.json "
        "mcporter.json .mcporter", "https://modelcontextprotocol.io/docs/develop/connect-local-servers"),
    ProtectedProgramFiles("editor", "Claude Code", ".claude .claude.json .claude-plugin .claude-flow .claude.local .config/claude",
        "https://code.claude.com/docs/en/settings"),
    ProtectedProgramFiles("editor", "Cursor", ".config/cursor .cursor .cursor-server .cursor-plugin", "https://cursor.com/docs/context/mcp"),
    ProtectedProgramFiles("editor", "Codex", "codex.yaml codex.json .codex.yaml .codex.json .codex .codex-plugin", "https://developers.openai.com/codex/config-basic"),
    ProtectedProgramFiles("editor", "Gemini CLI, Antigravity and Jules", ".gemini .antigravity .agent .jules gemini-extension.json",
        "https://geminicli.com/docs/reference/configuration/, https://antigravity.google/docs/rules-workflows"),
    ProtectedProgramFiles("editor", "Windsurf", ".windsurf .codeium", "https://docs.windsurf.com/windsurf/cascade/mcp"),
    ProtectedProgramFiles("editor", "Cline", ".cline .clinerules/hooks", "https://docs.cline.bot/features/hooks/"),
    ProtectedProgramFiles("editor", "Roo Code, Kilo Code and Zoo", ".roo .kilocode .kilo kilo.json kilo.jsonc .roocode",
        "https://docs.roocode.com/features/mcp/using-mcp-in-roo, https://kilo.ai/docs"),
    ProtectedProgramFiles("editor", "Continue", ".continue .continuerc.json .continuerc", "https://docs.continue.dev/reference"),
    ProtectedProgramFiles("editor", "Aider", ".aider.conf.yml .aider.conf.yaml .aider.model.settings.yml", "https://aider.chat/docs/config/aider_conf.html"),
    ProtectedProgramFiles("editor", "OpenCode", ".opencode opencode.json opencode.jsonc .opencode.json .opencode.jsonc .config/opencode", "https://opencode.ai/docs/config/"),
    ProtectedProgramFiles("editor", "Crush", ".crush crush.json .crush.json .config/crush", "https://github.com/charmbracelet/crush#configuration"),
    ProtectedProgramFiles("editor", "Qwen Code, Kimi, iFlow and Grok", ".qwen .kimi .kimi-code .iflow .grok",
        "https://qwenlm.github.io/qwen-code-docs/en/users/configuration/settings/"),
    ProtectedProgramFiles("editor", "Kiro and Amazon Q", ".kiro .amazonq .aws/amazonq", "https://kiro.dev/docs/hooks/"),
    ProtectedProgramFiles("editor", "Junie and JetBrains AI Assistant", ".junie .aiassistant", "https://junie.jetbrains.com/docs/"),
    ProtectedProgramFiles("editor", "GitHub Copilot", ".github/hooks .github/mcp.json .github/copilot .copilot .config/github-copilot",
        "https://docs.github.com/copilot/how-tos/use-copilot-agents/coding-agent/use-hooks"),
    ProtectedProgramFiles("editor", "GitLab Duo", ".gitlab/duo .duo", "https://docs.gitlab.com/user/gitlab_duo/model_context_protocol/"),
    ProtectedProgramFiles("editor", "Amp, Cody and Sourcegraph", ".amp .cody .sourcegraph cody.json .config/amp", "https://ampcode.com/manual"),
    ProtectedProgramFiles("editor", "Goose", ".goose .config/goose", "https://block.github.io/goose/docs/guides/config-files"),
    ProtectedProgramFiles("editor", "Augment", ".augment .auggie", "https://docs.augmentcode.com/cli/overview"),
    ProtectedProgramFiles("editor", "Factory", ".factory .droid", "https://docs.factory.ai/cli/configuration/settings"),
    ProtectedProgramFiles("editor", "Warp", ".warp", "https://docs.warp.dev/knowledge-and-collaboration/mcp"),
    ProtectedProgramFiles("editor", "OpenHands and Devin", ".openhands .devin .cognition", "https://docs.openhands.dev/openhands/usage/customization/repository"),
    ProtectedProgramFiles("editor", "Trae, Qoder and CodeBuddy", ".trae .trae-cn .qoder .codebuddy .lingma .joycode .comate .marscode",
        "https://docs.trae.ai/ide/model-context-protocol"),
    ProtectedProgramFiles("editor", "Tabnine and Supermaven", ".tabnine .supermaven", "https://docs.tabnine.com/main/getting-started/tabnine-agent"),
    ProtectedProgramFiles("editor", "Mistral Vibe, Letta and Rovo Dev", ".vibe .letta .rovodev .rovo", "https://github.com/mistralai/mistral-vibe"),
    ProtectedProgramFiles("editor", "Plandex, SWE-agent, gptme and Codebuff", ".open-interpreter .openinterpreter .interpreter .autogpt .gpt-pilot .pythagora .metagpt .mentatconfig.json .smol .gptengineer .devchat .plandex .plandex-v2 .plandex-home .swe-agent .sweagent .sweep "
        ".gptme gptme.toml gptme.local.toml .codebuff codebuff.json .mentat .mentat_config.json .ra-aid .gpteng .forge forge.yaml",
        "https://gptme.org/docs/config.html, https://www.codebuff.com/docs"),
    ProtectedProgramFiles("editor", "Void, Bolt, v0, Lovable and Firebender", ".void .bolt .v0 .lovable .firebender firebender.json",
        "https://docs.firebender.com/, https://support.bolt.new/"),
    ProtectedProgramFiles("editor", "other agents", ".eca .config/eca .llxprt .omp .codiumai .codiumate .kodu .claude-dev .eliza .aichat .config/aichat .sgptrc .config/shell_gpt .mods.yml .config/mods .config/fabric .fabric .llm .config/io.datasette.llm .probe .jetbrains-ai .swe .agent-os .agentos .augmentcode .supercode .cursorless .claudesync .ccmanager .vibe-kanban .uzi .crystal .opcode .codemcp codemcp.toml .wave .waveterm .aider-desk .qodercli .nova-agent .trae-agent trae_config.yaml .mini-swe-agent .goose-acp .acp acp.json .acp.json .zencoder .qodo .refact .blackbox .blackboxai .traycer .bito .pieces .aide .melty .pochi .pi "
        ".openclaw .clawdbot .moltbot .hermes .nanocoder agents.config.json .cagent cagent.yaml .oh-my-pi .snow "
        ".codegen .codegpt .tongyi .potpie .devika .codeflow .groq .costrict .neovate .deepagents .commandcode .mux "
        ".adal .dexto .claude-server-commander .mastracode .ona-agents .bob .cortex .codemaker .stakpak .vtcode "
        "vtcode.toml",
        "https://agentskills.io/home"),
    ProtectedProgramFiles("editor", "what sets agents up", ".emdash.json .conductor.json .forge.yaml .container-use .xcodebuildmcp .vibekit .serena .ruler .rulesync rulesync.jsonc rulesync.json .hooks.json .swarm "
        ".hive-mind .skillshare .openskills .apm apm.yml .conductor conductor.json .superset",
        "https://github.com/intellectronica/ruler, https://docs.conductor.build/core/scripts"),
)  # fmt: skip
