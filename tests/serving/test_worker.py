"""A worker of several shards: each row is answered once, whatever it ran with."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_doubles import FakeShard, WorkerAlone
from waiting import wait_until

from penstock.backends import Batch
from penstock.backends.null import NullRunner
from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.serving import worker_load
from penstock.serving.shard_link import ShardLink
from penstock.serving.shared_page import PageLayout, SharedPage
from penstock.serving.worker_slots import WorkerSlots
from penstock.types import TensorSpec
from penstock.wire import frames

CONFIG = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (5,)),),
    outputs=(TensorSpec("y", "FP32", (5,)),),
    max_batch_size=32,
    batching=BatchPolicy(32, is_dynamic=True),
    memory=MemoryPolicy(spill_bytes=1 << 16),
)
TEXTS = replace(
    CONFIG,
    inputs=(TensorSpec("x", "BYTES", (-1,)),),
    outputs=(TensorSpec("y", "BYTES", (-1,)),),
)
# Batches run ahead, in two slots, as on a GPU.
AHEAD = replace(CONFIG, device="cuda", num_instances=2, options={"null.copy_ms": "1"})


class Noting(NullRunner):
    """Notes the rows of every batch, and in how many pieces they came."""

    seen: list[tuple[int, int]] = []
    # Called while a batch runs.
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def settle(self) -> None:
        """Those of the warm-up do not count."""
        Noting.seen = []

    def start(self, batch: Batch):
        Noting.seen.append((batch.num_rows, len(batch.all_pieces)))
        Noting.meanwhile()
        return super().start(batch)


@pytest.fixture(autouse=True)
def noting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_load, "backend", lambda name: Noting)


@contextmanager
def worker_with(
    num_shards: int, config: ModelConfig = CONFIG, *, in_thread: bool = False
) -> Iterator[tuple[WorkerAlone, list[FakeShard]]]:
    worker = WorkerAlone(config, in_thread=in_thread)
    try:
        shards = [worker.attach() for _ in range(num_shards)]
        for shard in shards:
            if config.inputs[0].is_fixed:
                shard.add_slab(), shard.add_slab()
        if not in_thread:
            worker.step()
        yield worker, shards
    finally:
        worker.close()


def fill(shards: list[FakeShard]) -> None:
    """Any bits, NaN included, different in every slab."""
    generator = np.random.default_rng(1)
    for shard in shards:
        for slab in range(2):
            column = shard.column(slab, 0)
            column[...] = np.frombuffer(generator.bytes(column.nbytes), np.float32).reshape(-1, 5)


def dones(shard: FakeShard) -> list[frames.Done]:
    received = shard.receive()
    assert all(isinstance(each, frames.Done) for each in received), received
    return received


RUNS = [
    [(0, 0, 3)],
    [(0, 2, 1), (1, 0, 8)],
    [(1, 7, 1)],
    [(0, 0, 1), (0, 2, 2), (1, 4, 3)],
]


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("config", [CONFIG, AHEAD], ids=["at once", "ahead"])
def test_merged_batches_are_those_of_single_runs_bit_for_bit(num_shards, config):
    with worker_with(num_shards, config) as (worker, shards):
        fill(shards)
        for shard, runs in zip(shards, RUNS, strict=False):
            shard.dispatch(runs)
        expected = [sum(run[2] for run in runs) for runs in RUNS[:num_shards]]
        answers: list[list[frames.Done]] = [[] for _ in shards]

        def all_answered() -> bool:
            worker.step()
            for found, shard in zip(answers, shards, strict=True):
                found += dones(shard)
            return all(answers)

        wait_until(all_answered)
        assert Noting.seen == [(sum(expected), sum(map(len, RUNS[:num_shards])))]
        for number, ((done,), shard) in enumerate(zip(answers, shards, strict=True)):
            assert done.total_rows == sum(expected)
            assert done.is_first == (number == 0)
            assert shard.rows(done.batch).tobytes() == shard.rows(done.batch, 0).tobytes()
            assert len(shard.rows(done.batch)) == expected[number]


def test_rows_that_were_not_sent_are_not_written():
    with worker_with(2) as (worker, shards):
        fill(shards)
        for shard in shards:
            shard.column(0, 1)[...] = 7
            shard.dispatch([(0, 2, 3)])
        worker.step()
        for shard in shards:
            assert np.all(shard.column(0, 1)[[0, 1, 5, 6, 7]] == 7)
            assert shard.column(0, 1)[2:5].tobytes() == shard.column(0, 0)[2:5].tobytes()


def test_the_batches_of_an_only_shard_are_no_business_of_others():
    with worker_with(1) as (worker, (shard,)):
        fill([shard])
        shard.dispatch([(0, 0, 3)])
        shard.dispatch([(1, 0, 2)])
        worker.step()
        assert Noting.seen == [(3, 1), (2, 1)]
        assert [(done.total_rows, done.is_first) for done in dones(shard)] == [(0, True)] * 2


@pytest.mark.parametrize("geometries", [("a", "b"), ("", "")], ids=["different", "unknown"])
def test_other_geometries_are_not_merged(geometries):
    with worker_with(2) as (worker, shards):
        for shard, geometry in zip(shards, geometries, strict=True):
            shard.dispatch([(0, 0, 3)], geometry=geometry)
        worker.step()
        assert Noting.seen == [(3, 1), (3, 1)]
        assert all(done.total_rows == 0 for shard in shards for done in dones(shard))


def test_what_must_be_alone_is():
    with worker_with(3) as (worker, shards):
        for number, shard in enumerate(shards):
            shard.dispatch([(0, 0, 3)], is_alone=number == 1)
        worker.step()
        assert sorted(Noting.seen) == [(3, 1), (6, 2)]
        assert [len(dones(shard)) for shard in shards] == [1, 1, 1]


def test_a_batch_has_at_most_the_rows_of_the_model():
    with worker_with(4, replace(CONFIG, batching=BatchPolicy(12, is_dynamic=True))) as (worker, s):
        for shard in s:
            shard.dispatch([(0, 0, 5)])
        worker.step()
        assert sorted(Noting.seen) == [(10, 2), (10, 2)]
        assert [len(dones(shard)) for shard in s] == [1, 1, 1, 1]


def test_a_model_that_is_not_batched_runs_one_part_at_a_time():
    with worker_with(2, replace(CONFIG, batching=BatchPolicy(32))) as (worker, shards):
        for shard in shards:
            shard.dispatch([(0, 0, 1)])
        worker.step()
        assert Noting.seen == [(1, 1), (1, 1)]


def words(*counts: int) -> list[np.ndarray]:
    return [
        np.array([[f"{count} {row}".encode(), b"\xc3\xa9"] for row in range(count)], object)
        for count in counts
    ]


def test_texts_of_several_shards_are_merged_too():
    with worker_with(2, TEXTS) as (worker, shards):
        sent = [words(1, 2), words(3)]
        for shard, arrays in zip(shards, sent, strict=True):
            shard.spill(arrays)
        worker.step()
        assert Noting.seen == [(6, 3)]
        for shard, arrays in zip(shards, sent, strict=True):
            (done,) = dones(shard)
            found = shard.spilled(done)
            assert [each.tolist() for (each,) in found] == [each.tolist() for each in arrays]
            offsets = tuple(e.offset for extents in done.outputs for e in extents)
            shard.send(frames.Release(offsets))
        worker.step()


def test_the_spill_of_a_shard_is_pinned_with_its_first_batch(monkeypatch):
    pinned: list[int] = []
    monkeypatch.setattr(Noting, "pin", lambda self, memory: pinned.append(memory.nbytes))
    worker = WorkerAlone(TEXTS, die=lambda: None)
    try:
        shards = [worker.attach() for _ in range(2)]
        worker.step()
        assert not pinned
        for _ in range(2):
            shards[1].spill(words(1))
            worker.step()
        assert pinned == [TEXTS.memory.spill_bytes]
    finally:
        worker.close()


def test_a_full_spill_is_the_problem_of_its_shard():
    with worker_with(2, TEXTS) as (worker, shards):
        large = [np.array([[b"x" * 20_000, b""]], object)]
        for _ in range(4):
            # Never released: the fourth has no room.
            shards[0].spill(large)
            shards[1].spill(words(1))
            worker.step()
        received = shards[0].receive()
        assert [type(each) for each in received] == [frames.Done] * 3 + [frames.BatchFailed]
        assert "do not fit the spill segment" in received[3].error
        assert len(dones(shards[1])) == 4


def test_a_failure_is_told_to_all_parts():
    with worker_with(2, replace(CONFIG, options={"null.fail_on": "13"})) as (worker, shards):
        shards[0].column(0, 0)[1, 0] = 13
        for shard in shards:
            shard.dispatch([(0, 0, 3)])
        worker.step()
        for shard in shards:
            (failed,) = shard.receive()
            assert isinstance(failed, frames.BatchFailed) and failed.is_merged
        shards[0].dispatch([(0, 0, 2)], is_alone=True)
        worker.step()
        (failed,) = shards[0].receive()
        assert isinstance(failed, frames.BatchFailed) and not failed.is_merged


def test_shards_that_ask_for_it_hear_of_the_start_before_the_answer():
    worker = WorkerAlone(CONFIG)
    try:
        shards = [worker.attach(hears_starts=True), worker.attach(hears_starts=True)]
        for shard in shards:
            shard.add_slab()
        worker.step()
        numbers = [shard.dispatch([(0, 0, 2)]) for shard in shards]
        began = time.monotonic()
        worker.step()
        for shard, number in zip(shards, numbers, strict=True):
            started, done = shard.receive()
            assert started == frames.Started(number, True, started.at)
            assert began <= started.at <= time.monotonic()
            assert isinstance(done, frames.Done)
        number = shards[0].dispatch([(0, 0, 1)])
        worker.step()
        started = shards[0].receive()[0]
        assert started == frames.Started(number, False, started.at)
    finally:
        worker.close()


def test_a_want_is_answered_with_a_claim():
    with worker_with(2) as (worker, shards):
        fill(shards)
        for shard in shards:
            shard.send(frames.Want((3,), geometry="g"))
        worker.step()
        claims = [shard.receive()[0] for shard in shards]
        assert all(isinstance(claim, frames.Claim) and claim.max_rows >= 3 for claim in claims)
        assert sum(claim.max_rows for claim in claims) == 32
        shards[0].dispatch([(0, 0, 3)], round=claims[0].round)
        shards[1].send(frames.Decline(claims[1].round))
        worker.step()
        (done,) = dones(shards[0])
        assert done.total_rows == 0 and shards[1].receive() == []


def test_the_next_batch_is_claimed_before_the_last_is_answered():
    """Unless its answers are in the spill, which the shard has to give back first."""
    full = {"max_batch_size": 8, "batching": BatchPolicy(8, is_dynamic=True)}
    more = frames.Want((2,), geometry="g")
    with worker_with(2, replace(CONFIG, **full)) as (worker, shards):
        fill(shards)
        shards[0].dispatch([(0, 0, 8)], more=more)
        worker.step()
        assert [type(each) for each in shards[0].receive()] == [frames.Claim, frames.Done]
    with worker_with(2, replace(TEXTS, **full)) as (worker, shards):
        shards[0].spill(words(8), more=more)
        worker.step()
        assert [type(each) for each in shards[0].receive()] == [frames.Done, frames.Claim]


def test_the_next_batch_is_claimed_while_one_runs():
    config = replace(CONFIG, options={"null.a_ms": "20"})
    with worker_with(2, config) as (worker, shards):
        received: list[frames.WorkerToShard] = []

        def wait_for_claim() -> None:
            """Keep the worker's only thread busy."""
            wait_until(lambda: received.extend(shards[0].receive()) or received)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Noting, "meanwhile", staticmethod(wait_for_claim))
            shards[0].dispatch([(0, 0, 2)], more=frames.Want((3,), due=0.0))
            worker.step()
        (claim,) = received
        assert isinstance(claim, frames.Claim)
        shards[0].dispatch([(0, 2, 3)], round=claim.round)
        wait_until(lambda: worker.step() or len(Noting.seen) == 2)
        assert [rows for rows, _ in Noting.seen] == [2, 3]
        assert len(dones(shards[0])) == 2


def test_a_slot_is_not_shown_as_idle_while_wants_are_unread(monkeypatch):
    """A shard that sees an idle slot sends rows of any level, before higher ones of others."""
    page = SharedPage.in_memory(PageLayout(num_shards=2, max_models=1, max_slots=1))
    with worker_with(2) as (worker, shards):
        monkeypatch.setattr(worker.worker, "_slots", WorkerSlots(page, 0, range(1), 1))
        idle_at_answer: list[bool] = []
        send = ShardLink.send

        def note(link: ShardLink, frame: frames.WorkerToShard) -> None:
            if isinstance(frame, frames.Done):
                idle_at_answer.append(page.is_idle(0, 0))
            send(link, frame)

        with pytest.MonkeyPatch.context() as patch:
            want = frames.Want((2,), geometry="g")
            patch.setattr(ShardLink, "send", note)
            patch.setattr(Noting, "meanwhile", staticmethod(lambda: shards[1].send(want)))
            shards[0].dispatch([(0, 0, 1)])
            worker.step()
        assert idle_at_answer == [False]
        (claim,) = shards[1].receive()
        assert isinstance(claim, frames.Claim)
        shards[1].send(frames.Decline(claim.round))
        worker.step()
        assert page.is_idle(0, 0), "there is nothing more to run"


@pytest.mark.parametrize("config", [CONFIG, AHEAD], ids=["at once", "ahead"])
def test_a_shard_that_dies_is_forgotten_with_its_offers(config):
    with worker_with(3, config) as (worker, shards):
        fill(shards)
        for shard in shards:
            shard.dispatch([(0, 0, 3)])
        shards[1].close()
        worker.step()
        left = [shards[0], shards[2]]

        answers: list[list[frames.Done]] = [[] for _ in left]

        def all_answered() -> bool:
            worker.step()
            for found, shard in zip(answers, left, strict=True):
                found += dones(shard)
            return all(answers)

        wait_until(all_answered)
        assert [[done.is_first for done in found] for found in answers] == [[True], [False]]
        late = worker.attach()
        late.add_slab()
        late.dispatch([(0, 0, 4)])
        wait_until(lambda: worker.step() or dones(late))


def test_a_shard_that_dies_while_its_rows_run_takes_nothing_with_it():
    slow = replace(AHEAD, options={"null.copy_ms": "1", "null.a_ms": "30"})
    with worker_with(2, slow) as (worker, shards):
        fill(shards)
        for shard in shards:
            shard.dispatch([(0, 0, 3)])
        worker.step()
        assert Noting.seen == [(6, 2)]
        (link, other) = worker.worker.links
        shards[0].close()
        worker.step()
        assert link.is_gone and link.memory is not None, "the batch still runs in it"
        answers: list[frames.Done] = []
        wait_until(lambda: answers.extend(dones(shards[1])) or answers)
        assert answers[0].is_first, "the other one counts nothing"
        assert shards[1].rows(1).tobytes() == shards[1].rows(1, 0).tobytes()
        wait_until(lambda: worker.step() or link.memory is None)
        assert other.memory is not None


def test_a_shard_of_another_version_is_not_served(caplog):
    with worker_with(1) as (worker, (shard,)):
        other = worker.attach()
        worker.step()
        other.send(frames.Hello(frames.VERSION + 1, 64))
        worker.step()
        versions = f"a shard speaks frames {frames.VERSION + 1}, this worker {frames.VERSION}"
        assert versions in caplog.text
        shard.dispatch([(0, 0, 1)])
        worker.step()
        assert len(dones(shard)) == 1


def test_stop_comes_after_what_was_sent_before_it():
    with worker_with(2) as (worker, shards):
        for shard in shards:
            shard.dispatch([(0, 0, 3)])
        worker.core.send(frames.encode(frames.Stop()))
        while worker.worker.step():
            pass
        assert [len(dones(shard)) for shard in shards] == [1, 1]


class Story:
    """A random life of a worker and its shards. Rows are numbered; each is sent once."""

    def __init__(self, seed: int, config: ModelConfig) -> None:
        self._random = random.Random(seed)
        self._number = 0
        self._worker = WorkerAlone(config)
        self._alive: list[FakeShard] = []
        # By shard and batch: the numbers of its rows.
        self._sent: dict[tuple[FakeShard, int], list[int]] = {}
        self._claims: dict[FakeShard, list[int]] = {}
        self._rows: dict[FakeShard, list[tuple[int, int]]] = {}
        self.num_answered = 0
        self.num_lost = 0

    def tell(self, num_steps: int) -> None:
        try:
            self._attach()
            for _ in range(num_steps):
                step = self._random.choice(
                    [self._offer] * 6 + [self._want] * 3 + [self._step] * 4 + [self._read] * 4
                    + [self._attach, self._kill]
                )  # fmt: skip
                step()
            wait_until(self._is_settled)
        finally:
            self._worker.close()
        total = self.num_answered + self.num_lost
        assert total == self._number, "each row is answered once, or lost with its shard"

    def _attach(self) -> None:
        if len(self._alive) < 4:
            shard = self._worker.attach(capacity=16)
            shard.add_slab(), shard.add_slab()
            self._alive.append(shard)
            self._claims[shard] = []
            self._rows[shard] = [(slab, row) for slab in range(2) for row in range(16)]

    def _kill(self) -> None:
        if len(self._alive) > 1:
            shard = self._alive.pop(self._random.randrange(len(self._alive)))
            self._read_one(shard)
            mine = [key for key in self._sent if key[0] is shard]
            self.num_lost += sum(len(self._sent.pop(key)) for key in mine)
            shard.close()

    def _offer(self, shard: FakeShard | None = None, round: int = 0, most: int = 8) -> None:
        shard = shard or self._random.choice(self._alive)
        free = self._rows[shard]
        count = min(len(free), self._random.randint(1, most))
        if not count:
            if round:
                shard.send(frames.Decline(round))
            return
        runs, numbers = [], []
        for _ in range(count):
            slab, row = free.pop(self._random.randrange(len(free)))
            shard.column(slab, 0)[row] = self._number
            runs.append((slab, row, 1))
            numbers.append(self._number)
            self._number += 1
        more = frames.Want((1,), geometry="g") if round and self._random.random() < 0.3 else None
        geometry = self._random.choice("gggh")
        is_alone = self._random.random() < 0.1
        batch = shard.dispatch(runs, geometry=geometry, is_alone=is_alone, round=round, more=more)
        self._sent[shard, batch] = numbers

    def _want(self) -> None:
        self._random.choice(self._alive).send(frames.Want((3,), geometry="g"))

    def _step(self) -> None:
        if self._worker.worker.has_work:
            assert self._worker.worker.step()

    def _read(self) -> None:
        self._read_one(self._random.choice(self._alive))

    def _read_one(self, shard: FakeShard) -> None:
        for frame in shard.receive():
            if isinstance(frame, frames.Claim):
                if self._random.random() < 0.3:
                    shard.send(frames.Decline(frame.round))
                else:
                    self._offer(shard, frame.round, frame.max_rows)
                continue
            assert isinstance(frame, frames.Done), frame
            numbers = self._sent.pop((shard, frame.batch))
            found = shard.rows(frame.batch)
            assert found[:, 0].tolist() == numbers
            assert frame.total_rows == 0 or frame.total_rows > len(numbers)
            self.num_answered += len(numbers)
            for run in shard.outputs.pop(frame.batch):
                self._rows[shard].append((run.slab, run.row))

    def _is_settled(self) -> bool:
        self._worker.step()
        for shard in self._alive:
            self._read_one(shard)
        return not self._sent


@pytest.mark.parametrize("config", [CONFIG, AHEAD], ids=["at once", "ahead"])
@settings(deadline=None, max_examples=at_most(60))
@given(seed=st.integers(0, 1 << 30))
def test_each_row_is_answered_exactly_once(config, seed):
    story = Story(seed, config)
    story.tell(60)
    assert story.num_answered > 0
