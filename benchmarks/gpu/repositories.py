"""What `server.py` serves: repositories as `penstock optimize` leaves them on a GPU, and what is
sent to them. Random weights of the true shapes.

ResNet-50 takes images of a byte for each colour (224 x 224 x 3, 150 kB) and normalises them on the
device; FP16, fused, CUDA graphs. BERT-large takes sequences as long as SQuAD's; packed, BF16 or
FP8, CUDA graphs.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import bert
import models
import numpy as np
from safetensors.torch import save_file

from penstock.backends import backend
from penstock.config import CPU, EACH_GPU, BatchPolicy, ModelConfig
from penstock.optimizer.passes import fp8, half
from penstock.repository import layout, versions
from penstock.serving import local
from penstock.serving.proof import apply_proof, prove
from penstock.serving.warmups import warm_up_all
from penstock.types import TensorSpec

NUM_IMAGES = 128
NUM_SEQUENCES = 2048
SEED = 11
# What a CPU has not, or is slow with.
OF_GPUS = ("penstock.cuda_graphs", "penstock.dtype")
ROWS = "rows.npz"
LINES = "rows.jsonl"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Subject:
    """One model: what is promised, in how large batches it runs, how its files are made."""

    slo: str
    max_batch: int
    files: Callable[[Path, bool, str], ModelConfig]
    rows: Callable[[bool], Arrays]
    # Only with CUDA.
    needs_gpu: bool = False


def image_rows(is_tiny: bool) -> Arrays:
    side = 32 if is_tiny else 224
    shape = (NUM_IMAGES, side, side, 3)
    return {"image": np.random.default_rng(SEED).integers(0, 256, shape, np.uint8)}


def sequence_rows(is_tiny: bool) -> Arrays:
    scale = bert.TINY if is_tiny else bert.LARGE
    return bert.batch_of(scale, bert.draw_lengths(scale, NUM_SEQUENCES, SEED), SEED)


def resnet_files(folder: Path, is_tiny: bool, device: str) -> ModelConfig:
    factory = "resnet_tiny_bytes" if is_tiny else "resnet50_bytes"
    (folder / "module.py").write_bytes(Path(models.__file__).read_bytes())
    save_file(getattr(models, factory)().state_dict(), folder / "model.safetensors")
    (images,) = image_rows(is_tiny).values()
    return ModelConfig(
        name="resnet50",
        version="1",
        backend="pytorch",
        artifact=str(folder / "module.py"),
        inputs=(TensorSpec("image", "UINT8", images.shape[1:]),),
        outputs=(TensorSpec("scores", "FP32", (1000,)),),
        max_batch_size=1,
        batching=BatchPolicy(1, is_dynamic=True),
        tolerance=half.TOLERANCE,
        options={**models.FUSED, **models.GRAPHS, "penstock.factory": factory},
    )


def bert_files(folder: Path, is_tiny: bool, device: str) -> ModelConfig:
    """In batches of as many tokens as fill the GPU."""
    scale = scale_on(device)
    config = bert.write_model(folder, scale)
    options = {**bert.BF16, **bert.PACKED, **bert.GRAPHS}
    batching = replace(config.batching, max_tokens=scale.num_tokens)
    tolerance = half.TOLERANCE
    return replace(
        config, name="bert-large", options=options, tolerance=tolerance, batching=batching
    )


def scale_on(device: str) -> bert.Scale:
    return bert.TINY if device == CPU else bert.filling(bert.LARGE, device)


def bert_fp8_files(folder: Path, is_tiny: bool, device: str) -> ModelConfig:
    config = bert_files(folder, is_tiny, device)
    bert.calibrate(replace(config, options={}), scale_on(device), device)
    return replace(config, options={**config.options, **bert.FP8}, tolerance=fp8.TOLERANCE)


SUBJECTS: Mapping[str, Subject] = {
    "resnet50": Subject("p99 < 15 ms", 128, resnet_files, image_rows),
    "bert-large": Subject("p99 < 130 ms", 256, bert_files, sequence_rows),
    "bert-large-fp8": Subject("p99 < 130 ms", 256, bert_fp8_files, sequence_rows, needs_gpu=True),
}


def write(subject: Subject, root: Path, max_batch: int, device: str, is_tiny: bool) -> None:
    """The repository, and beside it what is sent: for the bench one row a request, as long as it
    is."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as draft:
        config = subject.files(Path(draft), is_tiny, device)
        config = served_as(config, max_batch, device)
        for name, content in compiled(config).items():
            (Path(draft) / name).write_bytes(content)
        versions.commit(root, config.name, draft, config)
    write_rows(subject.rows(is_tiny), sent_to(root))


def served_as(config: ModelConfig, max_batch: int, device: str) -> ModelConfig:
    """In batches of so many rows; on a GPU with two batches on their way."""
    is_on_gpu = device != CPU
    options = {key: text for key, text in config.options.items() if is_on_gpu or key not in OF_GPUS}
    return replace(
        config,
        max_batch_size=max_batch,
        batching=replace(config.batching, max_batch_size=max_batch),
        device=EACH_GPU if is_on_gpu else CPU,
        num_instances=2 if is_on_gpu else 1,
        options=options,
    )


def compiled(config: ModelConfig) -> Mapping[str, bytes]:
    """Kernels, and which of them are the fastest, found by loading the model once, as a worker
    does."""
    (device, num_slots), *_ = local.place_here(config).workers
    config = config.of_worker(device, num_slots)
    runner = backend(config.backend)(config)
    proof = prove(config, runner)
    apply_proof(runner, proof)
    warm_up_all(config, runner, proof)
    files = runner.compiled()
    runner.close()
    return files


def sent_to(root: Path) -> Path:
    """Where the rows lie that a repository's model is asked for."""
    return root.with_name(f"{root.name}-rows")


def write_rows(rows: Arrays, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    np.savez(folder / ROWS, **rows)
    mask = rows.get("attention_mask")
    if mask is not None:
        with (folder / LINES).open("w") as file:
            for line in unpadded(rows, mask.sum(1)):
                file.write(json.dumps(line) + "\n")


def unpadded(rows: Arrays, lengths: np.ndarray) -> Iterator[dict[str, list[int]]]:
    for index, length in enumerate(lengths):
        yield {name: array[index, :length].tolist() for name, array in rows.items()}


def data_of(root: Path) -> Path:
    """The file for `penstock bench --data`."""
    lines = sent_to(root) / LINES
    return lines if lines.is_file() else sent_to(root) / ROWS


def rows_of(root: Path) -> Arrays:
    with np.load(sent_to(root) / ROWS) as found:
        return dict(found)


def config_of(root: Path) -> ModelConfig:
    """The one version that the repository holds."""
    (config,) = layout.read(root).configs
    return config
