"""Sequences against laws: each runs in order, one request at a time, in one slot of one instance,
and nothing of it runs after a request or a worker of it was lost."""

from dataclasses import replace
from random import Random

import pytest
from doubles import RecordingSink

from penstock.config import BatchPolicy, ModelConfig, SequenceControl, SequencePolicy
from penstock.errors import BackendFailed, InvalidRequest, Overloaded
from penstock.serving.plan import UNPLANNED, Fit, Geometry, RequestPlan, Ticket
from penstock.serving.sequence_batcher import SequenceBatcher
from penstock.types import Request, TensorSpec

IDLE_S = 1.0
OTHER_SHAPE = Fit(RequestPlan(Geometry((), None), 1, (), ()), (), has_fixed_outputs=False)
DIRECT = ModelConfig(
    name="m",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (1,)),),
    outputs=(TensorSpec("y", "INT64", (1,)),),
    max_batch_size=2,
    batching=BatchPolicy(2, is_dynamic=True),
    sequences=SequencePolicy(max_idle_s=IDLE_S),
)
OLDEST = replace(DIRECT, sequences=SequencePolicy(False, IDLE_S, max_candidates=4))


def make(id: int | str = 1, flags: str = "", now: float = 0.0, fit: Fit = UNPLANNED) -> Request:
    """A request of a sequence; flags are of `se`, for start and end."""
    request = Request(RecordingSink(), (), now)
    request.parameters = {
        "sequence_id": id,
        "sequence_start": "s" in flags,
        "sequence_end": "e" in flags,
    }
    request.ticket = Ticket(fit)
    request.timings.queued = now
    return request


def add(batcher: SequenceBatcher, id: int | str = 1, flags: str = "", now: float = 0.0) -> Request:
    request = make(id, flags, now)
    batcher.add(request, None, now)
    return request


def opened(config: ModelConfig = DIRECT, instances: int = 1) -> SequenceBatcher:
    batcher = SequenceBatcher(config)
    for instance in range(instances):
        batcher.open(instance)
    return batcher


def refusal(batcher: SequenceBatcher, request: Request, now: float = 0.0) -> str:
    with pytest.raises(InvalidRequest) as caught:
        batcher.add(request, None, now)
    return str(caught.value)


@pytest.mark.parametrize("id", [0, ""])
def test_a_request_without_an_id_is_refused(id: int | str):
    assert "non-zero or non-empty correlation ID" in refusal(opened(), make(id, "s"))


def test_the_first_request_must_have_the_start_flag():
    batcher = opened()
    assert "must specify the START flag on the first request" in refusal(batcher, make(1))
    add(batcher, 1, "se")
    assert "must specify the START flag" in refusal(batcher, make(1))


def test_a_request_is_one_row():
    request = make(1, "s")
    request.num_rows = 2
    assert "must specify batch-size 1" in refusal(opened(), request)


def test_another_api_key_cannot_join_a_sequence():
    batcher = opened()
    add(batcher, 1, "s")
    for flags in ("", "s", "e"):
        stranger = make(1, flags)
        stranger.caller = b"other"
        assert "is of another API key" in refusal(batcher, stranger)


@pytest.mark.parametrize(
    ("datatype", "id", "problem"),
    [
        ("INT32", 1 << 31, "largest of its CORRID's type INT32 is 2147483647"),
        ("UINT64", "text", "expected an integer, its CORRID is UINT64"),
        ("BYTES", 7, "expected a string"),
    ],
)
def test_an_id_must_fit_the_control_input(datatype: str, id: int | str, problem: str):
    controls = (SequenceControl("id", "CORRID", datatype),)
    policy = replace(DIRECT.sequences or SequencePolicy(), controls=controls)
    assert problem in refusal(opened(replace(DIRECT, sequences=policy)), make(id, "s"))


def test_requests_of_a_sequence_run_one_by_one_and_those_of_others_beside_them():
    batcher = opened()
    first, second, other = add(batcher, 1, "s"), add(batcher, 1), add(batcher, "b", "s")
    assert batcher.next_of(0, 0.0) == [first, other]
    assert [first.ticket.slot, other.ticket.slot] == [0, 1]
    assert batcher.next_of(0, 0.0) is None
    batcher.finished([first, other], 0.0)
    assert batcher.next_of(0, 0.0) == [second]
    assert second.ticket.slot == 0


def test_a_request_that_comes_while_another_of_its_sequence_runs_waits():
    batcher = opened()
    first = add(batcher, 1, "s")
    assert batcher.next_of(0, 0.0) == [first]
    second = add(batcher, 1)
    assert batcher.next_of(0, 0.0) is None
    batcher.finished([first], 0.0)
    assert batcher.next_of(0, 0.0) == [second]


def test_a_sequence_waits_in_line_for_a_slot_and_the_end_of_another_frees_it():
    batcher = opened()
    running = [add(batcher, id, "se") for id in (1, 2)]
    waiting = add(batcher, 3, "se")
    assert batcher.table.num_in_line == 1
    assert batcher.next_of(0, 0.0) == running
    assert batcher.next_of(0, 0.0) is None
    batcher.finished(running[:1], 0.0)
    assert batcher.next_of(0, 0.0) == [waiting]
    assert waiting.ticket.slot == 0


def test_an_idle_sequence_gives_its_slot_up_and_its_late_request_is_told_why():
    batcher = opened()
    for id in (1, 2):
        add(batcher, id, "s")
    batch = batcher.next_of(0, 0.0) or []
    batcher.finished(batch, 0.5)
    late = add(batcher, 3, "s", 0.6)
    assert batcher.next_of(0, 0.6) is None
    assert batcher.wake_at == 0.5 + IDLE_S
    batcher.expire(batcher.wake_at)
    assert batcher.next_of(0, batcher.wake_at) == [late]
    text = refusal(batcher, make(1), 1.6)
    assert "START flag" in text
    assert "ended after 1 s without a request" in text
    assert batcher.table.num_ended["idle"] == 2


def test_a_sequence_that_goes_on_is_not_idle():
    batcher = opened()
    add(batcher, 1, "s")
    for now in (0.0, 0.9, 1.8, 2.7):
        batcher.finished(batcher.next_of(0, now) or [], now)
        add(batcher, 1, "", now + 0.9)
    assert batcher.table.num_ended["idle"] == 0


def test_sequences_go_to_the_instance_with_most_room():
    batcher = opened(instances=2)
    requests = [add(batcher, id, "s") for id in (1, 2, 3, 4)]
    assert batcher.next_of(0, 0.0) == [requests[0], requests[2]]
    assert batcher.next_of(1, 0.0) == [requests[1], requests[3]]


def test_a_lost_instance_ends_its_sequences_and_later_requests_are_told():
    batcher = opened(instances=2)
    first, other = add(batcher, 1, "s"), add(batcher, 2, "s")
    assert batcher.next_of(0, 0.0) == [first]
    batcher.finished([first], 0.0)
    behind = add(batcher, 1)
    batcher.lose(0, "its worker crashed")
    ((request, error),) = batcher.take_broken()
    assert request is behind
    assert isinstance(error, BackendFailed)
    assert str(error) == "sequence 1 lost: its worker crashed"
    assert "the sequence was lost: its worker crashed" in refusal(batcher, make(1))
    assert batcher.next_of(1, 0.0) == [other], "the other instance goes on"


def test_a_sequence_that_has_not_begun_survives_the_loss_of_its_instance():
    batcher = opened()
    first, second = add(batcher, 1, "s"), add(batcher, 1, "e")
    batcher.lose(0, "its worker crashed")
    assert batcher.take_broken() == []
    batcher.open(0)
    assert batcher.next_of(0, 0.0) == [first]
    batcher.finished([first], 0.0)
    assert batcher.next_of(0, 0.0) == [second]


def test_a_cancelled_request_ends_its_sequence_until_the_next_start():
    batcher = opened()
    first, cancelled, behind = add(batcher, 1, "s"), add(batcher, 1), add(batcher, 1)
    again = add(batcher, 1, "s")
    assert batcher.remove(cancelled)
    ((request, error),) = batcher.take_broken()
    assert request is behind
    assert "sequence 1 cancelled" in str(error)
    assert batcher.next_of(0, 0.0) == [first]
    batcher.finished([first], 0.0)
    assert batcher.next_of(0, 0.0) == [again]


def test_requests_that_found_no_memory_come_first_again():
    batcher = opened()
    first, second = add(batcher, 1, "s"), add(batcher, 1)
    assert batcher.next_of(0, 0.0) == [first]
    batcher.put_back([first], None)
    assert batcher.num_queued == 2
    assert batcher.next_of(0, 0.0) == [first]
    batcher.finished([first], 0.0)
    assert batcher.next_of(0, 0.0) == [second]


def test_the_queue_is_bounded_and_says_what_holds_the_slots():
    batching = replace(DIRECT.batching, max_pending=2)
    batcher = opened(replace(DIRECT, batching=batching))
    for id in (1, 2):
        add(batcher, id, "s")
    with pytest.raises(Overloaded, match="maximum queue size.* 2 of 2 slots are held by sequences"):
        add(batcher, 3, "s")


def test_direct_waits_for_the_utilisation_or_the_delay():
    policy = SequencePolicy(True, IDLE_S, min_utilization=0.6)
    batching = replace(DIRECT.batching, max_queue_delay_s=0.2)
    batcher = opened(replace(DIRECT, sequences=policy, batching=batching))
    first = add(batcher, 1, "s")
    assert batcher.next_of(0, 0.0) is None
    assert batcher.wake_at == 0.2
    assert batcher.next_of(0, batcher.wake_at) == [first]
    batcher.finished([first], 0.2)
    requests = [add(batcher, 1, "", 0.3), add(batcher, 2, "s", 0.3)]
    assert batcher.next_of(0, 0.3) == requests


def test_oldest_prefers_its_sizes_until_the_delay_is_over():
    batching = BatchPolicy(4, True, (2,), max_queue_delay_s=0.2)
    batcher = opened(replace(OLDEST, max_batch_size=4, batching=batching))
    requests = [add(batcher, id, "s") for id in (1, 2, 3)]
    assert batcher.next_of(0, 0.0) == requests[:2]
    assert batcher.next_of(0, 0.1) is None
    assert batcher.wake_at == 0.2
    assert batcher.next_of(0, 0.2) == requests[2:]


def test_oldest_has_more_candidates_than_rows():
    batcher = opened(OLDEST)
    requests = [add(batcher, id, "s") for id in (1, 2, 3, 4)]
    assert batcher.next_of(0, 0.0) == requests[:2]
    assert batcher.next_of(0, 0.0) == requests[2:]
    assert {request.ticket.slot for request in requests} == {0, 1, 2, 3}


def test_a_batch_has_one_shape():
    batcher = opened()
    first = add(batcher, 1, "s")
    other = make(2, "s", 0.1, OTHER_SHAPE)
    batcher.add(other, None, 0.1)
    assert batcher.next_of(0, 0.2) == [first]
    assert batcher.next_of(0, 0.2) == [other]


def test_a_drain_ends_idle_sequences_so_that_those_in_line_run():
    batcher = opened()
    for id in (1, 2):
        add(batcher, id, "s")
    batcher.finished(batcher.next_of(0, 0.0) or [], 0.0)
    waiting = add(batcher, 3, "s")
    batcher.table.end_idle(0.0)
    assert batcher.next_of(0, 0.0) == [waiting]
    batcher.finished([waiting], 0.0)
    batcher.expire(0.0)
    assert batcher.table.num_live == 0


class Sequences:
    """Random clients, batches, deaths and cancels."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.now = 0.0
        self.batcher = opened(self.config, 2)
        self.lives = {0: 0, 1: 0}
        self.running: dict[int, list[Request]] = {0: [], 1: []}
        self.waiting: list[Request] = []
        # Where the state of each sequence is, by id: instance, its life and the slot.
        self.states: dict[object, tuple[int, int, int]] = {}
        self.ran: set[Request] = set()
        # What never ran, by the sequence; and the sequence and turn of each request.
        self.gaps: dict[tuple[int, int], int] = {}
        self.turns: dict[Request, tuple[tuple[int, int], int]] = {}
        self.num_starts = dict.fromkeys(range(1, 6), 0)

    def id(self, request: Request) -> object:
        return (request.parameters or {})["sequence_id"]

    def forget(self, requests: list[Request]) -> None:
        """These never run: what follows must not find the state any more."""
        for request in requests:
            self.waiting.remove(request)
            assert request not in self.ran
            sequence, turn = self.turns[request]
            self.gaps[sequence] = min(turn, self.gaps.get(sequence, turn))

    def collect_broken(self) -> None:
        self.forget([request for request, _ in self.batcher.take_broken()])

    def arrive(self, id: int, flags: str) -> None:
        self.now += 0.01
        request = make(id, flags, self.now)
        try:
            self.batcher.add(request, None, self.now)
        except InvalidRequest:
            assert "s" not in flags
        else:
            self.waiting.append(request)
            self.num_starts[id] += "s" in flags
            self.turns[request] = (id, self.num_starts[id]), len(self.turns)

    def run(self, instance: int) -> None:
        if instance not in self.running:
            assert self.batcher.next_of(instance, self.now) is None
            return
        batch = self.batcher.next_of(instance, self.now) or []
        assert len(batch) <= self.config.max_batch_size
        alive = [*batch, *self.running[instance]]
        assert len({request.ticket.slot for request in alive}) == len(alive)
        for request in batch:
            place = instance, self.lives[instance], request.ticket.slot
            assert 0 <= request.ticket.slot < self.config.num_sequence_slots
            if (request.parameters or {})["sequence_start"]:
                self.states[self.id(request)] = place
            assert self.states[self.id(request)] == place, "it has the state of the sequence"
            of_id = [each for each in self.waiting if self.id(each) == self.id(request)]
            assert of_id[0] is request, "in order"
            sequence, turn = self.turns[request]
            assert turn < self.gaps.get(sequence, turn + 1), "an earlier request never ran"
            self.waiting.remove(request)
            self.ran.add(request)
        self.running[instance] += batch

    def finish(self, instance: int, is_first: bool) -> None:
        running = self.running.get(instance, [])
        done = running[:1] if is_first else running[:]
        del running[: len(done)]
        for request in done:
            if (request.parameters or {})["sequence_end"]:
                self.states.pop(self.id(request), None)
        self.batcher.finished(done, self.now)

    def lose_or_open(self, instance: int) -> None:
        if instance not in self.running:
            self.running[instance] = []
            self.lives[instance] += 1
            self.batcher.open(instance)
            return
        self.batcher.lose(instance, "its worker crashed")
        self.collect_broken()
        self.batcher.finished(self.running.pop(instance), self.now)

    def cancel(self, index: int) -> None:
        if self.waiting:
            request = self.waiting[index % len(self.waiting)]
            assert self.batcher.remove(request)
            self.forget([request])
            self.collect_broken()

    def find_no_memory(self, instance: int) -> None:
        batch = self.batcher.next_of(instance, self.now)
        if batch:
            self.batcher.put_back(batch, None)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.batcher.expire(self.now)

    def counts_are_right(self) -> None:
        assert self.batcher.num_queued == len(self.waiting)
        assert set(self.batcher.requests()) == set(self.waiting)
        assert 0 <= self.batcher.table.num_live <= self.batcher.table.num_slots
        assert not self.batcher.broken

    def end(self) -> None:
        """In the end, all that waits runs, and every sequence ends."""
        for instance in (0, 1):
            if instance not in self.running:
                self.lose_or_open(instance)
        for _ in range(1000):
            for instance in (0, 1):
                self.run(instance)
                self.finish(instance, is_first=False)
            self.wait(IDLE_S)
            if not self.waiting:
                break
        assert not self.waiting
        self.wait(2 * IDLE_S)
        assert self.batcher.table.num_live == self.batcher.table.num_in_line == 0


@pytest.mark.parametrize("config", [DIRECT, OLDEST], ids=["direct", "oldest"])
@pytest.mark.parametrize("seed", range(40))
def test_laws_hold_whatever_clients_and_workers_do(config: ModelConfig, seed: int):
    random = Random(seed)
    world = Sequences(config)
    flags = ["", "", "", "s", "s", "e", "se"]
    actions = [
        lambda: world.arrive(random.randint(1, 5), random.choice(flags)),
        lambda: world.run(random.randint(0, 1)),
        lambda: world.finish(random.randint(0, 1), is_first=random.random() < 0.5),
        lambda: world.lose_or_open(random.randint(0, 1)),
        lambda: world.cancel(random.randint(0, 20)),
        lambda: world.find_no_memory(random.randint(0, 1)),
        lambda: world.wait(random.uniform(0, 2 * IDLE_S)),
    ]
    for action in random.choices(actions, [8, 5, 5, 0.5, 0.5, 1, 0.5], k=400):
        action()
        world.counts_are_right()
    world.end()
