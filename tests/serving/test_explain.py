"""Why batches are small, worked out from what happened; and what a model says about itself."""

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from doubles import FakeClock, Puppets, RecordingSink, settle

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig, QueuePolicy
from penstock.serving import worker_load
from penstock.serving.batches import BatchRecord
from penstock.serving.explain import (
    Explanation,
    InstanceState,
    ProcessState,
    describe_policy,
    mode_of,
    waits_for,
    who_is_busy,
    why_small,
)
from penstock.serving.model import Model
from penstock.serving.proof import Proof
from penstock.types import Request, TensorSpec, from_array

POLICY = BatchPolicy(16, is_dynamic=True)
CONFIG = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (-1,)),),
    outputs=(TensorSpec("y", "INT64", (-1,)),),
    max_batch_size=16,
    batching=POLICY,
    memory=MemoryPolicy(slab_bytes=4096, spill_bytes=1 << 16),
)
IDLE, BUSY = InstanceState(0, "idle", 1), InstanceState(1, "busy", 2)
DOWN = InstanceState(2, "not ready", 0)


def batch(
    rows: int = 1,
    requests: int | None = None,
    closed_by: str = "queue empty",
    instance_wait_s: float = 0.0,
    length: int = 4,
    tokens: int = 0,
) -> BatchRecord:
    num_requests = rows if requests is None else requests
    took = (0.0, instance_wait_s, 0.01, 0.01)
    return BatchRecord(
        0.0, rows, num_requests, ((length,),), *took, 0, closed_by, "answered", tokens
    )


def verdict(
    records: list[BatchRecord],
    policy: BatchPolicy = POLICY,
    num_shapes: int = 1,
    target_size: int | None = None,
) -> str:
    return "\n".join(why_small(policy, records, num_shapes, target_size))


class TestWhySmall:
    def test_nothing_ran(self):
        assert verdict([]) == "No batch has run yet."

    def test_no_larger_batch_is_possible(self):
        assert "max_batch_size is at most 1" in verdict([batch()], BatchPolicy(1, is_dynamic=True))

    def test_batching_is_not_configured(self):
        text = verdict([batch(3)], BatchPolicy(16))
        assert "dynamic_batching is not set" in text and "3.0 rows" in text

    def test_batches_are_not_small(self):
        text = verdict([batch(12), batch(16)])
        assert text == "Batches are well filled: 14.0 of at most 16 rows on average."

    def test_requests_are_large_already(self):
        assert "Requests carry 8.0 rows each already" in verdict([batch(16, requests=2)] * 5)

    def test_instances_were_idle(self):
        text = verdict([batch(1)] * 93 + [batch(2, instance_wait_s=0.01)] * 7)
        assert "Instances were idle when requests came: 93% of the batches left at once" in text
        assert "with 1 row; more load would batch by itself" in text
        assert "Everything that waited" not in text, "7 % are not worth a sentence"

    def test_instances_were_busy_and_little_came_meanwhile(self):
        text = verdict([batch(3, instance_wait_s=0.01)] * 10)
        assert "about 3.0 requests come while a batch runs" in text
        assert "idle when requests came" not in text

    def test_shapes_do_not_mix(self):
        records = [batch(closed_by="other shape")] * 8 + [batch()] * 2
        text = verdict(records, num_shapes=37)
        assert "37 shapes were seen and each has its own lane: 80% of the batches" in text

    def test_a_preferred_size_is_small(self):
        policy = replace(POLICY, preferred_batch_sizes=(2, 4))
        text = verdict([batch(4, closed_by="preferred size")] * 3, policy)
        assert "100% of the batches closed at a preferred size (2, 4)" in text

    def test_the_delay_is_too_short_for_the_load(self):
        policy = replace(POLICY, max_queue_delay_s=0.0005)
        text = verdict([batch(2, closed_by="delay expired")] * 3, policy)
        assert "max_queue_delay (0.5 ms) was over: too few requests come" in text

    def test_the_delay_is_over_because_there_are_many_shapes(self):
        policy = replace(POLICY, max_queue_delay_s=0.0005)
        records = [batch(1, closed_by="delay expired", length=length) for length in range(8)]
        text = verdict(records, policy, num_shapes=8)
        assert "The last batches had 8 shapes" in text and "declare paddable axes" in text
        assert "100% of the batches went when max_queue_delay (0.5 ms) was over;" in text
        assert "too few requests" not in text

    def test_the_slo_allows_no_more(self):
        text = verdict([batch(6, closed_by="SLO target")] * 3, target_size=6)
        assert "closed at b* = 6 rows" in text

    def test_a_budget_of_tokens_is_what_batches_are_filled_to(self):
        policy = replace(POLICY, max_tokens=1000)
        few = [batch(2, closed_by="token budget", tokens=400)] * 5
        text = verdict(few, policy)
        assert "closed at the budget of 1000 tokens" in text and "2.0 rows on average" in text
        assert verdict([batch(2, tokens=700)] * 5, policy) == (
            "Batches are well filled: 700 of at most 1000 tokens on average, in 2.0 rows."
        )
        text = verdict([batch(6, closed_by="SLO target")] * 3, policy, target_size=300)
        assert "closed at b* = 300 tokens" in text

    @pytest.mark.parametrize(
        ("closed_by", "words"),
        [
            ("SLO deadline", "the most urgent one late"),
            ("rerun", "ran again alone after a failure"),
            ("no room", "penstock.max_slabs"),
        ],
    )
    def test_other_causes(self, closed_by, words):
        assert words in verdict([batch(closed_by=closed_by)] * 3)

    def test_the_most_frequent_cause_comes_first(self):
        records = [batch(closed_by="other shape")] * 3 + [batch(closed_by="rerun")] * 7
        summary, first, second = why_small(POLICY, records, 5, None)
        assert summary == "Batches hold 1.0 rows on average; at most 16 are allowed."
        assert first.startswith("70%") and second.startswith("5 shapes")


@pytest.mark.parametrize(
    ("policy", "max_batch_size", "mode", "reason"),
    [
        (POLICY, 16, "fixed", "Triton's rules"),
        (replace(POLICY, slo_latency_s=0.05), 16, "slo", "within 50 ms"),
        (BatchPolicy(16), 16, "unbatched", "no dynamic_batching"),
        (BatchPolicy(1), 0, "unbatched", "no batch dimension"),
        (BatchPolicy(1, is_dynamic=True), 1, "unbatched", "max_batch_size is 1"),
        (BatchPolicy(16, slo_latency_s=0.05), 16, "slo", "each request runs by itself"),
    ],
)
def test_mode_and_what_decided_it(policy, max_batch_size, mode, reason):
    config = replace(CONFIG, batching=policy, max_batch_size=max_batch_size)
    assert mode_of(config, policy)[0] == mode
    assert reason in mode_of(config, policy)[1]


def test_a_batcher_that_goes_by_less_than_was_configured():
    mode, reason = mode_of(CONFIG, replace(POLICY, is_dynamic=False))
    assert (mode, reason) == ("unbatched", "what was found at load; see the note")


def test_policy_in_words_names_what_is_set():
    policy = replace(
        POLICY,
        preferred_batch_sizes=(4, 8),
        max_queue_delay_s=0.0001,
        preserve_ordering=True,
        num_priorities=2,
        policies=(QueuePolicy(default_timeout_s=0.2, max_queue_size=7),),
    )
    assert describe_policy(CONFIG, policy) == {
        "max_batch_size": "16",
        "preferred_batch_size": "4, 8",
        "max_queue_delay": "0.1 ms",
        "preserve_ordering": "yes",
        "priority_levels": "2",
        "queue time-out": "200 ms, then REJECT",
        "max_queue_size": "7",
    }
    assert describe_policy(CONFIG, POLICY) == {
        "max_batch_size": "16",
        "max_queue_size": "8192",
        "max_wait": "the larger of 1 s and 10 times the largest batch",
    }


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (replace(POLICY, max_wait_s=0.25), "250 ms"),
        (replace(POLICY, max_wait_s=0.0), "unlimited"),
        (replace(POLICY, policies=(QueuePolicy(max_queue_size=7),)), None),
        (replace(POLICY, slo_latency_s=0.05, max_wait_s=0.25), None),
    ],
)
def test_the_longest_wait_is_shown_where_it_is_in_force(policy, text):
    assert describe_policy(CONFIG, policy).get("max_wait") == text


def test_a_model_found_unfit_for_batches_does_not_claim_to_wait_for_company(monkeypatch):
    async def scenario(model, puppets, clock):
        model.submit(ask(3))

    proof = Proof("answers depend on what else is in the batch", "", frozenset(), ())
    monkeypatch.setattr(worker_load, "prove", lambda config, runner: proof)
    policy = replace(POLICY, max_queue_delay_s=5.0, preferred_batch_sizes=(4,))
    answer = explained(replace(CONFIG, batching=policy), scenario)
    assert answer.policy.keys() == {"max_batch_size", "max_queue_size", "max_wait"}
    assert [lane.waits_for for lane in answer.waiting] == ["nothing: it leaves now"]


@pytest.mark.parametrize(
    ("instances", "policy", "words"),
    [
        ([DOWN], POLICY, "none is ready"),
        ([BUSY, DOWN], POLICY, "an idle instance (1 busy)"),
        ([IDLE, BUSY], POLICY, "it leaves now"),
        ([IDLE], replace(POLICY, max_queue_delay_s=0.005), "company, for at most 3 ms more"),
        (
            [IDLE],
            replace(POLICY, max_queue_delay_s=0.005, preferred_batch_sizes=(4,)),
            "a preferred size (4), for at most 3 ms more",
        ),
        ([IDLE], replace(POLICY, max_queue_delay_s=0.001), "it leaves now"),
    ],
)
def test_what_a_lane_waits_for(instances, policy, words):
    assert words in waits_for(policy, instances, oldest_s=0.002)


def ask(length: int, rows: int = 1) -> Request:
    values = np.zeros((rows, length), np.int64)
    return Request(RecordingSink(), [from_array("x", "INT64", values)], 0.0)


def explained(config: ModelConfig, scenario) -> Explanation:
    """What a model says in the midst of the scenario, as it arrives at the other end."""

    async def main() -> Explanation:
        puppets, clock = Puppets(), FakeClock()
        model = Model(config, start_life=puppets, clock=clock)
        starting = asyncio.ensure_future(model.start())
        await puppets.step_all()
        await starting
        await scenario(model, puppets, clock)
        answer = model.explain()
        closing = asyncio.ensure_future(model.close())
        while not closing.done():
            await puppets.step_all()
        await closing
        return msgspec.json.decode(msgspec.json.encode(answer), type=Explanation)

    return asyncio.run(main())


def test_a_model_tells_what_waits_what_ran_and_what_was_asked():
    async def scenario(model, puppets, clock):
        for length in (3, 3, 5):
            model.submit(ask(length))
        await puppets.step_all()
        model.submit(ask(3, rows=2))
        await settle()
        for length in (7, 7, 3):
            model.submit(ask(length))
            clock.advance(0.25)
        model.submit(Request(RecordingSink(), (), 0.0))

    answer = explained(CONFIG, scenario)
    assert (answer.model, answer.state, answer.mode) == ("echo", "READY", "fixed")
    assert [each.state for each in answer.instances] == ["busy"]
    told = [(lane.shape, lane.num_requests, lane.num_rows) for lane in answer.waiting]
    assert told == [("[7]", 2, 2), ("[3]", 1, 1)]
    assert [lane.oldest_s for lane in answer.waiting] == [0.75, 0.25]
    assert {lane.waits_for for lane in answer.waiting} == {"an idle instance (1 busy)"}
    last, first = answer.recent
    assert (first.shape, first.num_rows, first.closed_by) == ("[3]", 2, "other shape")
    assert (last.shape, last.age_s, last.closed_by) == ("[5]", 0.75, "queue empty")
    assert answer.num_shapes == 2
    assert [(s.shape, s.num_requests) for s in answer.shapes] == [("[3]", 2), ("[5]", 1)]
    assert answer.batch_sizes == {1: 1, 2: 1}
    assert answer.refused == {"invalid": 1}
    assert (answer.paces, answer.notes) == ([], [])


def test_notes_of_the_model_are_passed_on():
    async def scenario(model, puppets, clock):
        pass

    note = "served one by one: answers depend on batch-mates"
    answer = explained(replace(CONFIG, warnings=(note,)), scenario)
    assert answer.notes == ["served one by one: answers depend on batch-mates"]
    assert answer.verdicts == ["No batch has run yet."]


def test_slo_mode_tells_its_table_and_what_it_aims_at():
    async def scenario(model, puppets, clock):
        for _ in range(3):
            model.submit(ask(3))
        await settle()
        clock.advance(0.010)
        await puppets.step_all()

    config = replace(CONFIG, batching=replace(POLICY, slo_latency_s=0.05))
    answer = explained(config, scenario)
    assert answer.mode == "slo"
    [pace] = answer.paces
    assert pace.shape == "[3]"
    assert list(pace.times_s) == [1, 2, 4, 8, 16]
    assert pace.times_s[4] >= 0.010
    assert 1 <= pace.target_size <= 16


def test_a_rerun_waits_before_all_others():
    config = replace(CONFIG, options={"null.fail_on": "0"})

    async def scenario(model, puppets, clock):
        for _ in range(3):
            model.submit(ask(3))
        await settle()
        for _ in range(2):
            puppets.alive[0].step()
            await settle()

    answer = explained(config, scenario)
    [waiting] = answer.waiting
    assert (waiting.num_requests, waiting.waits_for) == (2, "an instance, to run again alone")


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"core": 0.5}, []),
        ({"core": 0.95}, ["95% of a core and takes all requests itself: penstock serve --shards"]),
        ({"core": 0.3, "shard 1": 0.5, "shard 2": 0.5}, []),
        ({"core": 0.3, "shard 1": 1.0}, ["shard 1 takes 100% of a core: more of them"]),
        ({"core": 0.99, "shard 1": 0.5}, []),
    ],
)
def test_an_event_loop_without_time_to_spare_is_told(shares: dict[str, float], words: list[str]):
    found = who_is_busy([ProcessState(name, 1, busy) for name, busy in shares.items()])
    assert len(found) == len(words)
    for sentence, part in zip(found, words, strict=True):
        assert part in sentence
