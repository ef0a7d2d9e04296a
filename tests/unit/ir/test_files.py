"""Schedule files: what is written is read back; what is malformed is refused quickly, in one sentence."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from paceline.algorithms import find
from paceline.errors import FileFormatError, PacelineError, ProofError, UsageError
from paceline.ir import files
from paceline.ir.collective import Collective, Kind
from paceline.ir.files import from_bytes, load, save, to_json, to_msgpack
from paceline.ir.verify import verify
from strategies import requests

RING = find("ring")(Collective(Kind.ALL_REDUCE, 4))


@given(request=requests(most_ranks=12))
def test_both_forms_give_the_schedule_back(request: tuple) -> None:
    entry, collective, parameters = request
    schedule = entry(collective, **parameters)
    for data in (to_json(schedule), to_msgpack(schedule)):
        again = from_bytes(data)
        assert again.digest == schedule.digest
        assert again.algorithm == schedule.algorithm


def test_large_json_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "_MAX_JSON_BYTES", 100)
    with pytest.raises(UsageError, match=r"save it as \.msgpack"):
        save(RING, tmp_path / "ring.json")
    with pytest.raises(FileFormatError, match=r"save large schedules as \.msgpack"):
        from_bytes(to_json(RING))


def test_files(tmp_path: Path) -> None:
    for name in ("ring.json", "ring.msgpack"):
        save(RING, tmp_path / name)
        assert load(tmp_path / name).digest == RING.digest
    with pytest.raises(UsageError, match=r"saved as \.json or as \.msgpack"):
        save(RING, tmp_path / "ring.txt")
    with pytest.raises(UsageError, match="cannot write"):
        save(RING, tmp_path / "no" / "ring.json")
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "none.json")


def _changed(path: str, value: Any) -> bytes:
    content = json.loads(to_json(RING))
    *parents, last = path.split(".")
    at = content
    for parent in parents:
        at = at[parent]
    at[last] = value
    return json.dumps(content).encode()


def _repacked(**changes: Any) -> bytes:
    content = msgspec.msgpack.decode(to_msgpack(RING))
    for key, value in changes.items():
        (content if key in content else content["transfers"])[key] = value
    return msgspec.msgpack.encode(content)


COLUMN = json.loads(to_json(RING))["transfers"]
HOSTILE = {
    "empty": b"",
    "one byte": b"\x00",
    "text": b"hello, schedule",
    "an array": b"[1,2,3]",
    "cut short": to_json(RING)[:-20],
    "cut short, packed": to_msgpack(RING)[:-20],
    "other format": _changed("format", "onnx"),
    "newer version": _changed("version", 2),
    "version a string": _changed("version", "1"),
    "unknown collective": _changed("collective.kind", "allreduced"),
    "no ranks": _changed("collective.num_ranks", 0),
    "negative ranks": _changed("collective.num_ranks", -4),
    "huge ranks": _changed("collective.num_ranks", 10**18),
    "beyond 64 bits": _changed("collective.num_ranks", 10**40),
    "fewer ranks": _changed("collective.num_ranks", 3),
    "root outside": _changed("collective.root", 9),
    "huge chunks": _changed("num_chunks", 10**15),
    "no chunks": _changed("num_chunks", 0),
    "chunks a float": _changed("num_chunks", 4.5),
    "negative rank": _changed("transfers.source", [-1, *COLUMN["source"][1:]]),
    "huge rank": _changed("transfers.destination", [2**40, *COLUMN["destination"][1:]]),
    "to itself": _changed("transfers.destination", COLUMN["source"]),
    "to nobody": _changed("transfers.destination", [[], *COLUMN["destination"][1:]]),
    "to a rank twice": _changed("transfers.destination", [[1, 1], *COLUMN["destination"][1:]]),
    "huge count": _changed("transfers.count", [2**31 - 1, *COLUMN["count"][1:]]),
    "no count": _changed("transfers.count", [0, *COLUMN["count"][1:]]),
    "steps go back": _changed("transfers.step", COLUMN["step"][::-1]),
    "column too short": _changed("transfers.chunk", COLUMN["chunk"][:-1]),
    "reduce a number": _changed("transfers.reduce", [3] * len(COLUMN["reduce"])),
    "unknown field": _changed("transfers.weight", [1.0]),
    "long name": _changed("algorithm", "x" * 10**6),
    "NaN": to_json(RING).replace(b'"num_chunks":4', b'"num_chunks":NaN'),
    "infinity": to_json(RING).replace(b'"num_chunks":4', b'"num_chunks":1e999'),
    "deep nesting": b'{"format":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep nesting, packed": b"\x91" * 200_000,
    "claims 4 GiB": b"\xc6\xff\xff\xff\xff",
    "claims 4 billion pairs": b"\xdf\xff\xff\xff\xff",
    "more chunks than moves": _repacked(num_chunks=1 << 19),
    "negative step": _repacked(step=b"\xff" * 4 * len(COLUMN["step"])),
    "odd bytes": _repacked(step=b"\0\0\0"),
    "reduce of two": _repacked(reduce=b"\2" * len(COLUMN["reduce"])),
    "long key": to_json(RING).replace(b'"format"', b'"' + b"k" * 10**6 + b'":1,"format"'),
    "keys with escapes": to_json(RING).replace(b'"transfers":{', b'"transfers":{"\\u001b[31m\\n":1,'),
    "name with escapes": _changed("algorithm", "\x1b[31mring\n"),
    "many empty lists": to_json(RING)[:-2] + b',"x":[' + b"[]," * 10**5 + b"[]]}}",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_files_are_refused_quickly_in_one_sentence(tmp_path: Path, case: str) -> None:
    path = tmp_path / "schedule.json"
    path.write_bytes(HOSTILE[case])
    tracemalloc.start()
    with pytest.raises(PacelineError) as caught:
        verify(load(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    assert peak < 64 << 20


@given(data=st.data(), form=st.sampled_from([to_json, to_msgpack]))
@examples(400)
def test_random_damage_gives_a_clean_error_or_a_well_formed_schedule(data: st.DataObject, form: Any) -> None:
    content = bytearray(form(RING))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FileFormatError, ProofError):
        verify(from_bytes(bytes(content)))


@given(content=st.binary(max_size=200))
def test_random_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(FileFormatError):
        from_bytes(content)


def test_the_documented_example_is_a_schedule() -> None:
    text = (Path(__file__).parents[3] / "docs" / "schedule_format.md").read_text()
    example = text.split("```json\n")[1].split("```")[0]
    verify(from_bytes(example.encode()))
