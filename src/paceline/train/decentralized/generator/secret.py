"""The file with a job's secret."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from paceline.errors import GeneratorError, UsageError

_SECRET_BYTES = 32
_LARGEST = 4096


def read_or_make_secret(file: Path) -> tuple[bytes, bool]:
    """Return the secret, and whether it was made now because there was no such file."""
    try:
        return _make_secret(file), True
    except FileExistsError:
        return read_secret(file), False
    except OSError as error:
        raise GeneratorError(f"cannot make the secret's file {file}: {error.strerror}") from None


def read_secret(file: Path) -> bytes:
    """Return the secret in a file that only its owner may read."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise UsageError(f"the secret's file {file} is not a regular file")
            if mode & 0o077:
                raise UsageError(f"the secret's file {file} can be read by others: run chmod 600 {file}")
            secret = opened.read(_LARGEST).strip()
    except OSError as error:
        raise GeneratorError(f"cannot read the secret's file {file}: {error.strerror}") from None
    if len(secret) < 16:
        raise UsageError(f"the secret in {file} has {len(secret)} bytes, and needs 16 or more: remove the file")
    return secret


def _make_secret(file: Path) -> bytes:
    """Write a new secret, under another name first: nobody reads half of it."""
    secret = secrets.token_hex(_SECRET_BYTES).encode()
    if file.exists():
        raise FileExistsError
    draft = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(secret + b"\n")
        os.link(draft, file)
    finally:
        draft.unlink()
    return secret
