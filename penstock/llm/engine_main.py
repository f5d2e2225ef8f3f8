"""Engine process: `python -m penstock.llm.engine_main FD PARENT`.

Loads a model on request of the core. Then it handles messages of shards between steps, and answers
each step with one message to each shard that has requests open. While idle it sleeps until a
message arrives. When a shard is gone, its requests are aborted. It dies with the core.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.errors import (
    ConfigError,
    InvalidRequest,
    Overloaded,
    PenstockError,
    describe_error,
)
from penstock.llm import messages, wait_policy
from penstock.llm.engine import Engine
from penstock.llm.engine_links import EngineLink, EngineLinks
from penstock.llm.engine_loading import start_engine
from penstock.llm.messages import TokenEvent
from penstock.processes.start import begin_life
from penstock.wire.frames import Attach, StartFailed, Stop

log = logging.getLogger("penstock.engine")
MAX_ERROR_CHARS = 500
# Prompt tokens whose logprobs go into one message.
MAX_PROMPT_LOGPROBS = 1024
# Failed steps in a row before the process exits: the GPU may be lost to this process only.
MAX_FAILURES = 3
UNREAD = "its shard does not read; what was generated is lost"


class EngineProcess:
    """Engine behind one socket to the core and one to each shard, with one thread."""

    def __init__(
        self, sock: socket.socket, set_policy: Callable[[int], str] = lambda num_threads: ""
    ) -> None:
        self._links = EngineLinks(sock)
        self._set_policy = set_policy
        self._engine: Engine | None = None
        self._num_failures = 0
        # Totals of the engine that were reported.
        self._reported = EngineTotals()
        # Seconds of steps that no report has told yet.
        self._busy_s = 0.0

    def serve(self) -> None:
        """Serve until the core closes the socket or sends Stop."""
        try:
            while self._take_messages():
                if self._engine is not None:
                    self._step(self._engine)
                    self._tell_failures(self._engine)
        finally:
            self._links.close()

    def _take_messages(self) -> bool:
        """Handle all pending messages, or wait for one if idle; return False to exit."""
        is_idle = self._engine is None or self._engine.is_idle
        while True:
            is_core, links = self._links.wait(is_idle)
            if is_core and not self._hear_core():
                return False
            for link in links:
                self._hear_shard(link)
            if not is_core and not links:
                return True
            is_idle = False

    def _hear_core(self) -> bool:
        received = self._links.core.receive()
        if received is None:
            return False
        data, fds = received
        message = messages.decode_to_engine(data)
        if isinstance(message, messages.LoadEngine):
            return self._load(message)
        if isinstance(message, Attach):
            self._links.attach(fds[0])
        return not isinstance(message, Stop)

    def _hear_shard(self, link: EngineLink) -> None:
        engine, received = self._engine, link.channel.receive()
        assert engine is not None, "shards are attached after LoadEngine"
        if received is None:
            self._links.detach(link)
            for number in link.requests:
                engine.give_up(number)
            return
        match messages.decode_shard_to_engine(received[0]):
            case messages.GenerateRequest() as message:
                self._add(engine, message, link)
            case messages.GiveUp(requests):
                for number in requests:
                    engine.give_up(number)
                    self._links.close_request(number)
            case messages.EndText(number, index):
                engine.end(number, index)
                self._check_open(engine, number)

    def _load(self, message: messages.LoadEngine) -> bool:
        try:
            self._engine, ready = start_engine(message, self._set_policy)
        except ConfigError as error:
            self._tell_core(StartFailed(error.problems))
            return False
        except Exception as error:  # Any error of a library is the answer to LoadEngine.
            log.exception("the model cannot be loaded")
            self._tell_core(StartFailed((describe_error(error)[:MAX_ERROR_CHARS],)))
            return False
        self._tell_core(ready)
        return True

    def _add(self, engine: Engine, message: messages.GenerateRequest, link: EngineLink) -> None:
        try:
            engine.add(message)
        except PenstockError as error:
            self._send(link, _refusal(message.id, error))
        except Exception as error:  # Engine loop: one bad request must not affect others.
            log.exception("a request cannot be added")
            engine.give_up(message.id, "error")
            reason = describe_error(error)[:MAX_ERROR_CHARS]
            self._send(link, messages.RequestRefused(message.id, reason, False))
        else:
            self._links.open_request(message.id, link)

    def _step(self, engine: Engine) -> None:
        began = time.perf_counter()
        try:
            events = engine.step()
        except Exception as error:  # Engine loop: a failed step ends the requests in flight.
            log.exception("a step failed")
            reason = describe_error(error)[:MAX_ERROR_CHARS]
            self._fail(engine.fail(), reason)
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                raise SystemExit(f"{self._num_failures} steps in a row failed: {reason}") from None
            return
        self._num_failures = 0
        step_s = time.perf_counter() - began
        self._busy_s += step_s
        for chunk in _take_prompt_logprobs(engine):
            if (owner := self._links.owner(chunk.request)) is not None:
                self._send(owner, chunk)
        if events or engine.scheduler.num_computed > self._reported.num_computed:
            self._report(engine, events, step_s)

    def _report(self, engine: Engine, events: list[TokenEvent], step_s: float) -> None:
        """Send each shard the events of its requests, and one of them what the engine counted."""
        scheduler = engine.scheduler
        gauges = len(scheduler.running), len(scheduler.waiting), scheduler.pool.num_free
        is_counted = False
        for link, own in self._links.events_by_link(events).items():
            report = messages.StepReport(own, *gauges, step_s)
            if not is_counted:
                is_counted = True
                self._reported = self._reported.count(report, engine)
                report.busy_s, self._busy_s = self._busy_s, 0.0
            self._send(link, report)
        for event in events:
            if event.reason:
                self._check_open(engine, event.request)

    def _tell_failures(self, engine: Engine) -> None:
        """Answer the requests whose grammar failed."""
        failures, engine.failures = engine.failures, {}
        for request, error in failures.items():
            is_invalid = isinstance(error, InvalidRequest)
            self._fail([request], str(error)[:MAX_ERROR_CHARS], is_invalid=is_invalid)

    def _check_open(self, engine: Engine, request: int) -> None:
        if not engine.has(request):
            self._links.close_request(request)

    def _fail(self, requests: Iterable[int], reason: str, *, is_invalid: bool = False) -> None:
        for link, own in self._links.requests_by_link(requests).items():
            for request in own:
                self._links.close_request(request)
            self._send(link, messages.StepFailed(tuple(own), reason, is_invalid))

    def _send(self, link: EngineLink, message: messages.EngineToShard) -> None:
        if link.send(message):
            return
        # Its shard has stopped reading: end its requests rather than keep what it may never read.
        log.error("a shard does not read its answers; its %d requests end", len(link.requests))
        link.drop_unsent()
        requests = tuple(link.requests)
        for request in requests:
            if self._engine is not None:
                self._engine.give_up(request)
            self._links.close_request(request)
        link.send(messages.StepFailed(requests, UNREAD))

    def _tell_core(self, message: messages.FromEngine) -> None:
        self._links.core.send(messages.encode(message))


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """What an engine has counted since it was loaded."""

    num_computed: int = 0
    num_asked: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def count(self, report: messages.StepReport, engine: Engine) -> EngineTotals:
        """Let a report tell what is new since these totals; return the totals of now."""
        scheduler = engine.scheduler
        now = EngineTotals(
            scheduler.num_computed,
            scheduler.pool.num_asked,
            scheduler.pool.num_found,
            scheduler.num_preemptions,
            scheduler.num_drafted,
            scheduler.num_accepted,
        )
        report.num_computed = now.num_computed - self.num_computed
        report.num_asked = now.num_asked - self.num_asked
        report.num_cached = now.num_cached - self.num_cached
        report.num_preemptions = now.num_preemptions - self.num_preemptions
        report.num_drafted = now.num_drafted - self.num_drafted
        report.num_accepted = now.num_accepted - self.num_accepted
        report.waits_s = scheduler.take_waits()
        report.expert_tokens = engine.take_expert_load()
        return now


def _take_prompt_logprobs(engine: Engine) -> Iterator[messages.PromptLogprobsChunk]:
    """Take the new prompt logprobs, in messages of limited size."""
    chunks, engine.prompt_logprobs = engine.prompt_logprobs, []
    for each in chunks:
        for start in range(0, len(each.logprobs), MAX_PROMPT_LOGPROBS):
            part = each.logprobs[start : start + MAX_PROMPT_LOGPROBS]
            yield messages.PromptLogprobsChunk(each.request, each.start + start, part)


def _refusal(request: int, error: PenstockError) -> messages.RequestRefused:
    if isinstance(error, Overloaded):
        return messages.RequestRefused(request, str(error), True, error.retry_after_s, error.reason)
    return messages.RequestRefused(request, str(error), False)


def main() -> None:
    sock = begin_life()
    if sock is None:
        return
    EngineProcess(sock, wait_policy.apply).serve()
    sock.close()
    os._exit(0)


if __name__ == "__main__":
    main()
