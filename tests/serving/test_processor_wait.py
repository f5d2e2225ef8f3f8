"""The kernel's count of the time a thread waited for a processor."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from doubles import FakeClock, Puppets, RecordingSink

from penstock.config import BatchPolicy, ModelConfig
from penstock.serving.admission import LOOK_EVERY_S, LOOK_WITHIN_S, ProcessorWait
from penstock.serving.model import Model
from penstock.serving.paces import Paces
from penstock.types import Request, TensorSpec, from_array


def test_it_is_the_second_number_in_nanoseconds(tmp_path: Path):
    file = tmp_path / "schedstat"
    file.write_text("1000 2500000000 7\n")
    wait = ProcessorWait(str(file))
    assert wait.total_s() == 2.5
    file.write_text("2000 2600000000 8\n")
    assert wait.total_s() == 2.6
    wait.close()
    wait.close()
    assert wait.total_s() == 0.0


@pytest.mark.parametrize("text", ["", "1000\n", "a b c\n"])
def test_what_cannot_be_read_is_no_wait(text: str, tmp_path: Path):
    file = tmp_path / "schedstat"
    file.write_text(text)
    wait = ProcessorWait(str(file))
    assert wait.total_s() == 0.0
    wait.close()
    assert ProcessorWait(str(tmp_path / "missing")).total_s() == 0.0


def test_of_this_thread_it_never_shrinks():
    wait = ProcessorWait()
    totals = [wait.total_s() for _ in range(100)]
    assert totals == sorted(totals) and totals[0] >= 0.0
    wait.close()


def test_a_model_with_an_slo_tells_its_batcher_what_was_waited_since_the_last_look(monkeypatch):
    config = ModelConfig(
        name="echo",
        version="1",
        backend="null",
        artifact="",
        inputs=(TensorSpec("x", "INT64", (4,)),),
        outputs=(TensorSpec("y", "INT64", (4,)),),
        max_batch_size=8,
        batching=BatchPolicy(8, is_dynamic=True, slo_latency_s=1.0),
    )
    totals = iter([5.0, 5.25, 7.0, 7.5])
    noted: list[float] = []
    monkeypatch.setattr(ProcessorWait, "total_s", lambda self: next(totals))
    monkeypatch.setattr(Paces, "note_wait", lambda self, waited_s: noted.append(waited_s))

    async def main() -> None:
        clock, puppets = FakeClock(), Puppets()
        model = Model(config, start_life=puppets, clock=clock)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting

        def ask() -> None:
            tensor = from_array("x", "INT64", np.ones((1, 4), np.int64))
            model.submit(Request(RecordingSink(), (tensor,), clock.now))

        ask()
        noted.clear()
        clock.advance(2 * LOOK_EVERY_S)
        ask()
        ask()  # Too soon for another look.
        assert noted[-1:] == [0.25]
        clock.advance(2 * LOOK_WITHIN_S)
        before = len(noted)
        ask()
        assert 1.75 not in noted[before:], "added up over too long a time"
        clock.advance(2 * LOOK_EVERY_S)
        ask()
        assert 0.5 in noted
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing

    asyncio.run(main())
