"""The worker process: owns the device and one loaded Runner, and nothing else.

Started by the supervisor as `python -m penstock.serving.worker FD PARENT`. The core's socket brings
the model and the sockets of the shards (`Attach`); these bring batches. Runs them in place in each
shard's shared memory, merged if `Claims` says so, and exits when the core's socket closes. Knows no
protocol and no queue. In-process use runs the same loop in a thread.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from penstock.backends import Runner
from penstock.backends.processing import model_in
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import describe_error
from penstock.processes.channel import Channel
from penstock.processes.start import begin_life, take_part
from penstock.serving.claim_timer import ClaimTimer, send_claim
from penstock.serving.claims import ClaimRows, Claims, Offer, StartBatch
from penstock.serving.drift_watch import read_references
from penstock.serving.executor import BatchExecutor, Begun, Part, explain_error
from penstock.serving.input_sketch import InputSketch, SeenRow
from penstock.serving.shard_link import ShardLink, ShardMemory
from penstock.serving.shared_page import SharedPage
from penstock.serving.shares import Queued
from penstock.serving.slab import Segment
from penstock.serving.worker_calls import Route, WorkerCalls
from penstock.serving.worker_load import MemoryLimit, describe_load_error, load_runner
from penstock.serving.worker_metrics import WorkerMetrics
from penstock.serving.worker_responses import BatchThread
from penstock.serving.worker_slots import WorkerSlots
from penstock.system import host_policy, logs
from penstock.wire import frames

log = logging.getLogger("penstock.worker")

Answer = frames.Done | frames.BatchFailed


@dataclass(slots=True, eq=False)
class Run:
    """A batch for the runner. `claimed` is how `Claims` knows it; None: it does not, because there
    was only one shard. `begun` is None until it is started."""

    parts: Sequence[Part]
    claimed: StartBatch | None = None
    begun: Begun | None = None


@dataclass(slots=True, eq=False)
class Worker:
    """One model on one device. One thread receives, runs and answers. If the runner runs ahead, a
    second thread waits for results and sends the answers, in the order of the batches.

    The batches of an only shard run as they come, for it knows which slots are free. With several,
    `Claims` decides.
    """

    _channel: Channel
    on_load: Callable[[frames.LoadModel], None] | None = None
    on_ready: Callable[[], None] | None = None
    # Exits the process; None if the worker runs in a thread.
    die: Callable[[], None] | None = None
    _config: ModelConfig | None = None
    _loaded: BatchExecutor | None = None
    # The runner, if it monitors its device's memory.
    _watched: Runner | None = None
    # None without a limit, in a thread, or once the worker has asked to be replaced.
    _memory_limit: MemoryLimit | None = None
    # All sockets.
    _epoll: select.epoll = field(default_factory=select.epoll)
    # By the descriptors of their sockets.
    _links: dict[int, ShardLink] = field(default_factory=dict)
    _num_links: int = 0
    _claims: Claims | None = None
    # Its place on the shared page; None: the model has one shard.
    _slots: WorkerSlots | None = None
    # Whether `Claims` decides what runs.
    _is_shared: bool = False
    _begun: queue.SimpleQueue[Run | None] = field(default_factory=queue.SimpleQueue)
    _answerer: threading.Thread | None = None
    # Claims while the receiving thread runs a batch; only without an answering thread.
    _timer: ClaimTimer | None = None
    # Wakes the receiving thread; None without an answering thread.
    _wake_fd: int | None = None
    # Runs the batches of a decoupled model; None for others.
    _responses: BatchThread | None = None
    # For what both threads change: the counts of batches in flight, and the next three.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Batches in flight that `Claims` does not know.
    _num_unclaimed: int = 0
    # Batches that `Claims` has yet to learn the end of, with that time and whether they failed.
    _ended: list[tuple[StartBatch, float, bool]] = field(default_factory=list)
    # Shards that are gone, and whose last batch has ended.
    _unused: list[ShardLink] = field(default_factory=list)
    # The calls of its model's code to other models; None if it cannot make any.
    _calls: WorkerCalls | None = None
    # Metrics of its model's code; None before it is loaded.
    _metrics: WorkerMetrics | None = None
    # Compares inputs with the evidence; None without any.
    _sketch: InputSketch | None = None

    def __post_init__(self) -> None:
        self._epoll.register(self._channel.fileno(), select.EPOLLIN)

    @property
    def has_work(self) -> bool:
        """Whether `step` would not wait for a frame, except for what was claimed."""
        if self._is_shared and self._claims is not None and self._claims.wake_at is not None:
            return True
        return bool(self._ended or self._epoll.poll(0))

    @property
    def links(self) -> list[ShardLink]:
        return list(self._links.values())

    def serve(self) -> None:
        """Handle frames until the core closes its socket or sends Stop."""
        while self.step():
            pass

    def step(self) -> bool:
        """Wait for frames, handle one of each socket that has any, and run what can run; False
        after the last."""
        for fd, _ in self._wait():
            link = self._links.get(fd)
            if link is not None:
                self._receive(link)
            elif fd == self._wake_fd:
                os.eventfd_read(fd)
            elif not self._obey():
                return False
        if self._is_shared:
            # All that lies in the sockets can join the next batch.
            while ready := [fd for fd, _ in self._epoll.poll(0) if fd in self._links]:
                for fd in ready:
                    self._receive(self._links[fd])
            self._decide()
        if self._unused:
            self._forget_unused()
        return True

    def close(self) -> None:
        """Close the shards' sockets and unmap their memory; only needed for workers in a thread."""
        if self._timer is not None:
            self._timer.close()
        links = self.links
        if self._responses is not None:
            # It may wait for their memory.
            for link in links:
                self._detach(link)
        self._end_answers()
        if self._calls is not None:
            self._calls.close()
        if self._metrics is not None:
            self._metrics.close()
        for link in self.links:
            self._detach(link)
        self._forget_unused()
        for link in links:
            # Those with requests that a decoupled model never ends.
            link.close()
        if self._slots is not None:
            self._slots.close()
        if self._wake_fd is not None:
            os.close(self._wake_fd)
            self._wake_fd = None
        self._epoll.close()

    def _wait(self) -> list[tuple[int, int]]:
        """Return the sockets that have frames; wait for one, but not beyond the time at which
        `Claims` goes on without."""
        if not self._is_shared:
            return self._epoll.poll()
        assert self._claims is not None
        if self._ended and not self._num_unclaimed:
            return self._epoll.poll(0)
        if self._claims.wake_at is None:
            return self._epoll.poll()
        # The time-outs of epoll are whole milliseconds.
        left_s = max(0.0, self._claims.wake_at - time.monotonic())
        select.select([self._epoll], [], [], left_s)
        return self._epoll.poll(0)

    def _obey(self) -> bool:
        """Handle a frame of the core; False when it was the last."""
        received = self._channel.receive()
        if received is None:
            return False
        data, fds = received
        frame = frames.decode_to_worker(data)
        if isinstance(frame, frames.Enclosed):
            segment = Segment(frame.nbytes, fds.pop())
            frame = frames.decode_to_worker(bytes(segment.view[: frame.nbytes]))
            segment.close()
        if isinstance(frame, frames.LoadModel):
            return self._load(frame)
        if isinstance(frame, frames.Attach):
            if frame.block is not None:
                self._open_page(frame, fds.pop())
            self._attach(socket.socket(fileno=fds[0]), frame.shard)
        elif isinstance(frame, frames.SetExecutors):
            assert self._claims is not None, "a model is loaded first"
            self._claims.count_executors(frame.count)
        elif isinstance(frame, frames.Leave):
            self._leave(frame.reason)
        elif isinstance(frame, frames.Stop):
            self._finish_all()
            return False
        return True

    def _load(self, frame: frames.LoadModel) -> bool:
        if frame.version != frames.VERSION:
            text = f"the core speaks frames version {frame.version}, this worker {frames.VERSION}"
            self._tell_core(frames.StartFailed((text,)))
            return False
        config = self._config = frame.model
        try:
            if self.on_load is not None:
                self.on_load(frame)
            self._metrics = WorkerMetrics(self._channel.send)
            runner, ready = load_runner(config, frame.proof)
            references = read_references(config)
        except BaseException as error:  # Any exception of the model's code is the answer to Load.
            self._tell_core(frames.StartFailed(describe_load_error(error, config)))
            return False
        if references:
            has_batch = config.max_batch_size > 0
            self._sketch = InputSketch(references, self._channel.send_now, has_batch=has_batch)
        may_pin = self.die is not None
        self._loaded = BatchExecutor(config, runner, ready.proof, may_pin=may_pin)
        if self.on_ready is not None:
            self.on_ready()
        self._watched = model_in(runner)
        if self.die is not None and config.memory_bytes is not None:
            self._memory_limit = MemoryLimit(config.memory_bytes)
        num_slots = config.num_instances if runner.runs_ahead and config.uses_gpu else 1
        self._claims = Claims(_policy(config, ready.proof), config.num_instances, num_slots)
        self._claims.seed(ready.timings)
        if runner.runs_ahead or runner.is_decoupled:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._wake_fd, select.EPOLLIN)
        if runner.is_decoupled:
            told = self._start_calls, self._returned, self._ended_responses
            self._responses = BatchThread(self._loaded, config, *told)
        elif runner.runs_ahead:
            self._answerer = threading.Thread(target=self._answer_all, daemon=True)
            self._answerer.start()
        else:
            self._timer = ClaimTimer(self._claims, self._links)
        self._tell_core(ready)
        return True

    def _open_page(self, frame: frames.Attach, fd: int) -> None:
        """Map the shared page, once."""
        claims, config = self._claims, self._config
        if self._slots is None and frame.block is not None:
            assert claims is not None and config is not None, "a model is loaded first"
            num_slots = config.num_instances if config.uses_gpu else 1
            slots = range(frame.first_slot, frame.first_slot + num_slots)
            page = SharedPage.open(fd)
            self._slots = WorkerSlots(page, frame.block, slots, claims.num_slots)
            claims.read = self._read_queue
        os.close(fd)

    def _read_queue(self, number: int, now: float) -> Queued | None:
        """Return what the shard of this link shows on the page."""
        for link in self._links.values():
            if link.number == number and self._slots is not None:
                return self._slots.read(link.shard, now)
        return None

    def _attach(self, sock: socket.socket, shard: int) -> None:
        """Serve one more shard."""
        self._num_links += 1
        link = ShardLink(self._num_links, Channel(sock), shard)
        self._links[sock.fileno()] = link
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        assert self._claims is not None, "a model is loaded first"
        self._claims.attach(link.number)
        self._is_shared = self._is_shared or len(self._links) > 1 or self._slots is not None

    def _detach(self, link: ShardLink) -> None:
        """Forget a shard whose socket has closed. Its memory stays while a batch uses it."""
        fd = link.channel.fileno()
        self._epoll.unregister(fd)
        del self._links[fd]
        assert self._claims is not None
        self._claims.detach(link.number)
        if self._calls is not None:
            self._calls.detach(link.number)
        with self._lock:
            link.is_gone = True
            if not link.num_running:
                self._unused.append(link)
        if self._responses is not None:
            self._responses.lose(link)

    def _forget_unused(self) -> None:
        """Release the memory of shards that are gone."""
        with self._lock:
            unused, self._unused = self._unused, []
        for link in unused:
            if link.memory is not None and self._loaded is not None and self.die is not None:
                for memory in link.memory.inputs:
                    self._loaded.pinning_runner.unpin(memory)
            if self._loaded is not None:
                self._loaded.regions.close_link(link.number)
            link.close()

    def _receive(self, link: ShardLink) -> None:
        """Handle a frame of a shard. Each but unasked batches of an only shard is for `Claims`."""
        received = link.channel.receive()
        if received is None:
            self._detach(link)
            return
        data, fds = received
        frame = frames.decode_shard_to_worker(data)
        if isinstance(frame, frames.Dispatch):
            if not frame.runs and not link.is_spill_pinned and link.memory is not None:
                # Not before: most models never use it, and eight shards have 2 GiB of spill.
                link.is_spill_pinned = True
                self._pin(link.memory.spill.input.view)
            part = Part.of(link, frame)
            if not self._is_shared and not frame.round:
                self._run(Run((part,)))
            else:
                self._share().offered(_offer(part))
        elif isinstance(frame, frames.Release):
            assert link.memory is not None
            link.memory.spill.release(frame.offsets)
        elif isinstance(frame, frames.CancelRequest):
            if self._responses is not None:
                self._responses.cancel(link, frame)
        elif isinstance(frame, frames.Recall | frames.Want | frames.Decline):
            self._consider(link, frame)
        else:
            self._map(link, frame, fds)

    def _consider(
        self, link: ShardLink, frame: frames.Recall | frames.Want | frames.Decline
    ) -> None:
        """Let `Claims` know what a shard has, or takes back."""
        if isinstance(frame, frames.Recall):
            if self._share().recall(link.number, frame.batch):
                link.send(frames.Recalled(frame.batch))
        elif isinstance(frame, frames.Want):
            self._share().wanted(link.number, _queued(frame))
        else:
            more = None if frame.more is None else _queued(frame.more)
            self._share().passed(link.number, frame.round, more)

    def _map(
        self,
        link: ShardLink,
        frame: frames.Hello | frames.MapSlab | frames.MapRegion | frames.UnmapRegion,
        fds: Sequence[int],
    ) -> None:
        """Map or unmap the memory of a shard, or of its clients."""
        assert self._loaded is not None
        if isinstance(frame, frames.MapSlab):
            assert link.memory is not None
            self._pin(link.memory.map_slab(frame.slab, frame.nbytes, fds[0]))
        elif isinstance(frame, frames.MapRegion):
            self._loaded.regions.open(frame, fds, link.number)
        elif isinstance(frame, frames.UnmapRegion):
            self._loaded.regions.close(frame.region, link.number)
        else:
            self._greet(link, frame, fds)

    def _greet(self, link: ShardLink, frame: frames.Hello, fds: Sequence[int]) -> None:
        if frame.version != frames.VERSION:
            log.error("a shard speaks frames %d, this worker %d", frame.version, frames.VERSION)
            self._detach(link)
            return
        assert self._config is not None
        link.hears_starts = frame.hears_starts
        link.memory = ShardMemory(self._config, frame.spill_bytes, fds)
        if frame.has_calls:
            self._calls = self._calls or WorkerCalls(self._config.hang_s)
            self._calls.attach(link.number, fds[2])

    def _share(self) -> Claims:
        """Let `Claims` decide from now on."""
        assert self._claims is not None
        self._is_shared = True
        return self._claims

    def _decide(self) -> None:
        """Send claims and run batches, as `Claims` says."""
        claims = self._claims
        assert claims is not None
        with self._lock:
            if self._num_unclaimed:
                # Batches of the only shard there was may take all slots. Their end wakes this.
                return
            ended, self._ended = self._ended, []
        for batch, at, has_failed in ended:
            claims.ended(batch, at, has_failed=has_failed)
            if self._slots is not None:
                self._slots.end(batch)
        for decision in claims.decide(time.monotonic()):
            if isinstance(decision, ClaimRows):
                send_claim(decision, self._links)
                continue
            parts = [each for offer in decision.offers if isinstance(each := offer.frame, Part)]
            if self._slots is not None:
                self._slots.start(decision)
            self._run(Run(parts, decision))
        if self._slots is not None:
            # A batch that has ended meanwhile leads to the next decision first, and so do Wants
            # that came while it ran: to an idle slot, shards send rows of any level unasked.
            if claims.is_idle and not self._ended and not self._epoll.poll(0):
                self._slots.rest()
            return
        self._is_shared = len(self._links) > 1 or not claims.is_empty

    def _pin(self, memory: memoryview) -> None:
        """Pin shared memory for the GPU. Only in the worker's own process: a thread unmaps the
        memory while the process lives, and the GPU could still read it."""
        assert self._loaded is not None
        if self.die is not None:
            self._loaded.pinning_runner.pin(memory)

    def _run(self, run: Run) -> None:
        assert self._loaded is not None
        if self._responses is not None:
            self._run_decoupled(self._responses, run)
            return
        now = time.monotonic()
        _tell_start(run, now)
        if self._answerer is not None:
            with self._lock:
                self._num_unclaimed += run.claimed is None
                for part in run.parts:
                    part.link.num_running += 1
        elif run.claimed is not None and self._timer is not None:
            self._timer.arm_for_next()
        try:
            run.begun = self._begin(run.parts)
        except BaseException as error:  # Any exception of the model is answered.
            answers = self._failed(run.parts, error)
        else:
            seen = None if self._sketch is None else _look(self._sketch, run, now)
            if self._answerer is None:
                self._answer(run)
            else:
                self._begun.put(run)
            if seen is not None and self._sketch is not None:
                self._sketch.add(seen)
            self._leave_if_asked()
            return
        self._send_all(run, answers)

    def _run_decoupled(self, responses: BatchThread, run: Run) -> None:
        # Its requests have one owner, so there is one shard.
        (part,) = run.parts
        with self._lock:
            part.link.num_running += 1
        responses.submit(part)

    def _returned(self, part: Part, errors: Sequence[str]) -> None:
        """A decoupled model takes the next batch."""
        self._leave_if_full([frames.BatchFailed(part.frame.batch, text) for text in errors])

    def _ended_responses(self, part: Part) -> None:
        """All requests of a batch have their final responses."""
        with self._lock:
            part.link.num_running -= 1
            if part.link.is_gone and not part.link.num_running:
                self._unused.append(part.link)
        assert self._wake_fd is not None
        os.eventfd_write(self._wake_fd, 1)

    def _start_calls(self, parts: Sequence[Part]) -> None:
        """Send the calls of the batch that this thread is about to run to its shards."""
        if self._calls is not None:
            self._calls.begin([Route(part.link.number, part.frame.batch) for part in parts])

    def _begin(self, parts: Sequence[Part]) -> Begun:
        assert self._loaded is not None
        self._start_calls(parts)
        return self._loaded.begin(parts)

    def _failed(self, parts: Sequence[Part], error: BaseException) -> list[Answer]:
        """Return the answers for a batch that failed. If the error lost the GPU, exit instead: the
        core then finds the culprit by running the requests again, each alone."""
        text = explain_error(error)
        assert self._loaded is not None
        if self.die is not None and model_in(self._loaded.runner).is_lost():
            log.error("the GPU is lost to this worker: %s", text)
            self.die()
        return [frames.BatchFailed(part.frame.batch, text, len(parts) > 1) for part in parts]

    def _leave_if_asked(self) -> None:
        """Ask once to be replaced, if the runner wants it; the core then stops this worker."""
        reason = "" if self._watched is None else self._watched.restart_reason
        if reason:
            self._watched = None
            self._leave(reason)

    def _leave_if_full(self, answers: Sequence[Answer]) -> None:
        """Ask to be replaced if memory is exhausted; before the answers are sent, so that no batch
        follows them. Invariant: the exceptions of the batch are gone."""
        if self._memory_limit is None:
            return
        errors: list[str] = []
        for answer in answers:
            if isinstance(answer, frames.Done):
                errors += answer.errors.values()
            else:
                errors.append(answer.error)
        reason = self._memory_limit.restart_reason(errors)
        if reason:
            self._memory_limit = None
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        for link in self.links:
            link.send(frames.Leaving(reason))
        self._tell_core(frames.Leaving(reason))

    def _answer_all(self) -> None:
        while (run := self._begun.get()) is not None:
            try:
                self._answer(run)
            except OSError:
                return  # The core has exited; the other thread notices too.

    def _finish_all(self) -> None:
        """Run what shards sent before the core's Stop, answer all, and close the model."""
        has_more = True
        while has_more:
            ready = [fd for fd, _ in self._epoll.poll(0) if fd in self._links]
            for fd in ready:
                self._receive(self._links[fd])
            if self._is_shared:
                self._decide()
            has_more = bool(ready or self._ended)
        self._finish_responses()
        self._end_answers()
        if self._calls is not None:
            self._calls.close()
        if self._loaded is not None:
            self._loaded.runner.close()
        if self._metrics is not None:
            self._metrics.close()

    def _finish_responses(self) -> None:
        """Wait until the last responses of a decoupled model have left, while shards say what they
        have read."""
        while self._responses is not None and self._responses.is_busy:
            for fd, _ in self._epoll.poll():
                link = self._links.get(fd)
                if link is not None:
                    self._receive(link)
                elif fd == self._wake_fd:
                    os.eventfd_read(fd)
                else:
                    return  # The core has closed its socket.

    def _end_answers(self) -> None:
        """Stop the thread that answers after it has answered all started batches."""
        if self._responses is not None:
            self._responses.close()
            self._responses = None
        if self._answerer is not None:
            self._begun.put(None)
            self._answerer.join()
            self._answerer = None

    def _answer(self, run: Run) -> None:
        assert self._loaded is not None and run.begun is not None
        try:
            answers: list[Answer] = []
            for part, each in zip(run.parts, self._loaded.finish(run.begun), strict=True):
                answers += [each] if isinstance(each, frames.Done) else self._failed([part], each)
            del each  # If it is an exception, it holds memory.
        except BaseException as error:  # Any exception of the model is answered.
            answers = self._failed(run.parts, error)
        self._send_all(run, answers)

    def _send_all(self, run: Run, answers: Sequence[Answer]) -> None:
        """Answer the shards of a batch that has ended. If they give back no spill, the next batch
        is claimed first: they are busy with the answers for longer than with a claim."""
        if self._answerer is None and self._timer is not None:
            self._timer.disarm()
        self._leave_if_full(answers)
        claims_first = run.claimed is not None and not any(map(_fills_spill, answers))
        if claims_first:
            self._end(run, answers)
            if self._answerer is None and self._claims is not None and not self._claims.is_claiming:
                self._decide()
        for part, answer in zip(run.parts, answers, strict=True):
            self._send(part, answer)
        if not claims_first:
            self._end(run, answers)
        if self._answerer is None:
            return
        with self._lock:
            self._num_unclaimed -= run.claimed is None
            for part in run.parts:
                part.link.num_running -= 1
                if part.link.is_gone and not part.link.num_running:
                    self._unused.append(part.link)
        if (self._is_shared or self._unused) and self._wake_fd is not None:
            os.eventfd_write(self._wake_fd, 1)

    def _end(self, run: Run, answers: Sequence[Answer]) -> None:
        """Tell `Claims`, if it knows the batch, that it has ended."""
        if run.claimed is None:
            return
        has_failed = not isinstance(answers[0], frames.Done)
        with self._lock:
            self._ended.append((run.claimed, time.monotonic(), has_failed))
        if self._wake_fd is not None:
            os.eventfd_write(self._wake_fd, 1)

    def _send(self, part: Part, answer: Answer) -> None:
        try:
            part.link.send(answer)
        except OSError as error:
            if not isinstance(answer, frames.Done):
                raise
            in_spill = (each for some in answer.outputs for each in some if not each.region)
            part.memory.spill.release(each.offset for each in in_spill)
            text = f"the answer's description does not fit a frame: {error.strerror}"
            part.link.send(frames.BatchFailed(answer.batch, text))

    def _tell_core(self, frame: frames.FromWorker) -> None:
        self._channel.send(frames.encode(frame))


def _look(sketch: InputSketch, run: Run, now: float) -> SeenRow | None:
    """Copy a row of a batch that has begun, if it is time for one. Only the device reads clients'
    memory."""
    if not sketch.is_due(now) or any(part.frame.has_regions for part in run.parts):
        return None
    return None if run.begun is None else sketch.take(run.begun.batch, now)


def _tell_start(run: Run, now: float) -> None:
    for part in run.parts:
        if part.link.hears_starts and part.frame.tells_start:
            part.link.send(frames.Started(part.frame.batch, len(run.parts) > 1, now))


def _fills_spill(answer: Answer) -> bool:
    """Whether an answer has outputs in the worker's spill."""
    if not isinstance(answer, frames.Done):
        return False
    return any(not extent.region for outputs in answer.outputs for extent in outputs)


def _policy(config: ModelConfig, proof: frames.Proof) -> BatchPolicy:
    """Return how shards are served: as the core batches, given this proof."""
    is_batched = config.max_batch_size > 0 and not proof.unbatched
    return config.batching if is_batched else replace(config.batching, is_dynamic=False)


def _offer(part: Part) -> Offer:
    frame = part.frame
    return Offer(
        part.link.number,
        part.num_rows,
        # Without a geometry it is merged with nothing.
        frame.geometry or part,
        frame.round,
        frame.num_tokens,
        frame.is_alone,
        None if frame.more is None else _queued(frame.more),
        part,
        frame.batch,
    )


def _queued(frame: frames.Want) -> Queued:
    return Queued(
        frame.rows,
        frame.tokens,
        frame.due,
        frame.head_rows,
        frame.head_tokens,
        frame.geometry,
        frame.arrivals_per_s,
        frame.target_size,
    )


def _prepare(load: frames.LoadModel) -> None:
    """Set up logging and environment for the model, before any of its code runs."""
    logs.describe(load.model.name, load.model.version)
    os.environ.update(load.environment)
    if load.model.host_policy is not None:
        host_policy.apply(load.model.host_policy)


def main() -> None:
    sock = begin_life()
    if sock is None:
        return
    logging.getLogger("penstock.model_code").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model's prints appear at once, also if stdout is a pipe.
        sys.stdout.reconfigure(line_buffering=True)
    # Never write to a model's folder.
    sys.dont_write_bytecode = True
    # A model's code may parse arguments, which are not for it.
    del sys.argv[1:]
    channel = Channel(sock)
    try:
        Worker(channel, _prepare, take_part, lambda: os._exit(1)).serve()
    except BaseException as error:  # Errors outside of batches end the worker.
        log.error("the worker failed", exc_info=error)
        with contextlib.suppress(OSError):
            failed = frames.StartFailed((f"the worker failed: {describe_error(error)}",))
            channel.send(frames.encode(failed))
        os._exit(1)
    channel.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
