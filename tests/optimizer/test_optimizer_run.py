"""A whole run on a small model, with real children and a real server."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from suites import onnx_models

import penstock
from penstock import manifest, repository, slo
from penstock.errors import ConfigError
from penstock.optimizer import run
from penstock.optimizer.plan import Plan
from penstock.optimizer.progress import Progress

WISH = slo.parse("p99 < 2s at 20/s")
SIZE = 32


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
        budget_s=30.0,
    )


def test_an_slo_that_the_original_keeps(plan: Plan) -> None:
    told: list[Progress] = []
    found = run.optimize(plan, told.append, "penstock optimize …")
    assert found.outcome == "met"
    assert found.chosen is not None and not found.chosen.steps
    assert [str(each.candidate) for each in found.tries] == ["original"]
    assert found.held_out is not None
    assert found.held_out.original == pytest.approx(0.9, abs=0.06)
    assert {each.stage for each in told} == {"baseline", "proof"}

    kept = manifest.read(Path(plan.out) / "small" / found.version)
    assert kept is not None
    assert kept.evidence["slo"] == "p99 < 2s at 20/s poisson"
    assert kept.evidence["outcome"] == "met"
    assert kept.evidence["measured"]["p99"]["value"] > 0
    assert kept.evidence["accuracy"]["num_examples"] == found.held_out.num_examples
    assert kept.evidence["lineage"]["steps"] == []
    assert kept.evidence["hardware"]["num_cores"] >= 1
    assert kept.evidence["versions"]["onnxruntime"]

    (config,) = repository.read(Path(plan.out) / "small").configs
    assert config.slo == "p99 < 2s at 20/s poisson"
    with penstock.load(Path(plan.out) / "small") as model:
        answer = model.infer(np.zeros((1, SIZE), np.float32))
    assert answer["y"].shape == (1, SIZE)


def test_run_again_nothing_is_measured_and_nothing_committed_twice(plan: Plan) -> None:
    first = run.optimize(plan, lambda progress: None, "")
    again = run.optimize(plan, lambda progress: None, "")
    assert again.num_measured == 0
    assert again.num_remembered > 0
    assert again.version == first.version == "1"
    assert again.after == first.after
    assert repository.version_folders(Path(plan.out) / "small") == ["1"]


def test_a_journal_is_of_one_model_data_and_plan(plan: Plan, tmp_path: Path) -> None:
    run.optimize(plan, lambda progress: None, "")
    journals = Path(plan.out) / run.WORK / "small"
    assert len(list(journals.glob("*/journal.jsonl"))) == 1
    with np.load(plan.data) as arrays:
        changed = {name: arrays[name].copy() for name in arrays}
    changed["x"][0, 0] += 1
    np.savez(plan.data, **changed)
    run.optimize(plan, lambda progress: None, "")
    assert len(list(journals.glob("*/journal.jsonl"))) == 2
    for path in journals.glob("*/journal.jsonl"):
        keys = [(r["kind"], r["key"]) for r in map(json.loads, path.read_text().splitlines())]
        assert len(keys) == len(set(keys))


def test_labels_that_the_original_knows_nothing_of_are_refused(plan: Plan) -> None:
    with np.load(plan.data) as arrays:
        rows, labels = arrays["x"], arrays["label"]
    np.savez(plan.data, x=rows, label=np.random.default_rng(0).permutation(labels))
    with pytest.raises(ConfigError, match="guessing gives"):
        run.optimize(plan, lambda progress: None, "")
    assert not (Path(plan.out) / "small").exists()


def test_a_repository_that_cannot_be_written(plan: Plan) -> None:
    Path(plan.out).write_text("a file")
    with pytest.raises(ConfigError, match="models"):
        run.optimize(plan, lambda progress: None, "")
