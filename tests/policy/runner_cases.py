"""Ways to run ``rm -rf x`` through another program, and commands in which the same words are only data."""

from __future__ import annotations

CERTAIN = [
    # another spelling
    "/bin/rm -rf x", "/usr/local/bin/rm -rf x", "./rm -rf x", "/tmp/evil/rm -rf x", "r''m -rf x", "RM -rf x",
    # users, limits, namespaces
    "env rm -rf x", "env -i A=1 rm -rf x", "env -S 'rm -rf x'", "env --split-string='rm -rf x'", "sudo rm -rf x", "sudo -u bob -- rm -rf x",
    "sudo -iu bob rm -rf x", "doas -u bob rm -rf x", "su -c 'rm -rf x'", "su bob -c 'rm -rf x'", "su - bob --command='rm -rf x'",
    "runuser -u bob -- rm -rf x", "runuser bob -c 'rm -rf x'", "pkexec rm -rf x", "sg wheel -c 'rm -rf x'", "nice -n 5 rm -rf x",
    "ionice -c 3 rm -rf x", "chrt -f 1 rm -rf x", "taskset -c 0 rm -rf x", "taskset 1 rm -rf x", "timeout 5 rm -rf x",
    "timeout -k 1 -s KILL 5 rm -rf x", "time rm -rf x", "/usr/bin/time -v rm -rf x", "nohup rm -rf x", "setsid -f rm -rf x",
    "stdbuf -oL rm -rf x", "unbuffer rm -rf x", "script -c 'rm -rf x'", "script -qc 'rm -rf x' /dev/null", "watch rm -rf x",
    "watch 'rm -rf x'", "watch -n1 'cd y; rm -rf x'", "xargs rm -rf x", "xargs -I F rm -rf x",
    "xargs -n1 sh -c 'rm -rf x'", "parallel rm -rf ::: x", "parallel 'rm -rf x' ::: 1", "parallel -j2 --eta rm -rf ::: x",
    "flock f rm -rf x", "flock f -c 'rm -rf x'", "chroot / rm -rf x", "unshare -r rm -rf x", "nsenter -t 1 -m rm -rf x",
    "bwrap --bind / / rm -rf x", "firejail rm -rf x", "proot -r / rm -rf x", "fakeroot rm -rf x", "fakeroot -- rm -rf x",
    "systemd-run rm -rf x", "systemd-run --user --scope rm -rf x", "systemd-inhibit rm -rf x", "systemd-nspawn -D / rm -rf x",
    "machinectl shell h /bin/rm -rf x", "setpriv --reuid 1 rm -rf x", "capsh -- -c 'rm -rf x'", "prlimit --nproc=1 rm -rf x",
    "numactl -N 0 rm -rf x", "setarch x86_64 rm -rf x", "linux32 rm -rf x", "cpulimit -l 5 -- rm -rf x", "chpst -u bob rm -rf x",
    "gosu bob rm -rf x", "su-exec bob rm -rf x", "s6-setuidgid bob rm -rf x", "dumb-init rm -rf x", "tini -- rm -rf x",
    "start-stop-daemon --start --exec /bin/rm -- -rf x", "daemonize /bin/rm -rf x", "catchsegv rm -rf x", "faketime yesterday rm -rf x",
    "eatmydata rm -rf x", "run-parts --arg=x rm -rf x", "run-parts --arg=x /bin --regex '^rm$'", "gtimeout 5 rm -rf x", "i386 rm -rf x",
    # shells and the shell's own
    "sh -c 'rm -rf x'", "bash -lc 'rm -rf x'", "bash -ec 'cd y && rm -rf x'", "zsh -c 'rm -rf x'", "fish -c 'rm -rf x'", "dash -c 'rm -rf x'",
    "pwsh -c 'rm -rf x'", "nu -c 'rm -rf x'", "xonsh -c 'rm -rf x'", "bash -c 'for i in a; do rm -rf x; done'", "sh -c \"sh -c 'rm -rf x'\"",
    "bash -c 'echo $(rm -rf x)'", "command rm -rf x", "builtin command rm -rf x", "exec -a z rm -rf x", "eval rm -rf x", "eval 'rm -rf x'",
    "trap 'rm -rf x' EXIT", "coproc rm -rf x", "busybox rm -rf x", "busybox sh -c 'rm -rf x'", "toybox rm -rf x",
    "/lib64/ld-linux-x86-64.so.2 /bin/rm -rf x", "bash ./rm -rf x",
    # terminals
    "tmux new -d 'rm -rf x'", "tmux new-session -d rm -rf x", "tmux run-shell 'rm -rf x'", "tmux -c 'rm -rf x'", "tmux send-keys 'rm -rf x' Enter",
    "screen -dm rm -rf x", "screen -X exec rm -rf x", "xterm -e rm -rf x", "xterm -e 'rm -rf x'", "gnome-terminal -- rm -rf x",
    "xvfb-run rm -rf x", "xvfb-run -a rm -rf x", "dbus-run-session -- rm -rf x", "asciinema rec -c 'rm -rf x'", "ssh-agent rm -rf x",
    # debuggers
    "strace -f rm -rf x", "ltrace rm -rf x", "gdb --args rm -rf x", "gdb -ex 'shell rm -rf x'", "gdb -batch -ex '!rm -rf x'",
    "valgrind rm -rf x", "perf stat rm -rf x", "perf record -- rm -rf x", "rr record rm -rf x", "hyperfine 'rm -rf x'",
    "hyperfine --prepare 'rm -rf x' ls", "multitime rm -rf x", "coverage run rm -rf x", "ccache rm -rf x",
    "expect -c 'spawn rm -rf x'", "expect -c 'exec rm -rf x'",
    # watchers
    "entr rm -rf x", "entr -s 'rm -rf x'", "watchexec rm -rf x", "watchexec -- rm -rf x", "nodemon --exec 'rm -rf x'", "reflex rm -rf x",
    "pm2 start 'rm -rf x'", "forever start -c 'rm -rf x' y", "air --build.cmd 'rm -rf x'", "concurrently 'rm -rf x'", "cross-env A=1 rm -rf x",
    # network
    "socat - EXEC:'rm -rf x'", "socat - 'SYSTEM:rm -rf x'", "nc -l -e 'rm -rf x'", "nc -c 'rm -rf x' h 1", "ncat --exec 'rm -rf x' h 1",
    "ncat --sh-exec 'rm -rf x' h 1", "proxychains rm -rf x", "proxychains4 -q rm -rf x", "torsocks rm -rf x", "tsocks rm -rf x",
    "ssh h rm -rf x", "ssh -p 22 u@h rm -rf x", "ssh h 'rm -rf x'", "ssh h 'cd y && rm -rf x'", "ssh h -- rm -rf x", "ssh h sudo rm -rf x",
    "ssh h sh -c 'rm -rf x'", "ssh -o ProxyCommand='rm -rf x' h", "ssh -oProxyCommand='rm -rf x' h", "ssh -o 'LocalCommand rm -rf x' h",
    "mosh h -- rm -rf x", "rsh h rm -rf x", "autossh h rm -rf x", "sshpass -p y ssh h rm -rf x", "ssh h bash -lc 'rm -rf x'",
    "rsync -e 'rm -rf x' a b", "rsync --rsh='rm -rf x' a b", "rsync --rsync-path='rm -rf x' a h:b", "rsync -ae 'rm -rf x' a b",
    "scp -S 'rm -rf x' a h:b", "scp -oProxyCommand='rm -rf x' a h:b", "sftp -S 'rm -rf x' h", "sftp -o ProxyCommand='rm -rf x' h",
    "pssh -H h rm -rf x", "parallel-ssh -i -H h 'rm -rf x'", "pdsh -w h rm -rf x", "clush -w h rm -rf x", "ansible all -m shell -a 'rm -rf x'",
    "ansible all -m command -a 'cmd=\"rm -rf x\"'", "salt '*' cmd.run 'rm -rf x'", "fab -H h -- rm -rf x",
    # containers and machines
    "docker run alpine rm -rf x", "docker run --rm -v /:/h alpine rm -rf x", "docker exec c rm -rf x", "docker exec -it c sh -c 'rm -rf x'",
    "docker run --entrypoint rm alpine -rf x", "docker run --entrypoint=/bin/rm alpine -rf x", "docker container run alpine rm -rf x",
    "docker compose run app rm -rf x", "docker compose -f y exec app rm -rf x", "docker-compose exec app rm -rf x", "docker --context c exec c rm -rf x",
    "podman run alpine rm -rf x", "podman exec c rm -rf x", "nerdctl run alpine rm -rf x", "kubectl exec p -- rm -rf x",
    "kubectl -n n exec -it p -c c -- rm -rf x", "kubectl exec p -- sh -c 'rm -rf x'", "kubectl run p --image=i --command -- rm -rf x",
    "kubectl debug p --image=i -- rm -rf x", "kubectl create job j --image=i -- rm -rf x", "oc exec p -- rm -rf x", "oc rsh p rm -rf x",
    "lxc exec c -- rm -rf x", "incus exec c -- rm -rf x", "vagrant ssh -c 'rm -rf x'", "vagrant ssh -- rm -rf x", "multipass exec m -- rm -rf x",
    "limactl shell m rm -rf x", "crictl exec c rm -rf x", "runc exec c rm -rf x", "singularity exec i rm -rf x", "apptainer exec i rm -rf x",
    "flatpak run --command=rm app -rf x", "flatpak-spawn --host rm -rf x", "distrobox enter c -- rm -rf x", "toolbox run rm -rf x",
    "wsl -e rm -rf x", "wsl rm -rf x", "gcloud compute ssh h --command='rm -rf x'", "fly ssh console -C 'rm -rf x'", "heroku run rm -rf x",
    "aws ssm send-command --parameters 'commands=[\"rm -rf x\"]'", "gh codespace ssh -- rm -rf x", "gh alias set y '!rm -rf x'",
    "consul exec rm -rf x", "nomad alloc exec a rm -rf x",
    # git and its kind
    "git -c alias.y='!rm -rf x' y", "git -c core.pager='rm -rf x' log", "git -c core.fsmonitor='rm -rf x' status", "git -c core.sshCommand='rm -rf x' fetch",
    "git bisect run rm -rf x", "git bisect run sh -c 'rm -rf x'", "git rebase -x 'rm -rf x' main", "git rebase --exec='rm -rf x' main",
    "git rebase -i --exec 'rm -rf x' main", "git submodule foreach rm -rf x", "git submodule foreach --recursive 'rm -rf x'",
    "git filter-branch --tree-filter 'rm -rf x'", "git filter-branch --index-filter 'rm -rf x' HEAD", "git difftool -x 'rm -rf x'",
    "git difftool --extcmd='rm -rf x'", "git grep -O'rm -rf x' y", "git grep --open-files-in-pager='rm -rf x' y", "git clone 'ext::rm -rf x' y",
    "git fetch --upload-pack='rm -rf x' o", "git push --receive-pack='rm -rf x' o", "git config alias.y '!rm -rf x'", "git clone -u 'rm -rf x' a b",
    "hg --config alias.y='!rm -rf x' y", "hg --config hooks.pre-log='rm -rf x' log", "hg bisect -c 'rm -rf x'", "svn diff --diff-cmd 'rm -rf x'",
    # build tools and package managers
    "make CC='rm -rf x'", "make --eval='x:;rm -rf x'", "cmake -E env rm -rf x", "cmake -E time rm -rf x", "cmake -E rm -rf x", "meson devenv rm -rf x",
    "just --command rm -rf x", "just -c rm -rf x", "npm exec -- rm -rf x", "npm exec -c 'rm -rf x'", "npm x rm -rf x", "npx rm -rf x", "npx -c 'rm -rf x'",
    "npm explore p -- rm -rf x", "pnpm exec rm -rf x", "pnpm dlx rm -rf x", "yarn exec rm -rf x", "yarn exec 'rm -rf x'", "yarn dlx rm -rf x",
    "bun x rm -rf x", "bunx rm -rf x", "uv run rm -rf x", "uv run --with y rm -rf x", "uv run -- rm -rf x", "uvx rm -rf x", "poetry run rm -rf x",
    "pipenv run rm -rf x", "pdm run rm -rf x", "hatch run rm -rf x", "rye run rm -rf x", "pixi run rm -rf x", "conda run -n e rm -rf x",
    "mamba run rm -rf x", "micromamba run -n e rm -rf x", "pipx run rm -rf x", "bundle exec rm -rf x", "gem exec rm -rf x", "rbenv exec rm -rf x",
    "pyenv exec rm -rf x", "nodenv exec rm -rf x", "asdf exec rm -rf x", "mise exec -- rm -rf x", "mise x -- rm -rf x", "direnv exec . rm -rf x",
    "rustup run stable rm -rf x", "opam exec -- rm -rf x", "nvm exec 20 rm -rf x", "volta run rm -rf x", "fnm exec rm -rf x", "stack exec rm -- -rf x",
    "cargo watch -x rm -s 'rm -rf x'", "cargo watch -s 'rm -rf x'", "go test -exec 'rm -rf x' ./p", "go build -toolexec='rm -rf x' ./p",
    "mvn exec:exec -Dexec.executable=rm", "nix run nixpkgs#x -c rm -rf x", "nix shell nixpkgs#x -c rm -rf x", "nix develop -c rm -rf x",
    "nix develop --command rm -rf x", "nix-shell --run 'rm -rf x'", "nix-shell -p y --command 'rm -rf x'", "guix shell y -- rm -rf x",
    "guix environment --ad-hoc y -- rm -rf x", "tox exec -- rm -rf x", "lerna exec rm -rf x", "brew sh -c 'rm -rf x'", "devbox run rm -rf x",
    "apt-get -o APT::Update::Pre-Invoke::='rm -rf x' update", "apt -oDpkg::Pre-Invoke='rm -rf x' install y", "dpkg --pre-invoke='rm -rf x' -i y",
    "rpm --eval '%(rm -rf x)'", "python -m coverage run rm -rf x",
    # options of ordinary programs
    "find . -exec rm -rf x ';'", "find . -execdir rm -rf x +", "find . -ok rm -rf x ';'", "find . -exec sh -c 'rm -rf x' ';'",
    "fd y -x rm -rf x", "fd -X rm -rf x", "fd --exec rm -rf x", "fd --exec-batch=rm", "fzf --preview 'rm -rf x'", "fzf --preview='rm -rf x'",
    "fzf --bind 'enter:execute(rm -rf x)'", "fzf --bind='ctrl-a:become(rm -rf x)'", "fzf --bind 'start:reload:rm -rf x'", "sk --preview 'rm -rf x'",
    "gum spin -- rm -rf x", "gum spin --title t -- rm -rf x", "tar --checkpoint-action='exec=rm -rf x' -cf a b", "tar --to-command='rm -rf x' -xf a",
    "tar --to-comm='rm -rf x' -xf a", "tar -I 'rm -rf x' -xf a", "tar --use-compress-program 'rm -rf x' -xf a", "tar --rmt-command='rm -rf x' -xf h:a",
    "tar --info-script='rm -rf x' -cf a b", "zip -TT 'rm -rf x' a b", "zip --unzip-command='rm -rf x' a b", "rg --pre 'rm -rf x' y", "rg --pre=rm y",
    "rg --hostname-bin rm y", "sort --compress-program='rm -rf x' f", "split --filter='rm -rf x' f", "man -P 'rm -rf x' ls", "man --pager='rm -rf x' ls",
    "less '+!rm -rf x' f", "bat --pager 'rm -rf x' f", "wget --use-askpass='rm -rf x' u", "aria2c --on-download-complete='rm -rf x' u",
    "yt-dlp --exec 'rm -rf x' u", "install --strip-program='rm -rf x' -s a b", "gpg --agent-program 'rm -rf x' -d f", "borg --rsh 'rm -rf x' list",
    "restic -o sftp.command='rm -rf x' ls", "rclone --password-command 'rm -rf x' ls y", "sdiff --diff-program='rm -rf x' a b",
    "podman unshare rm -rf x", "podman machine ssh rm -rf x", "yarn run rm -rf x", "bun run rm -rf x", "ip netns exec n rm -rf x", "task -- rm -rf x",
    "corepack yarn exec rm -rf x", "VBoxManage guestcontrol v run --exe /bin/rm -- rm -rf x", "tcpdump -z rm -w f", "openvpn --up 'rm -rf x'",
    "java -XX:OnError='rm -rf x' X", "systemctl set-environment EDITOR='rm -rf x'", "cmake -E chdir d rm -rf x", "nix-build --run 'rm -rf x'",
    "nix eval --expr 'builtins.exec [\"rm\" \"x\"]'", "heroku run:detached 'rm -rf x'", "git daemon --access-hook='rm -rf x'", "logsave f rm -rf x",
    "/lib/ld-musl-x86_64.so.1 /bin/rm -rf x", "tmux if-shell true 'run \"rm -rf x\"'", "lldb -o 'platform shell rm -rf x'", "debugfs -R '!rm -rf x' d",
    "env -S'rm -rf x'", "env -vS 'rm -rf x'", "bash -c '$0 -rf x' rm", "sh -c 'exec \"$@\"' sh rm -rf x", "fish --command='rm -rf x'", "fzf --bind 'enter:execute:rm -rf x'",
    "hatch -e e run rm -rf x", "uv tool run rm -rf x", "psql -c '\\o |rm -rf x'", "mysql --pager='rm -rf x'", "rake -e 'sh \"rm -rf x\"'",
    "docker run img env A=b sh -c 'rm -rf x'", "xargs -P4 env -i /bin/rm", "find . -exec env rm -rf x +", "sudo -E env A=b nice rm -rf x",
    # tools of teams, clouds and folders; options attached to their values behind a sub-command
    "fly ssh console -C'rm -rf x'", "nix develop -c'rm -rf x'", "ansible-console h -a 'rm -rf x'", "lima rm -rf x",
    "orb -m u rm -rf x", "devspace enter -- rm -rf x", "okteto exec -- rm -rf x", "garden exec s rm -rf x", "mirrord exec -- rm -rf x",
    "telepresence intercept s -- rm -rf x", "flox activate -- rm -rf x", "flox activate -c 'rm -rf x'", "pulumi env run e -- rm -rf x",
    "sst shell rm -rf x", "sops exec-env f 'rm -rf x'", "berglas exec -- rm -rf x", "netlify dev:exec rm -rf x", "tailscale ssh h rm -rf x",
    "boundary connect -exec rm -- -rf x", "consul-template -exec 'rm -rf x'", "tv --source-command 'rm -rf x'", "terragrunt --tf-path rm plan",
    "proto run node -- rm -rf x", "bundler exec rm -rf x", "nix build --post-build-hook 'rm -rf x'", "npm edit --editor 'rm -rf x'",
    "meson test --wrapper='rm -rf x'", "meson test --wrap 'rm -rf x'",
    "rsync -M--rsh='rm -rf x' a h:b", "bfs . -exec rm -rf x ';'", "fzf --with-shell 'rm -rf x' --preview y", "summon rm -rf x", "enroot start c rm -rf x",
    "yt-dlp --downloader-args 'rm -rf x' u", "docker service update --args 'rm -rf x' s", "flux run rm -rf x", "dagger run rm -rf x",
    "cabal v2-exec rm -- -rf x", "composer exec -- rm -rf x", "composer exec rm -rf x", "esy rm -rf x", "jj --config-toml='ui.pager=\"rm -rf x\"' log",
    "repo forall -c 'rm -rf x'", "ddev exec rm -rf x", "pueue add -- rm -rf x", "nq rm -rf x", "py-spy record -- rm -rf x", "wgo rm -rf x",
    "mycli -e 'system rm -rf x'", "sqlcmd -Q ':!! rm -rf x'", "iex -e 'System.cmd(\"rm\",[\"-rf\",\"x\"])'", "bb -e '(shell \"rm -rf x\")'",
    "swipl -g 'shell(\"rm -rf x\")' -t halt", "sage -c 'import os; os.system(\"rm -rf x\")'", "rizin -qc '!rm -rf x' =",
    # code
    "awk -v c='rm -rf x' 'BEGIN{system(c)}'", "vim -c ':term rm -rf x'", "ruby -e '%x(rm -rf x)'", "php -r 'passthru(\"rm -rf x\");'",
    "perl -e 'open(F, \"rm -rf x|\")'", "python -c \"import pty; pty.spawn(['rm','-rf','x'])\"", "node -e \"require('child_process').spawnSync('rm', ['x'])\"",
    "ruby -e 'IO.popen([\"rm\", \"-rf\", \"x\"])'", "python -c '__import__(\"os\").system(\"rm -rf x\")'", "perl -pe 's/x/`rm -rf x`/e' f",
    "awk 'BEGIN{system(\"rm -rf x\")}'", "awk '{print | \"rm -rf x\"}' f", "gawk '\"rm -rf x\" | getline' f", "sed '1e rm -rf x' f", "sed -n '1!e rm -rf x' f",
    "python -c 'import os; os.system(\"rm -rf x\")'", "python3 -c \"import subprocess; subprocess.run(['rm','-rf','x'])\"",
    "python3.12 -Ic 'import os; os.execlp(\"rm\", \"rm\", \"-rf\", \"x\")'", "perl -e 'system \"rm -rf x\"'", "perl -e '`rm -rf x`'", "perl -e 'exec qw(rm -rf x)'",
    "ruby -e '`rm -rf x`'", "ruby -e 'system(\"rm\", \"-rf\", \"x\")'", "node -e 'require(\"child_process\").execSync(\"rm -rf x\")'",
    "php -r 'shell_exec(\"rm -rf x\");'", "lua -e 'os.execute(\"rm -rf x\")'", "deno eval 'new Deno.Command(\"rm\", {args: [\"x\"]}).spawn()'",
    "Rscript -e 'system(\"rm -rf x\")'", "julia -e 'run(`rm -rf x`)'", "vim -c '!rm -rf x' f", "vim -c ':!rm -rf x' f", "vim '+!rm -rf x' f",
    "vim -c 'call system(\"rm -rf x\")' f", "nvim --cmd '!rm -rf x'", "emacs --batch --eval '(shell-command \"rm -rf x\")'", "ed '!rm -rf x'",
    "sqlite3 d '.shell rm -rf x'", "sqlite3 -cmd '.system rm -rf x' d", "psql -c '\\! rm -rf x'", "psql -c \"copy t to program 'rm -rf x'\"",
    "mysql -e 'system rm -rf x'", "mysql -e '\\! rm -rf x'", "lftp -e '!rm -rf x'", "m4 -e 'syscmd(rm -rf x)'", "dc -e '!rm -rf x'",
    "gnuplot -e 'system \"rm -rf x\"'", "exiftool -if 'system(\"rm -rf x\")' f", "osascript -e 'do shell script \"rm -rf x\"'",
    "erl -eval 'os:cmd(\"rm -rf x\")'", "guile -c '(system \"rm -rf x\")'", "octave --eval 'system(\"rm -rf x\")'", "tclsh 'exec rm -rf x'",
]  # fmt: skip
"""The program is known to run the words: they are denied as ``rm -rf x`` itself is."""

GUESSED = [
    "someprog rm -rf x", "someprog -- rm -rf x", "someprog --now rm -rf x", "someprog 'rm -rf x'", "someprog --cmd='rm -rf x'",
    "someprog -c 'rm -rf x'", "someprog --hook 'cd y && rm -rf x'", "./deploy.sh rm -rf x", "python run.py rm -rf x",
    "python run.py 'rm -rf x'", "python -m runner rm -rf x", "make-it rm -rf x", "node run.js rm -rf x", "ruby run.rb rm -rf x",
    "newrunner -- sh -c 'rm -rf x'", "newrunner /bin/rm -rf x", "newrunner '/bin/rm -rf x'", "newrunner env rm -rf x", "newrunner --exec=rm",
    "newrunner --then 'echo a; rm -rf x'", "newrunner 'exec(rm -rf x)'", "newrunner --on-exit=\"sh -c 'rm -rf x'\"",
]  # fmt: skip
"""Nothing is known of the program: it is asked about."""

DATA = [
    "echo rm -rf x", "printf '%s' 'rm -rf x'", "grep rm -r src", "grep 'rm -rf x' README.md", "rg 'rm -rf' src", "man rm", "which rm", "type rm",
    "ls rm", "cat rm", "mkdir rm", "cp rm y", "git log -- rm", "git commit -m 'rm -rf x in the script'", "git grep 'rm -rf x'", "git add rm",
    "pip install rm", "npm install rm", "cargo add rm", "apt-get install rm", "brew install rm", "touch rm", "pytest -k rm", "make rm",
    "docker build -t rm .", "jq .rm f", "sed -n '/rm x/p' f", "sed 's/rm -rf x/true/' f", "awk '/rm -rf x/' f", "awk '{print \"rm -rf x\"}' f",
    "timeout 5 echo rm -rf x", "timeout 5 grep rm x", "nice git commit -m 'rm -rf x'", "cargo build", "git rm x", "docker rm x", "npm rm x", "ruff check rm",
    "cd rm", "head rm", "test -f rm", "chmod +x rm", "find . -name rm", "git branch rm", "git checkout rm", "uv pip install rm", "uv add rm",
    "kubectl get rm", "gh pr create --title 'rm -rf x'", "helm install rm y", "terraform plan", "curl http://h/rm", "diff rm x", "python -m pip install rm",
]  # fmt: skip
"""Nothing of it runs ``rm``: it is decided as if no rule spoke of ``rm``."""

IN_THE_TEXT = [
    "GIT_SSH_COMMAND='rm -rf x' git fetch", 'PAGER="rm -rf x" man ls', "export EDITOR='rm -rf x'; git commit", "X=rm; $X -rf x",
    "env GIT_SSH_COMMAND='rm -rf x' git fetch", "bash <<'E'\nrm -rf x\nE", "sh <<< 'rm -rf x'", "echo 'rm -rf x' | sh", "echo rm -rf x | bash -s",
    "printf 'rm -rf x' | ssh h", "echo rm -rf x | docker exec -i c sh", "echo 'rm -rf x' | sudo sh", "$(echo rm) -rf x", "`echo rm` -rf x",
    'eval "$(echo rm -rf x)"', "source <(echo rm -rf x)", "bash <(echo rm -rf x)", "echo 'rm -rf x' | at now", "alias q='rm -rf x'; q",
    "hash -p /bin/rm ls; ls", "jobs -x rm -rf x", "git config core.editor 'rm -rf x'", "python3 <<E\nimport os; os.system('rm -rf x')\nE",
    "cat <<E | sh\nrm -rf x\nE", "busybox sh <<E\nrm -rf x\nE", "xargs -I F sh -c F <<< 'rm -rf x'", "echo 'rm -rf x' | xargs -I F sh -c F",
]  # fmt: skip
"""The text of the script holds the command, and another command of it runs that."""

DATA_IN_THE_TEXT = [
    "cat > s.sh <<E\nrm -rf x\nE", "for f in a; do grep 'rm x' $f; done", 'echo "$(date) rm x"', "A=1 grep 'rm x' f", "echo rm | grep x",
]  # fmt: skip
"""Nothing of the script runs it."""
