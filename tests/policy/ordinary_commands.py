"""Ordinary commands of developers, and careful rules that allow them without a request."""

from __future__ import annotations

RULES = (
    "allow bash",
    *("deny bash rm -rf *", "deny bash curl *", "deny bash sudo *", "deny bash git push --force *", "deny bash shutdown *"),
    *("ask bash git push *", "ask bash rm *", "ask bash npm publish *", "ask bash docker push *", "ask bash kubectl delete *"),
    *("ask bash pip install *", "ask bash make deploy *", "ask bash node *", "ask bash ssh *"),
)  # fmt: skip

COMMANDS = [
    # look
    "ls -la", "ls -R src | head -50", "cat README.md", "cat src/rm.py", "head -20 curl.log", "tail -n 50 logs/node.log", "less README.md",
    "wc -l src/a.py", "tree -L 2", "stat rm", "du -sh node_modules", "df -h", "file curl", "pwd", "date", "whoami", "uname -a", "printenv | sort",
    "which node", "which curl git", "type rm", "which ls", "man curl", "man git push", "ps aux", "id",
    # search
    "grep -rn 'git push' .", "grep -n curl Dockerfile", "grep -rn 'rm -rf' scripts", "rg -n 'kubectl delete' deploy", "rg node src", "grep -c ssh config",
    "find . -name node -type d", "find . -name '*.py' -newer rm", "fd node", "fd -e py curl", "ag 'pip install' docs", "git grep -n 'npm publish'",
    "awk '/curl/ {print $1}' access.log", "sed -n '/git push/p' ci.yml", "sed 's/curl/wget/' f", "cut -d: -f1 f", "sort f | uniq -c", "jq .scripts.node package.json",
    "echo git push", "echo 'run rm -rf build first'", "printf '%s\\n' curl wget", "diff rm.txt curl.txt",
    # git
    "git status", "git diff", "git diff HEAD~1 -- src/node", "git log --oneline -20", "git log --grep='git push'", "git show HEAD", "git add .", "git add rm.py",
    "git commit -m 'fix: do not git push'", "git commit -m 'Use curl instead of wget'", "git commit -am 'rm -rf build before make deploy'", "git commit --amend --no-edit",
    "git checkout -b rm-old-code", "git checkout main", "git switch node", "git branch -d node", "git merge origin/main", "git rebase main", "git stash", "git stash pop",
    "git fetch origin", "git pull --rebase", "git tag v1.0", "git remote -v", "git blame src/curl.py", "git cherry-pick abc123", "git reset --hard HEAD~1", "git clean -fd",
    "git rm --cached node", "git mv node curl", "git restore src/a.py", "git worktree list", "git log -S 'rm -rf'", "git rev-parse HEAD",
    # files
    "mkdir -p src/node", "touch rm", "cp -r node_modules/curl /tmp/x", "mv curl node", "ln -s node nodejs", "chmod +x scripts/curl", "cd node && ls", "tar czf node.tgz node",
    "unzip curl.zip", "gzip node.log", "touch ssh curl", "tee node.log",
    # python
    "pytest", "pytest -k curl", "pytest tests/test_node.py::test_rm", "python -m pytest -q tests", "python manage.py migrate", "python setup.py build", "python script.py --name node",
    "python -m http.server", "ruff check .", "black src/node", "mypy src", "tox -e lint", "nox -s tests", "pip list", "pip show curl", "pip freeze", "uv sync", "uv add curl",
    "uv pip list", "poetry add node", "poetry install", "coverage report", "coverage run -m pytest", "pre-commit run --all-files", "python -m venv .venv", "conda list",
    "alembic upgrade head", "uvicorn app:app", "flask run", "celery -A app worker",
    # node
    "npm test", "npm run build", "npm install", "npm install node-fetch", "npm install curl", "npm ci", "npm run lint -- --fix", "yarn", "yarn add curl", "yarn build", "pnpm install",
    "pnpm add node", "eslint src", "prettier --write node", "tsc -p .", "jest curl", "vitest run", "next build", "vite build", "webpack --mode production",
    # others
    "cmake -S . -B b -DCURL_INCLUDE_DIR=/usr/include/curl", "composer require guzzle/curl", "pulumi preview", "netlify deploy", "dvc repro",
    "make", "make test", "make node", "make -j4 build", "cmake -B build", "cmake --build build", "ninja", "cargo build", "cargo test rm", "cargo add curl", "cargo run",
    "cargo clippy", "go build ./cmd", "go test ./node", "go mod tidy", "mvn package", "gradle build", "./gradlew test", "bundle install", "bundle update", "rake test",
    "rails db:migrate", "dotnet build", "composer install", "php artisan migrate", "docker ps", "docker build -t node .", "docker build -t curl .", "docker images node",
    "docker logs node", "docker pull node", "docker compose up -d", "docker compose logs node", "docker stop node", "kubectl get pods", "kubectl describe pod node",
    "kubectl apply -f deploy.yaml", "kubectl logs node", "helm list", "terraform plan", "gh pr list", "gh pr create --title 'rm -rf the old code'", "gh issue view 5",
    "gh pr view node", "brew install curl", "apt-get install -y curl", "apt list", "systemctl status ssh", "journalctl -u ssh", "./scripts/test.sh", "bash scripts/build.sh",
    "sh run.sh", "sqlite3 --version", "psql --version", "protoc --version", "shellcheck scripts/rm.sh", "time make", "timeout 60 pytest -k node", "nice make", "wget https://h/curl.tgz",
]  # fmt: skip
