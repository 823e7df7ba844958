"""Programs that run the command in their last words without any relevant change, such as ``timeout`` and ``nice``.

``timeout 5 nice git status`` is evaluated as ``git status``. Only forms that are understood word by word are unwrapped.
Every other form, and every other program that runs a command in its words, keeps its own policy
(:mod:`handrail.policy.shell.program_risks`), which is to ask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from handrail.contract.text.lazy_patterns import compile_regex_lazily

MAX_DEPTH = 8
"""The maximum number of wrappers around one command."""

_TIMEOUT_DURATION = compile_regex_lazily(r"(?:\d+(?:\.\d*)?|\.\d+)[smhd]?")
_NUMBER = compile_regex_lazily(r"[+-]?\d{1,9}")
_SIGNAL = compile_regex_lazily(r"[A-Z]{2,10}\d?|\d{1,2}")
_MODE = compile_regex_lazily(r"[0L]|\d{1,9}[KM]?")
_CLASS = compile_regex_lazily(r"[0-3]")
_LEVEL = compile_regex_lazily(r"[0-7]")
RESERVED_WORDS = frozenset(
    {"!", "{", "}", "[[", "]]", "case", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "in"}
    | {"select", "then", "until", "while", "coproc"}
)
_ASSIGNMENT = compile_regex_lazily(r"([A-Za-z_][A-Za-z0-9_]*)=", re.DOTALL)
_LOOKS_LIKE_ASSIGNMENT = compile_regex_lazily(r"[A-Za-z_][A-Za-z0-9_]*(?:\[.*\])?\+?=", re.DOTALL)
_VERSION = compile_regex_lazily(r"[0-9.]+\Z")

HARMLESS_VARIABLES = compile_regex_lazily(
    r"LANG|LANGUAGE|LC_[A-Z]+|TZ|TERM|COLUMNS|LINES|NO_COLOR|FORCE_COLOR|CLICOLOR(?:_FORCE)?|CI"
    r"|PYTHON(?:UNBUFFERED|DONTWRITEBYTECODE|HASHSEED|UTF8)|RUST_BACKTRACE|CARGO_TERM_COLOR|NODE_ENV|NODE_NO_WARNINGS"
    r"|SOURCE_DATE_EPOCH|DEBIAN_FRONTEND|PIP_NO_INPUT|GIT_TERMINAL_PROMPT|GIT_OPTIONAL_LOCKS"
    r"|V|VERBOSE|DEBUG|SKIP|HUSKY|LEFTHOOK|PRE_COMMIT_ALLOW_NO_CONFIG"
)
"""Variables that a command may set. None of them names a program, a file or an option."""
_POWERFUL_VARIABLES = compile_regex_lazily(
    r"_|PATH|IFS|ENV|HOME|PWD|OLDPWD|CDPATH|SHELL|USER|LOGNAME|TMPDIR|TEMP|TMP|HOSTNAME|UID|EUID|PPID|S?RANDOM|SECONDS|EPOCH.*|REPLY|LINENO"
    r"|PREFIX|DESTDIR|PROTOC|PYENV.*|[A-Z]+ENV_(?:ROOT|VERSION)|NVM_.*|FNM_.*|VOLTA_.*|ASDF.*|MISE_.*|SDKMAN_.*|COREPACK.*|JUST_.*|TASK_.*|GAWK.*|MSBUILD.*"
    r"|CORECLR.*|COR_.*|COMPLUS.*|COMPlus.*|(?:CC|CXX|AR|LD)_.*|.*_(?:CC|CXX|AR|LD)|HOSTCC|HOSTCXX|CROSS_COMPILE"
    r"|EDITOR|VISUAL|PAGER|BROWSER|TERMINFO.*|TERMCAP|DISPLAY|CC|CXX|CPP|LD|AR|AS|NM|RANLIB|STRIP|GZIP|GZIP_OPT|BZIP2?|XZ_.*|ZSTD_.*|FC"
    r"|PS[0-9]|PROMPT.*|OPT(?:ARG|IND|ERR)|DIRSTACK|FUNC.*|GLOB.*|HIST.*|MAIL.*|IGNOREEOF|FIGNORE|EXECIGNORE|INPUTRC|FCEDIT|TIMEFORMAT|MAPFILE"
    r"|(?:LD_|DYLD|GIT|SSH|BASH|SHELL|COMP_|ZSH|KSH|PYTHON|PYTEST|PIP|POETRY|PDM|TOX_|NOX|VIRTUAL_ENV|CONDA|PERL|RUBY|GEM_|BUNDLE|NODE|NPM|npm_"
    r"|YARN|PNPM|BUN_|DENO|JAVA|_JAVA|JDK|JVM|MAVEN|MVN|GRADLE|SBT|GO|CGO|CARGO|RUST|MAKE|MFLAGS|CMAKE|NINJA|MESON|GCC|CCACHE|LESS|MAN|GPG|GNUPG"
    r"|DOCKER|COMPOSE|KUBE|HELM|AWS_|AZURE|GOOGLE_|GCLOUD|XDG|DBUS|MALLOC|GLIBC|NLS|LOCPATH|TAR_|RSYNC|CURL|WGET|GREP|RIPGREP|FZF|AWK|POSIXLY|PHP|COMPOSER"
    r"|LUA|JULIA|ERL_|ELIXIR|MIX_|DOTNET|NUGET|HOMEBREW|NIX|ANSIBLE|TERRAFORM|VAULT|HANDRAIL|SUDO|MYSQL|SQLITE|OPENSSL|SSL|LLVM|CLANG|GTK|GDK|GIO"
    r"|LIBGL|MESA|PKG_CONFIG|UV_|R_|TF_|PG|QT_|VK_|DISTUTILS|SETUPTOOLS|COVERAGE|JEST|VITEST|ESLINT|SASS_|WEBPACK|TS_NODE|TSX_).*"
    r"|.*(?:PATH|OPTIONS?|OPTS?|FLAGS?|ARGS|COMMAND|CMD|PAGER|EDITOR|BROWSER|SHELL|WRAPPER|RUNNER|LAUNCHER|PROGRAM|EXEC|EXE|_BIN|PRELOAD|PLUGINS?"
    r"|HOOKS?|CONFIG|_CONF|RC|RCFILE|STARTUP|PROXY|proxy|LOADER|LIBRARY|LIBS?|_HOME|ASKPASS|_INIT|PROFILE)"
)
"""Variables by which common programs find what they run, load or read, and the shell's own."""


def is_harmless_variable(name: str) -> bool:
    """Return whether the shell, and programs of the workspace, run, load and read the same with this variable.

    Programs of the workspace read variables with names of their choice. They can do whatever they want without them.
    """
    return HARMLESS_VARIABLES.fullmatch(name) is not None or _POWERFUL_VARIABLES.fullmatch(name) is None


def explain_variable_risk(name: str, argv: Sequence[str]) -> str | None:
    """Return why a command with this variable may run, load or read something else, as half a sentence, or None.

    A program outside of the tables may read any variable, such as ``ZIP`` and ``HGMERGE``.

    :param argv: empty for a variable of the shell that its programs do not get
    """
    if HARMLESS_VARIABLES.fullmatch(name) is not None:
        return None
    if is_harmless_variable(name) and (not argv or _ignores_unknown_variables(split_wrapper_layers(argv)[-1])):
        return None
    return f"the text sets the variable {name}, which can change what programs do"


def _ignores_unknown_variables(argv: Sequence[str]) -> bool:
    """Return whether a program treats its words as data, or runs code of the workspace, whatever variables it gets."""
    program = argv[0] if argv else ""
    folder, _, name = program.rpartition("/")
    if folder and f"{folder}/" not in _FOLDERS:
        return program[0] != "/" and ".." not in folder.split("/")  # a program of the workspace
    if name in ENVIRONMENT_MANAGERS and len(argv) > 1 and argv[1] in ("run", "exec"):
        at = next((at for at, word in enumerate(argv) if at > 1 and word not in VALUELESS_OPTIONS), len(argv))
        return _ignores_unknown_variables(argv[at:])
    return name in _IGNORE_VARIABLES or _VERSION.sub("", name) in _RUN_WORKSPACE_CODE


_Values = Mapping[str, re.Pattern[str]]


def _first_operand_index(argv: Sequence[str], flags: frozenset[str], values: _Values) -> int | None:
    """Return the index of the first operand after exactly these options, or None for any other option.

    :param values: the pattern of each option's value; the forms are ``-x V``, ``-xV``, ``--long V`` and ``--long=V``
    """
    index = 1
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return index + 1
        if word[:1] != "-" or word == "-":
            return index
        if word in flags:
            index += 1
            continue
        if word[:2] == "--":
            name, sign, value = word.partition("=")
        else:
            name, sign, value = word[:2], word[2:], word[2:]
        wanted = values.get(name)
        if wanted is None:
            return None
        if not sign:
            index += 1
            value = argv[index] if index < len(argv) else ""
        if wanted.fullmatch(value) is None:
            return None
        index += 1
    return index


def _make_form_reader(flags: str = "", **values: re.Pattern[str]) -> Callable[[Sequence[str]], int | None]:
    known = frozenset(flags.split())
    by_option = {("-" if len(n) == 1 else "--") + n.replace("_", "-"): p for n, p in values.items()}
    return lambda argv: _first_operand_index(argv, known, by_option)


_timeout_options = _make_form_reader("--foreground --preserve-status -v --verbose -f -p", k=_TIMEOUT_DURATION, kill_after=_TIMEOUT_DURATION,
                         s=_SIGNAL, signal=_SIGNAL)  # fmt: skip


def _timeout(argv: Sequence[str]) -> int | None:
    at = _timeout_options(argv)
    return None if at is None or at >= len(argv) or _TIMEOUT_DURATION.fullmatch(argv[at]) is None else at + 1


_nice_options = _make_form_reader(n=_NUMBER, adjustment=_NUMBER)


def _find_nice_command(argv: Sequence[str]) -> int | None:
    if len(argv) > 1 and re.fullmatch(r"-{1,2}\d{1,9}", argv[1]):  # the old spelling: nice -5
        return 2
    return _nice_options(argv)


def _read_time_keyword(argv: Sequence[str]) -> int | None:
    """Read ``time`` as the shell's keyword. As a program it has the same form without options."""
    at = 2 if list(argv[1:2]) == ["-p"] else 1
    return None if at < len(argv) and argv[at] == "time" else at


def _command(argv: Sequence[str]) -> int | None:
    return None if len(argv) > 1 and argv[1][:1] == "-" else 1


def _env(argv: Sequence[str]) -> int | None:
    index = 1
    names: list[str] = []
    while index < len(argv) and (match := _ASSIGNMENT.match(argv[index])) is not None:
        names.append(match.group(1))
        index += 1
    inner = argv[index:]
    if not all(map(is_harmless_variable, names)):
        return None
    if not all(map(HARMLESS_VARIABLES.fullmatch, names)) and not _ignores_unknown_variables(inner):
        return None
    return None if index < len(argv) and argv[index][:1] == "-" else index


_WRAPPERS: Mapping[str, Callable[[Sequence[str]], int | None]] = {
    "timeout": _timeout,
    "nice": _find_nice_command,
    "nohup": _make_form_reader(),
    "time": _read_time_keyword,
    "stdbuf": _make_form_reader(i=_MODE, o=_MODE, e=_MODE, input=_MODE, output=_MODE, error=_MODE),
    "setsid": _make_form_reader("-w --wait"),
    "ionice": _make_form_reader("-t --ignore", c=_CLASS, n=_LEVEL, **{"class": _CLASS, "classdata": _LEVEL}),
    "command": _command,
    "env": _env,
}
WRAPPER_NAMES = frozenset(_WRAPPERS)
_BUILTINS = frozenset({"command", "time"})
"""Builtins of the shell. A program of that name, called by its path, is another one."""
_FOLDERS = ("/bin/", "/usr/bin/")


def find_wrapped_command_start(argv: Sequence[str]) -> int | None:
    """Return where in ``argv`` the command of a wrapper begins.

    :returns: None if the argv is not a wrapper, or not fully understood
    """
    if not argv:
        return None
    name = argv[0]
    form = _WRAPPERS.get(name)
    if form is None:
        if name[:1] != "/":
            return None
        for folder in _FOLDERS:
            if name.startswith(folder) and (bare := name[len(folder) :]) not in _BUILTINS:
                form = _WRAPPERS.get(bare)
    if form is None:
        return None
    at = form(argv)
    if at is None or at >= len(argv) or not argv[at] or argv[at][:1] == "-" or not argv[at].isprintable():
        return None  # a word with a mark is not printable
    # After its keywords, the shell continues to parse: a word there may be an assignment or another keyword.
    if argv[at] in RESERVED_WORDS or _LOOKS_LIKE_ASSIGNMENT.match(argv[at]):
        return None
    return at


def split_wrapper_layers(argv: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the words of each wrapper, outermost first, and last the command itself."""
    found: list[tuple[str, ...]] = []
    while len(found) < MAX_DEPTH and (at := find_wrapped_command_start(argv)) is not None:
        found.append(tuple(argv[:at]))
        argv = argv[at:]
    return (*found, tuple(argv))


# Tables for :mod:`handrail.policy.shell.nested_commands`: programs that run a command given in their words, and those that do not.
#
# A program in no table is unknown: any of its words may be a command, and a deny rule about that command makes the call
# need approval.


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


RUNNERS = _names(
    # users, limits, priorities, namespaces
    "env sudo sudo-rs doas please calife super su runuser pkexec sg newgrp newrole run0 gosu su-exec setpriv capsh",
    "gksu gksudo kdesu kdesudo nice ionice chrt taskset setsid setarch linux32 linux64 i386 x86_64 uname26",
    "prlimit numactl cpulimit cgexec softlimit chpst setuidgid envuidgid envdir setlock pgrphack runcon chroot",
    "unshare nsenter firejail bwrap proot fakeroot fakeroot-ng fakechroot pseudo schroot dchroot arch-chroot",
    "minijail0 nsjail sandbox-exec dzdo sux distrobox-enter logsave rootlesskit pasta systemd-run systemd-inhibit systemd-nspawn systemd-cat",
    "systemd-socket-activate machinectl homectl start-stop-daemon daemonize daemon dumb-init tini catatonit runsv",
    "caffeinate pbuilder cowbuilder sbuild flatpak-spawn host-spawn lxc-attach",
    "lxc-execute singularity apptainer ch-run udocker distrobox toolbox wsl cmd steam-run appimage-run",
    "nix-shell",
    # time, output, repetition
    "time gtime timeout gtimeout genv gnice gnohup gstdbuf gxargs gtime nohup stdbuf unbuffer watch viddy hwatch",
    "script xargs parallel sem rush flock lckdo lockfile-create setlock entr watchexec reflex nodemon chokidar onchange",
    "watchmedo watchman-make inotify-hookable when-changed modd hyperfine multitime chronic ifne mispipe",
    "pee vipe zrun ts-run retry run-one run-this-one run-parts at batch crontab fcrontab cronitor cronic",
    "concurrently cross-env cross-env-shell dotenv env-cmd dotenvx shdotenv envchain",
    "aws-vault doppler infisical chamber teller envconsul",
    "sshpass expect autoexpect rlwrap rlfe faketime eatmydata catchsegv gum",
    # terminals and displays
    "tmux tmate screen byobu zellij dtach abduco xterm uxterm konsole gnome-terminal xfce4-terminal lxterminal",
    "x-terminal-emulator alacritty kitty wezterm foot urxvt rxvt terminator tilix xdg-terminal asciinema ttyrec",
    "termtosvg ttyd gotty xvfb-run xwfb-run startx xinit vglrun optirun primusrun prime-run gamemoderun mangohud",
    "dbus-run-session dbus-launch ssh-agent keychain",
    # debuggers, tracers, compilers' helpers
    "strace ltrace gdb gdbserver cgdb lldb rr perf valgrind heaptrack uftrace bpftrace sysdig dtruss ddd r2 radare2",
    "scan-build intercept-build compiledb bear ccache sccache distcc icecc",
    # the shell's own
    "coproc command builtin exec eval",
    # packages
    "npx pnpx bunx uvx pipx",
    # network
    "nq tsp task-spooler pueue py-spy samply austin wgo ghostty esy",
    "proxychains proxychains4 torsocks torify tsocks trickle graftcp socat nc ncat netcat tcpserver tcpsvd udpsvd",
    "websocketd",
    # many programs in one, and the loader
    "busybox toybox ld.so",
)  # fmt: skip
"""Programs that run the command in their words, wherever it begins."""

ENVIRONMENT_MANAGERS = frozenset(
    {"uv", "poetry", "pipenv", "pdm", "hatch", "rye", "pixi", "conda", "mamba", "micromamba", "mise", "asdf", "bundle"}
    | {"rbenv", "pyenv", "nodenv", "direnv", "opam", "rtx", "jenv", "plenv", "phpenv", "goenv", "luaenv", "devbox"}
)
"""Managers of environments, whose ``run`` and ``exec`` start any program (``uv run rm``)."""

REMOTE_RUNNERS = _names(
    "ssh slogin autossh mosh rsh remsh rlogin dbclient plink et pssh parallel-ssh pdsh clush dsh cssh mussh",
    "ansible ansible-console salt salt-ssh salt-call knife bolt mco fab pyinfra",
)
"""Programs that pass their words to a shell on other machines."""

COMMAND_PLACES: Mapping[str, str] = {
    " ".join(sorted(REMOTE_RUNNERS)): "* -o",
    "coverage kernprof scalene memray viztracer torchrun accelerate mpirun mpiexec orterun srun salloc sbatch qsub bsub": "*",
    "mono wine wine64 box64 box86 pm2 forever foreman honcho overmind hivemind goreman air bench mock monit supervisord": "*",
    "supervise npm-run-all run-p run-s empty st op": "*",
    " ".join(sorted(ENVIRONMENT_MANAGERS)): "run exec x r watch shell tool activate -- --config-setting --config-settings",
    "scp sftp sshfs": "-o -S -D -b",
    "rsync": "-e -M --rsh --rsync-path --remote-option",
    "ssh-copy-id": "-o",
    "alias export declare typeset readonly local": "=",
    "jobs complete compgen mapfile readarray bind hash fc enable": "-x -C -p -e -f",
    "vagrant": "ssh winrm -c --command",
    "multipass colima limactl": "exec shell ssh",
    "lima orb orbctl enroot condor_run jsrun aprun summon dagger": "*",
    "flux": "run submit batch alloc exec ?",
    "docker podman nerdctl buildah finch": "run exec create debug ssh unshare -- --entrypoint --health-cmd --init-path --args",
    "docker-compose podman-compose": "run exec -- --entrypoint",
    "kubectl oc k3s microk8s minikube kubecolor kubectl.exe": "exec run debug rsh ssh -- --command",
    "crictl ctr runc crun youki nomad cf dokku heroku fly flyctl railway kamal lxc incus": "exec run run:detached ssh task console -- -C -c --command",
    "gcloud aws az doctl eb tsh gh glab": "ssh alias config extension exec command -- --command --ssh-command --scripts -c --parameters",
    "consul etcdctl": "exec lock watch -- -shell",
    "devspace okteto garden mirrord telepresence tilt skaffold": "exec enter run -- --command -c ?",
    "flox": "activate run -- -c --command ?",
    "pulumi sst sops berglas vault teleport tailscale netlify": "run shell exec exec-env exec-file dev:exec ssh -- -c --command ?",
    "boundary cloudflared": "-- -exec --exec ?",
    "consul-template": "-- -exec -template ?",
    "tv television": "--source-command -s --preview-command -p ?",
    "peco": "--exec ?",
    "terragrunt": "exec -- --tf-path --terragrunt-tfpath --auth-provider-cmd ?",
    "proto bundler moon vfox": "exec run e x activate -- -c ?",
    "ansible-playbook": "--ssh-common-args --ssh-extra-args --become-exe",
    "flatpak snap": "run enter --command",
    "nix guix nix-env nix-build nix-store nix-instantiate nixos-rebuild home-manager lorri devenv": "run eval shell develop "
           "environment -- -c -E --expr --command --run --phase --build-hook --post-build-hook --diff-hook --pre-build-hook 2:--option "
           "2:--argstr",
    "gem rustup rvm nvm fnm volta n chruby-exec dune spack tox nox lerna nx": "exec v1-exec v2-exec new-exec run do -- --exec --override -x",
    "composer": "exec config --",
    "repo west mr gita dvc lando ddev sail drush symfony": "run add shell super exec ssh ev -- -c ?",
    "yarn bun": "run exec x dlx set -- -c -e --call --eval --script-shell",
    "npm pnpm": "exec x dlx explore set run? run-script? start? restart? -c -e --call --eval --shell-mode --script-shell --shell --editor --viewer --git",
    "deno": "exec x dlx eval run? task? serve? -- -c -e --call --eval",
    "cargo": "watch run? r? flamegraph? -x -s -C --exec --shell --config",
    "go": "run? tool? env -exec -toolexec -vettool",
    "stack cabal": "exec v1-exec v2-exec new-exec run? v1-run? v2-run? new-run? do --exec -x",
    "mix": "cmd exec run? app.start? -e -r --eval code",
    "sbt crystal swift nim v dart": "exec eval run? r? build? -e --eval code =",
    "dotnet zig dub lein gradle gradlew": "exec run? r? build? build-exe? "
           "--exec -e --args =",
    "pip pip3": "-C --config-settings --config-setting --global-option --build-option --install-option --editor",
    "gcc g++ cc c++ clang clang++ gfortran": "-wrapper",
    "rustc": "-C --codegen",
    "helm": "--post-renderer --post-renderer-args",
    "configure config.status": "= ?",
    "sysctl": "= ?",
    "mount": "-o",
    "cvs": "-e ?",
    "dnsmasq": "--dhcp-script ?",
    "wpa_cli": "-a -i",
    "pandoc": "-F -L --filter --lua-filter --pdf-engine ?",
    "latexmk": "-e -pdflatex -latex -lualatex -xelatex -pdf -dvips ?",
    "make gmake bmake": "= --eval -E -V -v",
    "cmake ctest": "chdir env time -E -P --test-command --build-run-dir",
    "meson": "devenv --wrapper --ninja-args --vs-args",
    "ip": "exec",
    "task": "--",
    "corepack": "*",
    "vboxmanage": "-- --exe",
    "tcpdump": "-z",
    "openvpn pppd dhclient": "pty connect -sf --up --down --route-up --route-pre-down --ipchange --client-connect --tls-verify",
    "java": "= ?",
    "systemctl": "=",
    "just": "-c --command --shell --shell-arg --chooser = 2:--set",
    "bazel bazelisk buck buck2": "run? --run_under --workspace_status_command --shell_executable",
    "git": "run foreach config -c -x -O -u --exec --extcmd --upload-pack --receive-pack --tree-filter --msg-filter "
           "--index-filter --env-filter --parent-filter --commit-filter --tag-name-filter --setup --authors-prog --access-hook --httpd --open-files-in-pager "
           "--sendmail-cmd --to-cmd --cc-cmd --smtp-server --config remote-ext shell",
    "hg svn svnadmin bzr brz jj fossil darcs": "exec run -- -c --command --config --config-toml --config-option --diff-cmd --diff3-cmd --editor-cmd "
           "-O set settings --merge-cmd --posthook --prehook --ssh --remotecmd",
    "tar gtar bsdtar star dar": "-I -F -E --checkpoint-action --to-command --use-compress-program --rmt-command --rsh-command "
           "--info-script --new-volume-script --compress-program -compress-program",
    "zip": "-TT --unzip-command",
    "cpio": "--rsh-command",
    "rg": "--pre --hostname-bin",
    "ugrep ug": "--filter --pager --view",
    "adb": "shell exec-out exec-in",
    "fd fdfind": "-x -X --exec --exec-batch",
    "find gfind bfs": "-exec -execdir -ok -okdir",
    "sort gsort": "--compress-program",
    "split gsplit": "--filter",
    "install ginstall": "--strip-program",
    "fzf sk skim fzy": "--preview --bind --execute --cmd --with-shell -c",
    "man": "-P -H --pager --html",
    "bat batcat ag ack delta": "--pager --paging",
    "less more most": "code",
    "wget": "-e --execute --use-askpass",
    "aria2c": "--on-*",
    "yt-dlp youtube-dl": "--exec --exec-before-download --downloader --external-downloader --downloader-args "
           "--external-downloader-args --postprocessor-args --ppa --netrc-cmd",
    "feh sxiv nsxiv": "-A --action",
    "gpg gpg2 gpgsm gpgconf": "--agent-program --dirmngr-program --photo-viewer --pinentry-program",
    "borg restic rclone duplicity unison rdiff-backup": "-o --rsh --remote-path --password-command --sftp-ssh --ssh-options --rsync-options "
           "--remote-schema -sshcmd -rshcmd",
    "dpkg": "--pre-invoke --post-invoke --status-logger",
    "apt apt-get aptitude": "-o --option",
    "rpm rpmbuild rpmspec": "code --pipe",
    "brew": "sh ruby exec -- -c -e",
    "sdiff diff3": "--diff-program",
    "openssl": "-engine",
    "logrotate incrontab fswatch": "-c -m --mail",
    "mvn mvnw ant": "=",
    "psql mysql mariadb sqlite3 duckdb sqlplus usql mongosh mongo cqlsh mycli pgcli litecli sqlcmd snowsql beeline hive redis-cli lftp ftp clickhouse-client": "code --pager",
    "rake debugfs awk gawk mawk nawk original-awk sed gsed m4 dc exiftool rename prename xmlstarlet": "code",
    "vi vim nvim view vimdiff ex ed emacs emacsclient kak gnuplot gs tex latex pdflatex xelatex lualatex convert magick": "code",
    "nano joe": "code -s --speller",
    "gvim mvim neovide rvim vifm ranger lf zathura weechat mutt neomutt mail mailx nmh tig": "code ?",
}  # fmt: skip
"""Programs that run a command only in some places.

- ``*``: at every word
- a word: after this sub-command
- an option: as its value, or after its value
- ``2:OPTION``: as the value of an option with a name and a value
- ``=``: as the value of ``NAME=VALUE``
- ``code``: the words are code of a language
- ``run?``: after this sub-command come the arguments of a program of the workspace
- ``?``: any other word may also be a command
"""

PROGRAM_FIRST_RUNNERS = (ENVIRONMENT_MANAGERS - {"direnv", "mise", "rtx", "hatch"}) | _names(
    "env sudo doas nice nohup setsid stdbuf unbuffer time gtime chronic npx pnpx bunx uvx xvfb-run strace ltrace valgrind",
    "eatmydata catchsegv fakeroot dbus-run-session dumb-init tini caffeinate",
)
"""Programs whose command is the first word that is not an option, a value of one, or ``NAME=VALUE``.

The words after it belong to that command: ``uv run pytest -k curl`` runs no ``curl``.
"""

VALUELESS_OPTIONS = _names(
    "--no-sync --no-project --no-dev --no-default-groups --no-cache --no-config --no-progress --locked --frozen --offline --isolated",
    "--exact --verbose --quiet --yes --active --all-extras --all-groups --no-capture-output --live-stream",
)
"""Options of these programs that take no value."""

INPUT_RUNNERS = _names(
    "psql mysql mariadb sqlite3 duckdb usql sqlplus mongosh gdb lldb r2 rizin ed ex dc ftp lftp sftp expect debugfs crontab mail mailx",
    "fcrontab incrontab ncftp cftp telnet swipl sbatch qsub bsub m4 gnuplot bpftrace clickhouse-client beeline litecli pgcli mycli",
)
"""Programs, other than shells, that run their input unless an option gives them something to run."""

PROMPT_WORDS = _names("shell console dbshell tinker repl develop ssh enter")
"""Sub-commands that open a prompt, which runs its input."""

INTERPRETERS = frozenset(
    {
        "python",
        "python2",
        "python3",
        "pypy",
        "pypy3",
        "node",
        "nodejs",
        "perl",
        "ruby",
        "php",
        "lua",
        "tclsh",
        "source",
        ".",
    }
)
"""Programs that run a given file."""

CODE_INTERPRETERS = INTERPRETERS | _names(
    "luajit rscript r julia guile racket octave ocaml elixir erl clojure clj scala raku sbcl groovy jshell ghc ghci",
    "runghc swift crystal nim v dart kotlinc janet fennel wish osascript irb ipython ipython3 jupyter bpython",
    "iex swipl gprolog bb sage maxima gp gap matlab wolframscript scala-cli rizin",
    "tsx ts-node babel-node coffee esbuild-runner",
)  # fmt: skip
"""Interpreters of code, which their words may contain."""

OPTIONS_WITH_VALUE: Mapping[str, frozenset[str]] = {
    "git": frozenset(
        {"-c", "-C", "--git-dir", "--work-tree", "--exec-path", "--namespace", "--config-env", "--super-prefix"}
        | {"--attr-source", "--list-cmds"}
    ),
}
"""Options before the sub-command whose value is the next word, for programs of which all are known."""

_Words = tuple[str, ...]
SUBCOMMAND_SYNONYMS: Mapping[str, tuple[tuple[_Words, _Words], ...]] = {
    "git": (
        (("push",), ("send-pack",)), (("push",), ("http-push",)), (("push",), ("subtree", "push")), (("push",), ("lfs", "push")),
        (("add",), ("stage",)), (("blame",), ("annotate",)), (("init",), ("init-db",)), (("log",), ("whatchanged",)),
        (("clone",), ("lfs", "clone")), (("pull",), ("subtree", "pull")),
    ),
    "npm": (
        (("install",), ("i",)), (("install",), ("add",)), (("install",), ("in",)), (("install",), ("ins",)), (("install",), ("inst",)),
        (("install",), ("insta",)), (("install",), ("instal",)), (("install",), ("isnt",)), (("install",), ("isntall",)),
        (("run",), ("run-script",)), (("run",), ("rum",)), (("run",), ("urn",)), (("exec",), ("x",)), (("test",), ("t",)),
        (("test",), ("tst",)), (("uninstall",), ("un",)), (("uninstall",), ("remove",)), (("uninstall",), ("rm",)),
        (("uninstall",), ("r",)), (("uninstall",), ("unlink",)), (("ci",), ("clean-install",)), (("update",), ("up",)),
        (("update",), ("upgrade",)), (("link",), ("ln",)), (("config",), ("c",)), (("init",), ("create",)),
        (("login",), ("adduser",)), (("login",), ("add-user",)),
    ),
    "pnpm": (
        (("install",), ("i",)), (("remove",), ("rm",)), (("remove",), ("uninstall",)), (("remove",), ("un",)), (("run",), ("run-script",)),
        (("update",), ("up",)), (("test",), ("t",)),
    ),
    "bun": ((("install",), ("i",)), (("add",), ("a",)), (("remove",), ("rm",)), (("run",), ("r",))),
    "cargo": ((("build",), ("b",)), (("run",), ("r",)), (("test",), ("t",)), (("check",), ("c",)), (("remove",), ("rm",)), (("doc",), ("d",))),
    "docker": (
        (("run",), ("container", "run")), (("exec",), ("container", "exec")), (("rm",), ("container", "rm")), (("ps",), ("container", "ls")),
        (("kill",), ("container", "kill")), (("stop",), ("container", "stop")), (("start",), ("container", "start")),
        (("cp",), ("container", "cp")), (("create",), ("container", "create")), (("commit",), ("container", "commit")),
        (("logs",), ("container", "logs")), (("attach",), ("container", "attach")), (("build",), ("image", "build")),
        (("build",), ("buildx", "build")), (("push",), ("image", "push")), (("pull",), ("image", "pull")), (("rmi",), ("image", "rm")),
        (("load",), ("image", "load")), (("save",), ("image", "save")), (("tag",), ("image", "tag")), (("rm",), ("container", "remove")),
        (("rm",), ("remove",)), (("rmi",), ("image", "remove")),
    ),
    "podman": (
        (("run",), ("container", "run")), (("exec",), ("container", "exec")), (("rm",), ("container", "rm")), (("build",), ("image", "build")),
        (("push",), ("image", "push")), (("pull",), ("image", "pull")), (("rmi",), ("image", "rm")),
    ),
    "apt-get": ((("remove",), ("purge",)),),
    "gh": ((("pr", "create"), ("pr", "new")), (("release", "create"), ("release", "new")), (("codespace",), ("cs",)),
           (("extension",), ("ext",)), (("extension",), ("extensions",))),
    "terraform": ((("destroy",), ("apply", "-destroy")), (("destroy",), ("apply", "--destroy"))),
    "systemctl": ((("reboot",), ("start", "reboot.target")), (("poweroff",), ("start", "poweroff.target"))),
}  # fmt: skip
"""Sub-commands with several names, or with the same effect."""

ABBREVIATED_SUBCOMMANDS: Mapping[str, frozenset[str]] = {
    "npm": _names(
        "access adduser audit bugs cache ci completion config dedupe deprecate diff dist-tag docs doctor edit exec explain",
        "explore fund get help hook init install link login logout ls org outdated owner pack ping pkg prefix profile prune",
        "publish query rebuild repo restart root run run-script sbom search set shrinkwrap star start stop team test token",
        "uninstall unpublish unstar update version view whoami",
    ),
    "hg": _names(
        "add addremove amend archive backout bisect bookmarks branch clone commit config copy evolve export fetch forget",
        "histedit import incoming init merge outgoing prune pull purge push rebase recover remove rename resolve revert rollback",
        "shelve strip tag uncommit unshelve update",
    ),
}
"""Sub-commands of programs that accept every clear beginning of a name, such as ``npm publ``."""

PROGRAM_SYNONYMS: tuple[tuple[_Words, _Words], ...] = (
    (("npx",), ("npm", "exec")),
    (("pnpx",), ("pnpm", "dlx")),
    (("bunx",), ("bun", "x")),
    (("uvx",), ("uv", "tool", "run")),
    (("docker-compose",), ("docker", "compose")),
    (("podman-compose",), ("podman", "compose")),
    (("pip",), ("python", "-m", "pip")),
    (("pip",), ("python3", "-m", "pip")),
    (("pip3",), ("python3", "-m", "pip")),
    (("pip",), ("pip3",)),
    (("pip",), ("uv", "pip")),
    (("python",), ("python3",)),
    (("pytest",), ("python", "-m", "pytest")),
    (("pytest",), ("python3", "-m", "pytest")),
    (("pytest",), ("py.test",)),
    (("twine",), ("python", "-m", "twine")),
    (("twine",), ("python3", "-m", "twine")),
    (("apt",), ("apt-get",)),
    (("apt-get",), ("aptitude",)),
    (("apt",), ("aptitude",)),
    (("dnf",), ("yum",)),
    (("reboot",), ("systemctl", "reboot")),
    (("poweroff",), ("systemctl", "poweroff")),
    (("halt",), ("systemctl", "halt")),
    (("shutdown",), ("systemctl", "poweroff")),
    (("nc",), ("netcat",)),
    (("nc",), ("ncat",)),
    (("vi",), ("vim",)),
    (("git",), ("hub",)),
    (("make",), ("gmake",)),
    (("make",), ("remake",)),
    (("kubectl",), ("oc",)),
    (("kubectl",), ("kubecolor",)),
    (("kubectl",), ("microk8s.kubectl",)),
    (("kubectl",), ("k3s", "kubectl")),
    (("kubectl",), ("microk8s", "kubectl")),
    (("kubectl",), ("minikube", "kubectl", "--")),
    (("aws",), ("python3", "-m", "awscli")),
    (("node",), ("nodejs",)),
    (("gpg",), ("gpg2",)),
)  # fmt: skip
"""Programs that are the same under another name."""

DATA_PROGRAMS = _names(
    # print, compare, count
    "echo printf cat tac head tail wc nl od hexdump xxd strings cut paste tr rev fold fmt expand unexpand column comm",
    "join seq cmp diff diff3 sdiff colordiff difft grep egrep fgrep zgrep pcregrep look which whereis whatis type",
    "apropos man info tldr help ls dir vdir exa eza lsd tree stat file du df free ps top pgrep pidof id whoami groups",
    "basename dirname realpath readlink pwd date cal uname hostname nproc arch printenv locale getconf sum cksum md5sum",
    "sha1sum sha224sum sha256sum sha384sum sha512sum b2sum shasum base64 base32 jq yq xq tomlq uniq numfmt factor test [",
    "true false : expr let figlet cowsay lolcat banner logger notify-send zcat bzcat xzcat zstdcat jless glow mdcat",
    # files
    "cp mv rm ln mkdir rmdir touch chmod chown chgrp chattr mktemp truncate tee dd sync cd pushd popd rsync shred",
    "gzip gunzip bzip2 bunzip2 xz unxz zstd unzstd lz4 unzip 7z 7za unrar ar cpio patch dos2unix unix2dos install",
    "basenc csplit shuf tsort iconv lsof fuser mount umount kill pkill killall unset wait sleep",
    # packages, whose words are names of packages
    "pip pip3 apt-cache dnf yum apk pacman zypper port choco scoop winget dpkg-query snap apt-mark apt-file",
    "go rustc luarocks cpan nuget helm",
    # compilers, checkers, tests: their words are files, names and options
    "gcc g++ cc c++ clang clang++ gfortran ld as nm objdump readelf ninja pytest py.test mypy pyright ruff black isort",
    "flake8 pylint bandit eslint prettier tsc jest vitest mocha stylelint biome rustfmt gofmt golangci-lint clippy",
    "shellcheck shfmt hadolint yamllint markdownlint cspell codespell typos tokei cloc scc ctags javac kotlinc",
    "journalctl service rc-service terraform tofu dig nslookup host ping traceroute curl http",
)  # fmt: skip
"""Programs that run none of their words. A word that looks like a command is data."""

_IGNORE_VARIABLES = _names(
    "echo printf true false : cat tac head tail wc nl od ls dir stat du df basename dirname realpath readlink pwd seq cut paste tr",
    "rev fold fmt expand unexpand comm join uniq sort cksum md5sum sha1sum sha224sum sha256sum sha384sum sha512sum b2sum sum base64",
    "base32 cmp diff grep egrep fgrep rg jq sed awk gawk mawk envsubst test [ [[ printenv sleep date touch mkdir rmdir cp mv rm ln",
    "chmod mktemp tee cd export read exit return break continue wait jobs kill id whoami uname nproc",
)
"""Programs of data for which only the variables in the tables above mean something."""

_RUN_WORKSPACE_CODE = _names(
    "python pypy node nodejs tsx ts-node deno bun perl ruby php lua luajit rscript julia elixir groovy java kotlin bash sh dash zsh ksh",
    "pytest py.test tox nox coverage unittest npm npx pnpm yarn jest vitest mocha webpack vite eslint prettier tsc next turbo nx",
    "playwright cypress rollup cargo go mage rake rspec rails gradle gradlew mvn mvnw ant sbt lein mix dotnet ctest flask",
    "django-admin celery gunicorn uvicorn hypercorn alembic sphinx-build mkdocs invoke inv fab doit just task phpunit composer",
)
"""Programs that run code of the workspace, which reads variables with names of its choice. For ``make``, a variable names programs."""
