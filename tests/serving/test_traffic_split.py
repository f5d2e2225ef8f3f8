"""Which version answers, what is counted, and what is mirrored."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from doubles import FakeClock, RecordingSink, settle

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import BackendFailed, Cancelled, InvalidRequest, Overloaded, PenstockError
from penstock.serving.answer_store import AnswerStore
from penstock.serving.metrics import ModelMetrics
from penstock.serving.response_cache import ModelCache
from penstock.serving.split_counts import LATENCY
from penstock.serving.traffic_split import TrafficSplit, place_of, renew_split
from penstock.types import Request, Response, TensorSpec, from_array, to_array
from penstock.wire.frames import SplitRule

CONFIG = ModelConfig(
    name="m",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (2,)),),
    outputs=(TensorSpec("y", "FP32", (2,)),),
    max_batch_size=4,
    batching=BatchPolicy(4),
)
RULE = SplitRule(7, "canary", "2", share=0.25, header="Penstock-Version", limits=((LATENCY, 0.02),))
LIMITS = RULE.limits


class Version:
    """Answers at once, after `takes_s`; `answer` computes the output, or the error."""

    def __init__(self, version: str, clock: FakeClock) -> None:
        self.config = replace(CONFIG, version=version)
        self.metrics = ModelMetrics("m", version)
        self.is_ready = True
        self.num_waiting = 0
        self.takes_s = 0.005
        self.requests: list[Request] = []
        self.answer: Callable[[np.ndarray], np.ndarray | PenstockError] = lambda x: x
        self._clock = clock
        self.cache: ModelCache | None = None

    def submit(self, request: Request) -> None:
        if self.cache is not None and self.cache.answers(request, self._compute):
            return
        self._compute(request)

    def _compute(self, request: Request) -> None:
        self.requests.append(request)
        self._clock.advance(self.takes_s)
        found = self.answer(to_array(request.inputs[0]))
        request.num_rows = request.inputs[0].shape[0]
        request.timings.completed = self._clock()
        if isinstance(found, PenstockError):
            request.respond(found)
            return
        outputs = [from_array("y", "FP32", found)]
        request.respond(Response("m", self.config.version, outputs))


class Stage:
    def __init__(self, rule: SplitRule = RULE) -> None:
        self.clock = FakeClock()
        self.stable, self.candidate = Version("1", self.clock), Version("2", self.clock)
        self.split = TrafficSplit(rule, self.stable, self.candidate, self.clock)

    @property
    def counts(self):
        return self.split.counts

    def send(self, num_rows: int = 1, **headers: str) -> Request:
        """Send one request; return it with the version that was picked as its `id`."""
        named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        model = self.split.pick(named)
        inputs = [from_array("x", "FP32", np.array([[1, 2]] * num_rows, np.float32))]
        request = Request(RecordingSink(), inputs, self.clock(), id=model.config.version)
        self.split.watch(request, model)
        model.submit(request)
        return request


def run(scenario: Callable[[], object]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


def picks(stage: Stage, number: int, **headers: str) -> list[str]:
    return [stage.send(**headers).id for _ in range(number)]


def test_requests_are_split_by_the_share():
    async def scenario():
        stage = Stage()
        share = picks(stage, 2000).count("2") / 2000
        assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)
        stage.split.set_rule(replace_rule(share=1.0))
        assert set(picks(stage, 50)) == {"2"}

    run(scenario)


def replace_rule(**changes: object) -> SplitRule:
    fields = {name: getattr(RULE, name) for name in RULE.__struct_fields__}
    return SplitRule(**(fields | changes))


@pytest.mark.parametrize(
    ("named", "version"),
    [("candidate", "2"), ("stable", "1"), ("2", "2"), ("1", "1"), (" Candidate ", "2")],
)
def test_a_header_names_the_version(named: str, version: str):
    async def scenario():
        assert picks(Stage(), 30, penstock_version=named) == [version] * 30

    run(scenario)


def test_a_header_that_names_no_version_is_refused():
    with pytest.raises(
        InvalidRequest, match="'9' is no version of the rollout; expected candidate"
    ):
        Stage().split.pick({b"penstock-version": b"9"})


def test_equal_keys_get_the_same_version_in_all_shards_and_stay_there():
    """A key that the candidate has with 5 % it also has with 25 % and 50 %."""

    async def scenario():
        rules = [
            replace_rule(share=share, hash_header="X-User", salt=b"s")
            for share in (0.05, 0.25, 0.5)
        ]
        kept: set[str] = set()
        for rule in rules:
            stages = [Stage(rule), Stage(rule)]
            users = [f"user {number}" for number in range(400)]
            chosen = [{u for u in users if picks(stage, 1, x_user=u) == ["2"]} for stage in stages]
            assert chosen[0] == chosen[1]
            assert kept <= chosen[0]
            assert abs(len(chosen[0]) / 400 - rule.share) < 0.08
            kept = chosen[0]
        assert place_of(b"a", b"s") != place_of(b"a", b"t")
        # Without the header each request is on its own.
        assert len(set(picks(Stage(rules[2]), 100))) == 2

    run(scenario)


def test_a_candidate_that_is_not_ready_is_replaced_by_the_stable_version():
    async def scenario():
        stage = Stage(replace_rule(share=1.0))
        stage.candidate.is_ready = False
        assert picks(stage, 5) == ["1"] * 5
        assert picks(stage, 2, penstock_version="candidate") == ["1"] * 2
        assert stage.counts.num_fallbacks == 7
        assert stage.counts.stable.num_requests == 7

    run(scenario)


def test_both_sides_are_counted():
    async def scenario():
        stage = Stage(replace_rule(share=0.0))
        picks(stage, 3)
        stage.candidate.takes_s = 0.03
        picks(stage, 2, penstock_version="candidate")
        stable, candidate = stage.counts.stable, stage.counts.candidate
        assert (stable.num_requests, stable.late) == (3, [0])
        assert (candidate.num_requests, candidate.late) == (2, [2])

    run(scenario)


def test_failures_and_refusals_are_told_apart_from_faults_of_clients():
    async def scenario():
        stage = Stage(replace_rule(share=1.0))
        for error in (BackendFailed("x"), Overloaded("x"), InvalidRequest("x"), Cancelled("x")):
            stage.candidate.answer = lambda x, error=error: error
            assert isinstance(stage.send().sink.inner.error, type(error))
        counts = stage.counts.candidate
        assert (counts.num_failed, counts.late, counts.num_requests) == (1, [1], 2)

    run(scenario)


def test_more_rows_than_only_the_candidate_refuses_are_its_failure():
    """Clients have sent them before; nothing else would find it."""

    async def scenario():
        stage = Stage(replace_rule(share=1.0))
        stage.candidate.answer = lambda x: InvalidRequest("batch-size must be <= 2")
        stage.candidate.config = replace(CONFIG, version="2", max_batch_size=2)
        for num_rows, num_failed in ((2, 0), (5, 0), (3, 1), (4, 2)):
            stage.send(num_rows)
            assert stage.counts.candidate.num_failed == num_failed

    run(scenario)


def test_answers_from_a_cache_are_not_counted():
    """The stable version has more of them, so a good candidate would look slow beside it."""

    async def scenario():
        stage = Stage(replace_rule(mirrored_per_s=1e6))
        store = AnswerStore(1 << 20)
        stage.stable.cache = ModelCache(stage.stable.config, stage.stable.metrics, store)
        assert all([stage.send(penstock_version="stable").is_done for _ in range(5)])
        await settle()
        assert len([each for each in stage.stable.requests if not each.is_mirror]) == 1
        assert stage.counts.stable.num_requests == 1 and stage.counts.num_mirrored == 1

    run(scenario)


@pytest.mark.parametrize(("waited_s", "late"), [(0.03, [1]), (0.01, [])])
def test_a_client_that_leaves_after_the_limit_was_answered_late(waited_s: float, late: list[int]):
    """Otherwise a version so slow that clients give up would have no late request."""

    async def scenario():
        stage = Stage(replace_rule(share=1.0))
        stage.candidate.takes_s = waited_s
        stage.candidate.answer = lambda x: Cancelled("the client left")
        stage.send()
        counts = stage.counts.candidate
        assert (counts.late, counts.num_requests, counts.num_failed) == (late, len(late), 0)

    run(scenario)


def test_mirrors_compare_the_answers_in_both_directions():
    async def scenario():
        stage = Stage(replace_rule(share=0.5, mirrored_per_s=1e6))
        stage.candidate.answer = lambda x: x[:, ::-1]
        for named in ("stable", "candidate"):
            before = stage.counts.num_compared
            request = stage.send(penstock_version=named)
            assert request.is_done, "the client has its answer before the mirror runs"
            assert stage.counts.num_mirrored == before
            await settle()
            assert stage.counts.num_compared == before + 1
        assert stage.counts.num_disagreeing == 2
        assert stage.counts.outputs["y"].num_rows == 2
        # Mirrors are not counted as live requests.
        assert stage.counts.stable.num_requests == stage.counts.candidate.num_requests == 1
        mirrors = [each for each in stage.candidate.requests if each.is_mirror]
        assert len(mirrors) == 1

    run(scenario)


def test_a_shadow_answers_nothing_and_is_measured_by_its_mirrors():
    async def scenario():
        stage = Stage(replace_rule(mode="shadow", share=0.0, mirrored_per_s=1e6))
        stage.candidate.takes_s = 0.03
        for _ in range(5):
            assert stage.send(penstock_version="candidate").id == "1"
            await settle()
        assert all(each.is_mirror for each in stage.candidate.requests)
        counts = stage.counts
        assert (counts.num_mirrored, counts.num_disagreeing) == (5, 0)
        assert (counts.candidate.num_requests, counts.candidate.late) == (5, [5])
        assert (counts.stable.num_requests, counts.stable.late) == (5, [0])

    run(scenario)


@pytest.mark.parametrize("mode", ["canary", "shadow"])
def test_a_candidate_that_fails_where_the_stable_version_answers(mode: str):
    async def scenario():
        stage = Stage(replace_rule(mode=mode, share=0.0, mirrored_per_s=1e6))
        stage.candidate.answer = lambda x: BackendFailed("no")
        request = stage.send()
        await settle()
        assert request.sink.inner.error is None
        counts = stage.counts
        failed = counts.candidate.num_failed, counts.num_disagreeing
        assert failed == ((1, 0) if mode == "shadow" else (0, 1))

    run(scenario)


def test_mirrors_are_limited_and_wait_for_nobody():
    async def scenario():
        stage = Stage(replace_rule(share=0.0, mirrored_per_s=10.0))
        for _ in range(400):  # For 2 s.
            stage.send()
            await settle(2)
        assert 15 <= stage.counts.num_mirrored <= 25
        num_mirrored = stage.counts.num_mirrored
        stage.candidate.num_waiting = 1
        for _ in range(100):
            stage.send()
            await settle(2)
        assert stage.counts.num_mirrored == num_mirrored
        assert stage.counts.num_dropped >= 4
        assert stage.counts.stable.num_requests == 500

    run(scenario)


def test_mirrors_in_flight_are_limited():
    async def scenario():
        stage = Stage(replace_rule(share=0.0, mirrored_per_s=1e6))
        held: list[Request] = []
        submit, stage.candidate.submit = stage.candidate.submit, held.append
        for _ in range(20):
            stage.send()
            await settle(2)
        assert len(held) == 4
        for request in held:
            submit(request)
        stage.send()
        await settle(2)
        assert len(held) == 5

    run(scenario)


def test_refused_mirrors_are_dropped_and_make_room_for_others():
    async def scenario():
        stage = Stage(replace_rule(mode="shadow", share=0.0, mirrored_per_s=1e6))
        stage.candidate.answer = lambda x: Overloaded("busy")
        for _ in range(10):
            stage.send()
            await settle()
        assert (stage.counts.num_dropped, stage.counts.candidate.num_requests) == (10, 0)
        stage.candidate.answer = lambda x: x
        stage.send()
        await settle()
        assert stage.counts.num_mirrored == 1

    run(scenario)


def test_quiet_times_do_not_add_up_to_a_burst_of_mirrors():
    async def scenario():
        stage = Stage(replace_rule(share=0.0, mirrored_per_s=50.0))
        stage.clock.advance(3600.0)
        stage.stable.takes_s = 0.0
        for _ in range(100):
            stage.send()
            await settle()
        assert 10 <= stage.counts.num_mirrored <= 50

    run(scenario)


def test_mirrors_have_the_lowest_priority():
    async def scenario():
        stage = Stage(replace_rule(share=0.0, mirrored_per_s=1e6))
        batching = replace(CONFIG.batching, num_priorities=3, default_priority=1)
        stage.candidate.config = replace(stage.candidate.config, batching=batching)
        stage.send()
        await settle()
        assert [each.priority for each in stage.candidate.requests] == [3]

    run(scenario)


def test_requests_in_clients_memory_are_not_mirrored():
    async def scenario():
        stage = Stage(replace_rule(share=0.0, mirrored_per_s=1e6))
        request = Request(RecordingSink(), [from_array("x", "FP32", np.ones((1, 2)))], 0.0)
        request.uses_regions = True
        stage.split.watch(request, stage.stable)
        stage.stable.submit(request)
        await settle()
        assert request.is_done
        assert stage.candidate.requests == []

    run(scenario)


def test_counts_go_on_while_the_share_rises_and_begin_anew_with_a_rollout():
    stage = Stage()
    known = stage.split
    same = renew_split(known, replace_rule(share=0.5), stage.stable, stage.candidate)
    assert same is known and known.rule.share == 0.5
    other = renew_split(known, replace_rule(rollout=8), stage.stable, stage.candidate)
    assert other is not known and other.counts.rollout == 8
