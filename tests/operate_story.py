"""The life of a model in production: committed, served, replaced by a better version in steps, and
protected from two bad ones, all under an open-loop load.

    python tests/operate_story.py               # with 1 and 2 shards: at most 10 minutes
    python tests/operate_story.py --shards 2

Prints one line for each part and exits with 1 if one missed its goal: a planted fault is detected
within 30 s and swapped out within 2 s of the decision, and no request is lost. A request is lost if
it has no answer, a connection error, or a 5xx other than a refusal. Refused and wrong answers of a
bad version, before it is rolled back, are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import onnx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

from committed_versions import evidence  # noqa: E402
from open_loop import is_whole, percentile  # noqa: E402
from served import Served  # noqa: E402
from suites.onnx_models import Graph  # noqa: E402

from penstock.optimizer.this_machine import read_machine  # noqa: E402
from penstock.repository import layout, versions  # noqa: E402

RATE, NUM_CONNECTIONS, NUM_INPUTS, NUM_CLASSES = 200.0, 64, 64, 10
SLO = "p99 < 250ms at 200/s poisson"
# Goals, in seconds.
DETECTED_S, SWAPPED_S = 30.0, 2.0
LONGEST_S = 240.0
STEP_S = 5.0
NUM_BODIES = 200


def make_model(kind: str) -> onnx.ModelProto:
    """A classifier of 64 floats. `plain` computes twice what `fast` does; `slow` multiplies large
    matrices besides; `wrong` gives each class the score of the next one."""
    graph = Graph(seed=1)
    hidden = graph.add("Relu", graph.add("MatMul", "x", graph.drawn("w1", NUM_INPUTS, 512)))
    scores = graph.add("MatMul", hidden, graph.drawn("w2", 512, NUM_CLASSES))
    if kind == "plain":
        again = graph.add("Relu", graph.add("MatMul", "x", graph.drawn("w3", NUM_INPUTS, 16384)))
        waste = graph.add("MatMul", again, graph.drawn("w4", 16384, NUM_CLASSES))
        scores = graph.add("Add", scores, graph.add("Mul", waste, small(graph)))
    if kind == "slow":
        mean = graph.add("ReduceMean", "x", keepdims=0)
        square = graph.add("Add", graph.drawn("a", 768, 768), mean)
        for _ in range(96):
            square = graph.add("MatMul", square, "a")
        waste = graph.add("ReduceMean", square, keepdims=0)
        scores = graph.add("Add", scores, graph.add("Mul", waste, small(graph)))
    if kind == "wrong":
        order = graph.weight("order", np.roll(np.arange(NUM_CLASSES), 1))
        scores = graph.add("Gather", scores, order, axis=1)
    shape = ["rows", NUM_INPUTS]
    return graph.model({"x": (1, shape)}, scores, ["rows", NUM_CLASSES])


def small(graph: Graph) -> str:
    return graph.weight("small", np.array(1e-9, np.float32))


def commit(root: Path, kind: str) -> str:
    """Commit a version with evidence from this machine; return its number."""
    config_text = (
        'backend: "onnxruntime" max_batch_size: 16 dynamic_batching { }\n'
        f'input {{ name: "x" data_type: TYPE_FP32 dims: {NUM_INPUTS} }}\n'
        f'output {{ name: "y" data_type: TYPE_FP32 dims: {NUM_CLASSES} }}\n'
        'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
    )
    draft = Path(tempfile.mkdtemp(dir=root.parent)) / "classifier"
    (draft / "1").mkdir(parents=True)
    onnx.save(make_model(kind), draft / "1" / "model.onnx")
    (draft / "config.pbtxt").write_text(config_text)
    [config] = layout.read_one(draft.parent, "classifier").configs
    machine = msgspec.to_builtins(read_machine())
    software = machine.pop("versions")
    accuracy = {"metric": "agreement", "loss_bound": 0.005, "candidate": 1.0}
    made = evidence(hardware=machine, versions=software, slo=SLO, accuracy=accuracy)
    made["lineage"]["source_digest"] = "the same original"
    return versions.commit(root, "classifier", draft / "1", config, made)


@dataclass
class Sent:
    """One request and its answer; `status` 0: none yet, -1: the connection was lost."""

    due: float
    body: int
    status: int = 0
    version: str = ""
    latency_s: float = 0.0
    is_right: bool = True


class StoryLoad:
    """Poisson arrivals in a thread of its own; requests leave when they are due, whatever the
    server does. Every answer is compared with the right one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._random = random.Random(5)
        self.sent: list[Sent] = []
        self._is_stopping = False
        self._free: deque[Line] = deque()
        self._waiting: deque[Sent] = deque()
        self._messages, self.right = make_messages()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> StoryLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._thread.join()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(NUM_CONNECTIONS):
            await loop.create_connection(lambda: Line(self), "127.0.0.1", self._port)
        due = time.time()
        while not self._is_stopping:
            due += self._random.expovariate(RATE)
            if (wait_s := due - time.time()) > 0:
                await asyncio.sleep(wait_s)
            sent = Sent(due, self._random.randrange(NUM_BODIES))
            self.sent.append(sent)
            self._send(sent)
        ends = time.time() + 10
        while any(each.status == 0 for each in self.sent[-500:]) and time.time() < ends:
            await asyncio.sleep(0.05)
        for line in list(self._free):
            line.close()
        await asyncio.sleep(0.1)

    def _send(self, sent: Sent) -> None:
        if self._free:
            self._free.popleft().send(sent, self._messages[sent.body])
        else:
            self._waiting.append(sent)

    def is_free(self, line: Line) -> None:
        self._free.append(line)
        if self._waiting:
            self._send(self._waiting.popleft())

    def lost(self, line: Line) -> None:
        if line in self._free:
            self._free.remove(line)
        if self._is_stopping:
            return
        loop = asyncio.get_running_loop()
        again = loop.create_connection(lambda: Line(self), "127.0.0.1", self._port)
        self._again = loop.create_task(again)


class Line(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, load: StoryLoad) -> None:
        self._load = load
        self._buffer = b""
        self._sent: Sent | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._load.is_free(self)

    def close(self) -> None:
        self._transport.close()

    def send(self, sent: Sent, message: bytes) -> None:
        self._sent = sent
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not is_whole(self._buffer) or self._sent is None:
            return
        sent, answer = self._sent, self._buffer
        self._sent, self._buffer = None, b""
        sent.status, sent.latency_s = int(answer[9:12]), time.time() - sent.due
        if sent.status == 200:
            told = json.loads(answer[answer.index(b"\r\n\r\n") :])
            sent.version = told["model_version"]
            found = int(np.argmax(told["outputs"][0]["data"]))
            sent.is_right = found == self._load.right[sent.body]
        self._load.is_free(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._sent is not None:
            self._sent.status = -1
        self._load.lost(self)


def make_messages() -> tuple[list[bytes], list[int]]:
    """Requests, and the class that a right answer has."""
    chance = np.random.default_rng(3)
    rows = chance.normal(size=(NUM_BODIES, NUM_INPUTS)).astype(np.float32)
    weights = {
        each.name: onnx.numpy_helper.to_array(each) for each in make_model("fast").graph.initializer
    }
    scores = np.maximum(rows @ weights["w1"], 0) @ weights["w2"]
    messages = []
    for row in rows:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, NUM_INPUTS], "data": row.tolist()}
        body = json.dumps({"inputs": [tensor]}).encode()
        head = "POST /v2/models/classifier/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: "
        messages.append(f"{head}{len(body)}\r\n\r\n".encode() + body)
    return messages, scores.argmax(axis=1).tolist()


@dataclass
class StoryLine:
    """What one part of the story measured, and the goals that it missed."""

    title: str
    figures: list[str]
    missed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        state = "FAILED" if self.missed else "passed"
        told = [*self.figures, *(f"MISSED: {each}" for each in self.missed)]
        return f"{state}  {self.title}: {'; '.join(told)}"


class Story:
    def __init__(self, served: Served, load: StoryLoad) -> None:
        self._served = served
        self._load = load

    def _ask(self, action: str, **body: object) -> dict:
        path = f"/v2/repository/models/classifier/{action}"
        data = json.dumps(body).encode()
        status, answer = self._served.post(path, data) if body else self._served.get(path)
        assert status == 200, answer
        return json.loads(answer)

    def _roll_out(self, version: str) -> tuple[float, dict, list[Sent]]:
        """Start a canary; return when it began, how it ended, and the requests meanwhile."""
        first = len(self._load.sent)
        self._ask("promote", version=version, canary="5%", step_s=STEP_S)
        began, ends = time.time(), time.time() + LONGEST_S
        while (state := self._ask("rollout"))["decision"] == "running" and time.time() < ends:
            time.sleep(0.1)
        time.sleep(SWAPPED_S + 1)
        return began, state, self._load.sent[first:]

    def improve(self, version: str) -> StoryLine:
        began, state, sent = self._roll_out(version)
        took_s = (state["ended"] or time.time()) - began
        steps = [each for each in self._ask("history") if each["kind"] == "canary step"]
        shares = ", ".join(f"{100 * each['figures']['share']:.0f} %" for each in steps)
        ratio = state["figures"].get("compute_time_ratio")
        line = StoryLine(
            f"version {version} is faster",
            [
                f"{state['decision']} after {took_s:.0f} s in steps of 5 %, {shares}",
                f"compute time {ratio} x the stable version's",
                *describe(sent),
            ],
        )
        if state["decision"] != "promoted":
            line.missed.append(f"not promoted: {state['reason']}")
        line.missed += losses(sent)
        later = Counter(each.version for each in sent if each.due > (state["ended"] or 0) + 0.5)
        if set(later) - {version, ""}:
            line.missed.append(f"answers of {dict(later)} after the promotion")
        return line

    def protect(self, version: str, what: str, check: str) -> StoryLine:
        began, state, sent = self._roll_out(version)
        line = StoryLine(f"version {version} is {what}", [])
        if state["decision"] != "rolled back":
            line.missed.append(f"{state['decision']}: {state['reason']}")
            return line
        detected_s = state["ended"] - began
        event = self._ask("history")[-1]
        after = [each.due - state["ended"] for each in sent if each.version == version]
        swap_s = max(event["figures"]["swap_s"], *after, 0.0)
        line.figures = [
            f"rolled back {detected_s:.1f} s after its first request",
            f"swapped within {swap_s:.3f} s of the decision",
            *describe(sent),
            f"{sum(not each.is_right for each in sent)} wrong answers",
            f"reason: {state['reason'][:120]}",
        ]
        broken = [each["name"] for each in state["checks"] if each["state"] == "broken"]
        if check not in broken:
            line.missed.append(f"{broken} broke, not {check}")
        if detected_s > DETECTED_S:
            line.missed.append(f"detected after {detected_s:.1f} s, the goal is {DETECTED_S:.0f} s")
        if swap_s > SWAPPED_S:
            line.missed.append(f"swapped after {swap_s:.1f} s, the goal is {SWAPPED_S:.0f} s")
        line.missed += losses(sent)
        return line


def describe(sent: list[Sent]) -> list[str]:
    answered = [each.latency_s for each in sent if each.status == 200]
    refused, lost = sum(each.status == 503 for each in sent), sum(map(is_lost, sent))
    p99_ms = 1e3 * percentile(answered, 0.99)
    return [f"{len(sent):,} requests, {refused} refused, {lost} lost, p99 {p99_ms:.0f} ms"]


def is_lost(sent: Sent) -> bool:
    return sent.status not in (200, 503)


def losses(sent: list[Sent]) -> list[str]:
    lost = Counter(each.status for each in sent if is_lost(each))
    return [f"{sum(lost.values())} requests lost, by status {dict(lost)}"] if lost else []


def tell(shards: int) -> Iterator[StoryLine]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        root.mkdir()
        first = commit(root, "plain")
        versions.promote(root, "classifier", first)
        others = [commit(root, kind) for kind in ("fast", "slow", "wrong")]
        flags = ("--model-control-mode", "explicit", "--load-model", "*", "--shards", str(shards))
        with Served(root, *flags) as served, StoryLoad(served.port) as load:
            time.sleep(5)
            story = Story(served, load)
            yield story.improve(others[0])
            yield story.protect(others[1], "slow", "p99 < 250ms")
            yield story.protect(others[2], "wrong", "agreement")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shards", type=int, nargs="*", default=[1, 2])
    num_missed, began = 0, time.monotonic()
    for shards in parser.parse_args().shards:
        for line in tell(shards):
            num_missed += bool(line.missed)
            print(f"{shards} shard{'s' * (shards > 1)}  {line}", flush=True)
    print(f"{num_missed} goals missed, {(time.monotonic() - began) / 60:.1f} min")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
