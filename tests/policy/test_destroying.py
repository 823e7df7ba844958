"""Irreversible losses: detected from the file system and git's index; confined ones run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.policy.desk import AuthorizerFixture

from handrail.policy.file_losses import find_irrecoverable_file_losses
from handrail.policy.shell import confinement_proof
from handrail.policy.shell.parser import parse_script

pytestmark = pytest.mark.proves("P-17")

IDENTITY = ("-c", "user.name=x", "-c", "user.email=x@example.org")
FILES = {
    "tracked.py": "a = 1\n",
    "changed.py": "a = 1\n",
    "src/a.py": "a = 1\n",
    "build/kept.txt": "tracked\n",
    ".gitignore": "dist/\nnode_modules\n/target/\n",
}
OTHERS = {
    "notes.txt": "work\n",
    "dist/x": "x",
    "node_modules/y/z": "x",
    "src/node_modules/y": "x",
    "target/x": "x",
    "out/x": "x",
    "src/__pycache__/a.pyc": "x",
    "empty.txt": "",
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> AuthorizerFixture:
    top = tmp_path_factory.mktemp("losses") / "ws"
    for name, text in (*FILES.items(), *OTHERS.items()):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    for words in (("init", "-q"), ("add", "-f", *FILES), (*IDENTITY, "commit", "-qm", "x")):
        subprocess.run(["git", "-C", str(top), *words], check=True, env={"PATH": "/usr/bin:/bin", "HOME": str(top)})
    (top / "changed.py").write_text("a = 2, and more\n")
    return AuthorizerFixture(top)


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        ("rm tracked.py", ()),
        ("rm changed.py", ("changed.py",)),
        ("rm notes.txt", ("notes.txt",)),
        ("rm nothing.txt empty.txt", ()),
        ("rm -rf dist node_modules src/node_modules target", ()),
        ("rm -rf src/dist", ()),
        ("rm -rf build", ("build",)),
        ("rm -rf out", ("out",)),
        ("rm -rf src/__pycache__", ()),
        ("cd src && rm a.py", ()),
        ("cd src && rm ../notes.txt", ("src/../notes.txt",)),
        ("cd src; rm notes.txt", ("notes.txt",)),
        ("(cd src); rm notes.txt", ("notes.txt",)),
        ("timeout 5 rm notes.txt", ("notes.txt",)),
        ("echo x > tracked.py", ("tracked.py",)),
        ("echo x >> tracked.py", ()),
        ("echo x > new.py", ()),
        ("echo x > empty.txt", ()),
        ("echo x > dist/x", ()),
        ("cd src && echo x > a.py", ("src/a.py",)),
        ("for i in 1 2; do echo $i > notes.txt; done", ("notes.txt",)),
        ("if true; then echo $(echo x > notes.txt); fi", ("notes.txt",)),
        ("mv tracked.py notes.txt", ("notes.txt",)),
        ("mv notes.txt src", ()),
        ("cp notes.txt src/b.py", ()),
        ("cp notes.txt src/a.py", ("src/a.py",)),
        ("cp src/a.py tracked.py src", ("src",)),
        ("ls | tee notes.txt", ("notes.txt",)),
        ("ls | tee -a notes.txt", ()),
        ("ln -sf x notes.txt", ("notes.txt",)),
        ("ln -s x notes.txt", ()),
        ("git checkout changed.py", ("changed.py",)),
        ("git checkout tracked.py", ()),
        ("git checkout src", ("src",)),
        ("git checkout main", ()),
        ("rm /etc/passwd", ()),
        ("awk '{print > \"notes.txt\"}' src/a.py", ("notes.txt",)),
        ("awk '{print >> \"notes.txt\"; x = 1 > 0}' src/a.py", ()),
        ('F=notes.txt; echo x > "$F"', ("notes.txt",)),
        ('F=new.txt; echo x > "$F"', ()),
        ("F=notes.txt; rm $F", ("notes.txt",)),
        ("ln -sfn x notes.txt", ("notes.txt",)),
        ("ls | sponge notes.txt", ("notes.txt",)),
        ("> notes.txt", ("notes.txt",)),
        ("make test; > dist/x", ()),
        ("truncate -s 0 dist/x", ()),
        ("truncate -s 0 build/kept.txt", ("build/kept.txt",)),
        ("rm -rf dist/*", ()),
        ("rm dist/*.o target/*", ()),
        ("rm -rf out/*", ("out/",)),
        ("tar xzf old.tgz", (".",)),
        ("tar -C src -xf old.tar", ("src",)),
        ("tar --extract --file=old.tar --directory=src", ("src",)),
        ("tar -xf old.tar -C dist", ()),
        ("mkdir new && tar -xf old.tar -C new", ()),
        ("tar -xkf old.tar", ()),
        ("tar -tf old.tar && tar czf dist/x.tgz src", ()),
        ("cd src && tar xf ../old.tar", ("src/.",)),
        ("git archive HEAD | tar -x -C src", ("src",)),
        ("unzip -oq a.zip", (".",)),
        ("unzip -o a.zip -d dist", ()),
        ("unzip a.zip -d src", ()),
        ("7z x a.7z -y -osrc", ("src",)),
        ("cpio -idu < x", (".",)),
        ("bash -c '> notes.txt'", ("notes.txt",)),
        ("sh -c 'echo x > notes.txt'", ("notes.txt",)),
        ("bash -ec 'make test > dist/x; rm tracked.py'", ()),
        ("cd src && bash -c 'rm ../notes.txt'", ("src/../notes.txt",)),
        ("timeout 5 sh -c 'cd src && rm ../notes.txt'", ("src/../notes.txt",)),
        ("sh -c \"bash -c 'rm notes.txt'\"", ("notes.txt",)),
        ("nohup sh -c 'cp src/a.py notes.txt' &", ("notes.txt",)),
        ("bash -c -- 'rm notes.txt'", ("notes.txt",)),
        ("bash -ce 'rm notes.txt'", ("notes.txt",)),
        ("bash -c -e -o pipefail 'rm notes.txt' x", ("notes.txt",)),
        ("tar -xfbackup.tar", (".",)),
        ("tar -xkf old.tar --overwrite", (".",)),
        ("tar -xf old.tar --keep-newer-files", (".",)),
        ("tar xUkf old.tar", (".",)),
        ("tar -xf old.tar -Csrc x -C new", ("src",)),
        ("tar -xf old.tar -C src x -C new", ("src",)),
        ("7z -y x a.7z", (".",)),
        ("find dist | cpio -pdu src", ("src",)),
        ("find dist | cpio -p -d -u src", ("src",)),
        ("cpio -i -d -u -F x.cpio", (".",)),
        ("find dist | cpio -pd src", ()),
        ("mv -nf src/a.py notes.txt", ("notes.txt",)),
        ("mv -n src/a.py notes.txt", ()),
        ("cp --backup=none src/a.py notes.txt", ("notes.txt",)),
        ("cp --backup=numbered src/a.py notes.txt", ()),
        ("cp -b src/a.py notes.txt", ()),
        ("ln -sbf x notes.txt", ()),
    ],
)
def test_the_check_finds_the_files_that_a_command_would_destroy(
    repository: AuthorizerFixture, text: str, losses: tuple[str, ...]
) -> None:
    assert find_irrecoverable_file_losses(parse_script(text), repository.roots) == losses


def test_a_broad_rule_does_not_allow_data_loss_but_an_exact_rule_does(repository: AuthorizerFixture) -> None:
    for text in ("rm notes.txt", "rm -rf out", "cp src/a.py notes.txt"):
        assert repository.bash(text, "allow bash", "allow fs.write").action == "ask"
        assert repository.bash(text, "allow bash", f"allow bash {text}").action == "allow"
    assert repository.bash("rm -rf dist", "allow bash").action == "allow"
    assert "cannot be restored" in repository.bash("echo x > notes.txt", "allow bash", "allow fs.write").reason


def test_a_changed_ignore_file_does_not_hide_the_loss_of_files(repository: AuthorizerFixture) -> None:
    """Tracked files stay a loss whatever an ignore file says, and so do all files after a negated pattern."""
    ignore = Path(repository.path(".gitignore"))
    before = ignore.read_text()
    try:
        ignore.write_text("build/\n")
        assert find_irrecoverable_file_losses(parse_script("rm -rf build"), repository.roots) == ("build",)
        ignore.write_text("dist/\n!dist/x\n")
        assert find_irrecoverable_file_losses(parse_script("rm -rf dist"), repository.roots) == ("dist",)
        ignore.write_text("src/\n")
        assert find_irrecoverable_file_losses(parse_script("rm notes.txt"), repository.roots) == ("notes.txt",)
    finally:
        ignore.write_text(before)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("content", [b"dist/" * 2_000_000, b"tracked.py\0" * 1_000_000, b"\0" * 15_000_000])
def test_an_index_that_takes_too_long_to_search_proves_nothing(repository: AuthorizerFixture, content: bytes) -> None:
    index = Path(repository.path(".git/index"))
    before = index.read_bytes()
    try:
        index.write_bytes(b"DIRC\0\0\0\2\0\0\0\1" + content)
        assert find_irrecoverable_file_losses(parse_script("rm tracked.py"), repository.roots) == ("tracked.py",)
        assert not content.startswith(b"dist") or find_irrecoverable_file_losses(
            parse_script("rm -rf dist"), repository.roots
        ) == ("dist",)
    finally:
        index.write_bytes(before)


CONFINED = [
    "pytest -q", "python -m pytest -x", "python script.py", "./run.sh", "make test CI=1", "npm test", "npx --no-install tsc", "uv run pytest -q",
    "sed -i s/a/b/ f", "sed -i s/a/b/ *.py", "ls | xargs sed -i s/a/b/", "find . -name '*.py' -exec grep -n x {} +", "find . -name '*.pyc' -delete",
    "find . -name __pycache__ -exec rm -rf {} +", "bash -c 'ls | wc -l'", "bash -ec 'ls' x", "bash -e -o pipefail -c 'ls | wc'", "bash -o pipefail run.sh", "bash run.sh", "fish run.fish", "git commit -m \"$(cat <<'E'\nx\nE\n)\"", "git add $x",
    "for f in src/*.py; do python \"$f\"; done", "rm -rf __pycache__", "git -C sub commit -am x",
    "git -c color.ui=never log -1", "git -c user.name=x -c user.email=x@y commit -m x", "git -c core.pager=cat -c commit.gpgsign=false commit -m x",
    "git config user.name", "git config --type=bool core.bare", "git format-patch -3 -o build/patches", "find src -type d -empty -delete",
    "env -i HOME=/tmp PATH=/usr/bin make test", "env -u PYTHONPATH pytest -q", "env PYTHONPATH=src pytest", "xargs -a files.txt wc -l",
    "strace -f -e trace=openat python3 src/a.py", "terraform fmt -check", "helm template chart", "docker compose config", "rsync -a src/ build/copy",
    "source .venv/bin/activate && pytest -q", ". ./env.sh fast; make", "curl -sS localhost:8000/x | head", "curl http://127.0.0.1:3000/",
    "cmake -S . -B out -DCMAKE_C_COMPILER=clang --toolchain x.cmake", "set -a; . ./.env; set +a; pytest",
    "npx tsc --noEmit", "npx @biomejs/biome check src", "npx eslint .", "fd -e py -x wc -l", "fd -e py -X ruff format {}", "chmod -R u+w build",
    "make -j\"$(nproc)\"", "make -j$(nproc) test", "bash -n run.sh", "psql --version; vim --version", "sed -i '1i # x' f", "sed -i '/x/a y z' f",
    "> build/x.log", "truncate -s 0 build/x.log", "rm -rf build/*", "unzip -o x.zip -d build/x", "kill $PID", "kill -9 $!", "pkill -f http.server",
    "curl -X POST 'http://[::1]:80'", "sed -i.bak -E 's/(a) b/\\1/' f", "LOG=build/x.log; make test > \"$LOG\" 2>&1; tail \"$LOG\"",
]  # fmt: skip
NOT_CONFINED = [
    "rm -rf .git", "git clean -fd", "git $x", "bash -c 'rm -rf .git'", "bash -c \"$x\"",
    "bash -c -- 'rm -rf src'", "sh -c -e 'rm -rf src'", "bash -c +x 'rm -rf src'", "bash -c -o pipefail 'rm -rf src'", "timeout 5 zsh -c -- 'rm -rf src'",
    "bash -o errexit -c 'rm -rf src'", "bash -eo posix -c 'rm -rf src'", "bash -o run.sh", "bash -O extglob -c 'rm -rf src'",
    "fish -c true -c 'rm -rf src'", "pwsh -c 'Remove-Item src'", "find . -exec bash -c -- 'rm -rf src' ;", "psql -version", "sh $x", "sh", "cat x | sh", "sh <<'E'\nrm -rf .\nE",
    "find . -exec rm {} +", "find . -exec sh -c 'rm -rf .' ;", "ls | xargs rm", "ls | xargs -I{} mv {} /x", "uv run rm -rf src", "npx --no-install rimraf x",
    "npx create-vite web", "npx vite@latest", "npx $x", "npx -y tsc", "npx rimraf src", "npx playwright install", "fd -e py -X rm", "fd -x rm {}", "fd -HIx rm",
    "fd . -x sh -c 'rm {}'", "chmod -R -x src", "chmod -R u=r src", "chmod -R 000 src", "make -j$x", "make -j \"$x\"", "bash -n", "psql -c x", "tclsh --version",
    "sed -i '1c x' f", "sed -i '1r x' f", "truncate -s 0 f", "rm -rf \"$x\"/*", "rm -rf src/*", "rm -rf build/{a,../../src}", "rm -rf build/[ab]*/../../src", "kill -9 -1", "kill -- -1", "pkill -9 -u x", "npm unpublish x",
    "mvn deploy", "mongosh --eval x", "pip install x", "python -m pip install x", "curl x", "git push", "git fetch", "python -c 'x'", "python $x", "node -e x", "eval ls", "source $x", "source", "source -p x y", ". /dev/stdin", "source <(curl x)",
    "sudo ls", "make SHELL=x", "make -f -", "sed -i 'w x' f", "sed -i d f", "cp x .git/hooks/y", "mv .git x", "git -C .. status -x", "git -c a=b commit",
    "cd / && rm x", "$x y", "f() { x; }",
    "git -c core.pager=./x log", "git -c core.fsmonitor=./x status", "git -c user.name=x -c alias.l=!x l", "git -c commit.gpgsign=true commit -m x",
    "git -c core.editor=./x commit", "git -c color.pager.x=./y -c pager.log=./y log", "git config user.name x", "git config --file f user.name x",
    "git format-patch -1 -o ../x", "git format-patch -1 -o $x", "find src -empty -delete", "find . -type d -delete", "find / -type d -empty -delete",
    "find . -delete -type d -empty", "env -i rm -rf src", "env -u X rm a.py", "env GIT_SSH_COMMAND='rm -rf src' git log", "env -S 'rm x'", "env -i $x",
    "env -i git push", "python -m twine upload x", "python3 -m pipx install x", "rsync -a x h:y", "rsync -a h::m x", "rsync rsync://h/m x", "terraform apply",
    "helm install x y", "docker compose up", "sed -n -i p f", "sed -n -i.bak /x/p f", "sed -i 's/.*//' f", "perl -ni -e x f", "perl -i.bak -ne x f", "ruby -n -i -e x f",
    "curl localhost:80 http://x.org", "curl http://localhost.x.org", "curl http://localhost:80@x.org/", "curl http://localhost:$P", "curl -o a.py localhost",
    "cmake -E rm -rf src", "cmake -P x.cmake", "curl -K x localhost", "wget localhost/a.py", "source x && rm a.py", "source x && git push", "gawk -i inplace 0 f", "strace rm -rf src", "X=.git; rm -rf $X", "X=-rf; rm $X src",
]  # fmt: skip


@pytest.mark.proves("P-16")
@pytest.mark.parametrize("text", CONFINED)
def test_a_command_without_contradicting_words_stays_confined(text: str) -> None:
    assert confinement_proof.explain_script_not_confined(parse_script(text)) is None


@pytest.mark.proves("P-16")
@pytest.mark.parametrize("text", NOT_CONFINED)
def test_a_destructive_networked_or_undecidable_command_is_not_confined(text: str) -> None:
    assert confinement_proof.explain_script_not_confined(parse_script(text)) is not None
