"""Recordings made of arrays, without a server."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.config import RecordPolicy
from penstock.serving.recording_files import RingPlace, SegmentRing
from penstock.types import DATATYPES, Array, from_array
from penstock.wire.recording import (
    OK,
    RecordedRequest,
    describe,
    encode_description,
    encode_record,
)

START = 1_700_000_000.0
Arrays = Mapping[str, Array]


def write_recording(
    folder: Path,
    inputs: Sequence[Arrays],
    outputs: Sequence[Arrays] = (),
    *,
    times: Sequence[float] = (),
    statuses: Sequence[str] = (),
    redacted: Sequence[str] = (),
    place: RingPlace | None = None,
    share: float = 1.0,
    name: str = "m",
) -> Path:
    """Write requests with a batch dimension, 0.1 s apart if no times are given; return their
    folder."""
    ring = SegmentRing(folder / name, name, place or RingPlace())
    ring.policy = RecordPolicy(10**9, share)
    for index, arrays in enumerate(inputs):
        answers = outputs[index] if outputs else {}
        made = [from_array(n, datatype_of(a), a) for n, a in arrays.items()]
        given = [from_array(n, datatype_of(a), a) for n, a in answers.items()]
        record = RecordedRequest(
            START + (times[index] if times else 0.1 * index),
            str(index),
            "1",
            statuses[index] if statuses else OK,
            0.002,
            "",
            inputs=tuple(describe(each, is_redacted=each.name in redacted) for each in made),
            outputs=tuple(describe(each) for each in given),
        )
        data = [bytes(each.data) for each in made if each.name not in redacted]
        ring.write(
            encode_record(
                encode_description(record), [*data, *(bytes(each.data) for each in given)]
            )
        )
    ring.close()
    return folder / name


def write_texts(folder: Path, asked: Sequence[Mapping[str, object]], **more: object) -> Path:
    """Write requests to a language model, 0.1 s apart."""
    ring = SegmentRing(folder / "llm", "llm", RingPlace())
    ring.policy = RecordPolicy(10**9, 1.0)
    for index, each in enumerate(asked):
        record = RecordedRequest(
            START + 0.1 * index,
            "",
            "1",
            OK,
            0.5,
            "",
            parameters={"temperature": 0.0, "max_tokens": 7},
            asked=dict(each),
            texts=(f"answer {index}",),
            **more,
        )
        ring.write(encode_record(encode_description(record), []))
    ring.close()
    return folder / "llm"


def datatype_of(array: Array) -> str:
    if array.dtype.kind in "OSU":
        return "BYTES"
    return next(d.name for d in DATATYPES.values() if d.numpy == array.dtype and d.name != "BF16")


def digits(count: int, rows: int = 1) -> list[Arrays]:
    """Requests of a model with one input, each with its number in all values."""
    return [{"x": np.full((rows, 4), number, np.float32)} for number in range(count)]
