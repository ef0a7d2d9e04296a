"""A worker's connection to the service: the socket, the handshake and the messages, without ever waiting."""

from __future__ import annotations

import errno
import os
import select
import socket

from paceline.errors import GeneratorError
from paceline.train.decentralized.generator.messages import ToService, ToWorker, decode_from_service, encode
from paceline.train.decentralized.generator.wire import (
    MAX_FRAME_TO_WORKER,
    FrameReader,
    Session,
    WorkerHandshake,
    parse_address,
)

_READ = 256 * 1024
_MAX_UNSENT = 4 * 1024 * 1024


class Link:
    """A connection to one address. It is *open* when both sides have proved that they know the secret.

    Call :meth:`serve` when the socket is ready for :attr:`events`. Every failure is a GeneratorError that names the
    service, and a RefusedError where trying again is of no use.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self.address = address
        self._handshake = WorkerHandshake(secret, address)
        self._frames = FrameReader()
        self._session: Session | None = None
        self._unsent = bytearray()
        self._connecting = True
        host, port = parse_address(address)
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.socket = socket.socket(family, kind, protocol)
        except OSError as error:
            raise self._unreachable(error.strerror or str(error)) from None
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = self.socket.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            self.close()
            raise self._unreachable(os.strerror(code))

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._session is not None

    @property
    def events(self) -> int:
        """What to poll the socket for."""
        writes = self._connecting or self._unsent
        return select.POLLIN | select.POLLOUT if writes else select.POLLIN

    def send(self, message: ToService) -> None:
        """Send as soon as the socket takes it."""
        assert self._session is not None
        self._unsent += self._session.seal(encode(message))
        if len(self._unsent) > _MAX_UNSENT:
            raise GeneratorError(f"the generator at {self.address} does not read")
        self.write()

    def serve(self, ready: int) -> list[ToWorker]:
        """Write and read what can be; return the messages that have come."""
        if self._connecting:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise self._unreachable(os.strerror(code))
            if not ready & select.POLLOUT:
                return []
            self._connecting = False
        self.write()
        if not ready & ~select.POLLOUT:
            return []
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return []
        except OSError as error:
            raise GeneratorError(f"the generator at {self.address} is gone: {error.strerror}") from None
        if not data:
            raise GeneratorError(f"the generator at {self.address} has closed the connection")
        self._frames.feed(data)
        try:
            return self._read_frames()
        except GeneratorError as error:
            if error.args[0].startswith("sent "):
                raise GeneratorError(f"the generator at {self.address} {error}") from None
            raise

    def _read_frames(self) -> list[ToWorker]:
        messages = []
        while (body := self._frames.next()) is not None:
            if self._session is not None:
                messages.append(decode_from_service(self._session.open(body)))
            elif not self._handshake.has_answered:
                self._unsent += self._handshake.answer(body)
                self.write()
            else:
                self._session = self._handshake.finish(body)
                self._frames.limit = MAX_FRAME_TO_WORKER
        return messages

    def write(self) -> None:
        """Write what the socket takes now."""
        try:
            while self._unsent and not self._connecting:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise GeneratorError(f"the generator at {self.address} is gone: {error.strerror}") from None

    @property
    def has_unsent(self) -> bool:
        """Whether the socket has not taken everything yet."""
        return bool(self._unsent)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _unreachable(self, reason: str) -> GeneratorError:
        return GeneratorError(f"the generator at {self.address} cannot be reached: {reason}")
