"""``python -m handrail``: the command, where only the interpreter is at hand."""

from handrail.frontends.cli import main

if __name__ == "__main__":
    main()
