"""Packing is proposed where there is a mask to pack by, and only counts if it was done."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from packable import texts, write
from served_builds import a_config, a_situation
from suites.onnx_models import opened, workshop

from penstock.config import PadAxis, Padding
from penstock.optimizer import trials
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes.packing import SequencePacking
from penstock.optimizer.shapes import token_budgets
from penstock.repository import pbtxt

PASS = SequencePacking()
TOKENS = Step("packing", {"pack": "tokens", "bucket": "32"})


def on_gpu(config):
    return replace(config, device="cuda")


def reason(config) -> str:
    (skip,) = PASS.propose(a_situation(config))
    assert isinstance(skip, Skip)
    return skip.reason


def test_proposed_for_what_has_a_mask(tmp_path: Path) -> None:
    config = on_gpu(write(tmp_path))
    assert list(PASS.propose(a_situation(config))) == [TOKENS]
    fixed = tuple(replace(spec, shape=(128,)) for spec in config.inputs)
    fixed_config = replace(config, inputs=fixed, padding=None)
    assert list(PASS.propose(a_situation(fixed_config))) == [Step("packing", {"pack": "tokens"})]


def test_what_is_not_padded_is_filled_up_to_the_longest_request(tmp_path: Path) -> None:
    """More could be more than the model has positions for."""
    config = replace(on_gpu(write(tmp_path)), padding=None)
    rows = [
        {name: array[0] for name, array in texts((length,), length).items()}
        for length in (3, 19, 7)
    ]
    wanted = Step("packing", {"pack": "tokens", "bucket": "19"})
    assert list(PASS.propose(a_situation(config, rows=rows))) == [wanted]
    assert "how long" in reason(config)


def test_skipped_with_the_reason(tmp_path: Path) -> None:
    config = on_gpu(write(tmp_path))
    assert "not a PyTorch module" in reason(a_config())
    assert "already" in reason(replace(config, options={"penstock.pack": "tokens"}))
    assert "compiled" in reason(replace(config, options={"penstock.compile": "default"}))
    assert "mask" in reason(replace(config, inputs=config.inputs[:1]))
    (skip,) = PASS.propose(a_situation(replace(config, device="cpu")))
    assert isinstance(skip, Skip) and "CPUs" in skip.reason and skip.step == TOKENS


def built(config, tmp_path: Path, step: Step = TOKENS):
    folder = tmp_path / "m"
    (folder / "config.pbtxt").write_text(pbtxt.write(replace(config, name="m", file="module.py")))
    PASS.build(opened(folder), step, tmp_path / "t" / "m", workshop(tmp_path))
    return opened(tmp_path / "t" / "m").config


def test_all_lengths_share_batches_then(tmp_path: Path) -> None:
    config = write(tmp_path / "m" / "1")
    axes = (PadAxis("input_ids", 0), PadAxis("attention_mask", 0))
    made = built(replace(config, padding=Padding(axes, (16, 32))), tmp_path)
    assert made.options["penstock.pack"] == "tokens"
    assert made.padding == Padding(axes, (32,))


def test_what_was_not_padded_is_padded_then(tmp_path: Path) -> None:
    config = write(tmp_path / "m" / "1")
    made = built(replace(config, padding=None), tmp_path)
    assert made.padding is not None and made.padding.buckets == (32,)
    assert {axis.input for axis in made.padding.axes} == {"input_ids", "attention_mask"}


def test_batch_times_of_what_was_packed_know_their_tokens(tmp_path: Path) -> None:
    """They go by those, and a budget of tokens is proposed from them."""
    config = replace(write(tmp_path / "m" / "1"), max_batch_size=4, device="cpu")
    config = replace(config, batching=replace(config.batching, max_batch_size=4))
    made = built(config, tmp_path)
    assert made.is_packed
    lengths = (3, 19, 7, 30, 11)
    rows = [
        {name: array[0] for name, array in texts((length,), length).items()} for length in lengths
    ]
    table = trials.times(opened(tmp_path / "t" / "m"), rows, 1, 1)
    assert list(table.seconds) == list(table.tokens) == [32]
    assert table.tokens[32][4] == 3 + 19 + 7 + 30
    assert table.tokens[32][8] == 70 + 3 + 19 + 7
    assert token_budgets(table, 32, None) == [max(32, max(table.by_tokens) // 256 * 256)]


def test_a_model_that_was_not_packed_is_caught() -> None:
    before = Facts("pytorch")
    assert PASS.check(TOKENS, before, Facts("pytorch", built={"pack": "tokens: 6 layers"})) == []
    (problem,) = PASS.check(TOKENS, before, Facts("pytorch", built={}))
    assert problem == "asked for tokens, packed is nothing"
    facts = Facts("pytorch", built={"pack": "tokens: 6 layers"}, padding_problem="it changes")
    assert PASS.check(TOKENS, before, facts) == ["it changes"]
