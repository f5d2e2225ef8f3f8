"""Optimisations for tests of reports: of the size and with the figures that a small language model
on a few cores gives. Every call makes new values."""

import math

from penstock.benchmark.stats import Interval
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import Candidate, Skip, Stage, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.machine import Machine
from penstock.optimizer.numerics import Numerics
from penstock.optimizer.results import (
    Curve,
    FallbackLayer,
    Optimization,
    Outcome,
    Phase,
    ServedMeasurement,
    Streams,
    TermVerdict,
    Try,
)
from penstock.optimizer.simulate import TimeTable
from penstock.profiling.results import (
    Bound,
    NextStep,
    Operator,
    Peaks,
    Profile,
    RequestPhase,
)

MIB = 2**20
SLO = "p99 < 20ms at 200/s poisson"
PRICE = 0.4

EXPORT = Step("onnx-export")
GRAPH = Step("onnx-graph", {"level": "all"})
FUSION = Step("transformer-fusion", {"heads": "12"})
OPENVINO = Step("openvino")
HALF = Step("half", {"datatype": "BF16"})
DYNAMIC = Step("int8-dynamic", {"per_channel": "yes"})
ENTROPY = Step("int8-static", {"calibrator": "entropy", "per_channel": "yes"})
MINMAX = Step("int8-static", {"calibrator": "minmax", "per_channel": "yes", "kept": "2"})
BATCHING = Step("batching", {"mode": "slo", "max_batch": "16"})
INSTANCES = Step("instances", {"instances": "2", "threads": "1"})
MEMORY = Step("memory", {"arena": "shared"})

ORIGINAL = Candidate()
EXPORTED = ORIGINAL.then(EXPORT)
FUSED = EXPORTED.then(FUSION)
QUANTISED = FUSED.then(MINMAX)
BATCHED = QUANTISED.then(BATCHING)
CHOSEN = BATCHED.then(INSTANCES)


def around(value: float, part: float = 0.03) -> Interval:
    return Interval(value, value * (1 - part), value * (1 + part))


def machine() -> Machine:
    return Machine(
        cpu="Example CPU 9000",
        num_cores=4,
        memory_bytes=16 * 2**30,
        isa=("avx2", "f16c", "avx512_vnni"),
        versions={"onnxruntime": "1.24.0", "torch": "2.13.0", "penstock": "0.1.0"},
    )


def judgement(
    loss: float = 0.002, bound: float = 0.006, limit: float = 0.01, part: str = "choice"
) -> Judgement:
    return Judgement(
        metric="top1",
        original=0.912,
        candidate=0.912 - loss,
        loss=loss,
        loss_bound=bound,
        limit=limit,
        num_examples=1500,
        num_better=11,
        num_worse=14,
        method="exact binomial on discordant pairs",
        alpha=0.05,
        is_passed=bound <= limit,
        part=part,
        text=f"top1 loses {100 * loss:.1f} points, at most {100 * bound:.1f}",
    )


def numerics(max_relative: float = 2e-6) -> Numerics:
    return Numerics(
        num_examples=64,
        is_finite=True,
        has_same_shapes=True,
        max_absolute=max_relative * 4,
        max_relative=max_relative,
        min_cosine=1 - max_relative,
        agreement=1.0 if max_relative < 1e-3 else 0.992,
    )


def facts(num_quantised: int = 0) -> Facts:
    weights = {"FP32": 90 * MIB} if not num_quantised else {"FP32": 3 * MIB, "INT8": 22 * MIB}
    return Facts(
        backend="onnxruntime",
        operators={"MatMul": 36, "Softmax": 6, "LayerNormalization": 13},
        weight_bytes=weights,
        quantised={"MatMul": num_quantised} if num_quantised else {},
        built={"providers": "CPUExecutionProvider", "threads": "1"},
        num_parameters=22_700_000,
        file_bytes=sum(weights.values()),
    )


def times(first_s: float = 0.004) -> TimeTable:
    seconds = {rows: first_s * (0.4 + 0.6 * rows) for rows in (1, 8, 16)}
    return TimeTable(2, 1, {32: seconds, 128: {rows: 3 * s for rows, s in seconds.items()}})


def verdict(p99: Interval, limit_s: float = 0.02) -> TermVerdict:
    outcome = "kept" if p99.value < limit_s else "missed"
    return TermVerdict("p99 < 20ms", outcome, p99, limit_s, "s")


def curve(max_rate: float, floor_s: float) -> Curve:
    """What a queue would do: latency grows without bound towards the highest rate."""
    rates = [max_rate * share for share in (0.2, 0.4, 0.6, 0.8, 0.9, 1.1)]
    waits = [1 / max(1 - rate / (max_rate * 1.05), 0.02) for rate in rates]
    return Curve(
        rates=rates,
        throughput=[min(rate, max_rate * 1.02) for rate in rates],
        p50_s=[floor_s * (0.6 + 0.4 * wait) for wait in waits],
        p99_s=[floor_s * (1.2 + 0.9 * wait) for wait in waits],
    )


def served(p99_s: float, max_rate: float, memory_mib: int) -> ServedMeasurement:
    p99 = around(p99_s)
    compute_s = 0.35 * min(p99_s, 0.05)
    return ServedMeasurement(
        load="200/s poisson",
        p50=around(0.45 * p99_s, 0.01),
        p99=p99,
        throughput=around(min(200.0, max_rate), 0.005),
        goodput=0.998 if p99_s < 0.02 else 0.61,
        verdicts=[verdict(p99)],
        num_requests=2000,
        num_failed=0,
        phases={
            "preprocess": 0.0008,
            "queue": 0.3 * p99_s,
            "compute input": 0.00005,
            "compute": compute_s,
            "compute output": 0.00002,
            "network and codec": 0.0004,
        },
        rows_per_batch=3.4,
        memory_bytes=memory_mib * MIB,
        max_rate=around(max_rate, 0.02),
        cost_per_million=PRICE / 3600 / max_rate * 1e6,
        curve=curve(max_rate, 0.4 * min(p99_s, 0.05)),
        num_runs=2,
    )


def attempt(
    candidate: Candidate,
    stage: Stage,
    outcome: Outcome,
    reason: str,
    rate: float | None = None,
) -> Try:
    return Try(
        candidate,
        stage,
        outcome,
        reason,
        facts=facts(),
        numerics=numerics(),
        times=[times()],
        predicted_rate=rate,
        predicted_shape="2 instances x 1 thread, batches of 8" if rate else "",
        seconds=6.5,
    )


def tries() -> list[Try]:
    found = [
        attempt(ORIGINAL, "baseline", "kept", "the original, as it would be served", 98.0),
        attempt(EXPORTED, "compile", "kept", "1.4x the rate of the original", 137.0),
        attempt(EXPORTED.then(GRAPH), "compile", "equal", "within 2 % of its parent", 139.0),
        attempt(FUSED, "compile", "kept", "1.2x the rate of its parent", 168.0),
        attempt(EXPORTED.then(OPENVINO), "compile", "slower", "0.9x the rate of the best", 150.0),
        Try(FUSED.then(HALF), "precision", "failed", "BF16: no kernel for LayerNormalization"),
        attempt(FUSED.then(DYNAMIC), "quantise", "rejected", "built FP32: no MatMul is quantised"),
        attempt(FUSED.then(ENTROPY), "quantise", "rejected", "top1 may lose 4.4 points", 262.0),
        attempt(QUANTISED, "quantise", "kept", "1.5x the rate of its parent", 255.0),
        attempt(BATCHED, "batching", "kept", "1.1x the rate of its parent", 280.0),
        attempt(CHOSEN, "instances", "kept", "p99 keeps 20 ms up to 304/s", 296.0),
        attempt(CHOSEN.then(MEMORY), "memory", "equal", "the same rate, not simpler", 295.0),
    ]
    found[0].served = served(0.41, 98.0, 620)
    found[10].served = served(0.0118, 304.0, 212)
    found[6].numerics = None
    found[7].accuracy = judgement(0.031, 0.044)
    found[8].accuracy = judgement()
    for index in (7, 8):
        found[index].facts = facts(34)
        found[index].numerics = numerics(0.021)
    found[8].fallback = [
        FallbackLayer("/encoder/layer.0/attention/query/MatMul", "MatMul", 0.62, 0.00011),
        FallbackLayer("/classifier/Gemm", "Gemm", 0.21, 0.000004),
    ]
    return found


def phases() -> list[Phase]:
    cost = PRICE / 3600 * 1e6
    return [
        Phase("original", 0.41, 98.0, 0.912, cost / 98.0, True),
        Phase("onnx-export", 0.061, 137.0, 0.912, cost / 137.0, False),
        Phase("transformer-fusion", 0.034, 168.0, 0.912, cost / 168.0, False),
        Phase(
            "int8-static(calibrator=minmax, per_channel=yes)",
            math.nan,
            255.0,
            0.910,
            cost / 255.0,
            False,
        ),
        Phase("as served: batching → instances", 0.0118, 304.0, 0.910, cost / 304.0, True),
    ]


def operator(name: str, seconds: float, flops: float, num_bytes: float, bound: Bound) -> Operator:
    kind = name.rsplit("/", 1)[-1]
    return Operator(name, kind, seconds, flops, num_bytes, "fp32", bound, 0.6, name.split("/")[1])


def profile() -> Profile:
    operators = [
        operator("/layer.0/MatMul", 0.0011, 5.6e7, 1.3e6, "compute"),
        operator("/layer.0/LayerNormalization", 0.0002, 2.5e5, 4e5, "memory"),
        operator("/layer.0/Softmax", 0.0001, 1.2e5, 2e5, "memory"),
        operator("/layer.1/MatMul", 0.0012, 5.6e7, 1.3e6, "compute"),
        operator("/pool/Add", 0.00001, 4e3, 9e3, "launch"),
        Operator("/pool/Gather", "Gather", 0.00002, None, None, "fp32", "unknown", None),
    ]
    return Profile(
        model="reviews",
        backend="onnxruntime",
        batch="1 row of 32 tokens",
        num_runs=40,
        total_s=0.0027,
        profiled_s=0.0031,
        operators=operators,
        peaks=Peaks("Example CPU 9000", 1, {"fp32": 9e10, "int8": 2.9e11}, 1.2e10, 3e-6),
        buckets=[RequestPhase("queue", 0.003), RequestPhase("compute", 0.0027)],
        bound="compute",
        findings=["87 % of the time is MatMul, compute-bound at 56 % of the peak"],
        recommendation="Compute-bound: 87 % of the time. Next: INT8 MatMul: at most 2.4x",
        ceiling=2.4,
        steps=[
            NextStep("int8", "INT8 MatMul: at most 2.4x", 2.4),
            NextStep("path", "encode is 20 % of a request: at most 1.2x", 1.2),
        ],
    )


def kept() -> Optimization:
    return Optimization(
        name="reviews",
        source="hf/minilm-reviews",
        source_text="Hugging Face, 22.7 M parameters, FP32",
        slo=SLO,
        accuracy_budget="top1 drop <= 1 %",
        data_text="3,000 examples of reviews.npz, labelled",
        machine=machine(),
        created="2026-11-15 12:00:00 UTC",
        command="penstock optimize hf/minilm-reviews --data reviews.npz --out models",
        tries=tries(),
        skipped=[
            Skip("torch-compile", "the model is served by onnxruntime by now"),
            Skip("half", "no fast FP16 instructions", Step("half", {"datatype": "FP16"})),
        ],
        chosen=CHOSEN,
        before=served(0.41, 98.0, 620),
        after=served(0.0118, 304.0, 212),
        is_proven=True,
        held_out=judgement(part="held out"),
        phases=phases(),
        outcome="kept",
        version="1",
        out="models",
        work="models/.optimize/reviews/0123456789abcdef",
        price_per_hour=PRICE,
        profile=profile(),
        profiled=FUSED.key,
        elapsed_s=412.0,
        num_measured=31,
        num_remembered=4,
    )


def missed() -> Optimization:
    found = kept()
    found.outcome = "missed"
    found.after = served(0.0268, 151.0, 212)
    found.phases[-1] = Phase("as served: batching → instances", 0.0268, 151.0, 0.910, 0.74, True)
    found.binding = "compute (71 % of a request's 11.2 ms)"
    return found


def served_otherwise() -> Optimization:
    """Chosen with steps that were not tried one by one; nobody could say its highest rate."""
    found = missed()
    found.chosen, found.tries = CHOSEN, found.tries[:9]
    found.tries[8].outcome = "equal"
    assert found.after is not None
    found.after.max_rate = Interval(math.nan, math.nan, math.nan)
    found.after.cost_per_million = math.inf
    found.phases[-1].max_rate = math.nan
    return found


def refused() -> Optimization:
    found = kept()
    found.outcome = "refused"
    for each in found.tries:
        if each.stage in ("quantise", "batching", "instances", "memory"):
            each.outcome = "rejected"
    wide = judgement(0.002, 0.058)
    wide.num_examples, wide.num_needed = 50, 900
    wide.text = "50 examples cannot tell: top1 may lose 5.8 points; needs about 900 examples"
    found.tries[8].accuracy = wide
    found.tries = found.tries[:9]
    found.chosen, found.after, found.held_out, found.version = None, None, None, ""
    found.phases = found.phases[:1]
    return found


def disturbed() -> Optimization:
    """The measurements contradict each other, so there is no verdict."""
    found = missed()
    found.outcome = "disturbed"
    found.disturbances = ["load average 3.9 on 2 cores", "other processes used 45 % of the CPU"]
    found.unchecked = ["output 'embedding' is not compared: --outputs names 'logits' only"]
    return found


def out_of_time() -> Optimization:
    """What was quantised was refused, and the time was up before the rest was tried."""
    found = refused()
    found.skipped.append(Skip("fp8", "out of time before it was tried", cut_by="time"))
    found.notes = ["the time budget ended before every step was tried"]
    found.is_proven = False
    return found


def already_met() -> Optimization:
    """The original keeps the SLO: nothing else was looked at."""
    found = kept()
    found.before = found.after = served(0.0142, 240.0, 212)
    found.chosen, found.held_out, found.profile = ORIGINAL, None, None
    found.tries, found.phases, found.skipped = found.tries[:1], [], []
    return found


def without_data() -> Optimization:
    found = kept()
    found.notes = ["No data was given: inputs were drawn from the signature, static INT8 and the"]
    found.notes[0] += " accuracy gate were left out."
    found.data_text, found.accuracy_budget, found.held_out = "drawn from the signature", "", None
    found.skipped.append(Skip("int8-static", "no data to calibrate with"))
    found.chosen = FUSED.then(BATCHING).then(INSTANCES)
    found.tries = [*found.tries[:6], *found.tries[9:11]]
    found.tries[6].candidate, found.tries[7].candidate = found.chosen.parent, found.chosen
    del found.phases[3]
    for phase in found.phases:
        phase.accuracy = None
        phase.cost_per_million = None
    for run in (found.before, found.after):
        assert run is not None
        run.cost_per_million = None
    found.price_per_hour = None
    return found


def interrupted() -> Optimization:
    """After two steps: nothing but the original was served."""
    found = kept()
    found.outcome = "interrupted"
    found.notes = ["Interrupted: what came later in the sequence was not tried."]
    found.tries, found.phases = found.tries[:4], found.phases[:3]
    found.chosen, found.after, found.held_out, found.profile = FUSED, None, None, None
    found.elapsed_s, found.version = 95.0, ""
    return found


def nothing() -> Optimization:
    """Stopped before anything was measured."""
    found = interrupted()
    found.tries, found.phases, found.skipped = [], [], []
    found.chosen = found.before = None
    return found


def unknown_figures() -> Optimization:
    """Nobody could answer: figures that are infinite, or not numbers."""
    found = missed()
    assert found.before is not None
    endless = Interval(math.inf, math.inf, math.inf)
    found.before.p50 = found.before.p99 = endless
    found.before.max_rate = Interval(0.0, 0.0, 0.0)
    found.before.verdicts = [TermVerdict("p99 < 20ms", "missed", endless, 0.02, "s")]
    found.before.curve = Curve([50.0, 100.0], [20.0, 20.0], [math.inf] * 2, [math.nan] * 2)
    found.before.cost_per_million = math.inf
    found.phases[0] = Phase("original", math.inf, 0.0, math.nan, math.inf, True)
    return found


TEXT_SLO = "p99 ttft < 500ms, p99 tpot < 100ms at 2/s poisson"
DTYPE = Step("dtype", {"dtype": "bfloat16"})
PACE = Step("pace", {"tpot_ms": "100"})


def served_text(rate: float, tpot_s: float) -> ServedMeasurement:
    """Answers in pieces; how long a request was in which phase nobody knows."""
    ttft, tpot = around(3 * tpot_s), around(tpot_s)
    rates = [0.5 * rate, rate, 2 * rate]
    made = Curve(
        rates=rates,
        throughput=rates,
        p50_s=[20 * tpot_s] * 3,
        p99_s=[30 * tpot_s] * 3,
        ttft_p99_s=[2 * tpot_s, 3 * tpot_s, 9 * tpot_s],
        tpot_p99_s=[0.8 * tpot_s, tpot_s, 4 * tpot_s],
    )
    return ServedMeasurement(
        load="2/s poisson",
        p50=around(20 * tpot_s),
        p99=around(30 * tpot_s),
        throughput=around(2.0),
        goodput=1.0 if tpot_s < 0.1 else 0.7,
        verdicts=[
            TermVerdict("p99 ttft < 500ms", "kept", ttft, 0.5, "s"),
            TermVerdict("p99 tpot < 100ms", "kept" if tpot_s < 0.1 else "missed", tpot, 0.1, "s"),
        ],
        num_requests=40,
        num_failed=0,
        phases={},
        rows_per_batch=math.nan,
        memory_bytes=900 * MIB,
        max_rate=around(rate, 0.15),
        curve=made,
        num_runs=2,
        streams=Streams(ttft, tpot, 400.0, 60.0),
    )


def text() -> Optimization:
    """Of a language model: a datatype was kept, and how its steps are filled."""
    chosen = Candidate((DTYPE, PACE))
    kl = Judgement(
        "kl", 0.0, 0.0014, 0.0014, 0.0016, 0.02, 24, 0, 24, "paired BCa bootstrap", 0.05, True
    )
    original = Try(
        ORIGINAL, "baseline", "kept", "1.50/s keep the SLO", served=served_text(1.5, 0.12)
    )
    half = Try(Candidate((DTYPE,)), "precision", "kept", "2.60/s keep the SLO", accuracy=kl)
    half.served = served_text(2.6, 0.07)
    paced = Try(chosen, "batching", "kept", "3.00/s keep the SLO", served=served_text(3.0, 0.06))
    return Optimization(
        name="smol",
        source="smol.gguf",
        source_text="GGUF, 135 M parameters, float32",
        slo=TEXT_SLO,
        accuracy_budget="kl rise <= 0.02",
        data_text="96 prompts of prompts.jsonl, asked as chats",
        machine=machine(),
        created="2026-11-15 12:00:00 UTC",
        command="penstock optimize smol.gguf --data prompts.jsonl --out models",
        tries=[original, half, paced],
        skipped=[Skip("dtype", "only GPUs multiply in it", Step("dtype", {"dtype": "fp8"}))],
        chosen=chosen,
        before=original.served,
        after=paced.served,
        held_out=kl,
        phases=[
            Phase("original", 3.6, 1.5, 0.0, None, True),
            Phase(str(DTYPE), 2.1, 2.6, 0.0014, None, True),
            Phase(str(PACE), 1.8, 3.0, 0.0014, None, True),
        ],
        is_proven=True,
        outcome="kept",
        version="1",
        out="models",
        elapsed_s=300.0,
        form="text",
    )


MAKERS = {
    "kept": kept,
    "missed": missed,
    "refused": refused,
    "disturbed": disturbed,
    "out-of-time": out_of_time,
    "already-met": already_met,
    "without-data": without_data,
    "interrupted": interrupted,
    "nothing": nothing,
    "unknown-figures": unknown_figures,
    "served-otherwise": served_otherwise,
    "text": text,
}
