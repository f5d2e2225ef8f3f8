"""A `TritonPythonModel` that is decoupled, or that uses response senders anyway."""

from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from suites.backend import model_config
from waiting import wait_until

from penstock.backends import Batch, PerRequest, Runner, backend
from penstock.config import ModelConfig
from penstock.errors import BackendFailed
from penstock.types import TensorSpec
from penstock.wire.frames import RequestPart

CODE = """
import asyncio
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def respond(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[value]], np.int64))])

class TritonPythonModel:
"""


class Kept:
    """A responder that keeps what it is sent."""

    is_cancelled = False

    def __init__(self) -> None:
        self.values: list[object] = []
        self.is_over = False

    def send(self, answer, *, is_final, parameters=None):
        if self.is_over:
            raise BackendFailed("it was final")
        if answer is not None:
            text = isinstance(answer, Exception)
            self.values.append(str(answer) if text else int(answer["y"][0, 0]))
        self.is_over = is_final


def load(folder: Path, methods: str, is_decoupled: bool = True) -> Runner:
    version = folder / "1"
    version.mkdir()
    code = CODE + "\n".join("    " + line for line in dedent(methods).splitlines())
    (version / "model.py").write_text(code)
    specs = TensorSpec("x", "INT64", (1,)), TensorSpec("y", "INT64", (1,))
    config: ModelConfig = model_config("python", version / "model.py", specs[:1], specs[1:])
    return backend("python")(replace(config, is_decoupled=is_decoupled))


def start(runner: Runner, *rows: int, responders: object = ()) -> list[object]:
    inputs = {"x": np.array([[row] for row in rows], np.int64)}
    parts = [RequestPart(str(row), 1) for row in rows]
    return list(runner.start(Batch(inputs, len(rows), parts, responders=responders)).wait())


def test_responses_leave_by_their_responders_and_none_is_returned(tmp_path):
    runner = load(
        tmp_path,
        """
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                count = int(request.inputs()[0].as_numpy()[0, 0])
                for value in range(count):
                    sender.send(respond(value))
                sender.send(flags=FINAL)
        """,
    )
    responders = [Kept(), Kept()]
    assert start(runner, 2, 3, responders=responders) == []
    assert [each.values for each in responders] == [[0, 1], [0, 1, 2]]
    assert all(each.is_over for each in responders)


def test_a_decoupled_model_returns_nothing(tmp_path):
    runner = load(tmp_path, "def execute(self, requests):\n    return [respond(1)]")
    with pytest.raises(BackendFailed, match="must return None. It sends its responses; got list"):
        start(runner, 1, responders=[Kept()])


def test_coroutines_of_several_batches_run_at_once(tmp_path):
    runner = load(
        tmp_path,
        """
        def initialize(self, args):
            self.both = None
            self.num = 0

        async def execute(self, requests):
            # Each waits until the other has begun.
            if self.both is None:
                self.both = asyncio.Event()
            self.num += 1
            if self.num == 2:
                self.both.set()
            await self.both.wait()
            requests[0].get_response_sender().send(respond(self.num), FINAL)
        """,
    )
    first, second = Kept(), Kept()
    assert start(runner, 1, responders=[first]) == []
    assert start(runner, 2, responders=[second]) == []
    wait_until(lambda: first.is_over and second.is_over)
    assert first.values == second.values == [2]
    runner.close()


@pytest.mark.parametrize(
    ("line", "text"),
    [("raise ValueError('why')", "why"), ("return 5", "must return None")],
)
def test_the_error_of_a_coroutine_ends_what_is_open(tmp_path, line, text):
    runner = load(
        tmp_path,
        f"""
        async def execute(self, requests):
            requests[0].get_response_sender().send(respond(1), FINAL)
            requests[1].get_response_sender().send(respond(1))
            {line}
        """,
    )
    ended, still_open = Kept(), Kept()
    start(runner, 1, 2, responders=[ended, still_open])
    wait_until(lambda: still_open.is_over)
    assert ended.values == [1]
    assert still_open.values[0] == 1 and text in still_open.values[1]
    runner.close()


SENDERS = """
def execute(self, requests):
    def answer(request):
        request.get_response_sender().send(respond(7), FINAL)
    senders = [threading.Thread(target=answer, args=(each,)) for each in requests[::2]]
    for each in requests[::2]:
        each.get_response_sender()
    for thread in senders:
        thread.start()
    RETURN
"""


def test_a_model_that_is_not_decoupled_may_send_its_one_response(tmp_path):
    returned = "return [None, respond(8), None]"
    runner = load(tmp_path, SENDERS.replace("RETURN", returned), is_decoupled=False)
    (answer,) = start(runner, 1, 2, 3)
    assert isinstance(answer, PerRequest)
    assert [int(each["y"][0, 0]) for each in answer.answers] == [7, 8, 7]


def test_such_a_model_may_return_nothing_if_it_sends_all(tmp_path):
    runner = load(tmp_path, SENDERS.replace("RETURN", "return None"), is_decoupled=False)
    (answer,) = start(runner, 1)
    assert isinstance(answer, PerRequest)
    assert [int(each["y"][0, 0]) for each in answer.answers] == [7]
    (tmp_path / "other").mkdir()
    runner = load(tmp_path / "other", "def execute(self, requests):\n    pass", is_decoupled=False)
    with pytest.raises(BackendFailed, match="expected 1 responses to 1 requests, got NoneType"):
        start(runner, 1)
