"""What runs in a client's terminal while a command runs here: it shows what it is given over a socket, and nothing else.

The command itself is confined, by Handrail. Started as a program of its own, with the socket's path; it imports nothing of ours.
"""

import os
import socket
import sys

END = b"\0"
"""Before the exit code to end with. It is never in what is shown."""


def main(path: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
        wire.connect(path)
        ending = b""
        while piece := wire.recv(65536):
            shown, mark, rest = piece.partition(END) if not ending else (b"", b"", piece)
            ending += mark + rest
            while shown:
                shown = shown[os.write(1, shown) :]
        code = ending[1:]
        return int(code) if code.isdigit() else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except (OSError, KeyboardInterrupt):
        sys.exit(1)
