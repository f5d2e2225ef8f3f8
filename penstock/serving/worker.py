"""The worker process: owns the device and one loaded Runner, and nothing else.

Started by the supervisor as `python -m penstock.serving.worker FD PARENT`; reads frames from that
socket, runs batches in place in shared memory, answers with frames, and exits when the socket
closes. Knows no protocol and no queue. In-process use runs the same loop in a thread.
"""

from __future__ import annotations

import array
import contextlib
import errno
import io
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.backends import Runner
from penstock.backends.heads import Headed
from penstock.backends.processing import model_in
from penstock.errors import describe_error
from penstock.processes.start import begin_life, take_part
from penstock.serving.executor import BatchExecutor, Begun, WorkerMemory, explain_error
from penstock.serving.slab import Segment
from penstock.serving.worker_load import MemoryLimit, describe_load_error, load_runner
from penstock.system import logs
from penstock.wire import frames

# Limit on the descriptors of one frame.
MAX_FDS = 3
log = logging.getLogger("penstock.worker")


class Channel:
    """The worker's end of the socket: blocking, one frame per datagram."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(frames.MAX_FRAME_BYTES)
        self._view = memoryview(self._buffer)
        self._fd_space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)

    def receive(self) -> tuple[frames.ToWorker, list[int]] | None:
        """Return the next frame and its descriptors; None when the core has exited."""
        size, ancillary, _, _ = self._sock.recvmsg_into([self._buffer], self._fd_space)
        if size == 0:
            return None
        fds: list[int] = []
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                fds.extend(received)
        frame = frames.decode_to_worker(self._view[:size])
        if isinstance(frame, frames.Enclosed):
            segment = Segment(frame.nbytes, fds.pop())
            frame = frames.decode_to_worker(bytes(segment.view[: frame.nbytes]))
            segment.close()
        return frame, fds

    def send(self, frame: frames.FromWorker) -> None:
        """Send a frame; OSError if it is too large."""
        data = frames.encode(frame)
        if len(data) > frames.MAX_FRAME_BYTES:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        self._sock.send(data)

    def close(self) -> None:
        self._sock.close()


@dataclass(slots=True, eq=False)
class Worker:
    """One model on one device. One thread receives, runs and answers. If the runner runs ahead, a
    second thread waits for results and sends the answers, in the order of the batches."""

    _channel: Channel
    on_load: Callable[[frames.LoadModel], None] | None = None
    on_ready: Callable[[], None] | None = None
    # Exits the process; None if the worker runs in a thread.
    die: Callable[[], None] | None = None
    _memory: WorkerMemory | None = None
    _loaded: BatchExecutor | None = None
    # The runner, if it monitors its device's memory.
    _watched: Runner | None = None
    # None without a limit, in a thread, or once the worker has asked to be replaced.
    _memory_limit: MemoryLimit | None = None
    _begun: queue.SimpleQueue[Begun | None] = field(default_factory=queue.SimpleQueue)
    _answerer: threading.Thread | None = None

    def serve(self) -> None:
        """Handle frames until the core closes the socket or sends Stop."""
        while self.step():
            pass

    def step(self) -> bool:
        """Receive and handle one frame; False when it was the last."""
        received = self._channel.receive()
        if received is None:
            return False
        frame, fds = received
        if isinstance(frame, frames.Dispatch):
            self._run(frame)
        elif isinstance(frame, frames.Release):
            assert self._memory is not None
            self._memory.spill.release(frame.offsets)
        elif isinstance(frame, frames.MapSlab):
            assert self._memory is not None
            self._pin(self._memory.map_slab(frame.slab, frame.nbytes, fds[0]))
        elif isinstance(frame, frames.LoadModel):
            return self._load(frame, fds)
        elif isinstance(frame, frames.Stop):
            self._end_answers()
            if self._loaded is not None:
                self._loaded.runner.close()
            return False
        return True

    def close(self) -> None:
        """Unmap the shared memory; only needed for workers in a thread."""
        self._end_answers()
        if self._memory is not None:
            self._memory.close()

    def _load(self, frame: frames.LoadModel, fds: Sequence[int]) -> bool:
        if frame.version != frames.VERSION:
            text = f"the core speaks frames version {frame.version}, this worker {frames.VERSION}"
            self._channel.send(frames.StartFailed((text,)))
            return False
        config = frame.model
        try:
            if self.on_load is not None:
                self.on_load(frame)
            self._memory = memory = WorkerMemory(config, frame.spill_bytes, fds)
            runner, ready = load_runner(config, frame.proof)
        except BaseException as error:  # Any exception of the model's code is the answer to Load.
            self._channel.send(frames.StartFailed(describe_load_error(error, config)))
            return False
        self._loaded = BatchExecutor(config, runner, memory, ready.proof)
        if self.on_ready is not None:
            self.on_ready()
        self._watched = model_in(runner)
        if self.die is not None and config.memory_bytes is not None:
            self._memory_limit = MemoryLimit(config.memory_bytes)
        self._pin(memory.spill.input.view)
        if runner.runs_ahead:
            self._answerer = threading.Thread(target=self._answer_all, daemon=True)
            self._answerer.start()
        self._channel.send(ready)
        return True

    def _pin(self, memory: memoryview) -> None:
        """Pin shared memory for the GPU. Only in the worker's own process: a thread unmaps the
        memory while the process lives, and the GPU could still read it."""
        assert self._loaded is not None
        runner = self._loaded.runner
        if self.die is not None:
            (runner.inner if isinstance(runner, Headed) else runner).pin(memory)

    def _failed(self, batch: int, error: BaseException) -> frames.BatchFailed:
        """Return the answer for a batch that failed. If the error lost the GPU, exit instead: the
        core then finds the culprit by running the requests again, each alone."""
        answer = frames.BatchFailed(batch, explain_error(error))
        assert self._loaded is not None
        if self.die is not None and model_in(self._loaded.runner).is_lost():
            log.error("the GPU is lost to this worker: %s", answer.error)
            self.die()
        return answer

    def _run(self, frame: frames.Dispatch) -> None:
        assert self._loaded is not None
        try:
            begun = self._loaded.begin(frame)
        except BaseException as error:  # Any exception of the model is answered.
            failed = self._failed(frame.batch, error)
        else:
            if self._answerer is None:
                self._answer(begun)
            else:
                self._begun.put(begun)
            self._leave_if_asked()
            return
        self._leave_if_full(failed)
        self._send(failed)

    def _leave_if_asked(self) -> None:
        """Ask once to be replaced, if the runner wants it; the core then stops this worker."""
        reason = "" if self._watched is None else self._watched.restart_reason
        if reason:
            self._watched = None
            self._channel.send(frames.Leaving(reason))

    def _leave_if_full(self, answer: frames.Done | frames.BatchFailed) -> None:
        """Ask to be replaced if memory is exhausted; before the answer is sent, so that no batch
        follows it. Invariant: the exceptions of the batch are gone."""
        if self._memory_limit is None:
            return
        errors = answer.errors.values() if isinstance(answer, frames.Done) else [answer.error]
        reason = self._memory_limit.restart_reason(errors)
        if reason:
            self._memory_limit = None
            self._channel.send(frames.Leaving(reason))

    def _answer_all(self) -> None:
        while (begun := self._begun.get()) is not None:
            try:
                self._answer(begun)
            except OSError:
                return  # The core has exited; the other thread notices too.

    def _end_answers(self) -> None:
        """Stop the answering thread after it has answered all started batches."""
        if self._answerer is not None:
            self._begun.put(None)
            self._answerer.join()
            self._answerer = None

    def _answer(self, begun: Begun) -> None:
        assert self._loaded is not None
        try:
            answer: frames.Done | frames.BatchFailed = self._loaded.finish(begun)
        except BaseException as error:  # Any exception of the model is answered.
            answer = self._failed(begun.frame.batch, error)
        self._leave_if_full(answer)
        self._send(answer)

    def _send(self, answer: frames.Done | frames.BatchFailed) -> None:
        try:
            self._channel.send(answer)
        except OSError as error:
            if not isinstance(answer, frames.Done):
                raise
            assert self._memory is not None
            self._memory.spill.release(each.offset for part in answer.outputs for each in part)
            text = f"the answer's description does not fit a frame: {error.strerror}"
            self._channel.send(frames.BatchFailed(answer.batch, text))


def _prepare(load: frames.LoadModel) -> None:
    """Set up logging and environment for the model, before any of its code runs."""
    logs.describe(load.model.name, load.model.version)
    os.environ.update(load.environment)


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
    channel = Channel(sock)
    try:
        Worker(channel, _prepare, take_part, lambda: os._exit(1)).serve()
    except BaseException as error:  # Errors outside of batches end the worker.
        log.error("the worker failed", exc_info=error)
        with contextlib.suppress(OSError):
            channel.send(frames.StartFailed((f"the worker failed: {describe_error(error)}",)))
        os._exit(1)
    channel.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
