"""Requests of several rows to ensembles with conditions: every row goes its own way."""

from dataclasses import replace

import numpy as np
from doubles import RecordingSink, settle
from ensemble_stage import ensemble, error, member, run, step, values

from penstock.config import BatchPolicy
from penstock.errors import BackendFailed, Cancelled
from penstock.repository.ensemble_parameters import parse_condition, parse_default
from penstock.types import Request, RequestedOutput, TensorSpec, from_array


def flagged(*flags, start=0, outputs=()):
    """A row for each flag, whose value is its number."""
    rows = np.arange(start, start + len(flags), dtype=np.int64)
    inputs = [
        from_array("IN", "INT64", np.stack([rows, rows], axis=1)),
        from_array("FLAG", "INT64", np.array(flags, np.int64)[:, None]),
    ]
    wanted = [RequestedOutput(name) for name in outputs]
    return Request(RecordingSink(), inputs, 0.0, outputs=wanted)


def expected(*flags, start=0):
    return [[start + n if flag > 0 else -1] * 2 for n, flag in enumerate(flags)]


CHOSEN = replace(step("slow", takes="IN", makes="OUT"), condition=parse_condition("FLAG > 0"))
SWITCH = ensemble(CHOSEN, step("all", takes="IN", makes="ALL"), outputs=("OUT", "ALL"))
SWITCH = replace(
    SWITCH,
    inputs=(*SWITCH.inputs, TensorSpec("FLAG", "INT64", (1,))),
    defaults={"OUT": parse_default("-1")},
)
MEMBERS = (member("slow"), member("all"))


def test_rows_of_one_request_take_different_ways():
    async def scenario(stage):
        await stage.load(SWITCH, *MEMBERS)
        request = stage.send(flagged(1, 0, 1, 0, 0))
        await stage.puppets.step_all()
        assert values(request) == {
            "OUT": expected(1, 0, 1, 0, 0),
            "ALL": [[n, n] for n in range(5)],
        }
        # The members batch the rows again.
        assert stage.find("slow").metrics.batch_sizes == {2: 1}
        assert stage.find("all").metrics.batch_sizes == {5: 1}
        metrics = stage.find().metrics
        assert (metrics.num_success, metrics.num_inferences) == (1, 5)
        steps = stage.find().explain().steps
        assert [(each.num_answered, each.num_skipped) for each in steps] == [(2, 3), (5, 0)]

    run(scenario)


def test_requests_without_a_row_that_runs_are_answered_too():
    async def scenario(stage):
        await stage.load(SWITCH, *MEMBERS)
        request = stage.send(flagged(0, 0, outputs=["OUT"]))
        assert values(request) == {"OUT": expected(0, 0)}

    run(scenario)


def test_outputs_that_need_no_condition_are_computed_together():
    async def scenario(stage):
        await stage.load(SWITCH, *MEMBERS)
        request = stage.send(flagged(1, 0, 1, outputs=["ALL"]))
        await stage.puppets.step_all()
        assert values(request) == {"ALL": [[0, 0], [1, 1], [2, 2]]}
        assert stage.find("all").metrics.num_success == 1

    run(scenario)


def test_many_requests_keep_their_rows_in_order():
    async def scenario(stage):
        await stage.load(SWITCH, *MEMBERS)
        sent = []
        for n in range(30):
            flags = [(n + k) % 3 for k in range(1 + n % 8)]
            sent.append((flags, n, stage.send(flagged(*flags, start=n * 10))))
            if n % 4 == 0:
                await stage.step("slow")
        await stage.puppets.step_all()
        for flags, n, request in sent:
            assert values(request)["OUT"] == expected(*flags, start=n * 10)

    run(scenario)


def test_the_error_of_a_row_ends_the_request_and_cancels_the_others():
    failing = member("slow", options={"null.fail_on": "2"}, batching=BatchPolicy(1))

    async def scenario(stage):
        await stage.load(SWITCH, failing, MEMBERS[1])
        request = stage.send(flagged(*[1] * 8))
        await stage.puppets.step_all()
        failure = error(request)
        assert isinstance(failure, BackendFailed)
        assert str(failure).startswith("in ensemble 'whole', model 'slow': ")
        assert stage.find("slow").metrics.num_failures["CANCELED"] > 0
        assert stage.find().metrics.num_failures["BACKEND"] == 1
        again = stage.send(flagged(1, 0))
        await stage.puppets.step_all()
        assert values(again)["OUT"] == expected(1, 0)

    run(scenario)


def test_a_cancel_ends_all_rows():
    async def scenario(stage):
        await stage.load(SWITCH, *MEMBERS)
        request = stage.send(flagged(1, 1, 0))
        await settle()
        stage.find().cancel(request)
        assert isinstance(error(request), Cancelled)
        await stage.puppets.step_all()
        assert stage.find("slow").num_waiting == stage.find("all").num_waiting == 0
        await stage.find().drain()

    run(scenario)


def test_rows_with_outputs_of_different_shapes_cannot_be_joined():
    loose = {
        "inputs": (TensorSpec("x", "INT64", (-1,)),),
        "outputs": (TensorSpec("y", "INT64", (-1,)),),
    }
    config = replace(
        SWITCH,
        outputs=(TensorSpec("OUT", "INT64", (-1,)),),
        defaults={"OUT": parse_default("[]")},
    )

    async def scenario(stage):
        await stage.load(config, member("slow", **loose), member("all"))
        request = stage.send(flagged(1, 0))
        await stage.puppets.step_all()
        assert "output 'OUT' has shape" in str(error(request))
        assert "rows are joined if they have the same" in str(error(request))
        alone = stage.send(flagged(0))
        assert alone.sink.outputs[0]["OUT"].shape == (1, 0)

    run(scenario)


def test_each_row_is_traced():
    async def scenario(stage):
        await stage.load(SWITCH, *MEMBERS)
        request = flagged(1, 0)
        request.steps = []
        stage.send(request)
        await stage.puppets.step_all()
        assert sorted(each.name for each in request.steps) == ["all", "all", "slow"]

    run(scenario)


def test_rows_have_what_the_request_says_about_itself():
    seen = []

    async def scenario(stage):
        await stage.load(SWITCH, *MEMBERS)
        model = stage.find("all")
        submit = model.submit

        def spy(request, reserved=None):
            seen.append((request.id, request.caller, request.priority, request.parameters))
            assert 0 < request.timeout_s <= 5.0
            submit(request, reserved)

        model.submit = spy
        request = flagged(1, 0)
        request.id, request.caller, request.priority = "one", b"key", 2
        request.parameters, request.timeout_s = {"a": 1}, 5.0
        stage.send(request)
        await stage.puppets.step_all()
        values(request)

    run(scenario)
    assert seen == [("one", b"key", 2, {"a": 1})] * 2
