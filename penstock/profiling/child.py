"""Child process that profiles one model: times without a profiler, then with it, then a request
around the model. Started by `profiler`, which reads the files it writes."""

from __future__ import annotations

import signal
import sys
import time
import timeit
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from threading import Event

import msgspec

from penstock import backends
from penstock.backends import Batch, Runner
from penstock.backends.checks import share_of_cores
from penstock.backends.processing import apply, pad
from penstock.benchmark import system
from penstock.config import CPU, ONNX_RUNTIME, ModelConfig
from penstock.errors import ConfigError, PenstockError
from penstock.optimizer.shapes import THREADS
from penstock.profiling import onnx_times, openvino_times, profiler, roofline, torch_times, trace
from penstock.profiling.peaks import peaks_of
from penstock.profiling.profiler import ProfileFailed, ProfileJob
from penstock.profiling.results import Profile, RequestPhase
from penstock.profiling.roofline import RooflineInput
from penstock.profiling.work import Timed
from penstock.serving.local import LocalModel
from penstock.system import devices
from penstock.types import Request, Response, TensorSpec
from penstock.wire.v2 import Codec
from penstock.wire.v2_client import Values, encode_infer

NUM_WARM_UP = 3
# Batches per slot while several are in flight.
NUM_FLIGHTS = 4
# Longest time to repeat a slow run.
MAX_MEASURE_S = 20.0
MIN_RUNS = 3
TIMEOUT_S = 300.0
TORCH_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def main() -> None:
    job = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=ProfileJob)
    target = Path(job.profile_path)
    try:
        profile = profiled(job)
    except PenstockError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        target.write_bytes(msgspec.json.encode(ProfileFailed(list(problems))))
        sys.exit(1)
    target.write_bytes(msgspec.json.encode(profile))


def profiled(job: ProfileJob) -> Profile:
    served = profiler.read_config(Path(job.folder))
    config, job, sent = served.model, _of_the_model(served, job), _sent(served, job)
    batch = Batch({each.name: each.array() for each in job.tensors}, job.num_rows)
    runner = backends.backend(config.backend)(config)
    # Before any other runner: torch has one thread count for the whole process.
    built = dict(runner.built())
    num_threads = _num_threads(config, built)
    alone = _timed_alone(runner, batch, job.num_runs)
    num_runs, total_s = len(alone), median(alone)
    timed = _operators(config, runner, batch, num_runs, built)
    runner.close()
    alone_s = _single_thread(config, batch, num_runs, num_threads)
    buckets = buckets_of(served, Path(job.folder), sent, num_runs)
    cache, is_torch = Path(job.cache) if job.cache else None, config.engine == "pytorch"
    peaks = peaks_of(config.device, num_threads, cache, is_torch=is_torch)
    peaks = roofline.raised(peaks, timed.operators)
    if job.trace_path:
        spans = () if timed.gpu is None else timed.gpu.timeline
        trace.write(Path(job.trace_path), config.name, timed.events, buckets, spans)
    # Comparable only if the request runs the same batch: padding makes it longer, and with pre- or
    # postprocessing it has one row.
    is_same = config.padding is None and not served.is_processed
    computed = {each.name: each.seconds for each in buckets if is_same}
    measured = RooflineInput(
        operators=roofline.judged(timed.operators, peaks),
        peaks=peaks,
        total_s=total_s,
        buckets=buckets,
        num_rows=job.num_rows,
        max_batch_size=config.max_batch_size,
        single_thread_s=alone_s,
        gpu=timed.gpu,
        datatypes=roofline.buildable(config),
        queue_delay_s=_queue_delay_s(served),
        disturbance=roofline.disturbance(alone, computed.get(roofline.COMPUTE)),
    )
    steps = roofline.next_steps(measured)
    return Profile(
        model=config.name,
        backend=config.backend,
        batch=job.batch,
        num_runs=num_runs,
        total_s=total_s,
        profiled_s=timed.profiled_s,
        operators=list(measured.operators),
        peaks=peaks,
        buckets=list(buckets),
        bound=roofline.bound_of(measured),
        findings=[*roofline.findings(measured), *timed.notes, *_sharing(config)],
        recommendation=roofline.verdict(measured, steps),
        ceiling=steps[0].ceiling if steps else 1.0,
        versions=system.environment("").versions,
        steps=steps,
        headroom=None if measured.disturbance else roofline.headroom(measured),
        single_thread_s=alone_s,
        limit_share=None if measured.disturbance else roofline.limit_share(measured),
        gpu=timed.gpu,
        disturbance=measured.disturbance,
    )


def _sharing(config: ModelConfig) -> list[str]:
    """Say if the GPU may have been shared while this was measured."""
    is_shared = config.uses_gpu and devices.mps() == "on"
    return ["MPS is on: other processes may have run kernels at the same time"] * is_shared


def _of_the_model(config: ModelConfig, job: ProfileJob) -> ProfileJob:
    """Return the job with the model's own inputs, where a preprocess function makes these from what
    is sent: the rows with the most common shapes."""
    if config.preprocess is None:
        return job
    inputs = {each.name: each.array() for each in job.tensors}
    rows = [inputs]
    if config.max_batch_size:
        rows = [{name: each[n] for name, each in inputs.items()} for n in range(job.num_rows)]
    made = [pad(config.model.padding, row)[0] for row in apply(config, rows)]
    tensors, num_rows, text = profiler.make_batch(config.model, made)
    return msgspec.structs.replace(job, tensors=tensors, num_rows=num_rows, batch=text)


def _sent(config: ModelConfig, job: ProfileJob) -> Sequence[Values]:
    """Return a request's tensors: one row if processed, as answers may differ in shape."""
    if not config.is_processed or not config.max_batch_size:
        return job.tensors
    return [Values.of(each.name, each.datatype, each.array()[:1]) for each in job.tensors]


def _queue_delay_s(config: ModelConfig) -> float:
    """Return how long the batcher may delay a request. In slo mode the SLO decides instead."""
    batching = config.batching
    is_used = batching.is_dynamic and batching.slo_latency_s is None
    return batching.max_queue_delay_s if is_used else 0.0


def _num_threads(config: ModelConfig, built: Mapping[str, str]) -> int:
    """Return the thread count that the library reports, else an instance's share of the cores."""
    text = built.get(THREADS.get(config.backend, ""), "")
    return int(text) if text.isdigit() and int(text) > 0 else share_of_cores(config)


def _timed_alone(runner: Runner, batch: Batch, num_runs: int) -> list[float]:
    """Return the seconds of each run, of as many as there was time for."""
    run = _run_of(runner, batch)
    *_, last_s = timeit.repeat(run, repeat=NUM_WARM_UP, number=1)
    num_runs = max(MIN_RUNS, min(num_runs, int(MAX_MEASURE_S / max(last_s, 1e-9))))
    return timeit.repeat(run, repeat=num_runs, number=1)


def _run_of(runner: Runner, batch: Batch) -> Callable[[], object]:
    return lambda: list(runner.start(batch).wait())


def _flight_of(runner: Runner, batch: Batch, num_slots: int) -> Callable[[], object]:
    """Return a function that runs a few batches per slot, with one in flight per slot."""

    def fly() -> None:
        begun = deque(runner.start(batch) for _ in range(num_slots))
        for _ in range(NUM_FLIGHTS * num_slots):
            list(begun.popleft().wait())
            begun.append(runner.start(batch))
        while begun:
            list(begun.popleft().wait())

    return fly


def _operators(
    config: ModelConfig, runner: Runner, batch: Batch, num_runs: int, built: Mapping[str, str]
) -> Timed:
    if config.engine == ONNX_RUNTIME and config.device == CPU:
        return onnx_times.timed(config, batch.inputs, num_runs)
    if config.backend == "openvino":
        return openvino_times.timed(config, batch.inputs, num_runs)
    # On a GPU torch's profiler sees the kernels of other libraries too.
    if config.engine in ("pytorch", ONNX_RUNTIME):
        datatype = TORCH_TYPES.get(built.get("dtype", "").partition(",")[0], "fp32")
        run = _run_of(runner, batch)
        if config.device == CPU:
            return torch_times.timed(run, num_runs, datatype)
        num_slots = config.num_instances if runner.runs_ahead else 1
        flight = torch_times.Flight(_flight_of(runner, batch, num_slots), num_slots)
        return torch_times.timed(run, num_runs, datatype, flight, built.get("tf32", ""))
    note = f"backend '{config.backend}' does not tell of its operators: only the way is shown"
    return Timed((), 0.0, (), (note,))


def _single_thread(
    config: ModelConfig, batch: Batch, num_runs: int, num_threads: int
) -> float | None:
    option = THREADS.get(config.backend)
    if option is None or num_threads < 2 or config.device != "cpu":
        return None
    options = {**config.options, option: "1"}
    runner = backends.backend(config.backend)(replace(config, options=options))
    try:
        return median(_timed_alone(runner, batch, max(MIN_RUNS, num_runs // 2)))
    finally:
        runner.close()


class TimedSender:
    """Sends requests one after the other through the server's codec, batcher and worker loop in
    this process, and records the time of each part; sockets are left out."""

    def __init__(self, config: ModelConfig, tensors: Sequence[Values]) -> None:
        self._codec = Codec()
        self._specs: Sequence[TensorSpec] = config.outputs
        # If there is a function, it takes by far most of that part.
        before = "preprocess" if config.preprocess else "copy in"
        self._names = (before, "postprocess" if config.postprocess else "copy out")
        self._head, self._body = encode_infer(tensors)
        self._is_answered = Event()
        self._error: PenstockError | None = None
        self._encode_s = 0.0
        # For each request, its seconds by part, in the order it passes them.
        self.requests: list[dict[str, float]] = []

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        """Record the answer; called on the model's thread."""
        if isinstance(answer, PenstockError):
            self._error = answer
        else:
            began = time.perf_counter()
            self._codec.encode_answer(request, answer, self._specs)
            self._encode_s = time.perf_counter() - began
        if final:
            self._is_answered.set()

    def send(self, model: LocalModel) -> None:
        self._is_answered.clear()
        began = time.perf_counter()
        request = self._codec.decode_infer(self._body, self._head, self, time.monotonic())
        decode_s = time.perf_counter() - began
        model.send(request)
        if not self._is_answered.wait(TIMEOUT_S):
            raise PenstockError(f"no answer within {TIMEOUT_S:g} s")
        if self._error is not None:
            raise self._error
        timings = request.timings
        before, after = self._names
        parts = {"decode": decode_s, "queue": max(0.0, timings.dispatched - timings.queued)}
        parts |= {before: timings.compute_input_s, "compute": timings.compute_infer_s}
        self.requests.append(parts | {after: timings.compute_output_s, "encode": self._encode_s})


def buckets_of(
    config: ModelConfig, folder: Path, tensors: Sequence[Values], num_runs: int
) -> list[RequestPhase]:
    """Return the median time of each part, in the order a request passes them."""
    sender = TimedSender(config, tensors)
    with LocalModel(str(folder), config.version) as model:
        for _ in range(NUM_WARM_UP + num_runs):
            sender.send(model)
    counted = sender.requests[NUM_WARM_UP:]
    return [RequestPhase(name, median(each[name] for each in counted)) for name in counted[0]]


if __name__ == "__main__":
    # The parent ends this process. Ctrl-C at a terminal reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
