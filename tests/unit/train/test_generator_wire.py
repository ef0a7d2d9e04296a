"""The generator's bytes: frames, the handshake, tags and messages, with random and changed bytes."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import GeneratorError, RefusedError, UsageError
from paceline.train.decentralized.generator import messages, wire
from paceline.train.decentralized.generator.wire import (
    MAX_FRAME_TO_SERVICE,
    FrameReader,
    ServiceHandshake,
    Session,
    WorkerHandshake,
    check_secret,
    format_address,
    frame,
    parse_address,
)

SECRET = b"a secret of this job"


def body_of(framed: bytes) -> bytes:
    reader = FrameReader(1 << 20)
    reader.feed(framed)
    body = reader.next()
    assert body is not None
    assert reader.next() is None
    return body


def sessions(secret_of_service: bytes = SECRET) -> tuple[Session, Session]:
    """Shake hands: the worker's session, and the service's."""
    service, worker = ServiceHandshake(secret_of_service), WorkerHandshake(SECRET, "host:1")
    reply, session = service.answer(body_of(worker.answer(body_of(service.hello))))
    finished = worker.finish(body_of(reply))
    assert session is not None
    return finished, session


def test_both_sides_agree_and_messages_pass_in_order() -> None:
    worker, service = sessions()
    for body in (b"", b"one", b"two" * 1000):
        assert service.open(body_of(worker.seal(body))) == body
        assert worker.open(body_of(service.seal(body))) == body


def test_a_wrong_secret_is_refused_with_advice() -> None:
    with pytest.raises(RefusedError, match=r"generator at host:1 does not know this job's secret: give"):
        sessions(b"the secret of another job")


def test_a_service_that_does_not_know_the_secret_cannot_pretend() -> None:
    service, worker = ServiceHandshake(b"another secret......"), WorkerHandshake(SECRET, "host:1")
    answer = body_of(worker.answer(body_of(service.hello)))
    with pytest.raises(RefusedError, match="does not know"):
        worker.finish(answer[32:])  # its own proof, reflected


def test_a_recorded_handshake_is_of_no_use() -> None:
    first, worker = ServiceHandshake(SECRET), WorkerHandshake(SECRET, "host:1")
    recorded = body_of(worker.answer(body_of(first.hello)))
    assert first.answer(recorded)[1] is not None
    assert ServiceHandshake(SECRET).answer(recorded)[1] is None


def test_another_version_is_refused() -> None:
    hello = bytearray(body_of(ServiceHandshake(SECRET).hello))
    hello[len(wire._MAGIC) + 1] += 1
    with pytest.raises(RefusedError, match="version 2 of the protocol, this worker 1: install the same paceline"):
        WorkerHandshake(SECRET, "host:1").answer(bytes(hello))


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400", wire._MAGIC, wire._MAGIC + b"\0\1short"])
def test_something_else_is_no_generator(greeting: bytes) -> None:
    with pytest.raises(GeneratorError, match="host:1") as caught:
        WorkerHandshake(SECRET, "host:1").answer(greeting)
    assert not isinstance(caught.value, RefusedError)


def test_frames_repeated_left_out_or_sent_back_are_noticed() -> None:
    worker, service = sessions()
    first, second = body_of(worker.seal(b"first")), body_of(worker.seal(b"second"))
    with pytest.raises(GeneratorError, match="not authentic"):
        service.open(second)
    assert service.open(first) == b"first"
    with pytest.raises(GeneratorError, match="not authentic"):
        service.open(first)
    with pytest.raises(GeneratorError, match="not authentic"):
        worker.open(second)
    assert service.open(second) == b"second"


@given(st.binary(max_size=60), st.data())
def test_a_changed_frame_is_noticed(body: bytes, data: st.DataObject) -> None:
    worker, service = sessions()
    sealed = bytearray(body_of(worker.seal(body)))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(GeneratorError):
        service.open(bytes(sealed))


@given(st.lists(st.binary(max_size=40), max_size=10), st.lists(st.integers(1, 30), max_size=40))
def test_frames_arrive_whole_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream, reader, found = b"".join(frame(body) for body in bodies), FrameReader(), []
    while stream:
        size = cuts.pop() if cuts else len(stream)
        reader.feed(stream[:size])
        stream = stream[size:]
        while (body := reader.next()) is not None:
            found.append(body)
    assert found == bodies


def test_a_frame_that_is_too_long_is_refused_before_it_arrives() -> None:
    reader = FrameReader(MAX_FRAME_TO_SERVICE)
    reader.feed((MAX_FRAME_TO_SERVICE + 1).to_bytes(4, "big"))
    with pytest.raises(GeneratorError, match=r"a frame of 65537 bytes where at most 65536"):
        reader.next()


@given(st.binary(max_size=300))
def test_random_bytes_end_in_an_error_or_nothing(data: bytes) -> None:
    reader, handshake = FrameReader(), ServiceHandshake(SECRET)
    reader.feed(data)
    try:
        while (body := reader.next()) is not None:
            assert handshake.answer(body)[1] is None
    except GeneratorError:
        pass
    for decode in (messages.decode_from_worker, messages.decode_from_service):
        try:
            decoded = decode(data)  # type: ignore[operator]
        except GeneratorError:
            continue
        assert messages.encode(decoded)


JOIN = messages.Join(1, "host", "address", (2, 3), False, True, 1e9, 5)
SAMPLES = [
    JOIN,
    messages.Request(0.1, 0.2, 3e6, 4, 1),
    messages.Request(None, 0.0, 0.0, 0, 0),
    messages.Finished(7, True),
    messages.Drain(),
    messages.Heartbeat(),
    messages.Ready(),
    messages.AskAverage(),
    messages.AverageFinished(2, False),
    messages.Goodbye(),
]


@given(st.sampled_from(SAMPLES), st.data())
def test_changed_messages_are_refused_or_within_bounds(message: messages.ToService, data: st.DataObject) -> None:
    encoded = bytearray(messages.encode(message))
    for _ in range(data.draw(st.integers(0, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = messages.decode_from_worker(bytes(encoded))
    except GeneratorError:
        return
    for name in decoded.__struct_fields__:
        number = getattr(decoded, name)
        assert not isinstance(number, (int, float)) or (math.isfinite(number) and number >= 0)


@pytest.mark.parametrize(
    "number", [math.nan, math.inf, -math.inf, -1.0, -1, 1e300, "1", None, True], ids=lambda number: str(number)
)
@pytest.mark.parametrize("field", range(2, 6))
def test_numbers_that_make_no_sense_are_refused(number: object, field: int) -> None:
    parts: list[object] = ["Request", 0.1, 0.2, 1e6, 4, 1]
    parts[field] = number
    with pytest.raises(GeneratorError, match="sent an invalid message"):
        messages.decode_from_worker(msgspec.msgpack.encode(parts))


@pytest.mark.parametrize("worker", [-1, 4096, 2**63, 1.5, "0"])
def test_worker_numbers_have_bounds(worker: object) -> None:
    parts = msgspec.to_builtins(JOIN)
    assert messages.decode_from_worker(msgspec.msgpack.encode(parts)) == JOIN
    parts[1] = worker
    with pytest.raises(GeneratorError):
        messages.decode_from_worker(msgspec.msgpack.encode(parts))


def test_nesting_does_not_exhaust_the_stack() -> None:
    with pytest.raises(GeneratorError):
        messages.decode_from_worker(b"\x91" * 60_000)


def test_a_worker_cannot_say_what_only_the_service_says() -> None:
    with pytest.raises(GeneratorError):
        messages.decode_from_worker(messages.encode(messages.Commit(1)))


def test_addresses_and_secrets() -> None:
    assert parse_address("node:29600") == ("node", 29600)
    assert parse_address("[::1]:5") == ("::1", 5)
    assert format_address(*parse_address("[::1]:5")) == "[::1]:5"
    for text in ("node", ":5", "node:", "node:x", "node:65536", "node:-1", "node:²"):
        with pytest.raises(UsageError, match="is not an address"):
            parse_address(text)
    with pytest.raises(UsageError, match="has 3 bytes"):
        check_secret(b"abc")
