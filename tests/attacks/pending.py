"""Attacks that do not hold yet, each with what is missing. Empty is what this file is meant to be."""

from __future__ import annotations

_CALLS = "the filter of system calls is not applied yet"
_HOSTS = "no sandbox opens the network to single hosts yet"
_LIMITS = "limits are not applied yet"
PENDING: dict[str, str] = {
    "secret-like files by a program": "files that no rule allows are not masked in the sandbox yet",
    "ptrace and process_vm_readv": _CALLS,
    "memory": _LIMITS,
    "the longest file": _LIMITS,
    "limits cannot be raised": _LIMITS,
    **dict.fromkeys(
        ("vsock", "netlink", "io_uring", "bpf", "userfaultfd", "keyctl", "add_key", "request_key", "setns"), _CALLS
    ),
    **dict.fromkeys(
        (
            *("hosts by the runtime's door", "raw bytes to the proxy", "rebinding", "sessions with different rights"),
            *("credentials across hosts", "gzip bomb", "endless body", "slow body", "hosts by a program"),
        ),
        _HOSTS,
    ),
    "open_by_handle_at": _CALLS,
    "escapes in output": "output is not neutralised yet",
}
