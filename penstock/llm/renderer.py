"""A renderer process as its owner sees it: sends texts and messages there, and gets tokens back.

Code and patterns of a model folder that run on a client's text (tokenizer, chat template) run in
that process under limits of time, output and memory, never in the core or a shard. A job that
exceeds its time limit fails and its process is killed; the other jobs run again in a new process.
This side runs on its owner's event loop: the core's, or that of each shard, which has one of its
own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

import msgspec

from penstock.errors import (
    BackendFailed,
    Cancelled,
    InvalidRequest,
    NotReady,
    Overloaded,
    PenstockError,
    TooLarge,
)
from penstock.llm import messages
from penstock.llm.token_bytes import Vocabulary
from penstock.processes.child import ChildProcess, StartLife
from penstock.processes.life import ProcessLife
from penstock.processes.parts import Joiner, split
from penstock.processes.restarted import RestartedProcess
from penstock.processes.restarts import backoff_s
from penstock.sampling_params import Constraint
from penstock.wire.frames import StartFailed, Stop

log = logging.getLogger("penstock.llm")
RendererLife: StartLife = partial(ProcessLife, module="penstock.llm.renderer_main")
Lane = Literal["chat", "short", "long", "grammar"]
# Concurrent jobs. Short texts, chats and grammars each have a slot that long texts cannot take.
SLOTS: Mapping[Lane, int] = {"chat": 1, "short": 1, "long": 2, "grammar": 1}
# A job that runs this long gives its slot up to the next one, so that one slow chat template or
# tokenizer does not block its model's other clients. At most MAX_SLOW run without a slot.
SLOW_S, MAX_SLOW = 0.25, 2
# Characters of the longest job that counts as short: about a millisecond.
MAX_SHORT = 2000
STOP_S = 2.0
# Grammars whose check is remembered.
MAX_CHECKED = 128
ERRORS = {"invalid": InvalidRequest, "too_large": TooLarge, "failed": BackendFailed}


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits on code and patterns of a model folder."""

    # To load the tokenizer: one of 256,000 tokens takes 2 s.
    load_s: float = 120.0
    # For a job, and for each of its characters: tokenizers take about 1 µs.
    job_s: float = 5.0
    char_s: float = 2e-5
    # Data beyond that of the loaded tokenizer: a text of 8 MiB takes about 1 GiB.
    memory_bytes: int = 2 << 30
    # Limits of unfinished jobs, and of their characters, about those of one request body; further
    # jobs are refused.
    max_waiting: int = 1024
    max_waiting_chars: int = 1 << 26

    def share(self, num_shards: int) -> TextLimits:
        """Return the limits of one shard's renderer, so that all together keep these."""
        return replace(
            self,
            max_waiting=-(-self.max_waiting // num_shards),
            max_waiting_chars=-(-self.max_waiting_chars // num_shards),
        )


class Asker(Protocol):
    """Receiver of a job's outcome; called on the event loop."""

    def is_gone(self) -> bool: ...
    def encoded(self, tokens: list[list[int]]) -> None: ...
    def failed(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class RenderJob:
    message: messages.EncodeJob
    asker: Asker
    size: int
    limit_s: float
    lane: Lane
    # Processes that died while it ran.
    num_deaths: int = 0
    # Runs without a slot of its lane.
    is_slow: bool = False
    # The time limit, and when it becomes slow.
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def stop_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()

    @property
    def what(self) -> str:
        match self.message:
            case messages.CheckGrammar():
                return "grammar"
            case messages.EncodeChat():
                return "model's chat template and tokenizer"
        return "model's tokenizer"

    def blame(self, text: str) -> PenstockError:
        """Return the error of a job that broke a limit: a grammar is the client's."""
        is_grammar = isinstance(self.message, messages.CheckGrammar)
        return (InvalidRequest if is_grammar else BackendFailed)(f"the {self.what} {text}")


class Renderer:
    """Invariant: a job is in `_sent`, in `_suspects` or in its lane's queue until its asker has the
    outcome. Jobs that were running when a process crashed are suspects and run one at a time."""

    def __init__(
        self,
        name: str,
        source: messages.TextSource,
        limits: TextLimits | None = None,
        start_life: StartLife = RendererLife,
    ) -> None:
        self.name = name
        self._source = source
        self._limits = limits or TextLimits()
        (stop,) = split(messages.encode(Stop()))
        self.process = RestartedProcess[Vocabulary](
            "renderer process", self, start_life, self._receive, stop, self._limits.load_s
        )
        self._numbers = itertools.count()
        self._queues: dict[Lane, deque[RenderJob]] = {lane: deque() for lane in SLOTS}
        self._suspects: deque[RenderJob] = deque()
        self._sent: dict[int, RenderJob] = {}
        self._joiner = Joiner()
        # The job whose time limit the process is being killed for.
        self._overdue: RenderJob | None = None
        # Grammars that were checked, the last used one last, with what was wrong.
        self._checked: dict[Constraint, InvalidRequest | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self) -> None:
        """Wait until every job has an answer."""
        await self._idle.wait()

    async def close(self) -> None:
        self.process.stop()
        self._fail_all(NotReady(f"model '{self.name}' is unloaded"))
        await self.process.wait(STOP_S)

    # Jobs.

    def encode(self, texts: Sequence[str], is_whole: bool, asker: Asker) -> None:
        """Encode texts; raise Overloaded if too many jobs wait. The asker gets the outcome."""
        message = messages.EncodeTexts(next(self._numbers), list(texts), is_whole)
        self._submit(message, sum(map(len, texts)), "short", asker)

    def encode_chat(self, asked: object, options: object, max_chars: int, asker: Asker) -> None:
        """Like `encode`, for messages. The template may produce at most `max_chars` characters."""
        told, settings = msgspec.json.encode(asked), msgspec.json.encode(options)
        message = messages.EncodeChat(next(self._numbers), told, settings, max_chars)
        self._submit(message, len(told) + len(settings), "chat", asker)

    def check(self, constraint: Constraint, asker: Asker) -> None:
        """Compile a grammar. The asker gets no tokens if it is valid, or InvalidRequest; at once
        for one that was checked before."""
        if constraint in self._checked:
            error = self._checked[constraint] = self._checked.pop(constraint)
            if error is not None:
                raise InvalidRequest(str(error))
            asker.encoded([])
            return
        message = messages.CheckGrammar(next(self._numbers), constraint)
        self._submit(message, len(constraint.text), "grammar", asker)

    def _submit(self, message: messages.EncodeJob, size: int, lane: Lane, asker: Asker) -> None:
        if self.process.is_stopping:
            raise NotReady(f"model '{self.name}' is unloaded")
        jobs = list(self._jobs())
        if len(jobs) >= self._limits.max_waiting:
            raise Overloaded(f"{len(jobs)} texts wait to be encoded")
        most = self._limits.max_waiting_chars
        if jobs and sum(each.size for each in jobs) + size > most:
            raise Overloaded(f"texts of {most} characters wait to be encoded")
        lane = "long" if size > MAX_SHORT else lane
        limit_s = self._limits.job_s + self._limits.char_s * size
        self._queues[lane].append(RenderJob(message, asker, size, limit_s, lane))
        self._idle.clear()
        self._pump()

    def _jobs(self) -> Iterator[RenderJob]:
        yield from self._sent.values()
        yield from self._suspects
        for queue in self._queues.values():
            yield from queue

    def _pump(self) -> None:
        if not self.process.is_ready or any(job.num_deaths for job in self._sent.values()):
            return
        # One at a time, and before all others.
        while self._suspects and not self._sent:
            if self._run(self._suspects.popleft()):
                return
        if self._suspects:
            return
        for lane, queue in self._queues.items():
            num_running = sum(job.lane == lane and not job.is_slow for job in self._sent.values())
            while queue and num_running < SLOTS[lane]:
                num_running += self._run(queue.popleft())

    def _run(self, job: RenderJob) -> bool:
        """Send it, unless its client has disconnected; return whether it was sent."""
        loop = self.process.loop
        if job.asker.is_gone():
            loop.call_soon(self._tell, job, Cancelled("the client left"))
            return False
        self._sent[job.message.job] = job
        job.is_slow = False
        job.timers = [
            loop.call_later(job.limit_s, self._end_overdue, job),
            loop.call_later(SLOW_S, self._give_up_slot, job),
        ]
        self._send(job.message)
        return True

    def _give_up_slot(self, job: RenderJob) -> None:
        num_slow = sum(each.is_slow for each in self._sent.values())
        if job.message.job in self._sent and num_slow < MAX_SLOW:
            job.is_slow = True
            self._pump()

    def _end_overdue(self, job: RenderJob) -> None:
        if self.process.child is not None:
            self.process.child.read()  # The event loop may be late: the answer may have arrived.
        if job.message.job not in self._sent:
            return
        text = "%s: %s took longer than %.3g s; ending the renderer process"
        log.error(text, self.name, job.what, job.limit_s, extra={"model": self.name})
        self._overdue = job
        self.process.kill()

    def _finish(self, number: int, outcome: list[list[int]] | PenstockError) -> None:
        job = self._sent.pop(number, None)
        if job is not None:
            job.stop_timers()
            self._tell(job, outcome)
            self._pump()

    def _tell(self, job: RenderJob, outcome: list[list[int]] | PenstockError) -> None:
        self._remember(job.message, outcome)
        try:
            if isinstance(outcome, PenstockError):
                job.asker.failed(outcome)
            else:
                job.asker.encoded(outcome)
        except Exception:  # An error of one client must not stop the others.
            log.exception("%s: tokens cannot be handed over", self.name)
        if not any(True for _ in self._jobs()):
            self._idle.set()

    def _remember(
        self, message: messages.EncodeJob, outcome: list[list[int]] | PenstockError
    ) -> None:
        is_known = isinstance(outcome, list | InvalidRequest)
        if isinstance(message, messages.CheckGrammar) and is_known:
            error = outcome if isinstance(outcome, InvalidRequest) else None
            self._checked[message.constraint] = error
            if len(self._checked) > MAX_CHECKED:
                del self._checked[next(iter(self._checked))]

    def _fail_all(self, error: PenstockError) -> None:
        jobs = list(self._jobs())
        self._sent.clear()
        self._suspects.clear()
        for queue in self._queues.values():
            queue.clear()
        for job in jobs:
            job.stop_timers()
            self._tell(job, error)

    # The process.

    def launched(self, child: ChildProcess) -> None:
        self._joiner = Joiner()
        memory_bytes = self._limits.memory_bytes
        self._send(messages.LoadText(messages.VERSION, self._source, memory_bytes))

    def _send(self, message: messages.ToRenderer) -> None:
        if self.process.child is not None:
            for datagram in split(messages.encode(message)):
                self.process.child.send(datagram)

    def _receive(self, datagram: memoryview) -> None:
        data = self._joiner.add(bytes(datagram))
        if data is None:
            return
        match messages.decode_from_renderer(data):
            case messages.Encoded(job, tokens):
                self._finish(job, [messages.pack_tokens(each).tolist() for each in tokens])
            case messages.NotEncoded(job, kind, reason):
                self._finish(job, ERRORS[kind](reason))
            case StartFailed(problems):
                self.process.problems = problems
                self.process.kill()
            case messages.TextReady() as message:
                self.process.become_ready(message.vocabulary)
                self._pump()

    def ended(self, reason: str, was_ready: bool) -> float:
        if was_ready:
            self._judge(reason)
        elif self.process.was_loaded:
            problem = "; ".join(self.process.problems)
            problem = problem or f"the renderer process {reason} while loading"
            self._fail_all(NotReady(f"model '{self.name}' cannot encode texts: {problem}"))
        return backoff_s(self.process.num_deaths)

    def _judge(self, reason: str) -> None:
        """Fail the job that killed the process and run the others again; if several jobs may be to
        blame, run them one at a time."""
        overdue, self._overdue = self._overdue, None
        jobs = list(self._sent.values())
        for job in jobs:
            job.stop_timers()
        self._sent.clear()
        if overdue is not None and overdue in jobs:
            jobs.remove(overdue)
            for job in reversed(jobs):
                self._queues[job.lane].appendleft(job)
            limit_s = overdue.limit_s
            self._tell(overdue, overdue.blame(f"took longer than {limit_s:.3g} s and was stopped"))
        elif len(jobs) == 1:
            self._tell(jobs[0], jobs[0].blame(f"ended its process, which {reason}"))
        else:
            for job in jobs:
                job.num_deaths += 1
            self._suspects.extend(jobs)
