"""Supervises the workers of one model: starts them, detects crashes and hangs, restarts them.

Knows processes, sockets and back-off but no requests: its listener (`ModelHost`) finds out whether
a request caused a death. Everything runs on the core's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from penstock.config import ModelConfig
from penstock.processes.channel import Channel, socket_pair
from penstock.processes.child import ChildProcess, StartLife, limited
from penstock.processes.life import ProcessLife
from penstock.processes.restarts import HEALTHY_S, MAX_LOAD_DEATHS
from penstock.serving.context import log_about
from penstock.serving.instance import Instance
from penstock.serving.slab import Segment
from penstock.serving.spares import Spares
from penstock.serving.worker import Worker
from penstock.system.environment import asked_for
from penstock.wire import frames

log = logging.getLogger("penstock.supervisor")

TICK_S = 0.5
# Time for a leaving worker to close its model.
LEAVE_S = 5.0


class ThreadLife:
    """A worker in a thread of this process, for `penstock.load` and tests: the same loop and
    frames, without isolation. It cannot be killed, only asked to stop."""

    pid = 0
    was_killed_outside = False

    def __init__(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> None:
        self.sock, theirs = socket_pair()
        self._loop = loop
        self._on_death = on_death
        self._is_dead = False
        self._thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.socket_closed()

    def socket_closed(self) -> None:
        if not self._is_dead:
            self._is_dead = True
            self._loop.call_soon(self._on_death, "its thread ended")

    def has_room_for_another(self) -> bool:
        """Always False: a request that crashes a thread crashes the process, spares included."""
        return False

    def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        worker = Worker(channel)
        try:
            worker.serve()
        except OSError:
            pass  # The core closed the socket first.
        finally:
            worker.close()
            channel.close()


def load_timeout_text(limit_s: float) -> str:
    return f"loading took longer than {limit_s:g} s; parameters.penstock.load_timeout_s sets it"


class WorkerListener(Protocol):
    """Hears of the workers of one model."""

    def instance_ready(self, instance: Instance) -> None: ...

    def instance_leaving(self, instance: Instance) -> None:
        """Call `let_go` once the worker has no batches."""

    def instance_died(
        self, instance: Instance, reason: str, conclude: Callable[[bool], None]
    ) -> None:
        """Call `conclude`, now or soon, with whether a request is to blame: the death then counts
        towards no crash loop."""

    def load_failed(self, problems: Sequence[str]) -> None: ...

    def restarting(self, reason: str) -> None:
        """Note why a worker is started again."""

    def sketched(self, sketched: frames.Sketched) -> None:
        """Hear what a worker has seen of its inputs."""

    def measured(self, worker: int, changes: Sequence[frames.MetricChange]) -> None:
        """Hear what the worker of this instance has done to metrics of its model's code."""

    def tick(self) -> None:
        """Do periodic work, every TICK_S."""


class Supervisor:
    """The instances of one model. Once stopped it cannot be used again, and drops its references:
    an unloaded model must not wait for the garbage collector, which may run hours later."""

    def __init__(self, config: ModelConfig, start_life: StartLife = ProcessLife) -> None:
        self._config = config
        self._start_life = limited(start_life, config.memory_bytes)
        self._loop = asyncio.get_running_loop()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._timer_ids = itertools.count()
        self._lives = itertools.count(1)
        self._is_stopping = False
        # Result of the first workers' batching and padding checks, which later workers skip.
        self.proof: frames.Proof | None = None
        self.instances = [Instance(index, *place) for index, place in enumerate(config.places)]
        self.want_first(len(config.workers))
        self.spares = Spares(config, self.instances)

    @property
    def _all(self) -> list[Instance]:
        return [*self.instances, *self.spares.workers]

    def want_first(self, count: int) -> None:
        """Set how many workers `start` starts."""
        for instance in self.instances:
            instance.is_wanted = instance.index < count

    def start(self, listener: WorkerListener) -> None:
        """Start all workers; the listener hears of them until `stop`."""
        self._listener = listener
        for instance in self.instances:
            self._start(instance)
        self._later(TICK_S, self._tick)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Stop all workers after their current batches; kill those that take too long."""
        self._is_stopping = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        children = [each.child for each in self._all if each.child is not None]
        for child in children:
            child.send(frames.encode(frames.Stop()))
        await asyncio.gather(*(child.wait(timeout_s) for child in children))
        if hasattr(self, "_listener"):  # Not if it was never started.
            del self._listener

    def use(self, config: ModelConfig) -> None:
        """Start workers of this configuration from now on; there are places for its instances."""
        self._config = config
        for index in range(len(self.instances), len(config.places)):
            self.instances.append(Instance(index, *config.places[index], is_wanted=False))

    def want_another(self) -> Instance | None:
        """Choose a place for one more worker; None if all are used. Call `start_wanted` then."""
        free = [each for each in self.instances if not each.is_wanted]
        # One whose worker is still leaving is used again when that has ended.
        chosen = min(free, key=lambda each: (each.child is not None, each.index), default=None)
        if chosen is not None:
            chosen.is_wanted = True
        return chosen

    def start_wanted(self, instance: Instance) -> None:
        """Start a worker in a place that was chosen, unless it has one."""
        self._start(instance)

    def dismiss(self, instance: Instance, reason: str) -> None:
        """Stop a worker: at once if it is not ready, otherwise when it has answered."""
        instance.is_wanted = False
        if instance.child is None:
            instance.crashes.recovered()
            return
        instance.is_dismissed = True
        if not instance.is_ready:
            instance.child.life.kill()
        elif not instance.is_leaving:
            instance.send(frames.encode(frames.Leave(reason)))

    def kill_hung(self, instance: Instance) -> None:
        """Kill a worker that takes too long over a batch."""
        if instance.child is not None and not instance.is_hung:
            self._log(logging.ERROR, instance, " hangs; killing pid %d", instance.pid)
            instance.is_hung = True
            instance.child.life.kill()

    def give_up(self, instance: Instance, problem: str) -> None:
        """Kill a worker that cannot be used; another one is started."""
        instance.load_error = problem
        if instance.child is not None:
            instance.child.life.kill()

    def excuse(self, index: int) -> None:
        """Take back a death that counted towards a crash loop: a request caused it."""
        self.instances[index].crashes.excuse()
        self.spares.note_kill()

    def _start(self, instance: Instance) -> None:
        """Start a worker, unless there is one or none is wanted. A failed start counts as a death:
        its cause may be temporary."""
        if self._is_stopping or not instance.needs_worker:
            return
        try:
            self._launch(instance)
        except OSError as error:
            reason = f"could not be started ({error})"
            if instance.child is not None:
                instance.load_error = f"the worker {reason}"
                instance.child.life.kill()
                return
            self._go_on(instance, False, reason, False)

    def _launch(self, instance: Instance) -> None:
        instance.load_error = ""
        instance.started_at = self._loop.time()
        instance.is_hung = instance.is_leaving = instance.is_dismissed = False
        instance.life = next(self._lives)
        received, died = partial(self._receive, instance), partial(self._died, instance)
        instance.child = ChildProcess(self._loop, self._start_life, received, died)
        # A worker knows its own device only.
        config = self._config.of_worker(instance.device, instance.num_slots)
        environment = asked_for(os.environ, config.env)
        load = frames.LoadModel(frames.VERSION, config, self.proof, environment)
        self._send_load(instance, frames.encode(load))

    def _send_load(self, instance: Instance, data: bytes) -> None:
        """Send the Load frame; in shared memory if it is large, as a configuration may be."""
        if len(data) <= frames.MAX_LOAD_BYTES:
            instance.send(data)
            return
        segment = Segment(len(data))
        try:
            segment.view[: len(data)] = data
            instance.send(frames.encode(frames.Enclosed(len(data))), (segment.fd,))
        finally:
            segment.close()

    def _receive(self, instance: Instance, data: memoryview) -> None:
        self.handle(instance, frames.decode_from_worker(data))

    def handle(self, instance: Instance, frame: frames.FromWorker) -> None:
        """Handle a frame of a worker."""
        match frame:
            case frames.WorkerReady():
                instance.ready = frame
                instance.is_ready = True
                instance.ready_at = self._loop.time()
                took = instance.device, frame.load_s, instance.pid
                self._log(logging.INFO, instance, " ready on %s in %.2f s (pid %d)", *took)
                if not instance.is_spare:
                    self._listener.instance_ready(instance)
                self._prepare_spares()
            case frames.StartFailed():
                instance.load_error = "; ".join(frame.problems)
                # Later, other instances serve, or requests wait: it is tried again.
                if self.proof is None and not instance.is_spare:
                    self._listener.load_failed(frame.problems)
            case frames.Leaving():
                instance.is_leaving = True
                then = "replaced" if instance.is_wanted else "stopped"
                level = logging.WARNING if instance.is_wanted else logging.INFO
                text = " is %s when it has answered: %s"
                self._log(level, instance, text, then, frame.reason)
                self._listener.instance_leaving(instance)
            case frames.Sketched():
                self._listener.sketched(frame)
            case frames.Measured():
                self._listener.measured(instance.index, frame.changes)

    def let_go(self, instance: Instance) -> None:
        """Stop a leaving worker, which has no batches."""
        if instance.is_leaving and instance.child is not None:
            instance.send(frames.encode(frames.Stop()))
            self._later(LEAVE_S, self._end, instance, instance.child)

    def _end(self, instance: Instance, child: ChildProcess) -> None:
        """Kill a worker that has not stopped in time."""
        if instance.child is child:
            child.life.kill()

    def _died(self, instance: Instance, reason: str) -> None:
        assert instance.child is not None
        instance.was_killed_outside = instance.child.life.was_killed_outside
        instance.child = None
        was_ready, instance.is_ready = instance.is_ready, False
        conclude = partial(self._go_on, instance, was_ready, reason)
        self._listener.instance_died(instance, reason, conclude)

    def _go_on(self, instance: Instance, was_ready: bool, reason: str, is_excused: bool) -> None:
        """Restart the instance after a death, or drop a spare."""
        if self._is_stopping:
            return
        if instance.is_spare:
            self.spares.lose(instance, reason)
            return
        if instance.is_dismissed or not instance.is_wanted:
            instance.crashes.recovered()
            # It may be wanted again.
            self._start(instance)
            return
        well_s = self._loop.time() - instance.ready_at if was_ready else 0.0
        if is_excused:
            self.spares.note_kill()
        # A worker that asks to be replaced soon after its start counts as crashed.
        elif instance.is_leaving and well_s >= HEALTHY_S:
            instance.crashes.recovered()
        else:
            instance.crashes.died(well_s, instance.start_s if was_ready else math.inf)
        self._restart(instance, reason, is_excused)

    def _restart(self, instance: Instance, reason: str, is_excused: bool) -> None:
        if self.proof is None and instance.crashes.num_deaths >= MAX_LOAD_DEATHS:
            text = f"the worker {reason} while loading, {MAX_LOAD_DEATHS} times; see the log"
            if (limit := self._config.memory_bytes) is not None:
                text += f"; parameters.penstock.memory_bytes limits it to {limit} bytes"
            self._listener.load_failed((instance.load_error or text,))
            return
        self._listener.restarting(instance.load_error or f"its worker {reason}")
        delay_s = 0.0 if is_excused else instance.crashes.delay_s
        instance.num_restarts += 1
        spare = self.spares.pick() if delay_s == 0 else None
        why = f"cannot load the model: {instance.load_error}" if instance.load_error else reason
        then = "a spare takes over" if spare is not None else f"restart in {delay_s:.1f} s"
        self._log(logging.WARNING, instance, ": worker %s; %s", why, then, reason=reason)
        if spare is not None:
            self._adopt(instance, spare)
        elif delay_s == 0:
            self._start(instance)
        else:
            self._later(delay_s, self._start, instance)

    def _adopt(self, dead: Instance, spare: Instance) -> None:
        """Replace a dead worker by a spare, and start the next spare."""
        self.spares.promote(spare)
        spare.index = dead.index
        spare.crashes, spare.num_restarts = dead.crashes, dead.num_restarts
        spare.ready = spare.ready or dead.ready
        self.instances[dead.index] = spare
        if spare.is_ready:
            self._listener.instance_ready(spare)
        self._prepare_spares()

    def _prepare_spares(self) -> None:
        """Start the next wanted spare."""
        spare = None if self._is_stopping else self.spares.add()
        if spare is not None:
            self._start(spare)

    def _dismiss_spares(self) -> None:
        """Stop spares, once no request has killed a worker for a while."""
        for spare in self.spares.workers:
            if spare.is_ready and not spare.is_leaving:
                spare.is_leaving = True
                self.let_go(spare)

    def _tick(self) -> None:
        """Kill slow-loading workers, and adjust the number of spares."""
        self._listener.tick()
        for instance in self._all:
            self._end_if_too_slow(instance)
        if self.spares.num_wanted:
            self._prepare_spares()
        else:
            self._dismiss_spares()
        self._later(TICK_S, self._tick)

    def _end_if_too_slow(self, instance: Instance) -> None:
        """Kill a restarted worker that exceeds `load_timeout_s`; the catalog limits first loads."""
        limit_s = self._config.load_timeout_s
        is_late = self._loop.time() - instance.started_at > limit_s
        if instance.child is None or instance.is_ready or not is_late or instance.load_error:
            return
        instance.load_error = load_timeout_text(limit_s)
        self._log(logging.ERROR, instance, ": %s", instance.load_error)
        instance.child.life.kill()

    def _log(
        self, level: int, instance: Instance, text: str, *values: object, **more: object
    ) -> None:
        """Log a line about an instance; `more` are additional labels."""
        labels = {"instance": instance.index, "device": instance.device}
        more = {**labels, "worker_pid": instance.pid, **more}
        text = f" instance {instance.index}{text}"
        log_about(log, level, self._config, text, *values, **more)

    def _later(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        number = next(self._timer_ids)  # Not the timer itself: it refers to `run`, a cycle.

        def run() -> None:
            del self._timers[number]
            call(*args)

        self._timers[number] = self._loop.call_later(delay_s, run)
