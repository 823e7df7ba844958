"""A program for a client's terminal that shows the text it receives over a socket while a command runs.

Handrail itself runs and confines the command. This is started as a separate program, with the socket's path, and imports
nothing of Handrail.
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
