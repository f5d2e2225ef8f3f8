"""What goes into a pipe comes out of it."""

import pytest

from penstock.benchmark.exchange import ExchangeColumns, TimingSample
from penstock.benchmark.messages import (
    Answer,
    Broken,
    Count,
    Counted,
    Ended,
    GeneratorReport,
    Go,
    LoadPrepared,
    PrepareLoad,
    Question,
    SetUp,
    StopLoad,
    TargetOpened,
    decode_answer,
    decode_question,
    encode,
)
from penstock.benchmark.pacer import Closed, Flat, Open, Ramp, RateStep, Replay, Steps
from penstock.benchmark.results import ColdStart
from penstock.benchmark.targets import Counters, Description, TargetSpec
from penstock.data import InputSpec, Lengths, Origin

TARGET = TargetSpec("http://127.0.0.1:8000/v2/models/m", headers={"a": "b"})
INPUTS = InputSpec(path="x.npz", lengths=Lengths("uniform", (1.0, 9.0)))
COLUMNS = ExchangeColumns(
    b"12345678", b"", b"", b"\1", ["x"], samples=[TimingSample(0.1, {"queue": 0.0})]
)


@pytest.mark.parametrize(
    "question",
    [
        SetUp(TARGET, INPUTS, 1, 2, False),
        PrepareLoad(Closed(8), 7),
        PrepareLoad(Open(Flat(100.0), "gamma", 3.0), 7),
        PrepareLoad(Open(Ramp(1.0, 10.0, 60.0)), 7),
        PrepareLoad(Open(Steps((RateStep(1.0, 2.0), RateStep(3.0, 4.0)))), 7),
        PrepareLoad(Replay((0.0, 1.5), 0.1, "conv.csv"), 7),
        Go(12.5),
        StopLoad(13.5, 60.0),
        Count(),
    ],
)
def test_questions(question: Question) -> None:
    assert decode_question(encode(question)) == question


@pytest.mark.parametrize(
    "answer",
    [
        TargetOpened(
            Description("v2 HTTP", "http://x"), Origin("random", True), ColdStart(0.2, 0.1)
        ),
        LoadPrepared(),
        GeneratorReport(1.0, COLUMNS, 3, 4, 5.0, 7, 8, 9.0),
        Ended(True),
        Counted(None),
        Counted(Counters(1, 2, 3, 4, 5, 6, 7, 8, 9, busy_ns=10)),
        Broken(["no such model"]),
    ],
)
def test_answers(answer: Answer) -> None:
    assert decode_answer(encode(answer)) == answer
