"""Judge a model without Penstock's gate: its answers to fresh rows from plain runtimes, and from a
real server that is asked by many clients at once.

Knows nothing of passes, candidates or numerics; `is_broken` of an adversary decides about answers.
"""

import contextlib
import http.client
import importlib.util
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from google.protobuf import text_format
from served import Served
from tritonclient.grpc import model_config_pb2

from penstock.config import ModelConfig
from penstock.repository import layout
from penstock.types import Array, Tensor, from_array
from penstock.wire.v2_client import HEAD_LENGTH, decode_answer, encode_infer

Row = dict[str, Array]
# One per row, by the name of the output.
Answers = list[dict[str, Array]]
# What is wrong with answers to the fresh rows; empty: nothing.
Judge = Callable[[Answers], str]

NUM_CLIENTS = 16
# Requests wait so long for company where the version lets rows share a batch.
COMPANY_US = 20_000
DATATYPES = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "object": "BYTES"}


# Plain runtimes.


def run_onnx(path: Path, rows: Sequence[Row], num_rows: int = 1, has_batch: bool = True) -> Answers:
    """ONNX Runtime's answers, so many rows in a batch."""
    return _run(_onnx_session(path, {}), rows, num_rows, has_batch)


def run_build(config: ModelConfig, rows: Sequence[Row], num_rows: int) -> Answers:
    """Answers of a build as its configuration says it is computed, so many rows in a batch."""
    path = Path(config.artifact)
    run = {"onnxruntime": _onnx_session, "openvino": _openvino_request}[config.backend]
    has_batch = config.max_batch_size > 0
    return _run(run(path, config.options), rows, num_rows, has_batch)


def run_python(path: Path, rows: Sequence[Row], num_rows: int = 1) -> Answers:
    """Answers of a `model.py` with a function `infer`, in the order of the rows."""
    spec = importlib.util.spec_from_file_location(f"planted_{path.parent.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _run(module.infer, rows, num_rows, has_batch=True)


def _onnx_session(path: Path, options: Any) -> Callable[[Row], Row]:
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    for key, value in options.items():
        if key.startswith("session."):
            settings.add_session_config_entry(key, value)
    left_out = options.get("optimization.disable_specified_optimizers")
    session = ort.InferenceSession(
        str(path),
        settings,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=left_out.split(",") if left_out else None,
    )
    names = [each.name for each in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def _openvino_request(path: Path, options: Any) -> Callable[[Row], Row]:
    import openvino

    precision = {"INFERENCE_PRECISION_HINT": options.get("inference_precision", "f32")}
    compiled = openvino.Core().compile_model(str(path), "CPU", precision)

    def run(feeds: Row) -> Row:
        found = compiled(feeds)
        # An output has the names of all tensors that it was merged with.
        return {
            name: np.array(found[output]) for output in compiled.outputs for name in output.names
        }

    return run


def _run(run: Callable[[Row], Row], rows: Sequence[Row], num_rows: int, has_batch: bool) -> Answers:
    if not has_batch:
        return [run(row) for row in rows]
    answers: Answers = []
    for start in range(0, len(rows), num_rows):
        group = rows[start : start + num_rows]
        if len({array.shape for row in group for array in row.values()}) > len(group[0]):
            group_answers = [run({n: a[None] for n, a in row.items()}) for row in group]
        else:
            feeds = {name: np.stack([row[name] for row in group]) for name in group[0]}
            found = run(feeds)
            group_answers = [
                {name: array[i : i + 1] for name, array in found.items()} for i in range(len(group))
            ]
        answers += [{name: array[0] for name, array in each.items()} for each in group_answers]
    return answers


# The server.


@contextlib.contextmanager
def serving(root: Path, name: str, copy: Path) -> Iterator[Served]:
    """The newest version of a model, without its SLO, so that nothing is refused for being late.
    Where rows may share a batch, requests wait for each other as they would under load."""
    version = layout.version_folders(root / name)[-1]
    left_out = shutil.ignore_patterns("manifest.json", "config.pbtxt")
    shutil.copytree(root / name / version, copy / name / version, ignore=left_out)
    text = (root / name / version / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    config.parameters["penstock.slo"].string_value = "off"
    if config.HasField("dynamic_batching"):
        config.dynamic_batching.max_queue_delay_microseconds = COMPANY_US
    (copy / name / "config.pbtxt").write_text(text_format.MessageToString(config))
    served = Served(copy)
    try:
        yield served
    finally:
        assert served.terminate() == 0


def ask(served: Served, name: str, rows: Sequence[Row], *, has_batch: bool) -> Answers:
    """One request for each row, from many clients at once. Over HTTP: gRPC's threads and processes
    that are started beside them do not get along."""
    path = f"/v2/models/{name}/infer"

    def answer(client: http.client.HTTPConnection, row: Row) -> dict[str, Array]:
        tensors = [_tensor(key, array[None] if has_batch else array) for key, array in row.items()]
        length, body = encode_infer(tensors)
        client.request("POST", path, body, {HEAD_LENGTH: str(length)})
        response = client.getresponse()
        data = response.read()
        assert response.status == 200, data
        found = decode_answer(int(response.headers[HEAD_LENGTH]), data)
        return {key: array[0, ...] if has_batch else array for key, array in found.items()}

    def answer_share(number: int) -> list[tuple[int, dict[str, Array]]]:
        connection = http.client.HTTPConnection(served.address, timeout=60)
        with contextlib.closing(connection) as client:
            places = range(number, len(rows), NUM_CLIENTS)
            return [(place, answer(client, rows[place])) for place in places]

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        shares = pool.map(answer_share, range(NUM_CLIENTS))
        return [found for _, found in sorted(itertools.chain(*shares), key=lambda each: each[0])]


def _tensor(name: str, array: Array) -> Tensor:
    return from_array(name, DATATYPES[str(array.dtype)], np.ascontiguousarray(array))


# What is wrong with answers.


def same_best(truth: Answers, output: str, columns: slice, least: float, rows: Any = None) -> Judge:
    """The largest of these columns is the original's in at least this share of the rows."""

    def judge(answers: Answers) -> str:
        picked = range(len(truth)) if rows is None else rows
        pairs = [(truth[i][output][..., columns], answers[i][output][..., columns]) for i in picked]
        same = float(
            np.mean([np.mean(one.argmax(-1) == two.argmax(-1)) for one, two in pairs if two.size])
        )
        return "" if same >= least else f"{output}: best column is the same in {same:.0%} of rows"

    return judge


def near(truth: Answers, output: str, least: float = 0.95, rows: Any = None) -> Judge:
    """The median cosine with the original's output is at least this."""

    def judge(answers: Answers) -> str:
        picked = range(len(truth)) if rows is None else rows
        found = [cosine(truth[i][output], answers[i][output]) for i in picked]
        median = float(np.median(found))
        return "" if median >= least else f"{output}: median cosine {median:.2f}"

    return judge


def equal(truth: Answers, output: str, least: float) -> Judge:
    """Texts and integers are the original's in at least this share of the rows."""

    def judge(answers: Answers) -> str:
        pairs = zip(truth, answers, strict=True)
        same = float(np.mean([np.array_equal(one[output], two[output]) for one, two in pairs]))
        return "" if same >= least else f"{output}: the same in {same:.0%} of rows"

    return judge


def close(truth: Answers, output: str, share: float, rows: Any = None) -> Judge:
    """No value differs by more than this share of the output's usual magnitude."""

    def judge(answers: Answers) -> str:
        picked = range(len(truth)) if rows is None else rows
        usual = float(np.median([np.abs(truth[i][output]).max() for i in picked]))
        worst = max(_gap(truth[i][output], answers[i][output]) for i in picked)
        return "" if worst <= share * usual else f"{output}: off by {worst / usual:.2g} of its size"

    return judge


def score_at_least(score: Callable[[Answers], float], least: float) -> Judge:
    def judge(answers: Answers) -> str:
        found = score(answers)
        return "" if found >= least else f"score {found:.2f}, expected {least:.2f} at least"

    return judge


def both(*judges: Judge) -> Judge:
    return lambda answers: "; ".join(text for judge in judges if (text := judge(answers)))


def cosine(one: Array, other: Array) -> float:
    if one.shape != other.shape or not np.isfinite(other).all():
        return -1.0
    before, after = one.ravel().astype(np.float64), other.ravel().astype(np.float64)
    lengths = np.linalg.norm(before) * np.linalg.norm(after)
    return (
        float(before @ after / lengths) if lengths else float(not before.any() and not after.any())
    )


def _gap(one: Array, other: Array) -> float:
    if one.shape != other.shape:
        return float("inf")
    gap = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return float(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).max(initial=0.0))
