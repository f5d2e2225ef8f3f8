"""What an engine in a process of its own says of tokens, against the same by hand."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import text_server  # noqa: E402
import tiny_llm as tiny  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_text import TOKENIZER  # noqa: E402

from penstock.errors import BackendFailed  # noqa: E402
from penstock.optimizer.candidates import Build, Candidate, Step  # noqa: E402
from penstock.optimizer.llm import text_trials  # noqa: E402
from penstock.optimizer.llm.likelihoods import NUM_TOLD, scores  # noqa: E402
from penstock.optimizer.llm.text_subject import build_of, open_text_subject  # noqa: E402
from penstock.optimizer.time_plan import CutOff  # noqa: E402

TEXTS = [[5, 9, 33], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
NUM_NEW = 4


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    root = tmp_path_factory.mktemp("trials")
    folder = text_server.write_model(root)
    return open_text_subject(str(folder), "cpu", root / "original" / "smol").build


@pytest.fixture(scope="module")
def reference(build, tmp_path_factory):
    keep = tmp_path_factory.mktemp("kept") / "reference.npz"
    told = []
    found = text_trials.likelihoods(build, TEXTS, NUM_NEW, told.append, keep=keep)
    assert told and all(each.startswith("accuracy, ") for each in told)
    again = text_trials.read(keep)
    assert again.texts == found.texts and np.array_equal(again.told[2].own, found.told[2].own)
    return found


def test_texts_are_continued_and_told_as_by_hand(build, reference):
    weights = load_file(build.version_folder / "model.safetensors")
    config = tiny.CONFIG | {"vocab_size": TOKENIZER.get_vocab_size()}
    for given, text, told in zip(TEXTS, reference.texts, reference.told, strict=True):
        assert text[: len(given)] == given and len(text) == len(given) + NUM_NEW
        logprobs = tiny.by_hand(weights, config, text).log_softmax(-1)
        # What was added is what is likeliest.
        assert logprobs[len(given) - 1 : -1].argmax(-1).tolist() == text[len(given) :]
        own = logprobs[torch.arange(len(text) - 1), text[1:]]
        assert told.own == pytest.approx(own.numpy(), abs=1e-3)
        assert told.tokens.shape == (len(text) - 1, NUM_TOLD)
        assert told.tokens[:, 0].tolist() == logprobs[:-1].argmax(-1).tolist()
        assert told.logprobs[:, 0] == pytest.approx(logprobs[:-1].max(-1).values.numpy(), abs=1e-3)


def test_another_datatype_says_nearly_the_same(build, reference, tmp_path):
    half = Candidate((Step("dtype", {"dtype": "bfloat16"}),))
    candidate = build_of(build, half, tmp_path / "smol")
    found = text_trials.likelihoods(candidate, reference.texts, 0, lambda text: None)
    assert found.texts == reference.texts
    compared = [scores(*pair) for pair in zip(reference.told, found.told, strict=True)]
    assert all(1e-9 < each["kl"] < 0.5 for each in compared)


def test_a_judgement_that_outlasts_the_budget_is_cut_off(build):
    with pytest.raises(CutOff, match="not judged within 0 s"):
        text_trials.likelihoods(build, TEXTS, 0, lambda text: None, timeout_s=0.0)


def test_what_cannot_be_loaded_is_told_with_the_reason(build, tmp_path):
    broken = build_of(build, Candidate((Step("x", {"threads": "1"}),)), tmp_path / "smol")
    (broken.version_folder / "model.safetensors").unlink()
    (broken.version_folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(BackendFailed, match=r"it wrote: model\.safetensors: cannot be read"):
        text_trials.likelihoods(
            Build(Candidate(), broken.folder, broken.config), TEXTS, 0, lambda text: None
        )
