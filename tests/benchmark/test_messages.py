"""What goes into a pipe comes out of it."""

import pytest

from penstock.benchmark.exchange import Columns, TimingSample
from penstock.benchmark.messages import (
    Answer,
    Broken,
    Count,
    Counted,
    Ended,
    Go,
    Opened,
    Prepare,
    Prepared,
    Progress,
    Question,
    SetUp,
    Stop,
    decode_answer,
    decode_question,
    encode,
)
from penstock.benchmark.pacer import Closed, Flat, Open, Ramp, Replay, Step, Steps
from penstock.benchmark.targets import Counters, Description, TargetSpec
from penstock.data import InputSpec, Lengths, Origin

TARGET = TargetSpec("http://127.0.0.1:8000/v2/models/m", headers={"a": "b"})
INPUTS = InputSpec(path="x.npz", lengths=Lengths("uniform", (1.0, 9.0)))
COLUMNS = Columns(b"12345678", b"", b"", b"\1", ["x"], samples=[TimingSample(0.1, {"queue": 0.0})])


@pytest.mark.parametrize(
    "question",
    [
        SetUp(TARGET, INPUTS, 1, 2, False),
        Prepare(Closed(8), 7),
        Prepare(Open(Flat(100.0), "gamma", 3.0), 7),
        Prepare(Open(Ramp(1.0, 10.0, 60.0)), 7),
        Prepare(Open(Steps((Step(1.0, 2.0), Step(3.0, 4.0)))), 7),
        Prepare(Replay((0.0, 1.5), 0.1, "conv.csv"), 7),
        Go(12.5),
        Stop(13.5, 60.0),
        Count(),
    ],
)
def test_questions(question: Question) -> None:
    assert decode_question(encode(question)) == question


@pytest.mark.parametrize(
    "answer",
    [
        Opened(Description("v2 HTTP", "http://x"), Origin("random", True), 0.1, first_s=0.2),
        Prepared(),
        Progress(1.0, COLUMNS, 3, 4, 5.0, 7, 8, 9.0),
        Ended(True),
        Counted(None),
        Counted(Counters(1, 2, 3, 4, 5, 6, 7, 8, 9, busy_ns=10)),
        Broken(["no such model"]),
    ],
)
def test_answers(answer: Answer) -> None:
    assert decode_answer(encode(answer)) == answer
