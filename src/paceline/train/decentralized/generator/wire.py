"""How the group generator's messages travel: frames over TCP, authenticated in both directions.

A frame is its length in 4 bytes (big-endian), and a body. The first frames prove that both sides know the job's secret.
Nothing else of a peer is looked at before.

=========  ====================================================  ======================================================
from       body                                                  why
=========  ====================================================  ======================================================
service    ``_MAGIC``, version (2 bytes), nonce (32 bytes)       a new nonce, so old proofs are worthless
worker     nonce (32), proof as worker (32)                      only who knows the secret can make it
service    proof as service (32), or ``_REFUSAL``                the worker learns that this is its job's service
both       MessagePack (``messages.py``), tag (16)               the tag covers the number of the frame: none can be
                                                                 added, left out, changed or repeated
=========  ====================================================  ======================================================

A proof is HMAC-SHA256 with the secret over the role, the version and both nonces. A tag is the first half of an
HMAC-SHA256 with a key made of the secret and both nonces, one for each direction. Messages are not encrypted.

These classes read and make bytes. Sockets are elsewhere.
"""

from __future__ import annotations

import hmac
import os
import struct

from paceline.errors import GeneratorError, RefusedError, UsageError

VERSION = 1

MAX_FRAME_TO_SERVICE = 64 * 1024
MAX_FRAME_TO_WORKER = 16 * 1024 * 1024
"""Large enough for the addresses of all workers."""

HANDSHAKE_S = 10.0
"""So long a stranger may take to prove that it knows the secret."""

_MAX_HANDSHAKE_FRAME = 128
_MAGIC = b"paceline generator\n"
_REFUSAL = b"refused"
_NONCE = 32
_PROOF = 32
_TAG = 16
_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">Q")


def frame(body: bytes) -> bytes:
    """Put the length before a body."""
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames. ``limit`` bounds a body, and thereby what is kept."""

    def __init__(self, limit: int = _MAX_HANDSHAKE_FRAME) -> None:
        self.limit = limit
        self._bytes = bytearray()
        self._begin = 0

    def feed(self, data: bytes) -> None:
        """Add what has been received."""
        if self._begin:
            del self._bytes[: self._begin]
            self._begin = 0
        self._bytes += data

    def next(self) -> bytes | None:
        """Return the body of the next frame, or None if it is not complete."""
        body = self._begin + _LENGTH.size
        if len(self._bytes) < body:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes, self._begin)
        if length > self.limit:
            raise GeneratorError(f"sent a frame of {length} bytes where at most {self.limit} are allowed")
        if len(self._bytes) < body + length:
            return None
        self._begin = body + length
        return bytes(self._bytes[body : self._begin])


class Session:
    """Tags what is sent, and checks the tags of what is received."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0

    def seal(self, body: bytes) -> bytes:
        """Return the frame of the next message."""
        tag = hmac.digest(self._send_key, _COUNT.pack(self._num_sent) + body, "sha256")[:_TAG]
        self._num_sent += 1
        return _LENGTH.pack(len(body) + _TAG) + body + tag

    def open(self, sealed: bytes) -> bytes:
        """Return the message in the next frame that was received."""
        body, tag = sealed[:-_TAG], sealed[-_TAG:]
        expected = hmac.digest(self._receive_key, _COUNT.pack(self._num_received) + body, "sha256")[:_TAG]
        if not hmac.compare_digest(tag, expected):
            raise GeneratorError("sent a frame that is not authentic")
        self._num_received += 1
        return body


class ServiceHandshake:
    """The service's side: send ``hello``, hand the worker's frame to :meth:`answer`, send what that returns."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = os.urandom(_NONCE)
        self.hello = frame(_MAGIC + VERSION.to_bytes(2, "big") + self._nonce)

    def answer(self, body: bytes) -> tuple[bytes, Session | None]:
        """Return what to send, and the session; or a refusal and None, after which the connection is closed."""
        if len(body) != _NONCE + _PROOF:
            raise GeneratorError("is no worker of a paceline job")
        nonces = self._nonce + body[:_NONCE]
        if not hmac.compare_digest(body[_NONCE:], _derive(self._secret, b"worker", nonces)):
            return frame(_REFUSAL), None
        session = Session(_derive(self._secret, b"from service", nonces), _derive(self._secret, b"from worker", nonces))
        return frame(_derive(self._secret, b"service", nonces)), session


class WorkerHandshake:
    """The worker's side: hand the hello to :meth:`answer`, send what it returns; hand the next frame to :meth:`finish`.

    ``peer`` names the service in errors.
    """

    def __init__(self, secret: bytes, peer: str) -> None:
        self._secret = secret
        self._peer = peer
        self._nonces = b""

    @property
    def has_answered(self) -> bool:
        """Whether the next frame is for :meth:`finish`."""
        return bool(self._nonces)

    def answer(self, body: bytes) -> bytes:
        """Return this worker's proof."""
        rest = body.removeprefix(_MAGIC)
        if len(rest) == len(body) or len(rest) < 2:
            raise GeneratorError(f"{self._peer} is no group generator: give the address of one")
        version = int.from_bytes(rest[:2], "big")
        if version != VERSION:
            raise RefusedError(
                f"the generator at {self._peer} speaks version {version} of the protocol, this worker {VERSION}: "
                "install the same paceline on all hosts"
            )
        if len(rest) != 2 + _NONCE:
            raise GeneratorError(f"{self._peer} sent a malformed greeting")
        own = os.urandom(_NONCE)
        self._nonces = rest[2:] + own
        return frame(own + _derive(self._secret, b"worker", self._nonces))

    def finish(self, body: bytes) -> Session:
        """Return the session, if the service knows the secret, too."""
        if not hmac.compare_digest(body, _derive(self._secret, b"service", self._nonces)):
            raise RefusedError(
                f"the generator at {self._peer} does not know this job's secret: give its workers the secret file that "
                "it was started with, or the address of this job's generator"
            )
        return Session(
            _derive(self._secret, b"from worker", self._nonces), _derive(self._secret, b"from service", self._nonces)
        )


def _derive(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, purpose + b"|" + VERSION.to_bytes(2, "big") + nonces, "sha256")


def check_secret(secret: bytes) -> bytes:
    """Refuse a secret that can be guessed."""
    if len(secret) < 16:
        raise UsageError(f"the secret has {len(secret)} bytes: use 16 or more, made by secrets.token_bytes(32)")
    return secret


def parse_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[ipv6]:port``."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not port.isascii() or int(port) > 65535:
        raise UsageError(f"{address!r} is not an address; write it like 127.0.0.1:29600 or [::1]:29600")
    return host.removeprefix("[").removesuffix("]"), int(port)


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
