"""Logprobs of a language model build for given tokens, computed in a child process: `python -m
penstock.optimizer.llm.text_trials JOB ANSWER`. It loads the serving engine, so the logprobs are
those that would be served."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.errors import BackendFailed, PenstockError
from penstock.llm.messages import EngineSettings, GenerateRequest, Logprobs, pack_tokens
from penstock.llm.settings import settings_of
from penstock.optimizer.candidates import Build
from penstock.optimizer.llm.likelihoods import NUM_TOLD, PromptLogprobs
from penstock.optimizer.time_plan import JUDGE_S, CutOff, TookTooLong
from penstock.processes.tool import ToolProcess
from penstock.sampling_params import SamplingParams
from penstock.system import devices

if TYPE_CHECKING:
    from penstock.llm.engine import Engine

POLL_S = 0.1
Watch = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts as tokens, and a model's logprobs of each."""

    texts: list[list[int]]
    told: list[PromptLogprobs]


class LikelihoodJob(msgspec.Struct):
    settings: EngineSettings
    # Tokens of each text.
    texts: list[list[int]]
    # Tokens to generate greedily and append to each text first.
    num_new: int


def likelihoods(
    build: Build,
    texts: Sequence[Sequence[int]],
    num_new: int,
    watch: Watch,
    keep: Path | None = None,
    timeout_s: float = JUDGE_S,
) -> Texts:
    """Return the logprobs of each text, after the model appended `num_new` tokens. `keep`: also
    write the result to this file, for `read`. BackendFailed has the output of a failed process."""
    longest = max(map(len, texts)) + num_new + 1
    settings = settings_of(build.config)
    settings = msgspec.structs.replace(
        settings, max_length=longest, max_waiting=len(texts) + 1, ttft_s=None, tpot_s=None
    )
    job = LikelihoodJob(settings, [list(text) for text in texts], num_new)
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        asked, answer = Path(scratch, "job.json"), Path(scratch, "answer.npz")
        asked.write_bytes(msgspec.json.encode(job))
        _run([str(asked), str(answer)], watch, timeout_s)
        if keep is not None:
            shutil.copyfile(answer, keep)
        return read(answer)


def read(path: Path) -> Texts:
    # Opened here: given a path, np.load leaves the file open if it is not a valid archive.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
        lengths = found["lengths"].tolist()
        ends = np.cumsum(lengths)[:-1]
        # The first token of a text has no logprob.
        told_ends = np.cumsum([length - 1 for length in lengths])[:-1]
        parts = [np.split(found[name], told_ends) for name in ("own", "tokens", "logprobs")]
        return Texts(
            [each.tolist() for each in np.split(found["texts"], ends)],
            [PromptLogprobs(*each) for each in zip(*parts, strict=True)],
        )


def _run(arguments: Sequence[str], watch: Watch, timeout_s: float) -> None:
    began = time.monotonic()
    with ToolProcess(__name__, arguments, environment=devices.worker_environment()) as process:
        while process.is_running:
            took_s = time.monotonic() - began
            if took_s > timeout_s:
                kind = CutOff if timeout_s < JUDGE_S else TookTooLong
                raise kind(f"not judged within {timeout_s:.0f} s{process.tail()}")
            watch(f"accuracy, {took_s:.0f} s")
            time.sleep(POLL_S)
        if process.wait():
            raise BackendFailed(f"it {process.describe_end()}")


# The child process.


def main(job_path: str, answer_path: str) -> None:
    from penstock.llm.engine_loading import load

    job = msgspec.json.decode(Path(job_path).read_bytes(), type=LikelihoodJob)
    engine, _ = load(job.settings)
    texts = _continued(engine, job.texts, job.num_new) if job.num_new else job.texts
    flat = [each for part in _logprobs(engine, texts) for each in part]
    with open(answer_path, "wb") as file:
        np.savez(
            file,
            texts=np.array([token for text in texts for token in text], np.int64),
            lengths=np.array([len(text) for text in texts], np.int64),
            own=np.array([each.logprob for each in flat], np.float32),
            tokens=np.array([each.top_tokens for each in flat], np.int32),
            logprobs=np.array([each.top_logprobs for each in flat], np.float32),
        )


def _continued(engine: Engine, texts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """Append `num_new` greedily decoded tokens to each text, ignoring end-of-sequence tokens."""
    found = [list(text) for text in texts]
    _add(engine, texts, SamplingParams(temperature=0.0, max_tokens=num_new))
    while not engine.is_idle:
        for event in engine.step():
            found[event.request].append(event.token)
    return found


def _logprobs(engine: Engine, texts: Sequence[Sequence[int]]) -> list[list[Logprobs]]:
    found: list[dict[int, Logprobs]] = [{} for _ in texts]
    _add(engine, texts, SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=NUM_TOLD))
    while not engine.is_idle:
        engine.step()
        chunks, engine.prompt_logprobs = engine.prompt_logprobs, []
        for each in chunks:
            found[each.request] |= dict(enumerate(each.logprobs, each.start))
    return [[each[place] for place in sorted(each)] for each in found]


def _add(engine: Engine, texts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    for number, text in enumerate(texts):
        engine.add(GenerateRequest(number, pack_tokens(text), params))


if __name__ == "__main__":
    # Ctrl+C at the terminal reaches both processes; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        main(*sys.argv[1:])
    except PenstockError as error:
        sys.exit(str(error))
