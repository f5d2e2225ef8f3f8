"""Evaluate candidates of a language model: look in the journal first, then run processes, with the
benchmark as a streaming client of the OpenAI API. Results are on disk before they are used."""

from __future__ import annotations

import itertools
import math
import random
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil

from penstock.benchmark import pacer
from penstock.benchmark.pacer import Load, Open
from penstock.benchmark.targets import TargetSpec
from penstock.config import CPU
from penstock.data import InputSpec
from penstock.errors import BackendFailed, PenstockError
from penstock.llm.settings import settings_of
from penstock.optimizer import time_plan
from penstock.optimizer.accuracy import ALPHA, Judgement, judge
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.endpoints import ServedEndpoint, Servers, patience_s
from penstock.optimizer.journal import Journal
from penstock.optimizer.llm import likelihoods, text_trials
from penstock.optimizer.llm.text_prompts import Prompts, write_load
from penstock.optimizer.llm.text_subject import TextSubject, build_of
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import ServedMeasurement
from penstock.optimizer.served import LOWEST_RATE, ServedBench
from penstock.optimizer.served_figures import repriced
from penstock.optimizer.time_plan import MIN_SEARCH_S, MeasurementLimits, TextTime, TookTooLong
from penstock.slo import Latency, Slo

CHOICE, HELD_OUT = "choice", "held out"
# Prompts judged per part, and the tokens of a long prompt that are judged, at its start and at its
# end. More would take longer than measuring the candidates.
MAX_JUDGED, FIRST, LAST = 24, 64, 128
# Generated tokens of the original that are judged together with their prompt.
NUM_NEW = 16
REFERENCE = "reference.npz"
# Memory per engine: bytes per parameter (FP32), and overhead.
BYTES, BESIDE = 4, 3 << 30
# Rounds of the proof, and the share of the remaining time for its searches: the last level of each
# overruns its time.
NUM_ROUNDS, IN_TIME = 2, 0.7

# All answers have the requested length, so all candidates do the same work.
EXTRA = '{"ignore_eos": true}'
# Requests that a level should have, and the longest time to wait for them.
MIN_REQUESTS, MAX_LEVEL_S = 6, 60.0


class TextEndpoint(ServedEndpoint):
    """Endpoint of the OpenAI API. Each level sends new prompts to the server, written to `file`."""

    probe_s = 20.0
    # Answers take seconds, so a level has few of them: rates cannot be known more precisely.
    precision = 0.15
    is_streaming = True

    def __init__(self, build: Build, prompts: Prompts, file: Path, patience_s: float) -> None:
        super().__init__(build, str(file))
        self._prompts = prompts
        self._patience_s = patience_s
        # Every server gets the same prompts, level by level.
        self._levels = itertools.count()

    def target(self, plan: Plan) -> TargetSpec:
        origin = self.address.partition("/v2/")[0]
        return TargetSpec(
            f"openai+{origin}/v1",
            model=self.build.config.name,
            api="chat" if self._prompts.is_chat else "completions",
            timeout_s=self._patience_s,
            extra=EXTRA,
        )

    def inputs(self, plan: Plan) -> InputSpec:
        # The same prompts again would hit the prefix cache.
        level = next(self._levels)
        write_load(self._prompts, Path(self.data), level)
        return InputSpec(path=self.data, seed=plan.seed + level)

    def level_s(self, plan: Plan, load: Load) -> float:
        """Extend the level if too few requests would arrive in the configured time."""
        if not isinstance(load, Open):
            return plan.duration_s
        enough_s = MIN_REQUESTS / max(LOWEST_RATE, pacer.mean_rate(load))
        return max(plan.duration_s, min(MAX_LEVEL_S, enough_s))

    @property
    def num_clients(self) -> int:
        return settings_of(self.build.config).max_sequences


class Scores(msgspec.Struct):
    """One score per text, by metric; texts of the choice part come first."""

    by_metric: dict[str, list[float]]
    num_choice: int


class TextEvaluator:
    """Evaluates the candidates of one run. `tell` receives what is being done."""

    def __init__(
        self,
        plan: Plan,
        subject: TextSubject,
        prompts: Prompts,
        journal: Journal,
        time: TextTime,
        tell: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.subject = subject
        self.prompts = prompts
        self.journal = journal
        self.budget = plan.accuracy or likelihoods.DEFAULT
        self._time = time
        self._tell = tell
        self._work = journal.path.parent
        file = self._work / "prompts.jsonl"
        patience_s = patience_of(plan.slo, prompts.longest_answer)
        needed = 2 * (BYTES * subject.num_parameters + BESIDE)
        # Memory for one server at a time only.
        is_alone = subject.build.config.device != CPU or needed > psutil.virtual_memory().available
        self._servers = Servers(
            lambda build: TextEndpoint(build, prompts, file, patience_s), is_alone=bool(is_alone)
        )

    def close(self) -> None:
        self._servers.close()

    def build(self, candidate: Candidate) -> Build:
        original = self.subject.build
        if not candidate.steps:
            return original
        folder = self._work / "builds" / candidate.key / original.folder.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        return build_of(original, candidate, folder)

    # Speed.

    def rated(self, candidate: Candidate, start: float | None) -> ServedMeasurement:
        search_s = self._time.search_s

        def measured(bench: ServedBench) -> tuple[list[ServedMeasurement], bool]:
            found, has_ended = bench.rate_from(self.build(candidate), start)
            return [found], has_ended or search_s >= time_plan.TEXT_SEARCH_S

        key = candidate.key if start is None else f"{candidate.key} from {start:.4g}"
        (found,) = self._served("text rates", key, measured, MeasurementLimits(search_s=search_s))
        return found

    def prove(
        self, builds: Sequence[Build], starts: Sequence[float | None]
    ) -> list[ServedMeasurement]:
        longest_s = time_plan.TEXT_SEARCH_S

        def left_s() -> float:
            """Return the time left, less what the last level of each search overruns."""
            return math.inf if self._time.left_s is None else IN_TIME * self._time.left_s

        def measured(bench: ServedBench) -> tuple[list[ServedMeasurement], bool]:
            found = bench.prove(builds, starts)
            has_rates = all(each.max_rate is not None for each in found)
            return found, has_rates or longest_s < MIN_SEARCH_S

        key = " ".join(each.candidate.key for each in builds)
        limits = MeasurementLimits(NUM_ROUNDS, longest_s, left_s)
        return self._served("text proof", key, measured, limits)

    def _served(
        self,
        kind: str,
        key: str,
        measured: Callable[[ServedBench], tuple[list[ServedMeasurement], bool]],
        limits: MeasurementLimits,
    ) -> list[ServedMeasurement]:
        """Return the results at today's price. `measured` also returns whether more time would not
        change them. Failures are not kept: a busy machine may be free the next time."""
        bench = ServedBench(self.plan, (), self._tell, self._servers, limits)

        def alone() -> tuple[list[ServedMeasurement], bool]:
            try:
                return measured(bench)
            finally:
                # The next measurement must start with no other server running.
                self._servers.close()

        found, _ = self.journal.remember(
            kind,
            key,
            tuple[list[ServedMeasurement], bool],
            alone,
            passing=(PenstockError,),
            # A run with more time finds more.
            is_reusable=lambda found: found[1],
        )
        return [repriced(each, self.plan) for each in found]

    # Accuracy.

    def judge(self, candidate: Candidate, part: str = CHOICE, alpha: float = ALPHA) -> Judgement:
        """Test a candidate against the accuracy budget on one part of the prompts."""
        found = self._scores(candidate)
        before = self._scores(Candidate()).by_metric[self.budget.metric]
        after = found.by_metric[self.budget.metric]
        place = slice(found.num_choice) if part == CHOICE else slice(found.num_choice, None)
        scores = np.array(before[place]), np.array(after[place])
        # Scores are means over the tokens of a text, not binary, even if all are 1.
        judged = judge(*scores, self.budget, alpha=alpha, part=part, is_binary=False)
        if judged.num_needed is not None and judged.num_needed > MAX_JUDGED:
            # Do not ask for more prompts than would be used.
            judged.num_needed = None
            judged.text += f", and {MAX_JUDGED} are judged at most"
        means = {
            name: float(np.mean(values[place]))
            for name, values in found.by_metric.items()
            if name != self.budget.metric and values[place]
        }
        others = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
        judged.text += f" ({others})" if others else ""
        return judged

    def _scores(self, candidate: Candidate) -> Scores:
        def found() -> Scores:
            reference = self._reference()
            told = reference.told
            if candidate.steps:
                build, timeout_s = self.build(candidate), self._time.judge_s
                told = text_trials.likelihoods(
                    build, reference.texts, 0, self._tell, timeout_s=timeout_s
                ).told
            rows = [likelihoods.scores(*pair) for pair in zip(reference.told, told, strict=True)]
            by_metric = {name: [row[name] for row in rows] for name in likelihoods.METRICS}
            return Scores(by_metric, len(self._judged()[0]))

        return self.journal.remember("scores", candidate.key, Scores, found, passing=(TookTooLong,))

    def _reference(self) -> text_trials.Texts:
        """Return prompts with the original's completions and its logprobs; cached in a file."""
        path = self._work / REFERENCE
        if path.is_file():
            with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
                return text_trials.read(path)
        texts = [tokens for part in self._judged() for tokens in part]
        draft = path.with_suffix(".draft")
        text_trials.likelihoods(
            self.subject.build, texts, NUM_NEW, self._tell, keep=draft, timeout_s=self._time.judge_s
        )
        draft.rename(path)
        return text_trials.read(path)

    def _judged(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the prompts to choose by, and the held-out ones."""
        distinct = sorted({shortened(each.tokens) for each in self.prompts.asked})
        random.Random(self.plan.seed).shuffle(distinct)
        texts = [list(each) for each in distinct[: 2 * MAX_JUDGED]]
        if len(texts) < 2:
            raise BackendFailed("two different prompts at least are needed to judge by")
        half = len(texts) // 2
        return texts[:half], texts[half:]


def shortened(tokens: Sequence[int]) -> tuple[int, ...]:
    """Cut the middle out of a long prompt, not its form at the start nor the end to answer."""
    if len(tokens) <= FIRST + LAST:
        return tuple(tokens)
    return (*tokens[:FIRST], *tokens[-LAST:])


def patience_of(slo: Slo, num_tokens: int) -> float:
    """Return the request timeout, from the SLO's limits for a whole answer or for its parts."""
    limits = {"latency": math.inf, "ttft": math.inf, "tpot": math.inf}
    for term in slo.terms:
        if isinstance(term, Latency) and term.metric in limits:
            limits[term.metric] = min(limits[term.metric], term.limit_s)
    whole_s = min(limits["latency"], limits["ttft"] + num_tokens * limits["tpot"])
    return patience_s(None if math.isinf(whole_s) else whole_s)
