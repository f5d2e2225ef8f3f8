"""What conductor and generators say to each other over pipes. Pure: frames to messages and back.

A frame is its length in four bytes and a msgpack body. The conductor asks, a generator answers, and
reports by itself while a load runs.
"""

from __future__ import annotations

import struct

import msgspec

from penstock.benchmark.exchange import Columns
from penstock.benchmark.inputs import InputSpec, Origin
from penstock.benchmark.pacer import Load
from penstock.benchmark.targets import Counters, Description, TargetSpec

LENGTH = struct.Struct("<I")


class SetUp(msgspec.Struct, tag="set_up"):
    """The first message. `is_first`: send one request before anybody else did, and say how long it
    took. Answered by Opened."""

    target: TargetSpec
    inputs: InputSpec
    index: int
    num_processes: int
    is_first: bool


class Prepare(msgspec.Struct, tag="prepare"):
    """Open what this load needs. Answered by Prepared."""

    load: Load
    seed: int


class Go(msgspec.Struct, tag="go"):
    """Begin at this moment."""

    start: float


class Stop(msgspec.Struct, tag="stop"):
    """Send nothing that is due at this moment or later; what is under way may take `patience_s`.
    Answered by Ended, once: said again, it only changes the patience."""

    at: float
    patience_s: float


class Count(msgspec.Struct, tag="count"):
    """Ask for the server's own account. Answered by Counted."""


class Opened(msgspec.Struct, tag="opened"):
    description: Description
    origin: Origin
    connect_s: float | None
    load_s: float | None = None
    first_s: float | None = None
    # Why the first request failed.
    first_failure: str = ""


class Prepared(msgspec.Struct, tag="prepared"):
    pass


class Progress(msgspec.Struct, tag="progress"):
    """What was finished since the last one, and how the generator is."""

    at: float
    columns: Columns
    in_flight: int
    max_in_flight: int
    # The number under way, summed over time since the load began.
    in_flight_area_s: float
    num_connections: int
    # Since the load began.
    num_waited: int
    # Of the thread that sends, since it started: a model in the same process has its own.
    cpu_s: float


class Ended(msgspec.Struct, tag="ended"):
    """Everything under way was answered or given up; the load was through if `is_through`."""

    is_through: bool


class Counted(msgspec.Struct, tag="counted"):
    counters: Counters | None


class Broken(msgspec.Struct, tag="broken"):
    """It cannot go on, and why: the last message."""

    problems: list[str]


Question = SetUp | Prepare | Go | Stop | Count
Answer = Opened | Prepared | Progress | Ended | Counted | Broken

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_question(body: bytes) -> Question:
    return _questions.decode(body)


def decode_answer(body: bytes) -> Answer:
    return _answers.decode(body)
