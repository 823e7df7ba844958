"""The words of a shell text that may name workspace files which the text runs.

A user who approves ``bash run.sh`` approves the content of ``run.sh``. So the approval is bound to the content of the
files that a command runs: its script, the file given to a runner or an interpreter, and the files that a program runs by
default (a ``Makefile``, a ``package.json``). The search finds too much rather than too little. In a command that may run
something, each word that names a file counts. Nothing here reads the file system.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell import command_wrappers, program_risks, read_only_proof
from handrail.policy.shell.parser import ShellScript

_ONLY_DATA = frozenset(
    {"awk", "b2sum", "base32", "base64", "basename", "cat", "cd", "chgrp", "chmod", "chown", "cksum", "cmp", "column"}
    | {"comm", "cp", "csplit", "curl", "cut", "date", "dd", "df", "diff", "dirname", "dirs", "du", "echo", "egrep"}
    | {"expand", "expr", "factor", "false", "fd", "fdfind", "fgrep", "file", "find", "fmt", "fold", "free", "gawk"}
    | {"git", "grep", "groups", "gunzip", "gzip", "head", "hexdump", "hostname", "iconv", "id", "install", "join"}
    | {"jq", "kill", "less", "link", "ln", "ls", "md5sum", "mkdir", "mkfifo", "mktemp", "mv", "nl", "nproc", "numfmt"}
    | {"od", "paste", "patch", "popd", "printf", "ps", "pushd", "pwd", "readlink", "realpath", "rev", "rg", "rm"}
    | {"rmdir", "rsync", "sed", "seq", "sha1sum", "sha256sum", "sha512sum", "shred", "shuf", "sleep", "sort", "split"}
    | {"stat", "strings", "sum", "sync", "tac", "tail", "tar", "tee", "test", "touch", "tr", "tree", "true"}
    | {"truncate", "tsort", "uname", "unexpand", "uniq", "unlink", "unxz", "unzip", "uptime", "wait", "wc", "wget"}
    | {"which", "whoami", "xxd", "xz", "yq", "zcat", "zip", ":"}
)  # fmt: skip
"""Programs that treat their words as data, unless :func:`~handrail.policy.shell.program_risks.find_hidden_program_risk` finds a risk."""

_JAVASCRIPT = (
    "package.json",
    ".npmrc",
    ".yarnrc",
    ".yarnrc.yml",
    ".pnpmfile.cjs",
    "bunfig.toml",
    "pnpm-workspace.yaml",
)
_PYTHON_TESTS = (
    "conftest.py",
    "tests/conftest.py",
    "test/conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
    "noxfile.py",
)
_PYTHON_BUILD = ("pyproject.toml", "setup.py", "setup.cfg", "uv.toml", "requirements.txt")
_GRADLE = (
    *("build.gradle", "build.gradle.kts", "settings.gradle", "settings.gradle.kts", "gradle.properties"),
    *("gradle/wrapper/gradle-wrapper.properties", "gradle/wrapper/gradle-wrapper.jar"),
)
_MAVEN = (
    "pom.xml",
    ".mvn/extensions.xml",
    ".mvn/maven.config",
    ".mvn/jvm.config",
    ".mvn/wrapper/maven-wrapper.properties",
)
_COMPOSE = ("compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml", "compose.override.yaml")
_JUST = ("justfile", "Justfile", ".justfile", ".env")
_TASK = ("Taskfile.yml", "Taskfile.yaml", "taskfile.yml", "taskfile.yaml")
_RUBY = ("Rakefile", "rakefile", "Rakefile.rb", "Gemfile", "Gemfile.lock", ".rspec", "spec/spec_helper.rb")
_IMPLIED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("make", "gmake", "bmake"), ("GNUmakefile", "makefile", "Makefile", "BSDmakefile")),
    "just": _JUST,
    **dict.fromkeys(("npm", "npx", "pnpm", "pnpx", "yarn", "bun", "bunx", "corepack"), _JAVASCRIPT),
    **dict.fromkeys(("node", "nodejs", "tsx", "ts-node"), ("package.json", "index.js", "index.mjs", "tsconfig.json")),
    **dict.fromkeys(("jest", "vitest", "mocha", "webpack", "vite", "eslint", "prettier", "tsc", "next", "turbo", "nx"),
                    (*_JAVASCRIPT, "jest.config.js", "vitest.config.ts", "vite.config.js", "vite.config.ts", ".mocharc.js",
                     "webpack.config.js", "eslint.config.js", ".eslintrc.js", "prettier.config.js", "next.config.js",
                     "tsconfig.json", "turbo.json", "nx.json")),
    "deno": ("deno.json", "deno.jsonc", "package.json"),
    **dict.fromkeys(("pytest", "py.test", "tox", "nox", "coverage", "unittest", "hatch"), _PYTHON_TESTS),
    **dict.fromkeys(("pip", "pip3", "uv", "poetry", "pdm", "pipenv", "flit", "build", "rye", "pixi", "mypy", "ruff"), _PYTHON_BUILD),
    **dict.fromkeys(("python", "python3", "pypy", "pypy3"), ("__main__.py", "__init__.py")),
    **dict.fromkeys(("invoke", "inv"), ("tasks.py",)),
    "fab": ("fabfile.py",), "doit": ("dodo.py",), "scons": ("SConstruct", "Sconstruct", "sconstruct"),
    "flask": ("app.py", "wsgi.py", ".flaskenv", ".env"), "django-admin": ("manage.py",), "celery": ("celeryconfig.py",),
    "gunicorn": ("gunicorn.conf.py",), "sphinx-build": ("conf.py",), "mkdocs": ("mkdocs.yml",),
    "pre-commit": (".pre-commit-config.yaml",), "lefthook": ("lefthook.yml", "lefthook.yaml"),
    "cargo": ("Cargo.toml", "build.rs", "src/main.rs", "src/lib.rs", ".cargo/config.toml", ".cargo/config", "rust-toolchain.toml", "rust-toolchain"),
    "go": ("go.mod", "go.work", "*.go"), "mage": ("magefile.go",),
    **dict.fromkeys(("rake", "bundle", "bundler", "rspec", "rails"), _RUBY),
    **dict.fromkeys(("gradle", "gradlew"), _GRADLE), **dict.fromkeys(("mvn", "mvnw"), _MAVEN),
    "ant": ("build.xml",), "sbt": ("build.sbt", "project/build.properties", "project/plugins.sbt"), "lein": ("project.clj",),
    **dict.fromkeys(("cmake", "ctest"), ("CMakeLists.txt", "CMakePresets.json", "CMakeUserPresets.json", "Makefile", "build.ninja",
                                         "CTestTestfile.cmake")),
    "ninja": ("build.ninja",), "meson": ("meson.build", "meson_options.txt", "meson.options", "build.ninja"),
    **dict.fromkeys(("bazel", "bazelisk"), ("MODULE.bazel", "WORKSPACE", "WORKSPACE.bazel", "BUILD", "BUILD.bazel", ".bazelrc")),
    **dict.fromkeys(("docker", "podman", "buildah"), ("Dockerfile", "Containerfile", *_COMPOSE)),
    **dict.fromkeys(("docker-compose", "podman-compose"), _COMPOSE),
    "task": _TASK, "go-task": _TASK, "composer": ("composer.json",), "phpunit": ("phpunit.xml", "phpunit.xml.dist"),
    "mix": ("mix.exs",), "swift": ("Package.swift",), "zig": ("build.zig",), "stack": ("stack.yaml", "package.yaml"),
    **dict.fromkeys(("nix", "nix-build", "nix-shell"), ("flake.nix", "default.nix", "shell.nix")),
    **dict.fromkeys(("terraform", "tofu", "terragrunt"), ("*.tf", "*.tf.json", "*.tofu", "terragrunt.hcl", "root.hcl")),
    **dict.fromkeys(("dotnet", "msbuild"), ("*.csproj", "*.fsproj", "*.vbproj", "*.sln", "*.slnx", "*.proj", "Directory.Build.props",
                                            "Directory.Build.targets", "Directory.Packages.props", "Directory.Build.rsp", "Program.cs",
                                            ".config/dotnet-tools.json", "nuget.config", "NuGet.config", "NuGet.Config")),
    **dict.fromkeys(("gulp", "grunt", "rollup", "playwright", "cypress", "karma", "ava", "nyc", "lerna", "rush", "ng", "astro", "nuxt", "babel"),
                    (*_JAVASCRIPT, "gulpfile.js", "gulpfile.mjs", "gulpfile.cjs", "gulpfile.ts", "Gruntfile.js", "Gruntfile.cjs", "rollup.config.js",
                     "rollup.config.mjs", "playwright.config.ts", "playwright.config.js", "cypress.config.ts", "cypress.config.js", "karma.conf.js",
                     "ava.config.js", ".nycrc", "lerna.json", "rush.json", "angular.json", "astro.config.mjs", "nuxt.config.ts", "babel.config.js")),
    "pm2": ("ecosystem.config.js", "ecosystem.config.cjs"), "semantic-release": (*_JAVASCRIPT, ".releaserc", "release.config.js"),
    "thor": ("Thorfile",), "cap": ("Capfile", "config/deploy.rb"), "guard": ("Guardfile",), "pod": ("Podfile",), "brew": ("Brewfile",),
    "fastlane": ("Fastfile", "fastlane/Fastfile", ".fastlane/Fastfile"), "danger": ("Dangerfile",), "jekyll": ("_config.yml", "_plugins/*.rb"),
    **dict.fromkeys(("clojure", "clj"), ("deps.edn",)), "bb": ("bb.edn",), "shadow-cljs": ("shadow-cljs.edn",), "mill": ("build.mill", "build.sc"),
    **dict.fromkeys(("dart", "flutter"), ("pubspec.yaml", "build.yaml", "bin/main.dart", "lib/main.dart")), "rebar3": ("rebar.config",),
    "cabal": ("cabal.project", "Setup.hs", "*.cabal"), "dune": ("dune", "dune-project"), "gleam": ("gleam.toml",), "xmake": ("xmake.lua",),
    "conan": ("conanfile.py", "conanfile.txt"), "waf": ("wscript",), "premake5": ("premake5.lua",), "xcodebuild": ("*.xcodeproj/project.pbxproj",),
    "buck2": ("BUCK", ".buckconfig"), "buck": ("BUCK", ".buckconfig"), "pants": ("pants.toml", "BUILD"), "moon": ("moon.yml", ".moon/*.yml"),
    "locust": ("locustfile.py",), "behave": ("environment.py", "features/environment.py", "features/steps/*.py"), "scrapy": ("scrapy.cfg",),
    "alembic": ("alembic.ini", "alembic/env.py", "migrations/env.py"), "dvc": ("dvc.yaml",), "dbt": ("dbt_project.yml",), "kedro": ("pyproject.toml",),
    "nextflow": ("main.nf", "nextflow.config"), "maturin": ("pyproject.toml", "Cargo.toml", "build.rs"), "briefcase": ("pyproject.toml",),
    "pulumi": ("Pulumi.yaml", "__main__.py", "index.ts", "index.js", "main.go", "package.json"), "cdk": ("cdk.json", "package.json"),
    "serverless": ("serverless.yml", "serverless.ts"), "sam": ("template.yaml", "samconfig.toml"), "firebase": ("firebase.json",),
    "netlify": ("netlify.toml",), "vercel": ("vercel.json", "vercel.ts"), "wrangler": ("wrangler.toml", "wrangler.jsonc", "wrangler.json"),
    "helmfile": ("helmfile.yaml", "helmfile.yml"), "skaffold": ("skaffold.yaml",), "tilt": ("Tiltfile",), "earthly": ("Earthfile",),
    "act": (".github/workflows/*.yml", ".github/workflows/*.yaml"), "gitlab-ci-local": (".gitlab-ci.yml",), "devcontainer": (".devcontainer/devcontainer.json",),
    "devbox": ("devbox.json",), "devenv": ("devenv.nix",), "prek": (".pre-commit-config.yaml", "prek.toml"), "goreleaser": (".goreleaser.yaml", ".goreleaser.yml"),
    "overmind": ("Procfile",), "hivemind": ("Procfile",), "process-compose": ("process-compose.yaml", "process-compose.yml"), "mprocs": ("mprocs.yaml",),
    "ansible-playbook": ("ansible.cfg",), "vagrant": ("Vagrantfile",),
    "foreman": ("Procfile",), "honcho": ("Procfile",), "direnv": (".envrc",), "mise": ("mise.toml", ".mise.toml"),
    "snakemake": ("Snakefile", "workflow/Snakefile"), **dict.fromkeys(("r", "rscript"), (".Rprofile",)),
    "julia": ("Project.toml",), "perl": (), "latexmk": (".latexmkrc", "latexmkrc"), "gdb": (".gdbinit",),
    "watchman": (".watchmanconfig",), "tmux": (".tmux.conf",), "expect": (), "nodemon": ("nodemon.json", "package.json"),
}  # fmt: skip
"""The files that a program runs, or reads its commands from, without their names among its words. ``*`` is a wildcard."""

PROGRAM_FOLDERS = (".venv/bin", "venv/bin", "node_modules/.bin")
"""The folders of the workspace in which a bare name may be a program."""
_MOVES = frozenset({"cd", "pushd"})
_LOOPS = frozenset(
    {"for", "while", "until", "select", "function", "()", "eval", "source", "xargs", "-exec", "-execdir"}
)
MAX_LEVELS = 4_096
_JAVASCRIPT_ENDINGS = (".js", ".mjs", ".cjs", ".ts", ".json", "/index.js", "/package.json")
_PYTHON_ENDINGS = (".py", "/__init__.py", "/__main__.py")
_LOADED_ENDINGS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("node", "nodejs", "bun", "deno", "tsx", "ts-node"), _JAVASCRIPT_ENDINGS),
    **dict.fromkeys(("python", "pypy", "py", "pythonw", "ipython", "bpython", "pytest", "coverage", "uvicorn", "gunicorn"), _PYTHON_ENDINGS),
    **dict.fromkeys(("perl", "prove"), (".pm", ".pl")), **dict.fromkeys(("ruby", "irb", "rake", "rspec"), (".rb",)),
    **dict.fromkeys(("lua", "luajit"), (".lua", "/init.lua")), "gawk": (".awk",), "awk": (".awk",), "php": (".php",),
    "tclsh": (".tcl",), "julia": (".jl",), "rscript": (".R", ".r"), "guile": (".scm",), "emacs": (".el",), "groovy": (".groovy",),
}  # fmt: skip
"""The endings with which an interpreter finds the file of a module that its options or its code name."""
_BARE = compile_regex_lazily(r"[A-Za-z0-9][\w.+-]*")
_LOADED_NAME = compile_regex_lazily(r"[\w][\w./:-]{0,254}")
_MODULE_OPTION = compile_regex_lazily(r"-[A-Za-z]{0,15}?m(?P<name>.+)")
"""Python's option ``-m``, alone or after others, such as ``-Im``. The module follows, attached or as the next word."""
_MODULE = compile_regex_lazily(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_SIGNS = compile_regex_lazily(r"[\s;|&()<>`{}$!,\"'\\]+")
_PARTS = compile_regex_lazily(r"[=:@,]+")
_QUOTES = compile_regex_lazily(r"['\"\\]")
_HOME = compile_regex_lazily(r"\$HOME\b|\$\{HOME\}|(?<![^\s'\"=:])~(?=/|\s|\Z)")
_HERE = compile_regex_lazily(r"\$PWD\b|\$\{PWD\}|\$\(pwd\)|`pwd`|\$OLDPWD\b")
_VARIABLE = compile_regex_lazily(r"\$\w+")
MAX_PATH_BYTES = 4_095
"""The maximum bytes of a path. A longer word names no file."""
HOME_MARK = "\0HOME"
"""The placeholder at the beginning of a word for the home folder of programs."""


class ExecutingCommand(Struct, frozen=True):
    """One command of a text that runs something.

    :param words: each may name a file that is run, or the folder that contains it
    :param implied: names of files that are run if they are in the command's folder, or above it
    :param programs: bare names, each of which may be a program in one of :data:`PROGRAM_FOLDERS`
    :param levels: the number of nested folders that the command may change to in sequence
    :param enters: whether the command changes to one of the folders among its words, for the commands after it
    """

    words: tuple[str, ...]
    implied: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    levels: int = 1
    enters: bool = False


def find_executing_commands(script: ShellScript, text: str) -> tuple[ExecutingCommand, ...]:
    """Return the commands of a text with the words that may name what they run.

    A text that only handles data has none, except for the programs that it starts.
    """
    if script.unclear is None and all(treats_words_as_data(command.argv) for command in script.commands):
        return tuple(_bare_program_names(script))
    steps = [_make_command_step(command.argv) for command in script.commands]
    redirected = tuple(file.target for file in script.files)
    if script.unclear is not None or not script.is_plain:
        # As written too: where an argument has a mark, only the written word names the files that it may become.
        argvs = [word for command in script.commands for word in (*command.argv, *command.source)]
        steps.append(_make_step((*argvs, *_split_text_at_signs(text))))
    # A redirected file may be the input of an interpreter, so its content counts like a script's.
    if redirected:
        steps.append(ExecutingCommand(redirected))
    return tuple(steps)


def treats_words_as_data(argv: Sequence[str]) -> bool:
    """Return whether a command treats all of its words as data."""
    *_, inner = command_wrappers.split_wrapper_layers(argv)
    # A program with a path is a file that may have changed, whatever its name says.
    if not inner or "/" in inner[0]:
        return not inner
    if read_only_proof.is_command_provably_read_only(inner):
        return True
    return program_risks.program_name(inner) in _ONLY_DATA and program_risks.find_hidden_program_risk(inner) is None


def _bare_program_names(script: ShellScript) -> Iterator[ExecutingCommand]:
    """Return the bare names of a text's programs, which may be programs of the workspace."""
    names = {word for command in script.commands for word in _programs(command.argv)}
    if names:
        yield ExecutingCommand((), programs=tuple(sorted(names)))


def _programs(argv: Sequence[str]) -> Iterator[str]:
    for layer in command_wrappers.split_wrapper_layers(argv):
        if layer and "/" not in layer[0]:
            yield layer[0]


def _make_command_step(argv: Sequence[str]) -> ExecutingCommand:
    step = _make_step(argv)
    return replace(step, enters=program_risks.program_name(argv) in _MOVES)


def _make_step(argv: Iterable[str]) -> ExecutingCommand:
    words: dict[str, None] = {}
    implied: dict[str, None] = {}
    before = ""
    endings: dict[str, None] = {}
    loops = False
    moves = 0
    for word in argv:
        for part in _file_names_in_word(word):
            words[part] = None
            moves += part in _MOVES
            loops = loops or part in _LOOPS
            name = posixpath.basename(part).lower()
            implied.update(dict.fromkeys(_implied_files(name)))
            # Without the version, as in `python3.11`.
            endings.update(dict.fromkeys(_LOADED_ENDINGS.get(name.rstrip("0123456789.-"), ())))
        words.update(dict.fromkeys(_module_files_of_word(word, before)))
        before = word
    bare = tuple(word for word in words if _BARE.fullmatch(word))
    # Only with an interpreter among the words: for other programs, a dotted word is no module.
    for word in tuple(words) if endings else ():
        words.update(dict.fromkeys(_loaded_files(word, endings)))
    # Each `cd` may go one level deeper, and one in a loop any number of levels.
    return ExecutingCommand(tuple(words), tuple(implied), bare, MAX_LEVELS if loops and moves else 1 + moves)


def _loaded_files(word: str, endings: Iterable[str]) -> Iterator[str]:
    """Return the files that an interpreter loads for a word that may name a module, such as ``package.module``."""
    if _LOADED_NAME.fullmatch(word) is None:
        return
    for name in dict.fromkeys((word, word.replace("::", "/"), word.replace(".", "/"))):
        yield from (name + ending for ending in endings)


def _implied_files(name: str) -> tuple[str, ...]:
    found = _IMPLIED.get(name)
    return _IMPLIED.get(name.rstrip("0123456789."), ()) if found is None else found


def _file_names_in_word(word: str) -> Iterator[str]:
    """Return the word, and the parts of it that may name a file.

    Examples are ``--file=x``, ``-fx``, ``a.py::test``, and a text within a text.
    """
    # The variables for the home and the current folder are known. Others may have any value and are left as they are.
    word = _HERE.sub(".", _HOME.sub(HOME_MARK, word))
    yield word
    if word[:1] == "-" and len(word) > 2:
        yield word[2:]
    parts = _PARTS.split(word)
    for part in parts if len(parts) > 1 else ():
        if part:
            yield part
            if part[0] == "-" and len(part) > 2:
                yield part[2:]
    if _SIGNS.search(word):
        yield from _split_text_at_signs(word)


def _split_text_at_signs(text: str) -> Iterator[str]:
    """Return the parts between the signs of a text: with its quotes, without them, and without variables."""
    text = _HERE.sub(".", _HOME.sub(HOME_MARK, text))
    bare = _QUOTES.sub("", text)
    for read in dict.fromkeys((text, bare, _VARIABLE.sub(" ", bare))):
        for token in _SIGNS.split(read):
            for part in (token, *_PARTS.split(token)):
                if part:
                    yield part
                    if part[0] == "/":
                        yield part.lstrip("/")  # after an unknown variable
                    if part[0] == "-" and len(part) > 2:
                        yield part[2:]


def _module_files_of_word(word: str, before: str) -> Iterator[str]:
    """Return the files of the module that a word may name.

    The word stands after ``-m``, or has a form such as ``package.module:function``.
    """
    if _MODULE_OPTION.fullmatch(before + "_") is not None:
        return _python_module_files(word)
    if (bundle := _MODULE_OPTION.fullmatch(word)) is not None:
        return _python_module_files(bundle["name"])
    return _python_module_files(word.partition(":")[0]) if "." in word or ":" in word else iter(())


def _python_module_files(name: str) -> Iterator[str]:
    """Return the files that a Python module of this name may be."""
    if len(name) > MAX_PATH_BYTES or _MODULE.fullmatch(name) is None:
        return
    path = name.replace(".", "/")
    yield from (f"{path}.py", f"{path}/__main__.py", f"{path}/__init__.py")
    # Python runs the `__init__.py` of each package above a module.
    while path := posixpath.dirname(path):
        yield f"{path}/__init__.py"
