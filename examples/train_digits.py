"""Train the `digits` model on scikit-learn's bundled 8x8 digits and write it as ONNX.

Training needs `pip install "penstock[torch]" scikit-learn`; `held_out()` needs no torch, so
anyone can measure the file on the same images. The recipe was settled by validation inside
the training part; the held-out part only scores the result.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

if TYPE_CHECKING:
    import torch

MODEL = Path(__file__).resolve().parent / "repository" / "digits" / "1" / "model.onnx"
SPLIT_SEED = 0
HELD_OUT_FRACTION = 0.25
TRAINING_SEED = 0
NUM_EPOCHS = 60
BATCH_SIZE = 64
PEAK_LEARNING_RATE = 3e-3
MAX_DIFFERENCE = 1e-4  # between torch's logits and ONNX Runtime's


class Digits(NamedTuple):
    images: NDArray[np.float32]  # [n, 1, 8, 8], 0 to 1
    labels: NDArray[np.int64]


def training() -> Digits:
    return _split()[0]


def held_out() -> Digits:
    return _split()[1]


def _split() -> tuple[Digits, Digits]:
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    train, test = train_test_split(
        np.arange(len(labels)),
        test_size=HELD_OUT_FRACTION,
        stratify=labels,
        random_state=SPLIT_SEED,
    )
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def train(digits: Digits) -> torch.nn.Module:
    import torch

    torch.manual_seed(TRAINING_SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    images, labels = shifted(torch.from_numpy(digits.images)), torch.from_numpy(digits.labels)
    network = new_network()
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    num_batches = len(labels) // BATCH_SIZE
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=PEAK_LEARNING_RATE, total_steps=NUM_EPOCHS * num_batches
    )
    loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.05)
    for epoch in range(1, NUM_EPOCHS + 1):
        total_loss = 0.0
        # The last 3 of 1,347 rows sit out each epoch: as a batch they spoil the batch norm
        # (0.3 to 0.9 points of accuracy lost in each of three splits of the training part).
        for rows in torch.randperm(len(labels))[: num_batches * BATCH_SIZE].split(BATCH_SIZE):
            shifts = torch.randint(len(images), (BATCH_SIZE,))
            loss = loss_of(network(images[shifts, rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total_loss += loss.item()
        if epoch % 10 == 0:
            print(f"epoch {epoch}/{NUM_EPOCHS}: training loss {total_loss / num_batches:.4f}")
    return network.eval()


def shifted(images: torch.Tensor) -> torch.Tensor:
    """[9, n, 1, 8, 8]: the images moved by -1, 0 and 1 pixels along both axes."""
    import torch

    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    return torch.stack([padded[..., y : y + 8, x : x + 8] for y in range(3) for x in range(3)])


def new_network() -> torch.nn.Sequential:
    from torch import nn

    def convolution(num_in: int, num_out: int) -> nn.Conv2d:
        return nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False)

    return nn.Sequential(
        OrderedDict(
            conv1=convolution(1, 32),
            norm1=nn.BatchNorm2d(32),
            relu1=nn.ReLU(),
            conv2=convolution(32, 64),
            norm2=nn.BatchNorm2d(64),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=convolution(64, 64),
            norm3=nn.BatchNorm2d(64),
            relu3=nn.ReLU(),
            pool3=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(0.3),
            dense1=nn.Linear(64 * 2 * 2, 128),
            relu4=nn.ReLU(),
            dense2=nn.Linear(128, 10),
        )
    )


def folded_weights(network: torch.nn.Module) -> dict[str, NDArray[np.float32]]:
    """The weights by name, each batch norm multiplied into the convolution before it."""
    state = {name: value.numpy() for name, value in network.state_dict().items()}
    weights = {name: value for name, value in state.items() if name.startswith("dense")}
    for index in (1, 2, 3):
        norm = f"norm{index}"
        eps = network.get_submodule(norm).eps
        scale = state[f"{norm}.weight"] / np.sqrt(state[f"{norm}.running_var"] + eps)
        kernel = state[f"conv{index}.weight"] * scale[:, None, None, None]
        bias = state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * scale
        weights[f"conv{index}.weight"] = kernel.astype(np.float32)
        weights[f"conv{index}.bias"] = bias.astype(np.float32)
    return weights


def digits_model(weights: dict[str, NDArray[np.float32]]) -> onnx.ModelProto:
    nodes: list[onnx.NodeProto] = []

    def add(op: str, name: str, output: str | None = None, **attributes: int | list[int]) -> None:
        previous = nodes[-1].output[0] if nodes else "image"
        own = [f"{name}.weight", f"{name}.bias"] if f"{name}.weight" in weights else []
        nodes.append(
            helper.make_node(op, [previous, *own], [output or name], name=name, **attributes)
        )

    for index in (1, 2, 3):
        add("Conv", f"conv{index}", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        add("Relu", f"relu{index}")
        if index > 1:
            add("MaxPool", f"pool{index}", kernel_shape=[2, 2], strides=[2, 2])
    add("Flatten", "flatten", axis=1)
    add("Gemm", "dense1", transB=1)
    add("Relu", "relu4")
    add("Gemm", "dense2", output="logits", transB=1)

    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(weights[name], name) for name in sorted(weights)],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, ir_version=9, opset_imports=[opset], producer_name="penstock")


def torch_logits(network: torch.nn.Module, images: NDArray[np.float32]) -> NDArray[np.float32]:
    import torch

    with torch.inference_mode():
        return network(torch.from_numpy(images)).numpy()


def onnx_logits(model: onnx.ModelProto, images: NDArray[np.float32]) -> NDArray[np.float32]:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when onnxruntime is imported
    import onnxruntime

    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(["logits"], {"image": images})[0]


def wilson_interval(num_right: int, num_total: int) -> tuple[float, float]:
    """The 95 % confidence interval of a proportion."""
    z = 1.959964
    share = num_right / num_total
    width = z * math.sqrt(share * (1 - share) / num_total + (z / (2 * num_total)) ** 2)
    middle, denominator = share + z * z / (2 * num_total), 1 + z * z / num_total
    return (middle - width) / denominator, (middle + width) / denominator


def main() -> None:
    network = train(training())
    model = digits_model(folded_weights(network))
    onnx.checker.check_model(model, full_check=True)

    images, labels = held_out()
    logits = onnx_logits(model, images)
    difference = float(np.abs(logits - torch_logits(network, images)).max())
    print(f"largest difference between torch and ONNX Runtime: {difference:.1e}")
    if not difference < MAX_DIFFERENCE:
        raise SystemExit(f"the ONNX model does not answer like torch: {difference:.1e}")

    num_right = int((logits.argmax(axis=1) == labels).sum())
    accuracy = num_right / len(labels)
    low, high = wilson_interval(num_right, len(labels))
    print(
        f"held-out accuracy: {num_right} of {len(labels)} = {accuracy:.2%}"
        f" (95 % interval {low:.2%} to {high:.2%})"
    )
    metadata = {"accuracy": accuracy, "split_seed": SPLIT_SEED, "num_test": len(labels)}
    helper.set_model_props(model, {key: str(value) for key, value in metadata.items()})
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, MODEL)
    print(f"{MODEL}: {MODEL.stat().st_size} bytes")


if __name__ == "__main__":
    main()
