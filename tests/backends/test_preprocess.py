"""The stage before a network: each request gets its own answer or its own error."""

import numpy as np
import pytest
import tiny_pretrained as tiny

from penstock.backends import Batch, PerRequest, backend
from penstock.backends.preprocess import NUM_TOKENS, STEP
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import InvalidRequest
from penstock.types import TensorSpec
from penstock.wire.frames import RequestPart

TOKENS = tuple(TensorSpec(name, "INT64", (-1,)) for name in ("input_ids", "attention_mask"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = tiny.write_classifier(tmp_path_factory.mktemp("folders") / "m")
    config = ModelConfig(
        name="m",
        version="1",
        backend="preprocess",
        artifact=str(folder / "config.json"),
        inputs=(TensorSpec("TEXT", "BYTES", (1,)),),
        outputs=(*TOKENS, NUM_TOKENS),
        max_batch_size=8,
        batching=BatchPolicy(8, is_dynamic=True),
        options={STEP: "tokenizer"},
    )
    return backend("preprocess")(config)


def test_rows_of_a_request_are_padded_to_the_longest_of_them(runner):
    texts = np.array([[b"cat"], [b"the cat sat on the mat"], [b"cat"]], dtype=object)
    parts = [RequestPart("a", 2), RequestPart("b", 1)]
    (answer,) = runner.start(Batch({"TEXT": texts}, 3, parts)).wait()
    assert isinstance(answer, PerRequest)
    both, alone = answer.answers
    longest = both["input_ids"].shape[1]
    assert both["attention_mask"].sum(axis=1).tolist() == both[NUM_TOKENS.name][:, 0].tolist()
    assert both[NUM_TOKENS.name][1, 0] == longest > both[NUM_TOKENS.name][0, 0]
    length = alone["input_ids"].shape[1]
    assert both["input_ids"][0, :length].tolist() == alone["input_ids"][0].tolist()
    assert not both["input_ids"][0, length:].any()


def test_a_bad_row_fails_its_own_request(runner):
    texts = np.array([[b"cat"], [b"\xff"]], dtype=object)
    parts = [RequestPart("a", 1), RequestPart("b", 1)]
    (answer,) = runner.start(Batch({"TEXT": texts}, 2, parts)).wait()
    good, bad = answer.answers
    assert good["input_ids"].shape[0] == 1
    assert isinstance(bad, InvalidRequest)


def test_an_error_of_one_row_of_several_says_which(runner):
    texts = np.array([[b"cat"], [b"\xff"], [b"cat"]], dtype=object)
    (answer,) = runner.start(Batch({"TEXT": texts}, 3, [RequestPart("a", 3)])).wait()
    (bad,) = answer.answers
    assert isinstance(bad, InvalidRequest)
    assert str(bad).startswith("row 1: input 'TEXT': not UTF-8")
