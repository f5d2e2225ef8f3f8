"""What an ensemble answers with a build as its member, and what its steps give to a member."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from made_evaluators import made_evaluator
from onnx import numpy_helper
from optimizer import small_ensembles

from penstock.errors import ConfigError
from penstock.optimizer import ensemble_answers, folders, measured_ensemble
from penstock.optimizer.answer_source import CHOICE
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.examples import open_examples
from penstock.optimizer.journal import Journal
from penstock.optimizer.machine import Machine
from penstock.optimizer.measured_ensemble import MeasuredEnsemble
from penstock.optimizer.subject import open_subject

MACHINE = Machine("a processor", 2, 1 << 34, ())


def texts(values):
    return [{"TEXT": np.array([small_ensembles.text_of(row).encode()], object)} for row in values]


def test_inputs_of_a_member_by_the_steps_before_it(tmp_path: Path) -> None:
    model = small_ensembles.write_ensemble(tmp_path / "models")
    files = measured_ensemble.take(str(model), tmp_path / "taken")
    values = small_ensembles.rows(20)
    found = ensemble_answers.captured(files, "net", texts(values), tmp_path / "capture")
    np.testing.assert_array_equal(np.stack([row["x"] for row in found]), values)
    # The first step takes what clients send: no server is needed.
    shutil.rmtree(files.root / "net")
    (row,) = ensemble_answers.captured(files, "parse", texts(values[:1]), tmp_path / "capture")
    assert row["text"][0] == small_ensembles.text_of(values[0]).encode()


def test_data_that_a_step_refuses(tmp_path: Path) -> None:
    model = small_ensembles.write_ensemble(tmp_path / "models")
    files = measured_ensemble.take(str(model), tmp_path / "taken")
    rows = texts(small_ensembles.rows(3)) + [{"TEXT": np.array([b"not numbers"], object)}]
    with pytest.raises(ConfigError, match="the steps before 'net': example 3: .*not numbers"):
        ensemble_answers.captured(files, "net", rows, tmp_path / "capture")


def test_the_gate_judges_what_the_ensemble_answers(tmp_path: Path) -> None:
    """A member that answers with the opposite makes the ensemble lose what the labels say."""
    plan = small_ensembles.plan_of(tmp_path)
    files = measured_ensemble.take(plan.model, tmp_path / "taken")
    config = files.config
    asked = open_examples(plan, config.inputs, True)
    values = small_ensembles.rows(100)
    samples = replace(asked, rows=[{"x": row} for row in values])
    own = replace(plan, model=str(files.root / "net"), name="net", data="")
    subject = open_subject(own, tmp_path / "member" / "net")
    whole = MeasuredEnsemble(files, "net", plan.slo, asked, tmp_path / "ensembles")
    build = opposite(subject.build, tmp_path / "builds" / "net")
    with Journal(tmp_path / "run") as journal:
        own = replace(plan, model=own.model, name="net")
        evaluator = made_evaluator(own, MACHINE, subject, samples, journal, ensemble=whole)
        original = evaluator.judged.original_answers(CHOICE)
        indices = evaluator.judged.indices(CHOICE)
        expected = small_ensembles.answers(values[list(indices)])
        found = np.stack([answer["SCORES"] for answer in original])
        np.testing.assert_allclose(found, expected, atol=1e-5)
        judgement = evaluator.gate.judge(build, CHOICE)
        assert judgement.metric == "top1" and not judgement.is_passed
        assert judgement.original > 0.7 and judgement.candidate < 0.3
        assert evaluator.gate.judge(subject.build, CHOICE).candidate == judgement.original
        evaluator.close()


def opposite(parent: Build, folder: Path) -> Build:
    """Write the member with a last layer of the opposite sign."""
    folders.write(parent, parent.config, folder)
    path = folder / "1" / "model.onnx"
    model = onnx.load(path)
    last = model.graph.initializer[-1]
    last.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(last), last.name))
    path.unlink()
    onnx.save(model, path)
    return Build(Candidate((Step("half"),)), folder, folders.read_config(folder))
