"""Steps that fan out, conditions and defaults, with members' workers on strings; and any graph."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from doubles import RecordingSink, settle
from ensemble_stage import MEMORY, ensemble, error, member, run, step, values
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import BatchPolicy, EnsembleStep, FanOutLimits, ModelConfig, QueuePolicy
from penstock.errors import BackendFailed, Cancelled, NotReady, Overloaded, TooLarge
from penstock.repository.ensemble_cases import holds
from penstock.repository.ensemble_parameters import parse_condition, parse_default
from penstock.repository.ensemble_rules import graph_problems, member_problems
from penstock.serving.ensemble import Ensemble
from penstock.serving.ensemble_plan import EnsemblePlanner
from penstock.serving.metrics import ModelMetrics
from penstock.types import Request, Response, Tensor, TensorSpec, from_array, to_array
from penstock.wire.frames import SplitRule

LOOSE = {
    "inputs": (TensorSpec("x", "INT64", (-1, 2)),),
    "outputs": (TensorSpec("y", "INT64", (-1, 2)),),
}
DETECTOR, CLASSIFIER = member("detector", **LOOSE), member("classifier")
# The detector echoes its input, so a request brings the rows itself.
FAN = replace(
    ensemble(
        step("detector", takes="IN", makes="crops"),
        replace(step("classifier", takes="crops", makes="OUT"), fan_out=("crops",)),
    ),
    inputs=(TensorSpec("IN", "INT64", (-1, 2)),),
    outputs=(TensorSpec("OUT", "INT64", (-1, 2)), TensorSpec("crops", "INT64", (-1, 2))),
)


def bring(*numbers, rows=1, **tensors):
    """A request with a row of crops for each number."""
    crops = np.array([[[n, n] for n in numbers]] * rows, np.int64).reshape(rows, len(numbers), 2)
    inputs = [from_array("IN", "INT64", crops)]
    inputs += [from_array(name, "INT64", np.array(each)) for name, each in tensors.items()]
    return Request(RecordingSink(), inputs, 0.0)


def crops(*numbers):
    return [[[n, n] for n in numbers]]


def test_rows_become_requests_and_their_answers_are_joined_in_order():
    async def scenario(stage):
        await stage.load(FAN, DETECTOR, CLASSIFIER)
        request = stage.send(bring(5, 3, 9))
        await stage.puppets.step_all()
        assert values(request) == {"OUT": crops(5, 3, 9), "crops": crops(5, 3, 9)}
        metrics = stage.find("classifier").metrics
        assert (metrics.num_success, metrics.batch_sizes) == (3, {3: 1})
        assert [each.num_answered for each in stage.find().explain().steps] == [1, 3]

    run(scenario)


def test_rows_of_all_requests_and_of_clients_share_batches():
    async def scenario(stage):
        await stage.load(FAN, DETECTOR, CLASSIFIER)
        requests = [stage.send(bring(n, n + 10)) for n in range(3)]
        await stage.step("detector")
        tensor = from_array("x", "INT64", np.array([[7, 7]]))
        alone = stage.send(Request(RecordingSink(), [tensor], 0.0), "classifier")
        await stage.puppets.step_all()
        assert [values(each)["OUT"] for each in requests] == [crops(n, n + 10) for n in range(3)]
        assert values(alone) == {"y": [[7, 7]]}
        assert max(stage.find("classifier").metrics.batch_sizes) > 2

    run(scenario)


def test_without_rows_no_request_is_sent():
    async def scenario(stage):
        await stage.load(FAN, DETECTOR, CLASSIFIER)
        request = stage.send(bring())
        await stage.puppets.step_all()
        [outputs] = request.sink.outputs
        assert [array.shape for array in outputs.values()] == [(1, 0, 2), (1, 0, 2)]
        assert stage.find("classifier").metrics.num_success == 0
        # The same at the first step.
        first = replace(FAN, steps=(replace(FAN.steps[1], inputs={"x": "IN"}, fan_out=("IN",)),))
        first = replace(first, outputs=FAN.outputs[:1], name="first")
        await stage.load_together(first)
        request = stage.send(bring(), "first")
        assert request.sink.outputs[0]["OUT"].shape == (1, 0, 2)

    run(scenario)


def test_a_batch_of_requests_fans_out_row_by_row():
    async def scenario(stage):
        await stage.load(FAN, DETECTOR, CLASSIFIER)
        request = stage.send(bring(1, 2, 3, rows=4))
        await stage.puppets.step_all()
        assert values(request)["OUT"] == crops(1, 2, 3) * 4
        assert stage.find("classifier").metrics.num_success == 12

    run(scenario)


def test_an_ensemble_without_batches_fans_out_over_batching_members():
    config = replace(FAN, max_batch_size=0, batching=BatchPolicy(1))

    async def scenario(stage):
        await stage.load(config, DETECTOR, CLASSIFIER)
        request = stage.send(bring(4, 5))
        request.inputs = ()
        tensor = from_array("IN", "INT64", np.array([[4, 4], [5, 5]]))
        request = stage.send(Request(RecordingSink(), [tensor], 0.0))
        await stage.puppets.step_all()
        assert values(request) == {"OUT": crops(4, 5)[0], "crops": crops(4, 5)[0]}

    run(scenario)


def test_no_more_rows_than_allowed_are_in_flight():
    config = replace(FAN, fan_out_limits=FanOutLimits(max_in_flight=3))

    async def scenario(stage):
        await stage.load(config, DETECTOR, CLASSIFIER)
        request = stage.send(bring(*range(20)))
        await stage.step("detector")
        classifier = stage.find("classifier")
        most = 0
        while not request.is_done:
            most = max(most, classifier.num_waiting + classifier.num_running)
            stage.puppets.alive[-1].step()
            await settle()
        assert most == 3
        assert values(request)["OUT"] == crops(*range(20))

    run(scenario)


def test_a_request_with_too_many_rows_is_refused():
    config = replace(FAN, fan_out_limits=FanOutLimits(max_rows=4))

    async def scenario(stage):
        await stage.load(config, DETECTOR, CLASSIFIER)
        requests = [stage.send(bring(*range(n))) for n in (4, 5)]
        await stage.puppets.step_all()
        values(requests[0])
        failure = error(requests[1])
        assert isinstance(failure, TooLarge)
        assert str(failure) == (
            "in ensemble 'whole', model 'classifier': 'crops' has 5 rows; at most 4 "
            "(penstock.fan_out_limit)"
        )
        assert stage.find().metrics.num_refused["too_large"] == 1

    run(scenario)


def test_the_error_of_one_row_names_it_and_cancels_the_others():
    failing = member("classifier", options={"null.fail_on": "13"}, batching=BatchPolicy(1))

    async def scenario(stage):
        await stage.load(FAN, DETECTOR, failing)
        request = stage.send(bring(1, 13, *range(20, 40)))
        await stage.puppets.step_all()
        failure = error(request)
        assert isinstance(failure, BackendFailed)
        assert str(failure).startswith("in ensemble 'whole', model 'classifier', row 1: ")
        metrics = stage.find("classifier").metrics
        assert metrics.num_failures["CANCELED"] > 0
        again = stage.send(bring(1, 2))
        await stage.puppets.step_all()
        assert values(again)["OUT"] == crops(1, 2)

    run(scenario)


def test_a_row_that_the_member_refuses_ends_the_request_with_the_refusal():
    full = BatchPolicy(8, is_dynamic=True, policies=(QueuePolicy(max_queue_size=3),))

    async def scenario(stage):
        await stage.load(FAN, DETECTOR, member("classifier", batching=full))
        request = stage.send(bring(*range(30)))
        await stage.puppets.step_all()
        failure = error(request)
        assert isinstance(failure, Overloaded) and failure.reason == "queue_full"
        # With fewer in flight than the queue takes, they pass.
        narrow = replace(FAN, name="narrow", fan_out_limits=FanOutLimits(max_in_flight=3))
        await stage.load_together(narrow)
        request = stage.send(bring(*range(30)), "narrow")
        await stage.puppets.step_all()
        assert values(request)["OUT"] == crops(*range(30))

    run(scenario)


def test_a_cancelled_request_frees_its_rows():
    async def scenario(stage):
        await stage.load(FAN, DETECTOR, CLASSIFIER)
        request = stage.send(bring(*range(100)))
        await stage.step("detector")
        stage.find().cancel(request)
        assert isinstance(error(request), Cancelled)
        await stage.puppets.step_all()
        classifier = stage.find("classifier")
        assert (classifier.num_waiting, classifier.num_running) == (0, 0)
        assert classifier.metrics.num_success < 64

    run(scenario)


def test_rows_that_wait_keep_their_values():
    """The detector's memory is used again while most rows wait, and rows find none."""
    narrow = replace(MEMORY, slab_bytes=64, max_slabs=1)
    classifier = member("classifier", memory=narrow, max_batch_size=1, batching=BatchPolicy(1))
    config = replace(FAN, fan_out_limits=FanOutLimits(max_in_flight=2))

    async def scenario(stage):
        await stage.load(config, DETECTOR, classifier)
        requests = []
        for n in range(12):
            requests.append(stage.send(bring(*range(n, n + 9))))
            await stage.step("detector")
        await stage.puppets.step_all()
        for n, request in enumerate(requests):
            assert values(request) == dict.fromkeys(("OUT", "crops"), crops(*range(n, n + 9)))

    run(scenario)


def test_rows_are_requests_of_a_members_rollout():
    async def scenario(stage):
        await stage.load(FAN, DETECTOR, CLASSIFIER)
        await stage.act(stage.catalog.add_candidate(member("classifier", version="2")))
        assert await stage.catalog.split("classifier", SplitRule(1, "canary", "2", share=1.0))
        request = stage.send(bring(1, 2, 3))
        await stage.puppets.step_all()
        assert values(request)["OUT"] == crops(1, 2, 3)
        counts = stage.catalog.splits["classifier"].counts
        assert (counts.candidate.num_requests, counts.stable.num_requests) == (3, 0)

    run(scenario)


def test_a_member_is_reloaded_between_rows():
    config = replace(FAN, fan_out_limits=FanOutLimits(max_in_flight=1))

    async def scenario(stage):
        await stage.load(config, DETECTOR, CLASSIFIER)
        request = stage.send(bring(*range(6)))
        await stage.step("detector")
        await stage.load(member("classifier", version="2", max_batch_size=16))
        await stage.puppets.step_all()
        assert values(request)["OUT"] == crops(*range(6))
        assert stage.find("classifier").config.version == "2"
        # Without the member, what is left of the request fails.
        request = stage.send(bring(*range(6)))
        await stage.step("detector")
        await stage.act(stage.catalog.unload("classifier"))
        await stage.puppets.step_all()
        failure = error(request)
        assert isinstance(failure, NotReady) and "'classifier'" in str(failure)

    run(scenario)


def test_each_row_is_a_step_of_a_trace():
    async def scenario(stage):
        await stage.load(FAN, DETECTOR, CLASSIFIER)
        request = bring(1, 2, 3)
        request.steps = []
        stage.send(request)
        await stage.puppets.step_all()
        assert [each.name for each in request.steps] == ["detector", *["classifier"] * 3]

    run(scenario)


# Conditions.

FLAG = TensorSpec("FLAG", "INT64", (1,))


def optional_step(**changes):
    """`slow` makes OUT if FLAG is above 0."""
    chosen = replace(step("slow", takes="IN", makes="OUT"), condition=parse_condition("FLAG > 0"))
    config = ensemble(chosen)
    return replace(config, inputs=(*config.inputs, FLAG), **changes)


def test_a_request_takes_one_of_two_branches():
    config = optional_step()
    other = replace(step("fast", takes="IN", makes="OUT"), condition=parse_condition("FLAG <= 0"))
    config = replace(config, steps=(*config.steps, other))

    async def scenario(stage):
        await stage.load(config, member("slow"), member("fast"))
        for flag in (1, 0, 0):
            request = Request(
                RecordingSink(),
                [
                    from_array("IN", "INT64", np.array([[flag, flag]])),
                    from_array("FLAG", "INT64", np.array([[flag]])),
                ],
                0.0,
            )
            stage.send(request)
            await stage.puppets.step_all()
            assert values(request) == {"OUT": [[flag, flag]]}
        assert [stage.find(name).metrics.num_success for name in ("slow", "fast")] == [1, 2]
        steps = stage.find().explain().steps
        assert [(each.num_answered, each.num_skipped) for each in steps] == [(1, 2), (2, 1)]

    run(scenario)


@pytest.mark.parametrize(("default", "expected"), [("-1", [[-1, -1]]), ("IN", [[4, 4]])])
def test_an_output_of_a_step_that_did_not_run_has_its_default(default, expected):
    config = optional_step(defaults={"OUT": parse_default(default)})

    async def scenario(stage):
        await stage.load(config, member("slow"))
        request = Request(
            RecordingSink(),
            [
                from_array("IN", "INT64", np.array([[4, 4]])),
                from_array("FLAG", "INT64", np.array([[0]])),
            ],
            0.0,
        )
        stage.send(request)
        assert values(request) == {"OUT": expected}
        assert stage.find("slow").metrics.num_success == 0

    run(scenario)


def test_crops_that_default_to_none_are_no_requests():
    chosen = replace(FAN.steps[0], condition=parse_condition("FLAG > 0"))
    config = replace(
        FAN,
        inputs=(*FAN.inputs, FLAG),
        steps=(chosen, FAN.steps[1]),
        defaults={"crops": parse_default("[]")},
    )

    async def scenario(stage):
        await stage.load(config, DETECTOR, CLASSIFIER)
        found = stage.send(bring(1, 2, FLAG=[[1]]))
        empty = stage.send(bring(1, 2, FLAG=[[0]]))
        await stage.puppets.step_all()
        assert values(found)["OUT"] == crops(1, 2)
        assert [array.shape for array in empty.sink.outputs[0].values()] == [(1, 0, 2)] * 2

    run(scenario)


def test_each_row_decides_by_itself_in_a_nested_ensemble():
    """Crops of 5 and more go to `fine`; the others have a default."""
    checked = ensemble(
        step("total", takes="crop", makes="score"),
        replace(step("fine", takes="crop", makes="OUT"), condition=parse_condition("score >= 5")),
        name="checked",
        inputs=("crop",),
    )
    checked = replace(checked, defaults={"OUT": parse_default("-1")})
    total = member("total", outputs=(TensorSpec("y", "INT64", (1,)),))
    whole = replace(
        FAN,
        steps=(
            FAN.steps[0],
            EnsembleStep("checked", "", {"crop": "crops"}, {"OUT": "OUT"}, fan_out=("crops",)),
        ),
    )

    async def scenario(stage):
        # The null backend gives zeros where shapes differ, so nothing is above 5.
        await stage.load(whole, checked, DETECTOR, total, member("fine"))
        request = stage.send(bring(1, 9))
        await stage.puppets.step_all()
        assert values(request)["OUT"] == crops(-1, -1)
        assert stage.find("checked").metrics.num_success == 2

    run(scenario)


def test_a_condition_that_cannot_be_decided_ends_the_request():
    wide = replace(FLAG, shape=(-1,))
    config = optional_step(defaults={"OUT": parse_default("0")})
    config = replace(config, inputs=(config.inputs[0], wide))

    async def scenario(stage):
        await stage.load(config, member("slow"))
        request = Request(
            RecordingSink(),
            [
                from_array("IN", "INT64", np.array([[4, 4]])),
                from_array("FLAG", "INT64", np.array([[0, 1]])),
            ],
            0.0,
        )
        stage.send(request)
        assert str(error(request)) == (
            "in ensemble 'whole': 'FLAG' has shape [1, 2]; a condition reads one element"
        )

    run(scenario)


# Any graph, with members that answer in any order, from memory that is then used again.

SCALAR, LIST = (1,), (-1, 1)


def compute(model, value):
    """What the models of a flow make of one row: numbers around those in conditions."""
    if model == "scale":
        return (3 * value + 1) % 7 - 3
    if model == "spread":
        return [value + n for n in range(int(value) % 4)]
    return sum(value) % 5 - 2


class Scripted:
    """A model of a flow. `bad`: the number that it fails for."""

    is_ready, reason = True, ""

    def __init__(self, name, takes, makes, bad) -> None:
        spec = [(TensorSpec(n, "FP32", dims),) for n, dims in (("x", takes), ("y", makes))]
        self.config = ModelConfig(name, "1", "null", "", *spec, 8, BatchPolicy(8))
        self.metrics = ModelMetrics.from_config(self.config)
        self.open, self.bad, self.num_max = [], bad, 0

    def submit(self, request) -> None:
        self.open.append(request)
        self.num_max = max(self.num_max, len(self.open))

    def cancel(self, request) -> None:
        if not request.is_done:
            request.respond(Cancelled("cancelled"))
        if request in self.open:
            self.open.remove(request)

    def answer(self, index) -> None:
        request = self.open.pop(index)
        rows = to_array(request.inputs[0])
        if (rows == self.bad).any():
            request.respond(BackendFailed("bad number"))
            return
        made = [compute(self.config.name, row[0] if row.ndim == 1 else row[:, 0]) for row in rows]
        array = np.array(made, np.float32)
        array = array.reshape(len(rows), *((1,) if array.ndim == 1 else (-1, 1)))
        memory = bytearray(array.tobytes())
        output = Tensor("y", "FP32", array.shape, memoryview(memory))
        request.respond(Response(self.config.name, "1", [output]))
        memory[:] = b"\xff" * len(memory)


class Flow:
    """A config with its members, and what it makes of one row."""

    def __init__(self, config, kinds, bad) -> None:
        self.config = config
        self._kinds = kinds
        self.members = {
            "scale": Scripted("scale", SCALAR, SCALAR, bad),
            "spread": Scripted("spread", SCALAR, LIST, bad),
            "total": Scripted("total", LIST, SCALAR, bad),
        }
        self._bad = bad
        # There is no rollout.
        self.splits = {}

    def find(self, name, version=""):
        return self.members[name]

    def run(self, given):
        """The value of each tensor of one row; None if a step may fail."""
        values, undone, is_sound = {"IN": given}, list(self.config.steps), True
        for number in range(len(undone)):
            name = f"t{number}"
            for step_ in [each for each in undone if each.outputs["y"] == name]:
                if all(holds(each, values[each.tensor]) for each in step_.condition):
                    source = values[step_.inputs["x"]]
                    if step_.fan_out:
                        is_sound &= self._bad not in source
                        values[name] = [compute("scale", each) for each in source]
                    else:
                        bare = source if isinstance(source, list) else [source]
                        is_sound &= self._bad not in bare
                        values[name] = compute(step_.model, source)
            if name not in values and (default := self.config.defaults.get(name)) is not None:
                fill = default.value
                if self._kinds[name] == LIST:
                    fill = [] if fill is None else [fill]
                values[name] = values[default.tensor] if default.tensor else fill
        return values if is_sound else None


@st.composite
def flows(draw):
    kinds, steps, defaults = {"IN": SCALAR}, [], {}
    for number in range(draw(st.integers(1, 6))):
        name = f"t{number}"
        model = draw(st.sampled_from(["scale", "scale", "spread", "fan", "total"]))
        needed = LIST if model in ("fan", "total") else SCALAR
        sources = [each for each, dims in kinds.items() if dims == needed]
        if not sources:
            model, needed = "spread", SCALAR
            sources = [each for each, dims in kinds.items() if dims == needed]
        takes = draw(st.sampled_from(sources))
        fan_out = (takes,) if model == "fan" else ()
        kinds[name] = LIST if model in ("fan", "spread") else SCALAR
        model = "scale" if model == "fan" else model
        made = EnsembleStep(model, "", {"x": takes}, {"y": name}, fan_out)
        reads = draw(
            st.sampled_from([n for n, dims in kinds.items() if dims == SCALAR and n != name])
        )
        limit = draw(st.integers(-2, 2))
        same = [each for each, dims in kinds.items() if dims == kinds[name] and each != name]
        kind = draw(st.sampled_from(["plain", "either", "value", "tensor"]))
        if kind == "tensor" and not same:
            kind = "plain"
        if kind != "plain":
            made = replace(made, condition=parse_condition(f"{reads} > {limit}"))
        steps.append(made)
        if kind == "either":
            steps.append(replace(made, condition=parse_condition(f"{reads} <= {limit}")))
        elif kind == "value":
            empty = kinds[name] == LIST and draw(st.booleans())
            defaults[name] = parse_default("[]" if empty else str(limit))
        elif kind == "tensor":
            defaults[name] = parse_default(draw(st.sampled_from(same)))
    names = draw(st.lists(st.sampled_from(list(kinds)[1:]), min_size=1, unique=True))
    config = ModelConfig(
        "flow",
        "1",
        "ensemble",
        "",
        (TensorSpec("IN", "FP32", SCALAR),),
        tuple(TensorSpec(name, "FP32", kinds[name]) for name in names),
        4,
        BatchPolicy(4),
        steps=tuple(draw(st.permutations(steps))),
        defaults=defaults,
        fan_out_limits=FanOutLimits(100, draw(st.integers(1, 3))),
    )
    return Flow(config, kinds, draw(st.sampled_from([1e9, 1e9, 0, 1, 2, -1])))


@given(flows(), st.lists(st.integers(-3, 3), min_size=1, max_size=3), st.data())
def test_each_request_ends_once_with_its_rows_in_order(flow, given, data):
    """For any graph, order of answers, failure and moment of a cancel."""
    config = flow.config
    assert graph_problems(config) == []
    found = [flow.members[step_.model].config for step_ in config.steps]
    assert member_problems(config, found) == []
    if not EnsemblePlanner(config).plan(["IN"], []).has_conditions:
        # Rows of one request then have lists of one length.
        given = given[:1]
    request = Request(
        RecordingSink(), [from_array("IN", "FP32", np.array(given, np.float32)[:, None])], 0.0
    )
    cancel_after = data.draw(st.one_of(st.none(), st.integers(0, 10)))
    asyncio.run(drive(flow, request, cancel_after, data))
    assert request.sink.num_final == 1
    assert not any(each.open for each in flow.members.values())
    check_answer(flow, request, given, was_cancelled=cancel_after is not None)


async def drive(flow, request, cancel_after, data) -> None:
    whole = Ensemble(flow.config, flow)
    whole.submit(request)
    count = 0
    while not request.is_done:
        if count == cancel_after:
            whole.cancel(request)
            break
        busy = [each for each in flow.members.values() if each.open]
        chosen = busy[data.draw(st.integers(0, len(busy) - 1))]
        chosen.answer(data.draw(st.integers(0, len(chosen.open) - 1)))
        count += 1
    await settle()
    await whole.drain()


def check_answer(flow, request, given, *, was_cancelled) -> None:
    rows = [flow.run(value) for value in given]
    failure = request.sink.error
    if failure is not None:
        if isinstance(failure, Cancelled):
            assert was_cancelled
        elif "bad number" in str(failure):
            assert any(row is None for row in rows)
        else:
            # Lists of different lengths.
            assert len(given) > 1 and "has shape" in str(failure)
        return
    if any(row is None for row in rows):
        return  # What failed was not needed.
    [outputs] = request.sink.outputs
    assert list(outputs) == [spec.name for spec in flow.config.outputs]
    for spec in flow.config.outputs:
        found = [row[spec.name] for row in rows]
        expected = [[[n] for n in each] if spec.shape == LIST else [each] for each in found]
        assert outputs[spec.name].tolist() == expected


def test_answers_that_come_at_once_do_not_pile_up():
    """As from a response cache: a thousand rows, one in flight."""

    class Cached(Scripted):
        def submit(self, request) -> None:
            super().submit(request)
            self.answer(-1)

    config = replace(
        ensemble(replace(step("scale", takes="IN", makes="OUT"), fan_out=("IN",))),
        inputs=(TensorSpec("IN", "FP32", LIST),),
        outputs=(TensorSpec("OUT", "FP32", LIST),),
        fan_out_limits=FanOutLimits(2000, 1),
    )
    cached = Cached("scale", SCALAR, SCALAR, bad=1e9)
    numbers = np.arange(1500, dtype=np.float32).reshape(1, -1, 1)
    request = Request(RecordingSink(), [from_array("IN", "FP32", numbers)], 0.0)

    async def scenario() -> None:
        table = SimpleNamespace(find=lambda name, version: cached, splits={})
        Ensemble(config, table).submit(request)

    asyncio.run(scenario())
    expected = [compute("scale", each) for each in numbers.ravel().tolist()]
    assert request.sink.outputs[0]["OUT"].ravel().tolist() == expected
