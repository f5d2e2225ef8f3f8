"""Shape arithmetic folded for the sizes that are served, and INT8 on what is left."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from suites.onnx_models import (
    answers,
    batch,
    build_of,
    built,
    cnn,
    drawn_rows,
    examples_of,
    same_padded,
    situation,
    transformer,
)

from penstock.config import Preprocess
from penstock.optimizer import passes
from penstock.optimizer.candidates import Build, Candidate, Skip, Step
from penstock.optimizer.examples import Examples
from penstock.optimizer.facts import Facts, file_facts
from penstock.optimizer.passes.int8_static import Int8Static
from penstock.optimizer.passes.shape_folding import ShapeFolding, narrowing, num_shape_nodes

PASS = ShapeFolding()
DECLARED = Step("shape-folding")
NARROWED = Step("shape-folding", {"accepts x": "3x8x8"})


def same_build(folder: Path, size: tuple[int | str, int | str] = (8, 8)) -> Build:
    return build_of(same_padded([*size]), folder / "same")


def open_examples(build: Build, *sizes: int) -> Examples:
    """Rows of these heights and widths, in turns."""
    made = examples_of(build)
    rows = [drawn_rows(build, 1, seed, sizes[seed % len(sizes)])[0] for seed in range(24)]
    return replace(made, rows=rows)


def test_is_found_by_name_before_other_compilers_and_quantisation():
    assert isinstance(passes.find("shape-folding"), ShapeFolding)
    names = list(passes.PASSES)
    for later in ("openvino", "half", "int8-dynamic", "int8-static"):
        assert names.index("shape-folding") < names.index(later)


class TestPropose:
    def test_declared_sizes_need_no_data(self, tmp_path: Path):
        assert PASS.propose(situation(same_build(tmp_path))) == [DECLARED]

    def test_open_sizes_are_fixed_only_by_data_that_agrees(self, tmp_path: Path):
        build = same_build(tmp_path, ("h", "w"))
        for examples in (None, open_examples(build, 8, 9)):
            (skip,) = PASS.propose(situation(build, examples=examples))
            assert isinstance(skip, Skip)
        found = PASS.propose(situation(build, examples=open_examples(build, 8)))
        assert found == [NARROWED]

    def test_sizes_that_the_configuration_fixes_are_declared(self, tmp_path: Path):
        """The file leaves them open, and the server refuses others all the same."""
        build = same_build(tmp_path, ("h", "w"))
        inputs = tuple(replace(spec, shape=(3, 8, 8)) for spec in build.config.inputs)
        build = replace(build, config=replace(build.config, inputs=inputs))
        assert PASS.propose(situation(build, examples=examples_of(build))) == [DECLARED]

    def test_lengths_of_sequences_are_never_fixed(self, tmp_path: Path):
        build = build_of(transformer(with_mask=False), tmp_path / "text")
        found = PASS.propose(situation(build, examples=examples_of(build)))
        assert not any(isinstance(each, Step) and each.settings for each in found)

    def test_data_of_preprocessing_says_nothing_about_the_model(self, tmp_path: Path):
        build = same_build(tmp_path, ("h", "w"))
        inner = Preprocess("code.py:decode", build.config.inputs)
        build = replace(build, config=replace(build.config, preprocess=inner))
        found = PASS.propose(situation(build, examples=open_examples(build, 8)))
        assert all(isinstance(each, Skip) for each in found)

    def test_a_graph_without_shape_arithmetic(self, tmp_path: Path):
        (skip,) = PASS.propose(situation(build_of(cnn(), tmp_path / "cnn")))
        assert isinstance(skip, Skip) and skip.reason == "no operator computes shapes"

    def test_another_backend(self, tmp_path: Path):
        build = same_build(tmp_path)
        build = replace(build, config=replace(build.config, backend="pytorch"))
        (skip,) = PASS.propose(situation(build))
        assert skip == Skip("shape-folding", "the model is not an ONNX file")


def test_the_declared_sizes_are_folded_and_nothing_else_changes(tmp_path: Path):
    parent = same_build(tmp_path)
    made, facts = built(PASS, parent, DECLARED, tmp_path)
    assert num_shape_nodes(facts.operators) == 0
    assert made.config.inputs == parent.config.inputs
    assert made.config.max_batch_size == parent.config.max_batch_size
    for count in (1, 5):
        rows = batch(drawn_rows(parent, count))
        expected = answers(parent.artifact, rows)
        np.testing.assert_allclose(answers(made.artifact, rows), expected, atol=1e-5)


def test_a_size_by_the_data_is_the_only_one_that_is_accepted(tmp_path: Path):
    parent = same_build(tmp_path, ("h", "w"))
    made, facts = built(PASS, parent, NARROWED, tmp_path)
    assert num_shape_nodes(facts.operators) == 0
    assert made.config.inputs[0].shape == (3, 8, 8)
    assert narrowing(Candidate((NARROWED,))) == "'x' 3x8x8"
    assert narrowing(Candidate((DECLARED,))) == ""
    rows = batch(drawn_rows(parent, 3, size=8))
    expected = answers(parent.artifact, rows)
    np.testing.assert_allclose(answers(made.artifact, rows), expected, atol=1e-5)


class TestCheck:
    def test_fewer_operators_must_be_left_in_the_runtime(self):
        before, after = (
            Facts("onnxruntime", {"Pad": 2}, optimised_operators={"Pad": count}) for count in (2, 1)
        )
        assert PASS.check(DECLARED, before, after) == []
        (problem,) = PASS.check(DECLARED, after, after)
        assert problem == "1 operators compute shapes, as many as before"

    def test_of_other_runtimes_the_file_is_read(self):
        before, after = (Facts("openvino", {"Shape": count}) for count in (2, 0))
        assert PASS.check(DECLARED, before, after) == []
        assert PASS.check(DECLARED, before, before)


@pytest.mark.parametrize("is_folded", [True, False])
def test_int8_quantises_every_layer_of_the_clean_graph(tmp_path: Path, is_folded: bool):
    """Also where folding was not kept as a step of its own."""
    parent = same_build(tmp_path)
    if is_folded:
        parent, _ = built(PASS, parent, DECLARED, tmp_path)
    examples = examples_of(parent)
    (step, *_) = Int8Static().propose(situation(parent, examples=examples))
    assert isinstance(step, Step)
    _, facts = built(Int8Static(), parent, step, tmp_path, examples)
    assert facts.quantised["Conv"] + facts.quantised["Gemm"] == 4
    assert sum(file_facts(parent).quantisable.values()) == 4
    # Between convolutions there is nothing but bytes.
    assert num_shape_nodes(facts.operators) == 0
    assert facts.quantised["Add"] == 1
