"""What a model of sequences gets beside its clients' inputs: controls, states, empty rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import Batch, Outputs, PerRequest, Runner
from penstock.backends.finished import Finished
from penstock.backends.stateful import Stateful
from penstock.config import (
    BatchPolicy,
    ModelConfig,
    SequenceControl,
    SequencePolicy,
    SequenceState,
)
from penstock.errors import BackendFailed, ConfigError
from penstock.types import TensorSpec
from penstock.wire.frames import RequestPart

CONTROLS = (
    SequenceControl("start", "START", "INT32", (0, 1)),
    SequenceControl("ready", "READY", "BOOL", (0, 1)),
    SequenceControl("end", "END", "FP32", (-1, 1)),
    SequenceControl("id", "CORRID", "UINT64"),
)
SUM = SequenceState("sum", "new_sum", "INT32", (1,), (1,))
CONFIG = ModelConfig(
    name="m",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT32", (1,)),),
    outputs=(TensorSpec("y", "INT32", (1,)),),
    max_batch_size=4,
    batching=BatchPolicy(4, is_dynamic=True),
    sequences=SequencePolicy(controls=CONTROLS, states=(SUM,)),
)
Compute = Callable[[Batch], Outputs | PerRequest]


class Computed(Runner):
    """A runner that keeps what it got."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.batches: list[Batch] = []

    def start(self, batch: Batch) -> Finished:
        self.batches.append(batch)
        return Finished(self._compute(batch))

    def seen(self, name: str) -> object:
        return self.batches[-1].inputs[name].tolist()


def add(batch: Batch) -> Outputs:
    total = batch.inputs["x"] + batch.inputs["sum"]
    return {"y": total, "new_sum": total}


def make(compute: Compute = add, config: ModelConfig = CONFIG) -> tuple[Stateful, Computed]:
    inner = Computed(compute)
    return Stateful(config, inner), inner


def oldest(**changes: object) -> ModelConfig:
    policy = SequencePolicy(False, max_candidates=4, controls=CONTROLS, states=(SUM,))
    return replace(CONFIG, sequences=replace(policy, **changes))  # type: ignore[arg-type]


def part(slot: int, flags: str = "", id: int | str = 0) -> RequestPart:
    given = {"sequence_id": id or slot + 1} | dict.fromkeys(
        ["sequence_start"] * ("s" in flags), True
    )
    given |= dict.fromkeys(["sequence_end"] * ("e" in flags), True)
    return RequestPart(f"r{slot}", 1, parameters=given, slot=slot)  # type: ignore[arg-type]


def run(
    runner: Stateful, values: Sequence[int], parts: Sequence[RequestPart]
) -> list[dict[str, list[list[int]]] | Exception]:
    inputs = {"x": np.array(values, np.int32).reshape(-1, 1)}
    (answer,) = runner.start(Batch(inputs, len(values), parts)).wait()
    assert isinstance(answer, PerRequest)
    return [
        each if isinstance(each, Exception) else {name: v.tolist() for name, v in each.items()}
        for each in answer.answers
    ]


def test_states_go_from_one_request_to_the_next_and_clients_do_not_see_them():
    runner, inner = make()
    assert run(runner, [1, 10], [part(0, "s"), part(1, "s")]) == [{"y": [[1]]}, {"y": [[10]]}]
    assert run(runner, [20], [part(1)]) == [{"y": [[30]]}]
    assert run(runner, [2, 3], [part(0), part(1)]) == [{"y": [[3]]}, {"y": [[33]]}]
    assert inner.seen("sum") == [[1], [30]]
    assert run(runner, [5], [part(0, "s")]) == [{"y": [[5]]}], "a START begins anew"


def test_a_state_that_is_also_an_output_is_shown():
    shown = replace(CONFIG, outputs=(*CONFIG.outputs, TensorSpec("new_sum", "INT32", (1,))))
    runner, _ = make(config=shown)
    assert run(runner, [1], [part(0, "s")]) == [{"y": [[1]], "new_sum": [[1]]}]


def test_direct_rows_are_slots_and_empty_ones_are_not_ready():
    runner, inner = make()
    answers = run(runner, [7, 8], [part(3, "e s"), part(1, "s")])
    assert answers == [{"y": [[7]]}, {"y": [[8]]}], "each request has its own answer"
    assert run(runner, [9, 1], [part(2, "s"), part(1)]) == [{"y": [[9]]}, {"y": [[9]]}]
    run(runner, [7, 8], [part(3, "e s"), part(1, "s")])
    assert inner.seen("x") == [[0], [8], [0], [7]]
    assert inner.seen("ready") == [[False], [True], [False], [True]]
    assert inner.seen("start") == [[0], [1], [0], [1]]
    assert inner.seen("end") == [[-1.0], [-1.0], [-1.0], [1.0]]
    assert inner.seen("id") == [[0], [2], [0], [4]]
    assert inner.batches[-1].inputs["id"].dtype == np.uint64
    assert [each.id for each in inner.batches[-1].requests] == ["", "r1", "", "r3"]


def test_oldest_rows_are_in_any_order():
    runner, inner = make(config=oldest())
    run(runner, [7, 8], [part(3, "s"), part(1, "s")])
    assert inner.seen("x") == [[7], [8]]
    assert inner.seen("ready") == [[True], [True]]


def test_text_ids_are_bytes_of_the_control_input():
    controls = (SequenceControl("id", "CORRID", "BYTES"),)
    runner, inner = make(config=oldest(controls=controls))
    run(runner, [1], [part(0, "s", "abc")])
    assert inner.seen("id") == [[b"abc"]]


def test_a_request_whose_state_is_not_here_is_never_answered():
    runner, inner = make()
    missing, fine = run(runner, [1, 2], [part(0), part(1, "s")])
    assert isinstance(missing, BackendFailed)
    assert "lost" in str(missing)
    assert fine == {"y": [[2]]}
    (stolen,) = run(runner, [1], [part(1, id=77)])
    assert isinstance(stolen, BackendFailed)
    assert len(inner.batches) == 1


def test_an_end_forgets_the_state():
    runner, _ = make()
    run(runner, [1], [part(0, "s e")])
    (late,) = run(runner, [1], [part(0)])
    assert isinstance(late, BackendFailed)


def test_an_error_of_one_request_leaves_its_state_and_those_of_others_go_on():
    def compute(batch: Batch) -> PerRequest:
        totals = (batch.inputs["x"] + batch.inputs["sum"])[:, :, None]
        return PerRequest(
            [
                ValueError("thirteen") if total[0, 0] == 13 else {"y": total, "new_sum": total}
                for total in totals
            ]
        )

    runner, _ = make(compute)
    run(runner, [1, 2], [part(0, "s"), part(1, "s")])
    bad, good = run(runner, [12, 2], [part(0), part(1)])
    assert isinstance(bad, ValueError)
    assert good == {"y": [[4]]}
    assert run(runner, [1], [part(0)]) == [{"y": [[2]]}]


def test_parameters_stay_with_their_request():
    def answer(batch: Batch) -> PerRequest:
        each = [{"y": x, "new_sum": x} for x in batch.inputs["x"][:, None]]
        return PerRequest(each, {n: {"row": n} for n in range(len(each))})

    runner, _ = make(answer)
    inputs = {"x": np.array([[7], [8]], np.int32)}
    # Of three rows, the one between is empty.
    parts = [part(2, "s"), part(0, "s")]
    (answered,) = runner.start(Batch(inputs, 2, parts)).wait()
    assert answered.parameters == {0: {"row": 2}, 1: {"row": 0}}


def test_a_model_that_gives_no_state_fails_the_request():
    runner, _ = make(lambda batch: {"y": batch.inputs["x"]})
    (error,) = run(runner, [1], [part(0, "s")])
    assert isinstance(error, BackendFailed)
    assert "state 'new_sum': the model gave no such output" in str(error)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (np.zeros((1, 2), np.int32), r"shape \[2\], expected \[1\]"),
        (np.zeros((1, 1), np.int64), "numpy int64, expected int32"),
    ],
)
def test_a_wrong_state_fails_the_request(values: np.ndarray, problem: str):
    runner, _ = make(lambda batch: {"y": batch.inputs["x"], "new_sum": values})
    (error,) = run(runner, [1], [part(0, "s")])
    with pytest.raises(BackendFailed, match=problem):
        raise error  # type: ignore[misc]


def test_states_of_different_lengths_run_apart():
    """As a cache that grows with each request."""
    grown = SequenceState("past", "present", "INT32", (-1,), (1,))

    def compute(batch: Batch) -> Outputs:
        past = batch.inputs["past"]
        return {"y": past.sum(1, keepdims=True), "present": np.hstack([past, batch.inputs["x"]])}

    for config in (oldest(states=(grown,)), replace(CONFIG, sequences=oldest().sequences)):
        policy = replace(config.sequences or SequencePolicy(), states=(grown,), is_direct=False)
        runner, inner = make(compute, replace(config, sequences=policy))
        run(runner, [1], [part(0, "s")])
        run(runner, [2, 5], [part(0), part(1, "s")])
        assert len(inner.batches) == 3
        assert run(runner, [3, 6], [part(0), part(1)]) == [{"y": [[3]]}, {"y": [[5]]}]


def test_a_model_without_a_batch_dimension():
    config = replace(CONFIG, max_batch_size=0, batching=BatchPolicy(1))
    runner, inner = make(config=config)
    for value, total in ((1, 1), (2, 3)):
        inputs = {"x": np.array([value], np.int32)}
        (answer,) = runner.start(Batch(inputs, 1, [part(0, "s" * (value == 1))])).wait()
        assert answer.answers[0]["y"].tolist() == [total]  # type: ignore[union-attr, index]
    assert inner.seen("start") == [0]
    assert inner.seen("id") == [1]


def test_a_warm_up_request_is_a_sequence_of_its_own():
    runner, inner = make()
    run(runner, [1], [RequestPart("warm-up", 1)])
    assert inner.seen("start") == [[1]]
    assert inner.seen("end") == [[1.0]]
    assert inner.seen("ready") == [[True]]


def test_the_first_request_gets_the_initial_state_of_a_file(tmp_path: Path):
    np.array([40, 2], np.int32).tofile(tmp_path / "first.bin")
    state = SequenceState("sum", "new_sum", "INT32", (2,), (2,), "first.bin", folder=str(tmp_path))
    config = replace(CONFIG, sequences=SequencePolicy(states=(state,)))
    runner, inner = make(config=config)
    run(runner, [0], [part(0, "s")])
    assert inner.seen("sum") == [[40, 2]]
    (tmp_path / "first.bin").write_bytes(b"1234567")
    with pytest.raises(
        ConfigError, match=r"initial state 'first.bin'.*INT32 values of shape \[2\]"
    ):
        make(config=config)


def test_requested_outputs_always_include_the_states():
    runner, inner = make(config=oldest())
    asked = part(0, "s")
    asked.outputs = ("y",)
    run(runner, [1], [asked])
    assert inner.batches[-1].requests[0].outputs == ("y", "new_sum")
