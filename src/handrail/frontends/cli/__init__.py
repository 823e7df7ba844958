"""The command line: one program, with one command for each task."""

from __future__ import annotations


def main() -> None:
    """Run the ``handrail`` program. The kernel is loaded only when a command needs it."""
    from handrail.origins.search_path_cleanup import remove_untrusted_sys_path_entries

    remove_untrusted_sys_path_entries()
    import gc
    import os
    import sys

    for descriptor in range(3):  # the parent may have closed one, and the next opened file would take its place
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if not os.environ.get("HOME", "/").startswith("/"):  # a relative path would depend on the current folder
        del os.environ["HOME"]
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        # In the locale C, or another without UTF-8, Python cannot name every file. What is printed keeps the encoding of
        # the terminal, and what that does not have is escaped.
        os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding if sys.stdout else 'ascii'}:backslashreplace")
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - this very program

    # Loaded modules stay in memory, so collections at the start only cost time. An open kernel lowers the threshold.
    gc.set_threshold(250_000, 10, 10)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # pydantic would look for them in every package
    from handrail.frontends.cli.command_group import run_command_line

    code = run_command_line(sys.argv[1:])
    gc.freeze()
    sys.exit(code)
