"""``python -m handrail``: the ``handrail`` command, for environments without its script."""

from handrail.frontends.cli import main

if __name__ == "__main__":
    main()
