"""Small real images."""

from __future__ import annotations

import struct
import zlib


def make_png(width: int = 2, height: int = 2, padding: int = 0) -> bytes:
    """Return a grey PNG, with a text of ``padding`` bytes in it."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = part(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    note = part(b"tEXt", b"Comment\0" + b"x" * padding) if padding else b""
    rows = part(b"IDAT", zlib.compress(b"".join(b"\0" + b"\x80" * width for _ in range(min(height, 64)))))
    return b"\x89PNG\r\n\x1a\n" + head + note + rows + part(b"IEND", b"")


GIF = (
    b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00;"
)
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00\xff\xc0\x00\x0b\x08\x00\x10\x00\x20\x01\x01\x11\x00\xff\xd9"
WEBP = b"RIFF\x1a\x00\x00\x00WEBPVP8L\x0d\x00\x00\x00\x2f\x00\x00\x00\x10\x07\x10\x11\x11\x88\x88\xfe\x07\x00"
