"""Engine process: `python -m penstock.llm.engine_main FD PARENT`.

Loads a model on request, then handles messages between steps and answers each step with one
message. While idle it sleeps until a message arrives. It dies with the core.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator

from penstock.errors import ConfigError, Overloaded, PenstockError, describe_error
from penstock.llm import messages, wait_policy
from penstock.llm.engine import Engine
from penstock.llm.engine_loading import start_engine
from penstock.llm.messages import TokenEvent
from penstock.processes.start import begin_life
from penstock.wire.frames import MAX_FRAME_BYTES, StartFailed, Stop

log = logging.getLogger("penstock.engine")
MAX_ERROR_CHARS = 500
# Prompt tokens whose logprobs go into one message.
MAX_PROMPT_LOGPROBS = 1024
# Failed steps in a row before the process exits: the GPU may be lost to this process only.
MAX_FAILURES = 3


class EngineProcess:
    """Engine behind one socket, with one thread."""

    def __init__(
        self, sock: socket.socket, set_policy: Callable[[int], str] = lambda num_threads: ""
    ) -> None:
        self._sock = sock
        self._set_policy = set_policy
        self._buffer = bytearray(MAX_FRAME_BYTES)
        self._engine: Engine | None = None
        self._num_failures = 0
        # Computed tokens at the last report to the core.
        self._num_reported = 0

    def serve(self) -> None:
        """Serve until the core closes the socket or sends Stop."""
        while self._take_messages():
            if self._engine is not None:
                self._step(self._engine)

    def _take_messages(self) -> bool:
        """Handle all pending messages, or wait for one if idle; return False to exit."""
        is_idle = self._engine is None or self._engine.is_idle
        while is_idle or select.select([self._sock], [], [], 0)[0]:
            size = self._sock.recv_into(self._buffer)
            if size == 0:
                return False
            message = messages.decode_to_engine(memoryview(self._buffer)[:size])
            if not self._take(message):
                return False
            is_idle = False
        return True

    def _take(self, message: messages.ToEngine) -> bool:
        if isinstance(message, messages.LoadEngine):
            return self._load(message)
        if isinstance(message, Stop):
            return False
        assert self._engine is not None, "it is loaded first"
        if isinstance(message, messages.GenerateRequest):
            self._add(self._engine, message)
        elif isinstance(message, messages.GiveUp):
            for request in message.requests:
                self._engine.give_up(request)
        else:
            self._engine.end(message.request, message.index)
        return True

    def _load(self, message: messages.LoadEngine) -> bool:
        try:
            self._engine, ready = start_engine(message, self._set_policy)
        except ConfigError as error:
            self._send(StartFailed(error.problems))
            return False
        except Exception as error:  # Any error of a library is the answer to LoadEngine.
            log.exception("the model cannot be loaded")
            self._send(StartFailed((describe_error(error)[:MAX_ERROR_CHARS],)))
            return False
        self._send(ready)
        return True

    def _add(self, engine: Engine, message: messages.GenerateRequest) -> None:
        try:
            engine.add(message)
        except PenstockError as error:
            self._send(_refusal(message.id, error))
        except Exception as error:  # Engine loop: one bad request must not affect others.
            log.exception("a request cannot be added")
            engine.give_up(message.id, "error")
            self._send(
                messages.RequestRefused(message.id, describe_error(error)[:MAX_ERROR_CHARS], False)
            )

    def _step(self, engine: Engine) -> None:
        began = time.perf_counter()
        try:
            events = engine.step()
        except Exception as error:  # Engine loop: a failed step ends the requests in flight.
            log.exception("a step failed")
            reason = describe_error(error)[:MAX_ERROR_CHARS]
            self._send(messages.StepFailed(tuple(engine.fail()), reason))
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                raise SystemExit(f"{self._num_failures} steps in a row failed: {reason}") from None
            return
        self._num_failures = 0
        for chunk in _take_prompt_logprobs(engine):
            self._send(chunk)
        if events or engine.scheduler.num_computed > self._num_reported:
            self._num_reported = engine.scheduler.num_computed
            self._send(_report(engine, events, time.perf_counter() - began))

    def _send(self, message: messages.FromEngine) -> None:
        self._sock.send(messages.encode(message))


def _take_prompt_logprobs(engine: Engine) -> Iterator[messages.PromptLogprobsChunk]:
    """Take the new prompt logprobs, in messages of limited size."""
    chunks, engine.prompt_logprobs = engine.prompt_logprobs, []
    for each in chunks:
        for start in range(0, len(each.logprobs), MAX_PROMPT_LOGPROBS):
            part = each.logprobs[start : start + MAX_PROMPT_LOGPROBS]
            yield messages.PromptLogprobsChunk(each.request, each.start + start, part)


def _report(engine: Engine, events: list[TokenEvent], step_s: float) -> messages.StepReport:
    scheduler = engine.scheduler
    return messages.StepReport(
        events,
        len(scheduler.running),
        len(scheduler.waiting),
        scheduler.pool.num_free,
        scheduler.num_preemptions,
        step_s,
        num_computed=scheduler.num_computed,
        num_asked=scheduler.pool.num_asked,
        num_cached=scheduler.pool.num_found,
        waits_s=scheduler.take_waits(),
    )


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
