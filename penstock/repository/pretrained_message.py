"""The config.pbtxt of a Hugging Face folder that is served from text or images.

Completes what the operator's own config.pbtxt, if any, leaves out: backend, tensors, batching, and
the built-in steps around the network. `pretrained` says what the folder is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.config import EMBEDDING, IMAGE, OFFSETS, TOKEN_CLASSIFIER, TOKENIZER
from penstock.errors import ConfigError
from penstock.repository import onnx_file, parameters, pbtxt, pretrained
from penstock.repository.parameters import IMAGE_INPUT, format_tensors
from penstock.repository.pbtxt_fields import Proto
from penstock.repository.pretrained import Pretrained
from penstock.system import devices
from penstock.types import TensorSpec

TEXT = TensorSpec("TEXT", "BYTES", (1,))
PIXELS = "pixel_values"
TOKENS = ("input_ids", "attention_mask", "token_type_ids")
# Any of them is a tokenizer, with or without others.
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# Lengths that texts are padded to. Few, because each is warmed up at every batch size.
BUCKETS = (16, 32, 64, 128, 256, 512)
MAX_BATCH, MAX_IMAGES = 32, 16
# Most tokens of a batch: a larger one takes longer without being more efficient.
CPU_TOKENS, GPU_TOKENS = 2048, 16384
# Outputs of exported networks, in order of preference.
ONNX_LOGITS = ("logits",)
SENTENCE = "sentence_embedding"
ONNX_VECTORS = (SENTENCE, "last_hidden_state", "token_embeddings")
ANSWERS = (*ONNX_LOGITS, *ONNX_VECTORS)


def complete(message: Proto, found: Pretrained) -> Path:
    """Fill in the message; return the file that is loaded. ConfigError says what is missing."""
    if message.input or message.output:
        raise ConfigError(
            "input, output: a Hugging Face folder has its own; leave them out of config.pbtxt"
        )
    file = found.onnx_file
    # ONNX Runtime computes on CPUs here.
    is_torch = not file or (found.has_weights and bool(devices.read_gpus()))
    message.backend = message.backend or ("pytorch" if is_torch else "onnxruntime")
    if message.backend == "pytorch":
        file = pretrained.CONFIG
    message.default_model_filename = file
    is_image = found.task == "image classifier"
    steps = _image_steps(found, file) if is_image else _text_steps(found, file, message.backend)
    message.max_batch_size = message.max_batch_size or (MAX_IMAGES if is_image else MAX_BATCH)
    message.dynamic_batching.SetInParent()
    pbtxt.describe_tensors(message.input, [IMAGE_INPUT if is_image else TEXT])
    pbtxt.describe_tensors(message.output, outputs(found, _network_output(found, file)))
    for key, value in steps.items():
        if key not in message.parameters:
            message.parameters[key].string_value = value
    return found.folder / file


def _text_steps(found: Pretrained, file: str, backend: str) -> dict[str, str]:
    """Return the parameters of a network behind a tokenizer."""
    if not has_tokenizer(found.folder):
        save = "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) writes one"
        raise ConfigError(f"a {found.task} without a tokenizer; {save}")
    taken = text_inputs(found, file)
    pad = pretrained.pad_token(found.config)
    padding = [f"{each.name}[0]={pad if each.name == TOKENS[0] else 0}" for each in taken]
    longest = pretrained.max_length(found.folder, found.config)
    buckets = sorted({*(each for each in BUCKETS if each < longest), min(longest, BUCKETS[-1])})
    budget = GPU_TOKENS if backend == "pytorch" and devices.read_gpus() else CPU_TOKENS
    return {
        parameters.PREPROCESS: TOKENIZER,
        parameters.MODEL_INPUTS: format_tensors(taken),
        parameters.POSTPROCESS: found.head,
        parameters.MODEL_OUTPUTS: format_tensors([_network_output(found, file)]),
        parameters.PAD: ", ".join(padding),
        parameters.PAD_BUCKETS: ",".join(map(str, buckets)),
        parameters.MAX_TOKENS: str(max(budget, buckets[-1])),
    }


def _image_steps(found: Pretrained, file: str) -> dict[str, str]:
    """Return the parameters of a network behind an image step."""
    settings = pretrained.image_settings(found.folder)
    name, datatype = PIXELS, "FP32"
    if file.endswith(".onnx"):
        taken = onnx_file.read_signature(found.folder / file).inputs
        if len(taken) != 1:
            names = ", ".join(each.name for each in taken)
            raise ConfigError(f"{file}: takes {names}; expected one input, {PIXELS}")
        name, datatype = taken[0].name, taken[0].datatype
    pixels = TensorSpec(name, datatype, (3, settings.height, settings.width))
    return {
        parameters.PREPROCESS: IMAGE,
        parameters.MODEL_INPUTS: format_tensors([pixels]),
        parameters.POSTPROCESS: found.head,
        parameters.MODEL_OUTPUTS: format_tensors([_network_output(found, file)]),
    }


def text_inputs(found: Pretrained, file: str) -> list[TensorSpec]:
    """Return what the tokenizer makes of a text: the network's inputs, and those of the head."""
    taken = [TensorSpec(name, "INT64", (-1,)) for name in TOKENS[:2]]
    if file.endswith(".onnx"):
        taken = _onnx_inputs(found)
    if found.head == TOKEN_CLASSIFIER:
        taken.append(TensorSpec(OFFSETS, "INT64", (-1, 2)))
    return taken


def _network_output(found: Pretrained, file: str) -> TensorSpec:
    if file.endswith(".onnx"):
        return _onnx_output(found)
    width = _width(found)
    if found.head == EMBEDDING:
        return TensorSpec("last_hidden_state", "FP32", (-1, width))
    shape = (-1, width) if found.head == TOKEN_CLASSIFIER else (width,)
    return TensorSpec("logits", "FP32", shape)


def outputs(found: Pretrained, given: TensorSpec) -> list[TensorSpec]:
    """Return what clients get."""
    if found.head == EMBEDDING:
        return [TensorSpec("EMBEDDING", "FP32", (given.shape[-1],))]
    num_labels = _width(found)
    if found.head == TOKEN_CLASSIFIER:
        return [
            TensorSpec("ENTITIES", "BYTES", (1,)),
            TensorSpec("SCORES", "FP32", (-1, num_labels)),
            TensorSpec("OFFSETS", "INT64", (-1, 2)),
        ]
    return [
        TensorSpec("LABEL", "BYTES", (1,)),
        TensorSpec("SCORE", "FP32", (1,)),
        TensorSpec("SCORES", "FP32", (num_labels,)),
    ]


def has_tokenizer(folder: Path) -> bool:
    return any((folder / each).is_file() for each in TOKENIZER_FILES)


def notes(folder: Path, head: str) -> list[str]:
    """Return what was assumed because the folder does not say it."""
    if head != EMBEDDING:
        return []
    found: list[str] = []
    if pretrained.embedding(folder).is_guessed:
        found.append("no modules.json: embeddings are the mean over the tokens, not normalised")
    if prompt := pretrained.default_prompt(folder):
        found.append(f"the default prompt '{prompt}' is not added to texts; send it with them")
    return found


def _width(found: Pretrained) -> int:
    """Return the last size of the network's output."""
    if found.head == EMBEDDING:
        return pretrained.hidden_size(found.config)
    return len(pretrained.labels(found.config))


def _onnx_inputs(found: Pretrained) -> list[TensorSpec]:
    given = onnx_file.read_signature(found.folder / found.onnx_file).inputs
    taken = [replace(each, shape=each.shape[1:]) for each in given]
    strange = [each.name for each in taken if each.name not in TOKENS]
    if strange or not taken:
        expected = f"expected {', '.join(TOKENS)}"
        raise ConfigError(f"{found.onnx_file}: takes {', '.join(strange) or 'nothing'}; {expected}")
    return taken


def _onnx_output(found: Pretrained) -> TensorSpec:
    names = ONNX_VECTORS if found.head == EMBEDDING else ONNX_LOGITS
    signature = onnx_file.read_signature(found.folder / found.onnx_file)
    given = {each.name: each for each in signature.outputs}
    for name in names:
        if name in given:
            shape = list(given[name].shape[1:])
            # Exports may leave it open.
            if shape and shape[-1] < 0:
                shape[-1] = _width(found)
            return replace(given[name], shape=tuple(shape))
    raise ConfigError(
        f"{found.onnx_file}: gives {', '.join(given)}; expected one of {', '.join(names)}"
    )
