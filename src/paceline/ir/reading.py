"""Reading a file that may be anything."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import FileFormatError, UsageError

_STRIDE_BYTES = 1 << 20


def read_at_most(path: Path, most_bytes: int) -> bytes:
    """The whole file, or an error that says why not; memory grows with what is there, not with what is allowed."""
    parts, size = [], 0
    try:
        with path.open("rb") as stream:
            while part := stream.read(_STRIDE_BYTES):
                parts.append(part)
                size += len(part)
                if size > most_bytes:
                    raise FileFormatError(f"{path} is larger than the {most_bytes >> 20} MiB such a file may have")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return b"".join(parts)


def plain(text: str, most_characters: int = 300) -> str:
    """Text from a stranger made fit for a message: printable, on one line, not too long."""
    shown = text[: most_characters + 1]
    shown = "".join(character if character.isprintable() else "?" for character in shown)
    return shown if len(text) <= most_characters else shown[:most_characters] + "..."
