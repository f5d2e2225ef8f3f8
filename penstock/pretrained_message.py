"""The config.pbtxt of a Hugging Face folder that is served from text or images.

Completes what the operator's own config.pbtxt, if any, leaves out: backend, tensors, batching, and
the built-in steps around the network. `pretrained` says what the folder is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import devices, onnx_file, pretrained
from penstock.config import EMBEDDING, TOKENIZER
from penstock.errors import ConfigError
from penstock.pretrained import Pretrained
from penstock.types import TensorSpec

TEXT = TensorSpec("TEXT", "BYTES", (1,))
TOKENS = ("input_ids", "attention_mask", "token_type_ids")
# Lengths that texts are padded to. Few, because each is warmed up at every batch size.
BUCKETS = (16, 32, 64, 128, 256, 512)
MAX_BATCH = 32
# Most tokens of a batch: a larger one takes longer without being more efficient.
CPU_TOKENS, GPU_TOKENS = 2048, 16384
# Outputs of exported networks, in order of preference.
ONNX_LOGITS = ("logits",)
SENTENCE = "sentence_embedding"
ONNX_VECTORS = (SENTENCE, "last_hidden_state", "token_embeddings")


def complete(message: Any, found: Pretrained) -> Path:
    """Fill in the message; return the file that the backend loads. ConfigError says what is
    missing."""
    if message.input or message.output:
        raise ConfigError(
            ["input, output: a Hugging Face folder has its own; leave them out of config.pbtxt"]
        )
    file = found.onnx_file
    message.backend = message.backend or ("onnxruntime" if file else "pytorch")
    if message.backend == "pytorch":
        file = pretrained.CONFIG
    message.default_model_filename = file
    taken = _onnx_inputs(found) if file.endswith(".onnx") else _tokens(TOKENS[:2])
    given = _onnx_output(found) if file.endswith(".onnx") else _torch_output(found)
    message.max_batch_size = message.max_batch_size or MAX_BATCH
    message.dynamic_batching.SetInParent()
    _add(message.input, [TEXT])
    _add(message.output, outputs(found, given))
    longest = pretrained.max_length(found.folder, found.config)
    pad = pretrained.pad_token(found.config)
    fills = {name: pad if name == TOKENS[0] else 0 for name in TOKENS}
    budget = GPU_TOKENS if message.backend == "pytorch" and devices.read_gpus() else CPU_TOKENS
    buckets = [each for each in BUCKETS if each < longest] + [min(longest, BUCKETS[-1])]
    buckets = sorted(set(buckets))
    values = {
        "penstock.preprocess": TOKENIZER,
        "penstock.model_inputs": _listed(taken),
        "penstock.postprocess": found.head,
        "penstock.model_outputs": _listed([given]),
        "penstock.pad": ", ".join(f"{each.name}[0]={fills[each.name]}" for each in taken),
        "penstock.pad_buckets": ",".join(map(str, buckets)),
        "penstock.max_tokens": str(max(budget, buckets[-1])),
    }
    for key, value in values.items():
        if key not in message.parameters:
            message.parameters[key].string_value = value
    return found.folder / file


def outputs(found: Pretrained, given: TensorSpec) -> list[TensorSpec]:
    """Return what clients get."""
    if found.head == EMBEDDING:
        return [TensorSpec("EMBEDDING", "FP32", (given.shape[-1],))]
    num_labels = len(pretrained.labels(found.config))
    return [
        TensorSpec("LABEL", "BYTES", (1,)),
        TensorSpec("SCORE", "FP32", (1,)),
        TensorSpec("SCORES", "FP32", (num_labels,)),
    ]


def notes(folder: Path, head: str) -> list[str]:
    """Return what was assumed because the folder does not say it."""
    if head == EMBEDDING and pretrained.embedding(folder).is_guessed:
        return ["no modules.json: embeddings are the mean over the tokens, not normalised"]
    return []


def _torch_output(found: Pretrained) -> TensorSpec:
    if found.head == EMBEDDING:
        return TensorSpec("last_hidden_state", "FP32", (-1, pretrained.hidden_size(found.config)))
    num_labels = len(pretrained.labels(found.config))
    return TensorSpec("logits", "FP32", (num_labels,))


def _tokens(names: Sequence[str]) -> list[TensorSpec]:
    return [TensorSpec(name, "INT64", (-1,)) for name in names]


def _onnx_inputs(found: Pretrained) -> list[TensorSpec]:
    path = found.folder / found.onnx_file
    taken = [
        TensorSpec(each.name, each.datatype, each.shape[1:])
        for each in onnx_file.read_signature(path).inputs
    ]
    strange = [each.name for each in taken if each.name not in TOKENS]
    if strange or not taken:
        expected = f"expected {', '.join(TOKENS)}"
        raise ConfigError(
            [f"{found.onnx_file}: takes {', '.join(strange) or 'nothing'}; {expected}"]
        )
    return taken


def _onnx_output(found: Pretrained) -> TensorSpec:
    names = ONNX_VECTORS if found.head == EMBEDDING else ONNX_LOGITS
    given = {
        each.name: each for each in onnx_file.read_signature(found.folder / found.onnx_file).outputs
    }
    for name in names:
        if name in given:
            return _known_size(found, given[name])
    raise ConfigError(
        [f"{found.onnx_file}: gives {', '.join(given)}; expected one of {', '.join(names)}"]
    )


def _known_size(found: Pretrained, spec: TensorSpec) -> TensorSpec:
    """Return the output without its batch dimension; exports may leave its size open."""
    shape = list(spec.shape[1:])
    if shape and shape[-1] < 0 and found.head == EMBEDDING:
        shape[-1] = pretrained.hidden_size(found.config)
    elif shape and shape[-1] < 0:
        shape[-1] = len(pretrained.labels(found.config))
    return TensorSpec(spec.name, spec.datatype, tuple(shape))


def _add(target: Any, specs: Sequence[TensorSpec]) -> None:
    for spec in specs:
        item = target.add()
        item.name = spec.name
        kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
        item.data_type = _number(item, f"TYPE_{kind}")
        item.dims[:] = spec.shape


def _number(item: Any, name: str) -> int:
    field = item.DESCRIPTOR.fields_by_name["data_type"]
    values: Mapping[str, Any] = field.enum_type.values_by_name
    return int(values[name].number)


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(
        f"{spec.name}:{spec.datatype}[{','.join(map(str, spec.shape))}]" for spec in specs
    )
