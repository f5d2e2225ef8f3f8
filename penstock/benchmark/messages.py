"""Messages between the conductor and its generators. Pure: messages to msgpack and back.

The conductor asks, a generator answers; while a load runs, it also sends progress unasked.
"""

from __future__ import annotations

import msgspec

from penstock.benchmark.exchange import ExchangeColumns
from penstock.benchmark.pacer import Load
from penstock.benchmark.results import ColdStart
from penstock.benchmark.targets import Counters, Description, TargetSpec
from penstock.data import InputSpec, Origin


class SetUp(msgspec.Struct, tag="set_up"):
    """The first message. `is_first`: also time the first request. Answered by TargetOpened."""

    target: TargetSpec
    inputs: InputSpec
    index: int
    num_processes: int
    is_first: bool


class PrepareLoad(msgspec.Struct, tag="prepare"):
    """Open the connections that this load needs. Answered by LoadPrepared."""

    load: Load
    seed: int


class Go(msgspec.Struct, tag="go"):
    """Start the load at this moment."""

    start: float


class StopLoad(msgspec.Struct, tag="stop"):
    """Send nothing that is due at this moment or later; requests in flight have `patience_s`.
    Answered by Ended, once: a second StopLoad only changes the patience."""

    at: float
    patience_s: float


class Count(msgspec.Struct, tag="count"):
    """Ask for the server's own counters. Answered by Counted."""


class TargetOpened(msgspec.Struct, tag="opened"):
    description: Description
    origin: Origin
    cold_start: ColdStart
    # Why the first request failed.
    first_failure: str = ""


class LoadPrepared(msgspec.Struct, tag="prepared"):
    pass


class GeneratorReport(msgspec.Struct, tag="progress"):
    """The requests finished since the last report, and the generator's state."""

    at: float
    columns: ExchangeColumns
    in_flight: int
    max_in_flight: int
    # The number in flight, integrated over time since the load began.
    in_flight_area_s: float
    num_connections: int
    # Since the load began.
    num_waited: int
    # CPU time of the sending thread since it started, without that of an in-process model.
    cpu_s: float


class Ended(msgspec.Struct, tag="ended"):
    """Everything in flight was answered or cancelled; `is_through`: the load reached its end."""

    is_through: bool


class Counted(msgspec.Struct, tag="counted"):
    counters: Counters | None


class Broken(msgspec.Struct, tag="broken"):
    """The generator failed; its last message."""

    problems: list[str]


Question = SetUp | PrepareLoad | Go | StopLoad | Count
Answer = TargetOpened | LoadPrepared | GeneratorReport | Ended | Counted | Broken

encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder[Question](Question).decode
decode_answer = msgspec.msgpack.Decoder[Answer](Answer).decode
