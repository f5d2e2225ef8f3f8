"""Penstock's engine in this process, with what it computes on the way kept for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.llm.blocks import BlockPool
from penstock.llm.cache import Cache
from penstock.llm.checkpoint import open_checkpoint
from penstock.llm.engine import Engine
from penstock.llm.gguf import GgufFile
from penstock.llm.messages import GenerateRequest, pack_tokens
from penstock.llm.models.decoder import Decoder
from penstock.llm.pace import StepTimeModel, Targets
from penstock.llm.runner import CpuRunner, SampledStep
from penstock.llm.scheduler import BatchStep, Scheduler, StepLimits
from penstock.llm.text import Text
from penstock.llm.text_files import of_gguf
from penstock.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine has, and what it may do in a step."""

    num_blocks: int
    block_size: int
    max_sequences: int
    max_tokens: int
    max_length: int


class KeepingDecoder(Decoder):
    last: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        found = super().logits(hidden)
        self.last = found.clone()
        return found


@dataclass
class Trace:
    """What became of sequences, by their ids."""

    # A row of logits for each token that was sampled.
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    # How many parts a prompt was computed in, when it was computed first.
    num_parts: dict[int, int] = field(default_factory=dict)
    # Steps with parts of prompts and with tokens of others.
    num_mixed_steps: int = 0
    num_steps: int = 0


@dataclass
class TracedRunner:
    """A runner whose logits are kept."""

    runner: CpuRunner
    decoder: KeepingDecoder
    trace: Trace = field(default_factory=Trace)

    def run(self, step: BatchStep) -> SampledStep:
        ran = self.runner.run(step)
        sampled = [chunk.sequence.id for chunk in step.chunks if chunk.is_sampled]
        if sampled:
            assert self.decoder.last is not None
            for sequence, row in zip(sampled, self.decoder.last, strict=True):
                self.trace.logits.setdefault(sequence, []).append(row)
        self._count(step)
        return ran

    def _count(self, step: BatchStep) -> None:
        prompts = [each for each in step.chunks if each.start < each.sequence.num_prompt]
        parts = self.trace.num_parts
        for chunk in prompts:
            if not chunk.sequence.num_generated:
                parts[chunk.sequence.id] = parts.get(chunk.sequence.id, 0) + 1
        self.trace.num_steps += 1
        self.trace.num_mixed_steps += 0 < len(prompts) < len(step.chunks)


@dataclass(frozen=True, slots=True)
class Ours:
    decoder: Decoder
    text: Text

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype = torch.float32,
        kind: Callable[..., Decoder] = KeepingDecoder,
    ) -> Ours:
        checkpoint = open_checkpoint(path)
        try:
            decoder = kind(checkpoint.shape, checkpoint.weight, "cpu", dtype)
        finally:
            checkpoint.close()
        with GgufFile(path) as file:
            return cls(decoder, of_gguf(file.metadata))

    def traced(self, room: Room) -> tuple[Engine, Trace]:
        """Sequences of requests that ask for one continuation are numbered as they are added."""
        assert isinstance(self.decoder, KeepingDecoder)
        runner = TracedRunner(self._runner(room), self.decoder)
        return _engine(room, runner), runner.trace

    def engine(self, room: Room) -> Engine:
        return _engine(room, self._runner(room))

    def _runner(self, room: Room) -> CpuRunner:
        decoder = self.decoder
        cache = Cache(decoder.shape, room.num_blocks, room.block_size, "cpu", decoder.dtype)
        return CpuRunner(decoder, cache)


def _engine(room: Room, runner: CpuRunner | TracedRunner) -> Engine:
    limits = StepLimits(room.max_sequences, room.max_tokens, room.max_length)
    scheduler = Scheduler(BlockPool(room.num_blocks, room.block_size), limits)
    return Engine(scheduler, runner, StepTimeModel(Targets()), time.monotonic)


def asked(number: int, tokens: Sequence[int], num_tokens: int) -> GenerateRequest:
    """Greedy, and no token ends it."""
    return GenerateRequest(number, pack_tokens(tokens), replace(GREEDY, max_tokens=num_tokens))
