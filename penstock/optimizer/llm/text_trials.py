"""Compute a language model build's logprobs of given tokens, in a child process."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import BackendFailed
from penstock.llm.settings import settings_of
from penstock.optimizer.candidates import Build
from penstock.optimizer.llm.likelihood_child import LikelihoodJob
from penstock.optimizer.llm.likelihoods import NUM_TOLD, PromptLogprobs
from penstock.optimizer.llm.text_time import JUDGE_S
from penstock.optimizer.time_plan import CutOff, TookTooLong
from penstock.processes.tool import ToolProcess
from penstock.system import devices

POLL_S = 0.1
MODULE = "penstock.optimizer.llm.likelihood_child"
Watch = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts as tokens, and a model's logprobs of each."""

    texts: list[list[int]]
    told: list[PromptLogprobs]


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
    job = LikelihoodJob(settings, [list(text) for text in texts], num_new, NUM_TOLD)
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
    with ToolProcess(MODULE, arguments, environment=devices.worker_environment()) as process:
        while process.is_running:
            took_s = time.monotonic() - began
            if took_s > timeout_s:
                kind = CutOff if timeout_s < JUDGE_S else TookTooLong
                raise kind(f"not judged within {timeout_s:.0f} s{process.tail()}")
            watch(f"accuracy, {took_s:.0f} s")
            time.sleep(POLL_S)
        if process.wait():
            raise BackendFailed(f"it {process.describe_end()}")
