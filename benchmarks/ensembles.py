"""What an ensemble costs beside its members, and what it gains beside one model.

    python benchmarks/ensembles.py                  about six minutes
    python benchmarks/ensembles.py --device cuda    the classifier on a GPU
    python benchmarks/ensembles.py --quick          one short round

A JPEG photograph (640 x 480) is decoded and resized in Python, and MobileNetV2 (3.5 M parameters,
random weights, FP32) classifies it.

- **Overhead.** One client asks the ensemble `decode -> classify` over HTTP; in turns, the same two
  models are called one after the other in this process (`penstock.load`). The ratio of their median
  times is that of the same round; the median of the rounds is shown. Members that spin for a given
  time show below which cost the goal is missed. Turns are short, so that other programs meet both.
  The fastest tenth of the requests, and CPU time of server and client, depend less on others.
- **Gain.** The ensemble in turns with one model that decodes in its preprocess function, over HTTP
  with the same number of clients, all servers running. The model, or the ensemble's classifier,
  has 1 instance or one per core (on a GPU two); each round counts the better rate of each side.

Answers of both sides are compared first. Goals, set before measuring: an overhead below 15 % of the
members' time in process; a gain of at least 1.0x on two cores, 2x on 16 cores with a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from overhead.process import Launch, cpu_seconds, free_port, running
from rich.console import Console
from rich.table import Table

import penstock
from penstock.types import Array
from penstock.wire.v2_client import HEAD_LENGTH, Values, decode_answer, encode_infer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RESULTS = Path(__file__).with_name("results")
MAX_OVERHEAD = 0.15
GOALS = {"cpu": 1.0, "cuda": 2.0}
SIZE, NUM_IMAGES, BATCH = (640, 480), 32, 16
# The time of each of two members that only spin.
SPUN_MS = (0.0, 0.3, 1.0, 3.0, 10.0)
TOLERANCE = 1e-3
ENSEMBLE = "ensemble"
# Turns of a single client are this many times shorter than those under load, and as many more.
SHORTER = 8
# For each client, so that batches fill.
CLIENTS = {"cpu": 8, "cuda": 64}

PIXELS = '''"""JPEG files to what the classifier takes."""
import io

import numpy as np
from PIL import Image


def pixels_of(data):
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image = image.resize((341, 256), Image.Resampling.BILINEAR).crop((58, 16, 282, 240))
    pixels = np.asarray(image, np.float32) / 255
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


'''
FUNCTION = """def decode(row):
    return {"image": pixels_of(row["FILE"].ravel()[0])}
"""
DECODE = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        files = pb_utils.get_input_tensor_by_name(request, "FILE").as_numpy()
        pixels = np.stack([pixels_of(data) for data in files.ravel()])
        return pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", pixels)])
"""
SPIN = """import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ends_at = time.perf_counter() + {seconds}
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        while time.perf_counter() < ends_at:
            pass
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""


def tensor(kind: str, name: str, datatype: str, dims: str) -> str:
    return f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ] }}\n'


FILE, IMAGE = tensor("input", "FILE", "STRING", "1"), "3, 224, 224"


def write_model(root: Path, name: str, config: str, files: Mapping[str, str | Path]) -> None:
    version = root / name / "1"
    version.mkdir(parents=True)
    head = f"max_batch_size: {BATCH}\n"
    (root / name / "config.pbtxt").write_text(head + config)
    for file, content in files.items():
        if isinstance(content, Path):
            os.link(content, version / file)
        else:
            (version / file).write_text(content)


def instances(count: int, device: str = "cpu") -> str:
    kind = "KIND_GPU" if device == "cuda" else "KIND_CPU"
    return f"instance_group {{ count: {count} kind: {kind} }}\ndynamic_batching {{ }}\n"


def ensemble(takes: str, makes: str, steps: Sequence[tuple[str, str, str, str, str]]) -> str:
    """`steps` are a model, its input, the tensor it takes, its output, and the tensor it makes."""
    text = f'platform: "ensemble"\n{takes}{makes}ensemble_scheduling {{\n'
    for model, key, taken, made_by, made in steps:
        text += (
            f'  step {{ model_name: "{model}" model_version: -1\n'
            f'    input_map {{ key: "{key}" value: "{taken}" }}\n'
            f'    output_map {{ key: "{made_by}" value: "{made}" }} }}\n'
        )
    return text + "}\n"


def write_pipeline(
    root: Path, onnx: Path, device: str, num_decoders: int, num_classifiers: int = 1
) -> None:
    """Write decode -> classify as an ensemble."""
    made = tensor("output", "PIXELS", "FP32", IMAGE)
    config = f'backend: "python"\n{FILE}{made}{instances(num_decoders)}'
    write_model(root, "decode", config, {"model.py": PIXELS + DECODE})
    logits = tensor("output", "logits", "FP32", "1000")
    taken = tensor("input", "image", "FP32", IMAGE)
    config = f'platform: "onnxruntime_onnx"\n{taken}{logits}{instances(num_classifiers, device)}'
    write_model(root, "classify", config, {"model.onnx": onnx})
    steps = [
        ("decode", "FILE", "FILE", "PIXELS", "pixels"),
        ("classify", "image", "pixels", "logits", "logits"),
    ]
    write_model(root, "pipeline", ensemble(FILE, logits, steps), {})


def write_one(root: Path, onnx: Path, device: str, count: int) -> None:
    """Write one model that decodes in its preprocess function."""
    parameters = {
        "penstock.preprocess": "preprocess.py:decode",
        "penstock.model_inputs": "image:FP32[3,224,224]",
    }
    config = f'platform: "onnxruntime_onnx"\n{FILE}{tensor("output", "logits", "FP32", "1000")}'
    config += instances(count, device)
    for key, value in parameters.items():
        config += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    files = {"model.onnx": onnx, "preprocess.py": PIXELS + FUNCTION}
    write_model(root, "one", config, files)


def write_spinning(root: Path, milliseconds: float) -> None:
    row = tensor("input", "x", "FP32", "16"), tensor("output", "y", "FP32", "16")
    config = f'backend: "python"\n{"".join(row)}{instances(1)}'
    for name in ("first", "second"):
        code = SPIN.replace("{seconds}", str(milliseconds / 1e3))
        write_model(root, name, config, {"model.py": code})
    steps = [("first", "x", "x", "y", "between"), ("second", "x", "between", "y", "y")]
    write_model(root, "pipeline", ensemble(*row, steps), {})


def write_classifier(path: Path) -> Path:
    import torch

    sys.path.insert(0, str(EXAMPLES))
    from ensembles import mobilenet

    torch.manual_seed(0)
    module = mobilenet.MobileNetV2().eval()
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (torch.zeros(2, 3, 224, 224),),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
        )
    return path


def photographs() -> list[bytes]:
    """Return JPEG files of smooth noise, which take as long to decode as photographs."""
    from PIL import Image

    random, found = np.random.default_rng(0), []
    for _ in range(NUM_IMAGES):
        coarse = random.integers(0, 256, (SIZE[1] // 8, SIZE[0] // 8, 3), np.uint8)
        image = Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


def message(name: str, datatype: str, array: Array) -> tuple[int, bytes]:
    return encode_infer([Values.of(name, datatype, array)])


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a request: the median time, that of the fastest tenth, and the mean CPU time."""

    wall_s: float
    fast_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """The requests per second of several clients, and what one costs the server: CPU time of the
    core and of the workers."""

    rate: float
    core_s: float
    workers_s: float


class Served:
    """A model behind a server, and the requests that it is sent in turn."""

    def __init__(
        self,
        process: psutil.Process,
        port: int,
        model: str,
        messages: Sequence[tuple[int, bytes]],
    ) -> None:
        self.process, self.port, self.messages = process, port, messages
        self.path = f"/v2/models/{model}/infer"

    @property
    def cpu_s(self) -> float:
        """CPU time so far, of the server and of this process, its client."""
        return sum(cpu_seconds(self.process).values()) + time.process_time()

    def answer(self, connection: http.client.HTTPConnection, number: int) -> dict[str, Array]:
        head_length, body = self.messages[number % len(self.messages)]
        connection.request("POST", self.path, body, {HEAD_LENGTH: str(head_length)})
        response = connection.getresponse()
        data = response.read()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{self.path}: {response.status} {data[:300]!r}")
        return decode_answer(int(response.headers[HEAD_LENGTH]), data)

    def answers(self) -> list[dict[str, Array]]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            return [self.answer(connection, number) for number in range(len(self.messages))]

    def cost(self, seconds: float) -> Cost:
        """Return what a request of one client costs."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            return cost(lambda number: self.answer(connection, number), lambda: self.cpu_s, seconds)

    def load(self, clients: int, seconds: float) -> Load:
        """Ask with so many clients, each with one request in flight."""
        counts, before = [0] * clients, cpu_seconds(self.process)
        ends_at = time.perf_counter() + seconds

        def run(client: int) -> None:
            opened = http.client.HTTPConnection("127.0.0.1", self.port)
            with contextlib.closing(opened) as connection:
                while time.perf_counter() < ends_at:
                    self.answer(connection, client + counts[client] * clients)
                    counts[client] += 1

        began = time.perf_counter()
        threads = [threading.Thread(target=run, args=(each,)) for each in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = sum(counts) / (time.perf_counter() - began)
        spent = {
            pid: (after_s - before.get(pid, 0.0)) / sum(counts)
            for pid, after_s in cpu_seconds(self.process).items()
        }
        core_s = spent.pop(self.process.pid)
        return Load(rate, core_s, sum(spent.values()))


def cost(call: Callable[[int], object], cpu_s: Callable[[], float], seconds: float) -> Cost:
    found: list[float] = []
    before, ends_at = cpu_s(), time.perf_counter() + seconds
    while time.perf_counter() < ends_at or len(found) < 3:
        began = time.perf_counter()
        call(len(found))
        found.append(time.perf_counter() - began)
    spent_s = cpu_s() - before
    return Cost(statistics.median(found), float(np.quantile(found, 0.1)), spent_s / len(found))


@contextlib.contextmanager
def serving(root: Path, model: str, messages: Sequence[tuple[int, bytes]]) -> Iterator[Served]:
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", str(root), f"--http-port={port}"]
    command += ["--no-grpc", "--no-metrics", "--log-level=ERROR", "--allow-hard-links"]
    with running(Launch(command, port, ["/v2/health/ready"]), root / "log") as process:
        served = Served(process, port, model, messages)
        served.answers()
        yield served


def check_equal(one: Sequence[Mapping[str, Array]], other: Sequence[Mapping[str, Array]]) -> None:
    for left, right in zip(one, other, strict=True):
        for name, array in left.items():
            scale = float(np.abs(right[name]).max()) or 1.0
            np.testing.assert_allclose(array, right[name], atol=TOLERANCE * scale)


def overhead(
    root: Path,
    members: Sequence[tuple[str, str]],
    messages: Sequence[tuple[int, bytes]],
    inputs: Sequence[Array],
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """Ask the ensemble `pipeline` and its members in process, in turns. `members` are the models
    and the output that the next one takes."""
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serving(root, "pipeline", messages))
        loaded = [stack.enter_context(penstock.load(str(root / name))) for name, _ in members]

        def call(number: int) -> dict[str, Array]:
            array: Array = inputs[number % len(inputs)]
            for model, (_, output) in zip(loaded, members, strict=True):
                answer = model.infer(array)
                array = answer[output]
            return answer

        check_equal(served.answers(), [call(number) for number in range(len(inputs))])
        pairs = []
        for number in range(rounds):
            # Each side is first in every other round.
            sides = (
                lambda: served.cost(seconds),
                lambda: cost(call, time.process_time, seconds),
            )
            found = [sides[(number + place) % 2]() for place in range(2)]
            pairs.append((found[number % 2], found[1 - number % 2]))
    wholes, parts = zip(*pairs, strict=True)
    return {
        "ensemble_ms": statistics.median(each.wall_s for each in wholes) * 1e3,
        "in_process_ms": statistics.median(each.wall_s for each in parts) * 1e3,
        "fast": interval([one.fast_s / other.fast_s - 1 for one, other in pairs]),
        "cpu": interval([one.cpu_s / other.cpu_s - 1 for one, other in pairs]),
        **interval([one.wall_s / other.wall_s - 1 for one, other in pairs]),
    }


def interval(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the median over rounds, and what encloses it in 95 of 100 cases."""
    found = sorted(ratios)
    rank = max(0, int(len(found) / 2 - 0.98 * len(found) ** 0.5))
    return {"ratio": statistics.median(found), "range": [found[rank], found[-1 - rank]]}


def gain(folder: Path, onnx: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Load the ensemble and one model with a preprocess function in turns."""
    files = photographs()
    messages = [message("FILE", "BYTES", np.array([[each]], object)) for each in files]
    cores = len(os.sched_getaffinity(0))
    counts = (1, 2) if args.device == "cuda" else (1, cores)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Served] = {}
        for count in counts:
            # As many as the classifier leaves cores for, or as the instances of the other side.
            decoders = args.decoders or max(count, cores - 2)
            root = folder / f"pipeline-{count}"
            write_pipeline(root, onnx, args.device, decoders, count)
            name = f"{ENSEMBLE}, {decoders} x decode, {count} x classify"
            sides[name] = stack.enter_context(serving(root, "pipeline", messages))
            root = folder / f"one-{count}"
            write_one(root, onnx, args.device, count)
            served = stack.enter_context(serving(root, "one", messages))
            sides[f"one model, {count} x"] = served
        answers = [side.answers() for side in sides.values()]
        for others in answers[1:]:
            check_equal(answers[0], others)
        loads: dict[str, list[Load]] = {name: [] for name in sides}
        for number in range(args.rounds):
            names = list(sides)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                loads[name].append(sides[name].load(args.clients, args.seconds))
    mine = [name for name in loads if name.startswith(ENSEMBLE)]
    ones = [name for name in loads if name not in mine]
    rounds = range(args.rounds)
    best = [[max(loads[name][n].rate for name in names) for n in rounds] for names in (mine, ones)]
    median = statistics.median
    return {
        "clients": args.clients,
        "rates": {name: median(each.rate for each in found) for name, found in loads.items()},
        "cpu_ms": {
            name: {
                "core": median(each.core_s for each in found) * 1e3,
                "workers": median(each.workers_s for each in found) * 1e3,
            }
            for name, found in loads.items()
        },
        **interval([one / other for one, other in zip(*best, strict=True)]),
    }


def overheads(folder: Path, onnx: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    turns = SHORTER * args.rounds, args.seconds / SHORTER
    files = photographs()
    arrays = [np.array([[each]], object) for each in files]
    root = folder / "overhead"
    write_pipeline(root, onnx, args.device, 1)
    found["JPEG decode, MobileNetV2"] = overhead(
        root,
        [("decode", "PIXELS"), ("classify", "logits")],
        [message("FILE", "BYTES", each) for each in arrays],
        arrays,
        *turns,
    )
    rows = [np.random.default_rng(0).random((1, 16), np.float32) for _ in range(8)]
    for milliseconds in SPUN_MS:
        root = folder / f"spin-{milliseconds}"
        write_spinning(root, milliseconds)
        found[f"2 x {milliseconds:g} ms"] = overhead(
            root,
            [("first", "y"), ("second", "y")],
            [message("x", "FP32", each) for each in rows],
            rows,
            *turns,
        )
    return found


def show_overheads(found: Mapping[str, dict[str, Any]]) -> bool:
    """Show a table; return whether the first row keeps the goal."""
    if not found:
        return True
    head = ("members", "ensemble, ms", "in process, ms", "overhead (95 %)", "fastest tenth", "CPU")
    table = Table(*head)
    for name, each in found.items():
        low, high = each["range"]
        table.add_row(
            name,
            f"{each['ensemble_ms']:.2f}",
            f"{each['in_process_ms']:.2f}",
            f"{each['ratio']:.1%} ({low:.1%} to {high:.1%})",
            f"{each['fast']['ratio']:.1%}",
            f"{each['cpu']['ratio']:+.0%}",
        )
    Console().print(table)
    ratio: float = next(iter(found.values()))["ratio"]
    print(f"overhead of the first row: {ratio:.1%}, goal below {MAX_OVERHEAD:.0%}")
    return ratio < MAX_OVERHEAD


def show_gain(gained: Mapping[str, Any], goal: float) -> bool:
    if not gained:
        return True
    for name, rate in gained["rates"].items():
        cpu = gained["cpu_ms"][name]
        spent = f"CPU-ms a request: core {cpu['core']:.2f}, workers {cpu['workers']:.2f}"
        print(f"{name}: {rate:.1f} requests/s with {gained['clients']} clients; {spent}")
    low, high = gained["range"]
    ratio: float = gained["ratio"]
    found = f"{ratio:.2f} ({low:.2f} to {high:.2f}), goal at least {goal:.1f}"
    print(f"best of the ensemble / best of one model: {found}")
    return ratio >= goal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=GOALS, default="cpu", help="of the classifier (cpu)")
    parser.add_argument("--rounds", type=int, default=9, help="medians are reported (9)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each side of a round (2)")
    parser.add_argument("--clients", type=int, default=0, help="closed loop (cpu 8, cuda 64)")
    parser.add_argument("--only", choices=("overhead", "gain"), help="one of the two parts")
    parser.add_argument("--decoders", type=int, default=0, help="instances (cores - 2)")
    parser.add_argument("--quick", action="store_true", help="one round of a second")
    args = parser.parse_args()
    args.clients = args.clients or CLIENTS[args.device]
    if args.quick:
        args.rounds, args.seconds = 1, 1.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx = write_classifier(folder / "classifier.onnx")
        found = {} if args.only == "gain" else overheads(folder, onnx, args)
        gained = {} if args.only == "overhead" else gain(folder, onnx, args)
    is_kept = all([show_overheads(found), show_gain(gained, GOALS[args.device])])
    if not args.quick and not args.only:
        suffix = "" if args.device == "cpu" else "_gpu"
        path = RESULTS / f"ensembles{suffix}.json"
        path.write_text(json.dumps({"overhead": found, "gain": gained}, indent=1) + "\n")
    print("goals kept" if is_kept else "a goal is missed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
