"""Child process that returns a build's logprobs of given tokens: `python -m
penstock.optimizer.llm.likelihood_child JOB ANSWER`. It loads the serving engine, so its logprobs
are those that would be served."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import PenstockError
from penstock.llm.engine import Engine
from penstock.llm.engine_main import load
from penstock.llm.messages import EngineSettings, GenerateRequest, Logprobs, pack_tokens
from penstock.sampling_params import SamplingParams


class LikelihoodJob(msgspec.Struct):
    settings: EngineSettings
    # Tokens of each text.
    texts: list[list[int]]
    # Tokens to generate greedily and append to each text first.
    num_new: int
    # Number of most likely tokens to return per position.
    num_told: int


def main(job_path: str, answer_path: str) -> None:
    job = msgspec.json.decode(Path(job_path).read_bytes(), type=LikelihoodJob)
    engine, _ = load(job.settings)
    texts = continued(engine, job.texts, job.num_new) if job.num_new else job.texts
    told = likelihoods(engine, texts, job.num_told)
    flat = [each for part in told for each in part]
    with open(answer_path, "wb") as file:
        np.savez(
            file,
            texts=np.array([token for text in texts for token in text], np.int64),
            lengths=np.array([len(text) for text in texts], np.int64),
            own=np.array([each.logprob for each in flat], np.float32),
            tokens=np.array([each.top_tokens for each in flat], np.int32),
            logprobs=np.array([each.top_logprobs for each in flat], np.float32),
        )


def continued(engine: Engine, texts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """Append `num_new` greedily decoded tokens to each text, ignoring end-of-sequence tokens."""
    found = [list(text) for text in texts]
    params = SamplingParams(temperature=0.0, max_tokens=num_new)
    for number, text in enumerate(texts):
        engine.add(GenerateRequest(number, pack_tokens(text), params))
    while not engine.is_idle:
        for event in engine.step():
            found[event.request].append(event.token)
    return found


def likelihoods(
    engine: Engine, texts: Sequence[Sequence[int]], num_told: int
) -> list[list[Logprobs]]:
    """Return the logprobs of each text's tokens after the first."""
    found: list[dict[int, Logprobs]] = [{} for _ in texts]
    params = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=num_told)
    for number, text in enumerate(texts):
        engine.add(GenerateRequest(number, pack_tokens(text), params))
    while not engine.is_idle:
        engine.step()
        chunks, engine.prompt_logprobs = engine.prompt_logprobs, []
        for each in chunks:
            found[each.request] |= dict(enumerate(each.logprobs, each.start))
    return [[each[place] for place in sorted(each)] for each in found]


if __name__ == "__main__":
    # Ctrl+C at the terminal reaches both processes; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        main(*sys.argv[1:])
    except PenstockError as error:
        sys.exit(str(error))
