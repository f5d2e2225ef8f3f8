"""Ensembles with their members' workers on strings: every request ends once, with the right data.

The members echo what they get, so the value of an output says which way it came only by its name.
"""

from dataclasses import replace

import numpy as np
import pytest
from doubles import FakeClock, RecordingSink, settle
from ensemble_stage import MEMORY, ROW, ask, ensemble, error, member, run, step, values

from penstock.config import BatchPolicy, QueuePolicy
from penstock.errors import (
    BackendFailed,
    Cancelled,
    ConfigError,
    InvalidRequest,
    NotReady,
    Overloaded,
    Unsupported,
)
from penstock.serving.catalog import pending_of
from penstock.serving.ensemble import Ensemble
from penstock.serving.traffic_split import MirrorRequest
from penstock.types import OutputKeeper, Request, Response, TensorSpec, from_array
from penstock.wire.frames import SplitRule

CHAIN = ensemble(
    step("first", takes="IN", makes="between"), step("second", takes="between", makes="OUT")
)
# Two branches that meet: LEFT and RIGHT are outputs too.
PAIR = (TensorSpec("a", "INT64", (2,)), TensorSpec("b", "INT64", (2,)))
BOTH = (TensorSpec("p", "INT64", (2,)), TensorSpec("q", "INT64", (2,)))
DIAMOND = ensemble(
    step("first", takes="IN", makes="LEFT"),
    step("second", takes="IN", makes="RIGHT"),
    step("join", inputs={"a": "LEFT", "b": "RIGHT"}, outputs={"p": "P", "q": "Q"}),
    outputs=("LEFT", "RIGHT", "P", "Q"),
)
MEMBERS = (member("first"), member("second"), member("join", inputs=PAIR, outputs=BOTH))


def test_the_answer_has_the_name_of_the_ensemble_and_its_outputs():
    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        request = stage.send(ask(7, rows=3))
        await stage.puppets.step_all()
        assert values(request) == {"OUT": [[7, 7]] * 3}
        [answer] = request.sink.answers
        assert (answer.model_name, answer.model_version) == ("whole", "1")

    run(scenario)


def test_branches_run_at_the_same_time_and_meet():
    async def scenario(stage):
        await stage.load(DIAMOND, *MEMBERS)
        request = stage.send(ask(5))
        await settle()
        assert [stage.find(name).num_running for name in ("first", "second", "join")] == [1, 1, 0]
        await stage.puppets.step_all()
        assert values(request) == dict.fromkeys(("LEFT", "RIGHT", "P", "Q"), [[5, 5]])

    run(scenario)


def test_requests_of_all_ensembles_and_of_clients_share_batches():
    other = ensemble(step("first", takes="IN", makes="OUT"), name="other")

    async def scenario(stage):
        await stage.load(CHAIN, other, *MEMBERS[:2])
        requests = [stage.send(ask(n), name) for n, name in enumerate(["whole", "other"] * 2)]
        requests.append(ask(9, names=("x",)))
        stage.send(requests[-1], "first")
        await stage.puppets.step_all()
        assert stage.find("first").metrics.batch_sizes == {5: 1}
        assert [list(values(each).values()) for each in requests] == [
            [[[n, n]]] for n in (0, 1, 2, 3, 9)
        ]

    run(scenario)


def test_outputs_that_wait_for_others_keep_their_values():
    """The rows of a member are used again while its output waits for another step."""

    async def scenario(stage):
        await stage.load(DIAMOND, *MEMBERS)
        requests = []
        for value in range(40):
            requests.append(stage.send(ask(value)))
            # The other branch is behind.
            await stage.step("first")
        await stage.puppets.step_all()
        for value, request in enumerate(requests):
            assert values(request) == dict.fromkeys(("LEFT", "RIGHT", "P", "Q"), [[value, value]])

    run(scenario)


def test_tensors_that_find_no_rows_keep_their_values():
    """A member with a single row: the outputs of the first wait outside of shared memory."""
    narrow = replace(MEMORY, slab_bytes=64, max_slabs=1)

    async def scenario(stage):
        last = member("second", memory=narrow, max_batch_size=1, batching=BatchPolicy(1))
        await stage.load(replace(CHAIN, max_batch_size=1), member("first"), last)
        requests = [stage.send(ask(value)) for value in range(30)]
        await stage.step("first")
        more = [stage.send(ask(value)) for value in range(30, 60)]
        await stage.step("first")
        await stage.puppets.step_all()
        assert [values(each)["OUT"] for each in requests + more] == [[[n, n]] for n in range(60)]

    run(scenario)


def test_texts_and_variable_shapes_pass_too():
    text = TensorSpec("x", "BYTES", (-1,)), TensorSpec("y", "BYTES", (-1,))
    config = replace(
        CHAIN,
        inputs=(replace(text[0], name="IN"),),
        outputs=(replace(text[1], name="OUT"),),
    )

    async def scenario(stage):
        members = [member(name, inputs=text[:1], outputs=text[1:]) for name in ("first", "second")]
        await stage.load(config, *members)
        words = np.array([[b"one", b"\xff" * 300]], np.object_)
        request = Request(RecordingSink(), [from_array("IN", "BYTES", words)], 0.0)
        stage.send(request)
        await stage.puppets.step_all()
        assert values(request) == {"OUT": words.tolist()}

    run(scenario)


def test_only_what_the_wanted_outputs_need_is_computed():
    async def scenario(stage):
        await stage.load(DIAMOND, *MEMBERS)
        request = stage.send(ask(3, "RIGHT"))
        await stage.puppets.step_all()
        assert values(request) == {"RIGHT": [[3, 3]]}
        executions = [
            stage.find(name).metrics.num_executions for name in ("first", "second", "join")
        ]
        assert executions == [0, 1, 0]

    run(scenario)


def test_a_nested_ensemble_is_a_member_like_any_other():
    outer = ensemble(
        step("whole", inputs={"IN": "A"}, outputs={"OUT": "mid"}),
        step("first", takes="mid", makes="B"),
        name="outer",
        inputs=("A",),
        outputs=("B", "mid"),
    )

    async def scenario(stage):
        await stage.load(outer, CHAIN, *MEMBERS[:2])
        requests = [stage.send(ask(n, names=("A",)), "outer") for n in range(3)]
        await stage.puppets.step_all()
        assert [values(each) for each in requests] == [
            {"B": [[n, n]], "mid": [[n, n]]} for n in range(3)
        ]
        assert stage.find("whole").metrics.num_success == 3

    run(scenario)


def test_members_with_and_without_a_batch_dimension_mix():
    alone = member("second", max_batch_size=0, batching=BatchPolicy(1))
    config = replace(CHAIN, max_batch_size=0, batching=BatchPolicy(1))

    async def scenario(stage):
        await stage.load(config, member("first"), alone)
        tensor = from_array("IN", "INT64", np.array([4, 5], np.int64))
        request = stage.send(Request(RecordingSink(), [tensor], 0.0))
        await stage.puppets.step_all()
        assert values(request) == {"OUT": [4, 5]}

    run(scenario)


def test_an_optional_input_that_is_missing_stays_missing():
    optional = (*ROW, TensorSpec("w", "INT64", (2,), is_optional=True))
    config = ensemble(step("first", inputs={"x": "IN", "w": "MORE"}, outputs={"y": "OUT"}))
    more = TensorSpec("MORE", "INT64", (2,), is_optional=True)

    async def scenario(stage):
        await stage.load(
            replace(config, inputs=(*config.inputs, more)), member("first", inputs=optional)
        )
        requests = [stage.send(ask(1)), stage.send(ask(2, names=("IN", "MORE")))]
        await stage.puppets.step_all()
        assert [values(each) for each in requests] == [{"OUT": [[1, 1]]}, {"OUT": [[2, 2]]}]

    run(scenario)


def test_a_traced_request_notes_its_steps():
    async def scenario(stage):
        outer = ensemble(
            step("whole", inputs={"IN": "A"}, outputs={"OUT": "B"}), name="outer",
            inputs=("A",), outputs=("B",),
        )  # fmt: skip
        await stage.load(outer, CHAIN, *MEMBERS[:2])
        request, other = ask(1, names=("A",)), ask(2, names=("A",))
        request.steps = []
        for each in (request, other):
            stage.send(each, "outer")
        await stage.puppets.step_all()
        assert other.steps is None
        [whole] = request.steps
        assert (whole.name, whole.version) == ("whole", "1")
        assert [(each.name, each.version) for each in whole.steps] == [
            ("first", "1"),
            ("second", "1"),
        ]
        first, second = whole.steps
        moments = [whole.queued, first.queued, first.dispatched, first.ended, second.queued]
        moments += [second.dispatched, second.ended, whole.ended]
        assert moments == sorted(moments) and moments[0] > 0

    run(scenario)


def test_the_trace_of_a_failed_request_ends_with_the_step_that_failed():
    async def scenario(stage):
        await stage.load(CHAIN, MEMBERS[0], member("second", options={"null.fail_on": "13"}))
        request = ask(13)
        request.steps = []
        stage.send(request)
        await stage.puppets.step_all()
        assert isinstance(error(request), BackendFailed)
        assert [each.name for each in request.steps] == ["first", "second"]
        assert 0 < request.steps[1].queued <= request.steps[1].ended

    run(scenario)


# Errors, cancels and limits.


def test_the_error_of_a_step_names_the_member_and_cancels_the_others():
    failing = member("first", options={"null.fail_on": "13"})

    async def scenario(stage):
        await stage.load(DIAMOND, failing, *MEMBERS[1:])
        request = stage.send(ask(13))
        await settle()
        assert stage.find("second").num_running == 1
        await stage.step("first")
        failure = error(request)
        assert isinstance(failure, BackendFailed)
        assert str(failure).startswith("in ensemble 'whole', model 'first': ")
        assert "null.fail_on" in str(failure)
        assert stage.find("second").metrics.num_failures["CANCELED"] == 1
        await stage.puppets.step_all()
        metrics = stage.find().metrics
        assert metrics.num_failures["BACKEND"] == 1 and metrics.num_success == 0
        assert stage.find("join").metrics.num_executions == 0
        again = stage.send(ask(14))
        await stage.puppets.step_all()
        assert len(values(again)) == 4

    run(scenario)


def test_an_error_keeps_its_kind_and_when_to_try_again():
    full = BatchPolicy(8, policies=(QueuePolicy(max_queue_size=1),))

    async def scenario(stage):
        await stage.load(CHAIN, member("first", batching=full), member("second"))
        requests = [stage.send(ask(n)) for n in range(6)]
        refused = [each for each in requests if each.is_done]
        assert refused
        for each in refused:
            failure = error(each)
            assert isinstance(failure, Overloaded) and failure.reason == "queue_full"
            assert failure.retry_after_s > 0
            assert str(failure).startswith("in ensemble 'whole', model 'first': ")
        await stage.puppets.step_all()
        assert all(each.sink.num_final == 1 for each in requests)
        assert stage.find().metrics.num_refused["queue_full"] == len(refused)

    run(scenario)


def test_a_cancelled_request_frees_its_steps():
    async def scenario(stage):
        await stage.load(DIAMOND, *MEMBERS)
        request = stage.send(ask(1))
        await settle()
        stage.find().cancel(request)
        assert isinstance(error(request), Cancelled)
        await stage.puppets.step_all()
        assert request.sink.num_final == 1
        counts = [stage.find(name).metrics.num_failures["CANCELED"] for name in ("whole", "first")]
        assert counts == [1, 1]
        assert stage.find("join").metrics.num_executions == 0
        stage.find().cancel(request)
        stage.find().cancel(ask(1))

    run(scenario)


def test_wrong_requests_are_refused_before_any_step():
    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        wrong = [ask(1, names=("x",)), ask(1, "NO"), ask(1, rows=9), ask(1, names=())]
        for request in wrong:
            stage.send(request)
            assert isinstance(error(request), InvalidRequest)
        assert stage.find().metrics.num_refused["invalid"] == 4
        assert stage.find("first").num_waiting == 0

    run(scenario)


def test_a_model_cannot_call_an_ensemble_that_runs_it():
    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        request = ask(1)
        request.chain = ("first/1",)
        assert isinstance(error(stage.send(request)), Unsupported)
        request = ask(1)
        request.chain = ("other/1",)
        stage.send(request)
        await stage.puppets.step_all()
        assert values(request) == {"OUT": [[1, 1]]}

    run(scenario)


def test_members_get_what_the_request_says():
    seen = []

    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        for name in ("first", "second"):
            model = stage.find(name)
            submit = model.submit

            def spy(request, reserved=None, submit=submit):
                assert (request.id, request.caller, request.priority) == ("one", b"key", 2)
                assert request.parameters == {"a": 1}
                seen.append(request)
                submit(request, reserved)

            model.submit = spy
        request = ask(1)
        request.id, request.caller, request.priority = "one", b"key", 2
        request.parameters, request.timeout_s = {"a": 1}, 5.0
        stage.send(request)
        await stage.puppets.step_all()
        values(request)
        assert len(seen) == 2
        # What the first step took is gone.
        assert seen[0].timeout_s <= 5.0 and 0 < seen[1].timeout_s < seen[0].timeout_s

    run(scenario)


def test_a_member_that_allows_it_refuses_requests_whose_time_is_over():
    limited = BatchPolicy(8, is_dynamic=True, policies=(QueuePolicy(allow_timeout_override=True),))
    clock = FakeClock()

    async def scenario(stage):
        await stage.load(CHAIN, member("first"), member("second", batching=limited))
        model = stage.find()
        model.clock = clock
        request = ask(1)
        request.timeout_s = 1.0
        stage.send(request)
        await settle()
        clock.advance(2.0)
        await stage.puppets.step_all()
        failure = error(request)
        assert isinstance(failure, Overloaded) and failure.reason == "queue_timeout"
        assert "model 'second'" in str(failure)

    run(scenario)


def test_an_answer_of_another_shape_than_declared_is_an_error():
    loose = (TensorSpec("x", "INT64", (-1,)),)
    members = [
        member(name, inputs=loose, outputs=(TensorSpec("y", "INT64", (-1,)),))
        for name in ("first", "second")
    ]
    config = replace(CHAIN, inputs=(TensorSpec("IN", "INT64", (-1,)),))

    async def scenario(stage):
        await stage.load(config, *members)
        request = Request(
            RecordingSink(), [from_array("IN", "INT64", np.zeros((1, 3), np.int64))], 0
        )
        stage.send(request)
        await stage.puppets.step_all()
        assert "output 'OUT' of ensemble 'whole' has shape [1, 3]" in str(error(request))

    run(scenario)


def test_the_last_answer_can_be_kept_by_its_reader():
    kept = []

    class Keeping(RecordingSink):
        def respond(self, request, answer, final):
            if isinstance(answer, Response):
                assert answer.keeper is not None
                keeper: OutputKeeper = answer.keeper
                kept.append((keeper.keep(request), answer.outputs[0]))
            super().respond(request, answer, final)

    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        request = ask(8)
        request.sink = Keeping()
        stage.send(request)
        await stage.puppets.step_all()
        later = [stage.send(ask(n)) for n in range(20)]
        await stage.puppets.step_all()
        [(release, output)] = kept
        assert np.frombuffer(output.data, np.int64).tolist() == [8, 8]
        release()
        assert [values(each)["OUT"] for each in later] == [[[n, n]] for n in range(20)]

    run(scenario)


def test_mirrors_are_not_counted_as_requests():
    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        mirror = stage.send(ask(1, kind=MirrorRequest))
        await stage.puppets.step_all()
        values(mirror)
        for name in ("whole", "first", "second"):
            metrics = stage.find(name).metrics
            assert (metrics.num_success, metrics.num_inferences) == (0, 1)

    run(scenario)


# Loading and unloading.


def test_members_are_loaded_before_the_ensemble_whatever_the_order():
    async def scenario(stage):
        await stage.load_together(CHAIN, *MEMBERS[:2])
        assert isinstance(stage.find(), Ensemble)
        assert stage.catalog.is_ready
        rows = [(each.name, each.state) for each in stage.catalog.index([])]
        assert rows == [("first", "READY"), ("second", "READY"), ("whole", "READY")]

    run(scenario)


def test_an_ensemble_without_a_member_is_not_loaded():
    async def scenario(stage):
        await stage.load(CHAIN, MEMBERS[0])
        failure = stage.catalog.failure("whole")
        assert failure.problems == ("ensemble_scheduling.step[1]: model 'second' is not loaded",)
        broken = member("second", options={"null.a_ms": "soon"})
        await stage.load(CHAIN, broken)
        [problem] = stage.catalog.failure("whole").problems
        assert "model 'second' could not be loaded: " in problem and "null.a_ms" in problem

    run(scenario)


def test_members_that_do_not_fit_are_told_at_load():
    async def scenario(stage):
        await stage.load(CHAIN, member("first", max_batch_size=2), member("second"))
        [problem] = stage.catalog.failure("whole").problems
        assert "model 'first' has max_batch_size 2, less than the ensemble's of 8" in problem

    run(scenario)


def test_ensembles_that_need_each_other_are_not_loaded():
    one = ensemble(step("b", inputs={"IN": "IN"}, outputs={"OUT": "OUT"}), name="a")
    other = ensemble(step("a", inputs={"IN": "IN"}, outputs={"OUT": "OUT"}), name="b")

    async def scenario(stage):
        await stage.load(one, other)
        for name in "ab":
            [problem] = stage.catalog.failure(name).problems
            assert "a cycle of ensembles" in problem
        # One that becomes an ensemble later.
        leaf = member("b", inputs=one.inputs, outputs=one.outputs)
        await stage.load(one, leaf)
        assert stage.catalog.is_ready
        with pytest.raises(ConfigError, match="a cycle of ensembles: "):
            await Ensemble(other, stage.catalog).start()

    run(scenario)


def test_a_reload_of_a_member_loses_no_request():
    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        before = [stage.send(ask(n)) for n in range(10)]
        await stage.step("first")
        await stage.load(member("second", version="2"))
        after = [stage.send(ask(n)) for n in range(10, 20)]
        await stage.puppets.step_all()
        assert [values(each)["OUT"] for each in before + after] == [[[n, n]] for n in range(20)]
        assert stage.find("second").config.version == "2"
        assert stage.find("second").metrics.num_success >= 10

    run(scenario)


def test_a_fixed_version_of_a_member_is_used():
    config = ensemble(step("first", "1", takes="IN", makes="OUT"))

    async def scenario(stage):
        await stage.load_together(config, member("first"), member("first", version="2"))
        stage.send(ask(1))
        await stage.puppets.step_all()
        versions = [stage.catalog.find("first", v).metrics.num_success for v in "12"]
        assert versions == [1, 0]
        await stage.load(member("first", version="2"))
        assert stage.find().reason == "model 'first' version 1 is not loaded"

    run(scenario)


def test_without_a_member_the_ensemble_is_not_ready_and_says_why():
    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        waiting = stage.send(ask(1))
        await settle()
        await stage.act(stage.catalog.unload("second"))
        assert not stage.find().is_ready and not stage.catalog.is_ready
        assert stage.find().reason == "model 'second' is not loaded"
        assert stage.find().shown_state == "UNAVAILABLE"
        await stage.puppets.step_all()
        # It was on its way to the second step.
        assert isinstance(error(waiting), NotReady)
        refused = stage.send(ask(2))
        assert str(error(refused)) == "ensemble 'whole' is not ready: model 'second' is not loaded"
        await stage.load(member("second"))
        assert stage.find().is_ready
        request = stage.send(ask(3))
        await stage.puppets.step_all()
        assert values(request) == {"OUT": [[3, 3]]}

    run(scenario)


def test_a_member_that_changes_its_tensors_makes_the_ensemble_not_ready():
    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        other = (TensorSpec("x", "FP32", (2,)),)
        await stage.load(member("second", version="2", inputs=other))
        assert "input 'x' of model 'second' is FP32" in stage.find().reason
        refused = stage.send(ask(1))
        assert isinstance(error(refused), NotReady)
        await stage.load(member("second", version="3"))
        assert stage.find().is_ready

    run(scenario)


def test_an_unloaded_ensemble_answers_what_it_has_admitted():
    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        requests = [stage.send(ask(n)) for n in range(5)]
        whole = stage.find()
        await stage.act(stage.catalog.unload("whole"))
        await stage.puppets.step_all()
        assert [values(each)["OUT"] for each in requests] == [[[n, n]] for n in range(5)]
        assert [row.name for row in stage.catalog.index([])] == ["first", "second"]
        whole.submit(late := ask(9))
        assert isinstance(error(late), NotReady)

    run(scenario)


def test_close_ends_what_runs():
    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        request = stage.send(ask(1))
        await settle()
        await stage.find().close()
        assert isinstance(error(request), NotReady)
        assert stage.find().shown_state == "UNLOADING"

    run(scenario)


# Figures.


def test_clients_requests_count_once_and_steps_at_their_members():
    async def scenario(stage):
        await stage.load(DIAMOND, *MEMBERS)
        for n in range(3):
            stage.send(ask(n, rows=2))
        await stage.puppets.step_all()
        told = stage.find().metrics.statistics()
        assert told["inference_stats"]["success"]["count"] == 3
        assert (told["inference_count"], told["execution_count"]) == (6, 3)
        assert told["inference_stats"]["compute_infer"]["count"] == 3
        assert stage.find("join").metrics.num_success == 3
        [pending] = pending_of(stage.find())
        # Its members show what they computed.
        assert pending.busy_s is None

    run(scenario)


def test_each_step_is_explained():
    async def scenario(stage):
        await stage.load(DIAMOND, *MEMBERS)
        assert stage.find().explain().verdicts == ["No step has run yet."]
        stage.send(ask(1, "LEFT"))
        await stage.puppets.step_all()
        explanation = stage.find().explain()
        assert (explanation.mode, explanation.state) == ("ensemble", "READY")
        steps = [(each.model, each.num_answered) for each in explanation.steps]
        assert steps == [("first", 1), ("second", 0), ("join", 0)]
        assert explanation.steps[0].total_s >= explanation.steps[0].compute_s > 0
        assert "The slowest step is 'first'" in explanation.verdicts[0]

    run(scenario)


# Rollouts of members.


def test_steps_are_requests_of_a_members_rollout():
    async def scenario(stage):
        await stage.load(CHAIN, *MEMBERS[:2])
        await stage.act(stage.catalog.add_candidate(member("first", version="2")))
        rule = SplitRule(1, "canary", "2", share=1.0, mirrored_per_s=1e6)
        assert await stage.catalog.split("first", rule)
        requests = [stage.send(ask(n)) for n in range(3)]
        await stage.puppets.step_all()
        assert [values(each)["OUT"] for each in requests] == [[[n, n]] for n in range(3)]
        counts = stage.catalog.splits["first"].counts
        assert (counts.candidate.num_requests, counts.stable.num_requests) == (3, 0)
        assert counts.num_compared >= 1 and counts.num_disagreeing == 0
        assert stage.find("first").metrics.num_success == 0
        # Copies of the ensemble's own requests are not split: no client gets them.
        stage.send(copied := ask(7, kind=MirrorRequest))
        await stage.puppets.step_all()
        assert values(copied)["OUT"] == [[7, 7]]
        assert counts.candidate.num_requests == 3

    run(scenario)


def test_a_step_that_names_a_version_is_not_split():
    async def scenario(stage):
        named = step("first", "1", takes="IN", makes="OUT")
        await stage.load(ensemble(named), MEMBERS[0])
        await stage.act(stage.catalog.add_candidate(member("first", version="2")))
        assert await stage.catalog.split("first", SplitRule(1, "canary", "2", share=1.0))
        stage.send(request := ask(1))
        await stage.puppets.step_all()
        assert values(request)["OUT"] == [[1, 1]]
        assert stage.catalog.splits["first"].counts.candidate.num_requests == 0

    run(scenario)
