"""A program for a client's terminal that shows the text it receives over a socket while a command runs.

Handrail itself runs and confines the command. The client starts this as a separate program with the path of the socket. It
imports nothing of Handrail.
"""

import os
import socket
import sys

END = b"\0"
"""The byte before the exit code. It never occurs in the shown text."""


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
