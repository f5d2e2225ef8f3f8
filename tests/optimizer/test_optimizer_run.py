"""A whole run on a small model, with real children and a real server."""

import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import fake_nvml
import msgspec
import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from made_evaluators import made_evaluator
from made_recordings import write_recording
from optimizer import made_optimizations
from served_builds import null_build, write_outlier_model
from suites import onnx_models
from waiting import wait_until

import penstock
from penstock import slo
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer import (
    endpoints,
    evidence,
    run,
    shapes,
    tensor_run,
    time_plan,
    trials,
    workspace,
)
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.examples import Examples, Split, open_examples
from penstock.optimizer.journal import Journal
from penstock.optimizer.machine import Machine
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress import Progress
from penstock.optimizer.results import Optimization
from penstock.optimizer.subject import Subject, open_subject
from penstock.repository import layout, manifest
from penstock.system import devices
from penstock.types import TensorSpec

WISH = slo.parse("p99 < 2s at 20/s")
SIZE = 32
GPU = devices.Gpu(0, "GPU-0", "none", 80 << 30, 79 << 30)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A classifier that is right about most of its labels, and an SLO that anything keeps."""
    model = onnx_models.stack(2)
    onnx.save(model, tmp_path / "small.onnx")
    rows = np.random.default_rng(3).normal(size=(200, SIZE)).astype(np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    labels = session.run(None, {"x": rows})[0].argmax(axis=1)
    labels[::10] = (labels[::10] + 1) % SIZE
    np.savez(tmp_path / "data.npz", x=rows, label=labels)
    return Plan(
        str(tmp_path / "small.onnx"),
        "small",
        str(tmp_path / "models"),
        slo=WISH,
        data=str(tmp_path / "data.npz"),
        duration_s=1.0,
        # Too little for a search for the highest rate, which takes a minute.
        budget_s=38.0,
    )


@pytest.mark.slow
def test_an_slo_that_the_original_keeps(plan: Plan) -> None:
    """At once, with its proof; and run again nothing is measured, and nothing committed twice."""
    told: list[Progress] = []
    found = run.optimize(plan, told.append, "penstock optimize …")
    assert found.outcome == "kept"
    assert found.chosen is not None and not found.chosen.steps
    assert [str(each.candidate) for each in found.tries] == ["original"]
    assert found.held_out is not None
    assert found.held_out.original == pytest.approx(0.9, abs=0.06)
    assert {each.stage for each in told} == {"baseline", "proof"}
    check_evidence(plan, found)

    again = run.optimize(plan, lambda progress: None, "")
    assert again.num_measured == 0
    assert again.num_remembered > 0
    assert again.version == found.version == "1"
    # Also where a figure is not known, and NaN is not even equal to itself.
    assert repr(again.after) == repr(found.after)
    assert layout.version_folders(Path(plan.out) / "small") == ["1"]
    [journal] = (Path(plan.out) / workspace.WORK / "small").glob("*/journal.jsonl")
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    keys = [(each["kind"], each["key"]) for each in records]
    assert len(keys) == len(set(keys))


def check_evidence(plan: Plan, found: Optimization) -> None:
    kept = manifest.read(Path(plan.out) / "small" / found.version)
    assert kept is not None
    assert found.held_out is not None
    assert kept.evidence["slo"] == "p99 < 2s at 20/s poisson"
    assert kept.evidence["outcome"] == "kept"
    assert kept.evidence["measured"]["p99"]["value"] > 0
    assert kept.evidence["accuracy"]["num_examples"] == found.held_out.num_examples
    assert kept.evidence["lineage"]["steps"] == []
    assert kept.evidence["hardware"]["num_cores"] >= 1
    assert kept.evidence["versions"]["onnxruntime"]
    (config,) = layout.read(Path(plan.out) / "small").configs
    assert config.slo == "p99 < 2s at 20/s poisson"
    with penstock.load(Path(plan.out) / "small") as model:
        answer = model.infer(np.zeros((1, SIZE), np.float32))
    assert answer["y"].shape == (1, SIZE)


@pytest.mark.slow
def test_live_traffic_is_data_and_the_evidence_says_so(plan: Plan, tmp_path: Path) -> None:
    """Two rows a request, some of them twice; the version is compared with it when it is served."""
    values = np.random.default_rng(4).normal(size=(100, 2, SIZE)).astype(np.float32)
    requests = [{"x": each} for each in (*values, *values[:30])]
    folder = write_recording(tmp_path / "rec", requests, name="small")
    live = replace(plan, data=str(folder), from_live=str(tmp_path / "rec"))
    found = run.optimize(live, lambda progress: None, "")
    assert found.outcome == "kept" and found.data_text.startswith(
        "200 examples of small, without labels; live traffic, the latest different rows; recorded "
    )
    assert any("correctness was not checked" in each for each in found.unchecked)
    kept = manifest.read(Path(plan.out) / "small" / found.version)
    assert kept is not None
    span = kept.evidence["lineage"]["live"]
    assert span == {"from": "2023-11-14T22:13:20+00:00", "to": "2023-11-14T22:13:32+00:00"}
    known = kept.evidence["input_statistics"]["x"]["value"]
    assert known["num_rows"] == 200 and known["count"] == 200 * SIZE
    assert known["max"] == pytest.approx(float(values.max()))
    with penstock.load(Path(plan.out) / "small") as model:
        model.infer(values[0])
        wait_until(lambda: len(model.drift()) == 1 or model.infer(values[0]) is None)


def test_redacted_inputs_are_no_data(plan: Plan, tmp_path: Path) -> None:
    rows = [{"x": np.zeros((1, SIZE), np.float32)}] * 20
    folder = write_recording(tmp_path / "rec", rows, redacted=["x"])
    with pytest.raises(ConfigError, match="redacted inputs have no values to optimise with: 'x'"):
        inputs = (TensorSpec("x", "FP32", (SIZE,)),)
        open_examples(replace(plan, data=str(folder), labels=""), inputs, has_batch=True)


MACHINE = Machine("a processor", 2, 1 << 30, ("avx2",), versions={"onnxruntime": "1.2"})


def key_of(plan: Plan, machine: Machine = MACHINE, model: str = "m", data: str = "d") -> str:
    config = ModelConfig("m", "1", "null", "", (), (), 0, BatchPolicy(0))
    subject = Subject(Build(Candidate(), Path("m"), config), "ONNX", model, "ONNX")
    examples = Examples([], None, Split((), (), ()), data, "")
    made = tensor_run.TensorRun(plan, lambda progress: None, "", 0.0, "today", machine)
    return made.key(subject, examples)


def test_a_journal_is_of_one_model_data_machine_and_wish(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "scoring.py"
    code.write_text("def score(outputs, labels): ...")
    scored = replace(plan, evaluator="scoring:score")
    processed = replace(plan, postprocess="scoring:score")
    keys = [
        key_of(plan),
        key_of(plan, model="other"),
        key_of(plan, data="other"),
        key_of(plan, machine=msgspec.structs.replace(MACHINE, versions={"onnxruntime": "1.3"})),
        key_of(replace(plan, slo=slo.parse("p99 < 1s at 20/s"))),
        key_of(replace(plan, seed=1)),
        key_of(replace(plan, is_exhaustive=True)),
        key_of(scored),
        key_of(processed),
    ]
    code.write_text("def score(outputs, labels): return 1")
    importlib.invalidate_caches()
    keys += [key_of(scored), key_of(processed)]
    assert len(set(keys)) == len(keys)


def test_more_time_another_price_or_place_go_on_with_the_same(plan: Plan) -> None:
    for other in (
        replace(plan, budget_s=600.0),
        replace(plan, price_per_hour=2.0),
        replace(plan, out="elsewhere"),
    ):
        assert key_of(other) == key_of(plan)


def test_labels_that_the_original_knows_nothing_of_are_refused(plan: Plan) -> None:
    with np.load(plan.data) as arrays:
        rows, labels = arrays["x"], arrays["label"]
    np.savez(plan.data, x=rows, label=np.random.default_rng(0).permutation(labels))
    with pytest.raises(ConfigError, match="guessing gives"):
        run.optimize(plan, lambda progress: None, "")
    assert not Path(plan.out).exists(), "nothing is left that was not there"


def test_a_refused_run_leaves_what_was_there(plan: Plan) -> None:
    with_nan(plan, 117)
    other = Path(plan.out) / ".optimize" / "other" / "journal.jsonl"
    other.parent.mkdir(parents=True)
    other.touch()
    for _ in range(2):
        with pytest.raises(ConfigError, match="row 117 has NaN"):
            run.optimize(plan, lambda progress: None, "")
    found = {path.relative_to(plan.out).as_posix() for path in Path(plan.out).rglob("*")}
    assert found == {".optimize", ".optimize/other", ".optimize/other/journal.jsonl"}


def test_data_that_cannot_be_read_leaves_nothing(plan: Plan) -> None:
    Path(plan.data).write_bytes(b"no archive")
    with pytest.raises(ConfigError):
        run.optimize(plan, lambda progress: None, "")
    assert not Path(plan.out).exists()


def with_nan(plan: Plan, row: int) -> None:
    with np.load(plan.data) as loaded:
        arrays = dict(loaded)
    arrays["x"][row, 5] = np.nan
    np.savez(plan.data, **arrays)


def test_a_row_that_makes_the_answer_nan_is_refused_with_its_index(plan: Plan) -> None:
    with_nan(plan, 117)
    with pytest.raises(ConfigError) as caught:
        run.optimize(plan, lambda progress: None, "")
    [problem] = caught.value.problems
    assert problem.startswith(
        "data.npz: input 'x' row 117 has NaN, and the model's answer is not finite either; leave"
    )


@pytest.mark.slow
def test_a_model_that_takes_nan_for_a_missing_value_gets_it(plan: Plan) -> None:
    """As trees do: here it is replaced before anything is computed."""
    model = onnx.load(plan.model)
    for node in model.graph.node:
        node.input[:] = ["filled" if name == "x" else name for name in node.input]
    zero = onnx.numpy_helper.from_array(np.float32(0), "nothing")
    model.graph.initializer.append(zero)
    fill = [
        onnx.helper.make_node("IsNaN", ["x"], ["missing"]),
        onnx.helper.make_node("Where", ["missing", "nothing", "x"], ["filled"]),
    ]
    nodes = [*fill, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, plan.model)
    with_nan(plan, 117)
    found = run.optimize(plan, lambda progress: None, "")
    assert found.outcome == "kept"
    note = "data.npz: input 'x' row 117 has NaN; the model answers with finite values"
    assert note in found.notes


def test_what_users_get_is_judged_and_the_model_before_it_compared(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = "def name(outputs):\n    return {'name': f\"class {outputs['y'].argmax()}\"}\n"
    (tmp_path / "naming.py").write_text(code)
    np.savez(tmp_path / "rows.npz", x=np.load(tmp_path / "data.npz")["x"])
    wishes = replace(plan, data=str(tmp_path / "rows.npz"), postprocess="naming:name")
    subject = open_subject(wishes, tmp_path / "work" / "small")
    examples = open_examples(wishes, subject.build.config.inputs, True)
    # The same model with another function behind it.
    changed = tmp_path / "changed" / "small"
    shutil.copytree(subject.build.folder, changed)
    (changed / "1" / "postprocess.py").write_text(code.replace("argmax", "argmin"))
    step = Step("batching", {"mode": "off"})
    other = Build(Candidate((step,)), changed, layout.read(changed).configs[0])
    with Journal(tmp_path / "journal") as journal:
        lab = made_evaluator(wishes, MACHINE, subject, examples, journal)
        found = lab.gate.numerics(other, is_exact=True)
        assert (found.problems, found.max_absolute, found.num_examples) == ([], 0.0, 64)
        assert lab.gate.scorer.text == "the original's answers again"
        judged = lab.gate.judge(other, "choice")
        assert judged.original == 1.0
        assert judged.candidate < 0.2 and not judged.is_passed


OUTLIER = 77


@pytest.fixture
def outlier_plan(plan: Plan, tmp_path: Path, write_onnx) -> Plan:
    """Rows influence each other next to one of the examples only."""
    write_outlier_model(tmp_path / "outlier.onnx", write_onnx, SIZE)
    rows = np.random.default_rng(3).normal(size=(200, SIZE)).astype(np.float32)
    labels = rows.argmax(axis=1)
    rows[OUTLIER] *= 300
    np.savez(tmp_path / "outliers.npz", x=rows, label=labels)
    model, data = str(tmp_path / "outlier.onnx"), str(tmp_path / "outliers.npz")
    return replace(plan, model=model, data=data)


@pytest.mark.slow
def test_a_model_whose_real_rows_influence_each_other_is_never_batched(outlier_plan: Plan) -> None:
    """Neither as the baseline nor as it is committed; the check at load would let it be."""
    found = run.optimize(outlier_plan, lambda progress: None, "")
    assert found.outcome == "kept"
    [note] = [each for each in found.notes if each.startswith("the original is served without")]
    assert "without batching: answers depend on other rows in the batch: output 'y'" in note
    assert note.endswith(f"next to example {OUTLIER}")
    (config,) = layout.read(Path(outlier_plan.out) / "small").configs
    assert not config.batching.is_dynamic
    [original] = [each for each in found.tries if not each.candidate.steps]
    assert original.facts is not None and original.facts.batching_problem in note
    # It is timed as it is served: one row at a time.
    assert {rows for table in original.times for rows in table.seconds[0]} == {1}


def lab_of(plan: Plan, folder: Path, journal: Journal) -> Evaluator:
    subject = open_subject(plan, folder / "small")
    examples = open_examples(plan, subject.build.config.inputs, True)
    return made_evaluator(plan, MACHINE, subject, examples, journal)


def test_what_the_gate_judges_is_what_is_served(outlier_plan: Plan, tmp_path: Path) -> None:
    """Once rows are known to influence each other, answers are those of rows alone."""
    with Journal(tmp_path / "journal") as journal:
        lab = lab_of(outlier_plan, tmp_path / "work", journal)
        assert lab.run.original.config.batching.is_dynamic
        lab.inspector.check_rows()
        assert not lab.run.original.config.batching.is_dynamic
        indices = tuple(range(OUTLIER - 3, OUTLIER + 3))
        answers = lab.source.answers(lab.run.original, indices)
        for index, answer in zip(indices, answers, strict=True):
            if index != OUTLIER:
                assert answer["y"] == pytest.approx(lab.run.rows[index]["x"], rel=1e-6)
        # A build with a tolerance of its own is served as its parent is.
        config = replace(lab.run.original.config, tolerance=0.9)
        other = Build(Candidate((Step("int8-dynamic"),)), lab.run.original.folder, config)
        assert "next to example" in lab.inspector.facts(other).batching_problem
        assert set(lab.measurements.times(other, 1, 1).seconds[0]) == {1}
        # A run that goes on finds the original as it was left.
        examples = open_examples(outlier_plan, lab.run.original.config.inputs, True)
        again = made_evaluator(outlier_plan, MACHINE, lab.run.subject, examples, journal)
        again.inspector.check_rows()
        assert again.run.original == lab.run.original
        assert again.run.notes == lab.run.notes != []


NOISY = """
import numpy as np

random = np.random.default_rng()

def infer(inputs):
    x = inputs["x"]
    return {"y": x + random.normal(size=x.shape).astype(np.float32)}
"""
PYTHON_CONFIG = f"""
backend: "python" max_batch_size: 4
input {{ name: "x" data_type: TYPE_FP32 dims: {SIZE} }}
output {{ name: "y" data_type: TYPE_FP32 dims: {SIZE} }}
"""


def python_plan(plan: Plan, root: Path, code: str) -> Plan:
    """A model of a repository, whose author allows batches of 4."""
    folder = root / "repository" / "written"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    (folder / "config.pbtxt").write_text(PYTHON_CONFIG)
    return replace(plan, model=str(folder))


def test_a_model_that_answers_differently_each_time_cannot_be_judged(
    plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        run.optimize(python_plan(plan, tmp_path, NOISY), lambda progress: None, "")
    [problem] = caught.value.problems
    assert problem.startswith(
        "the model's answers differ between two runs on the same rows: output 'y' of example "
    )
    assert "fix its seed" in problem
    assert not (Path(plan.out) / "small").exists()


def test_batches_do_not_exceed_the_authors_limit(plan: Plan, tmp_path: Path) -> None:
    code = "def infer(inputs):\n    return {'y': 2 * inputs['x']}\n"
    with Journal(tmp_path / "journal") as journal:
        lab = lab_of(python_plan(plan, tmp_path, code), tmp_path / "work", journal)
        lab.inspector.check_rows()
        assert max(lab.measurements.times(lab.run.original, 1, 1).seconds[0]) == 4
    with Journal(tmp_path / "other journal") as journal:
        # A limit that nobody wrote may be exceeded.
        lab = lab_of(plan, tmp_path / "bare", journal)
        subject = replace(lab.run.subject, build=lab.run.original)
        config = replace(lab.run.original.config, max_batch_size=4)
        lab.run.subject = replace(subject, build=replace(lab.run.original, config=config))
        assert max(lab.measurements.times(lab.run.original, 1, 1).seconds[0]) == trials.LARGEST_RUNG


def committed(plan: Plan, tmp_path: Path, outcome: str) -> tuple[ModelConfig, Optimization]:
    """The version of a build that was measured in slo mode, as a server reads it."""
    subject = open_subject(plan, tmp_path / "work" / "small")
    settings = {"mode": "slo", "max_batch": "8"}
    config = shapes.with_batching(subject.build.config, settings, WISH)
    found = made_optimizations.missed()
    found.outcome, found.out, found.name, found.slo = outcome, plan.out, "small", str(WISH)
    build = tensor_run.without_promise(replace(subject.build, config=config), found)
    evidence.commit(build, found, "a run")
    (config,) = layout.read(Path(plan.out) / "small").configs
    return config, found


def test_a_version_that_keeps_its_slo_is_served_in_slo_mode(plan: Plan, tmp_path: Path) -> None:
    config, found = committed(plan, tmp_path, "kept")
    assert config.batching.slo_latency_s == 2.0
    assert tensor_run.UNPROMISED not in found.notes


@pytest.mark.parametrize("outcome", ["missed", "refused", "disturbed"])
def test_a_version_that_misses_its_slo_does_not_refuse_requests_for_it(
    plan: Plan, tmp_path: Path, outcome: str
) -> None:
    config, found = committed(plan, tmp_path, outcome)
    assert config.batching.slo_latency_s is None
    assert config.batching.is_dynamic and config.max_batch_size == 8
    assert f"not kept: {WISH} ({outcome})" in config.unkept_note
    assert tensor_run.UNPROMISED in found.notes


def test_a_repository_that_cannot_be_written(plan: Plan) -> None:
    Path(plan.out).write_text("a file")
    with pytest.raises(ConfigError, match="models"):
        run.optimize(plan, lambda progress: None, "")


@pytest.mark.slow
def test_on_a_gpu_nothing_is_started_twice(tmp_path: Path, monkeypatch) -> None:
    """A whole run on a GPU that computes nothing: one process for all that is asked of a model, and
    one server for each way to serve it, from its first measurement to the proof."""
    (tmp_path / "driver").mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml.build(tmp_path / "driver").parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(devices, "read_gpus", lambda: (GPU,))
    monkeypatch.setattr(time_plan, "WARM_UP_S", 0.3)
    folder = null_build(tmp_path, a_ms=1, copy_ms=1, gpu_memory_bytes=1 << 20).folder
    with open(folder / "config.pbtxt", "a") as file:
        file.write("\ninstance_group { kind: KIND_GPU }\n")
    loads: list[tuple[str, int]] = []
    servers: list[Path] = []
    load, enter = trials.TrialProcess.load, endpoints.ServedEndpoint.__enter__

    def loaded(self: trials.TrialProcess, run_timeout_s: float | None = None):
        loads.append((self.config.device, self.config.max_batch_size))
        return load(self, run_timeout_s)

    def entered(self: endpoints.ServedEndpoint) -> endpoints.ServedEndpoint:
        servers.append(self.build.folder)
        return enter(self)

    monkeypatch.setattr(trials.TrialProcess, "load", loaded)
    monkeypatch.setattr(endpoints.ServedEndpoint, "__enter__", entered)
    before = psutil.Process().children()
    # Less memory than it takes, so that nothing ends the sequence but its end.
    wish = slo.parse("p99 < 1s, memory <= 1KiB at 20/s")
    out = str(tmp_path / "models")
    # Too little for highest rates, and enough for a busy machine.
    plan = Plan(str(folder), "model", out, slo=wish, duration_s=0.5, budget_s=90.0)
    found = run.optimize(plan, lambda progress: None, "")
    assert found.outcome == "missed"
    # With a limit of memory, half of the largest batch is another model.
    assert loads == [("cuda", 8), ("cuda", 4)]
    assert len(servers) == len(set(servers)) > 1
    assert set(psutil.Process().children()) <= set(before)
    assert found.after is not None and found.after.gpu_memory_bytes == 1 << 20


@pytest.mark.parametrize(
    ("device", "options", "is_kept"),
    [
        ("cuda", {"penstock.pack": "tokens"}, True),
        ("cuda", {}, False),
        ("cpu", {"penstock.pack": "tokens"}, False),
    ],
)
def test_which_products_are_the_fastest_goes_with_the_version(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, options, is_kept
) -> None:
    kept: list[Path] = []

    def keep(build: Build, timeout_s: float) -> int:
        kept.append(build.version_folder)
        (build.version_folder / "fusion.json").write_text("{}")
        return 2

    monkeypatch.setattr(trials, "keep_compiled", keep)
    subject = open_subject(plan, tmp_path / "work" / "small")
    examples = open_examples(plan, subject.build.config.inputs, True)
    config = replace(subject.build.config, device=device, options=options)
    build = replace(subject.build, config=config)
    with Journal(tmp_path / "journal") as journal:
        lab = made_evaluator(plan, MACHINE, subject, examples, journal)
        lab.builder.keep_chosen(build)
        assert kept == [build.version_folder] * is_kept
        # A run that goes on has them.
        lab.builder.keep_chosen(build)
        assert len(kept) == is_kept
