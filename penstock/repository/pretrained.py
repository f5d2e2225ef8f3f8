"""Facts about a Hugging Face folder, read from its JSON files without its library.

Which task its architecture has, its labels, the longest text, how an embedding is pooled, and the
headers of its weights. Knows nothing of a model's tensors (`pretrained_message` does) and runs no
code of the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from penstock.config import CLASSIFIER, EMBEDDING, TOKEN_CLASSIFIER
from penstock.errors import ConfigError
from penstock.repository.image_settings import ImageSettings

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ONNX = ("model.onnx", "onnx/model.onnx")
PREPROCESSOR = "preprocessor_config.json"
MAX_HEADER_BYTES = 100 << 20
# Architectures of causal language models, which have an engine of their own. They include families
# that we do not serve, so that the user gets an error that lists those we do.
GENERATORS = ("ForCausalLM", "LMHeadModel")
# Task by the end of an architecture's name.
TASKS: Mapping[str, Task] = {
    "ForSequenceClassification": "text classifier",
    "ForTokenClassification": "token classifier",
    "ForImageClassification": "image classifier",
    "ForMaskedLM": "encoder",
    "Model": "encoder",
}
ACCEPTED = "a text classifier, token classifier, encoder, image classifier or causal LM"
# Without any limit in the folder's files.
DEFAULT_MAX_LENGTH = 512
# Larger limits in tokenizer_config.json mean "none".
NO_LIMIT = 1_000_000
# Position embeddings of these start behind the padding token's number.
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "data2vec-text")
# Image processors whose settings say all they do. "ConvNext" warps images from this size on.
IMAGE_KINDS = ("ViT", "DeiT", "Bit", "CLIP", "Siglip", "MobileNetV1", "MobileNetV2", "ConvNext")
WARPED_FROM = 384
HIDDEN_SIZES = ("hidden_size", "d_model", "dim", "n_embd")
Task = Literal["text classifier", "token classifier", "image classifier", "encoder"]
Activation = Literal["softmax", "sigmoid", "none"]
Pooling = Literal["mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens"]
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens")


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A folder that is served with its own pre- and postprocessing."""

    folder: Path
    architecture: str
    task: Task
    config: Mapping[str, object]

    @property
    def head(self) -> str:
        """The built-in step behind the model."""
        heads = {"token classifier": TOKEN_CLASSIFIER, "encoder": EMBEDDING}
        return heads.get(self.task, CLASSIFIER)

    @property
    def onnx_file(self) -> str:
        """The exported network, if the folder has one; empty without."""
        return next((name for name in ONNX if (self.folder / name).is_file()), "")

    @property
    def has_weights(self) -> bool:
        return any((self.folder / name).is_file() for name in WEIGHTS)


def read(folder: Path) -> Pretrained | None:
    """Return what a folder is; None for language models and for folders that are no Hugging Face
    models. ConfigError, with what is accepted, for other architectures."""
    if not is_model(folder):
        return None
    config = read_config(folder)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if not name and (folder / "modules.json").is_file():
        name = "SentenceTransformerModel"
    if not name or name.endswith(GENERATORS):
        return None
    for ending, task in TASKS.items():
        if name.endswith(ending):
            return Pretrained(folder, name, task, config)
    raise ConfigError(f"{folder.name}/{CONFIG}: {name} is not served; expected {ACCEPTED}")


def is_model(folder: Path) -> bool:
    """Whether it is a folder of Hugging Face with weights or an exported network."""
    if not (folder / CONFIG).is_file():
        return False
    return any((folder / each).is_file() for each in (*WEIGHTS, *ONNX))


def read_config(folder: Path) -> Mapping[str, object]:
    return _read_json(folder / CONFIG)


def labels(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the label of each class, in the order of the network's outputs."""
    given = config.get("id2label")
    if not isinstance(given, dict) or not given:
        # As transformers does: two classes without names.
        count = config.get("num_labels") or config.get("_num_labels")
        return tuple(f"LABEL_{n}" for n in range(count if isinstance(count, int) else 2))
    try:
        by_number = {int(number): str(label) for number, label in given.items()}
        return tuple(by_number[number] for number in range(len(by_number)))
    except (ValueError, KeyError):
        raise ConfigError(f"{CONFIG}: id2label: expected the numbers from 0 on") from None


def activation(config: Mapping[str, object]) -> Activation:
    """Return how scores follow from logits, as the pipelines of transformers choose it."""
    kind, count = config.get("problem_type"), len(labels(config))
    if kind == "regression":
        return "none"
    return "sigmoid" if kind == "multi_label_classification" or count == 1 else "softmax"


def hidden_size(config: Mapping[str, object]) -> int:
    for key in HIDDEN_SIZES:
        if isinstance(size := config.get(key), int):
            return size
    raise ConfigError(f"{CONFIG}: no size of the hidden states; expected {HIDDEN_SIZES[0]}")


def pad_token(config: Mapping[str, object]) -> int:
    """Return the number of the padding token; 0 if the folder names none."""
    number = config.get("pad_token_id")
    return number if isinstance(number, int) and number >= 0 else 0


def max_length(folder: Path, config: Mapping[str, object]) -> int:
    """Return the most tokens of a text: the smallest limit in the folder's files."""
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and config.get("model_type") in OFFSET_POSITIONS:
        positions -= pad_token(config) + 1
    limits = [
        positions,
        _optional_json(folder / "tokenizer_config.json").get("model_max_length"),
        _optional_json(folder / "sentence_bert_config.json").get("max_seq_length"),
    ]
    known = [int(each) for each in limits if isinstance(each, int | float) and 0 < each < NO_LIMIT]
    return min(known, default=DEFAULT_MAX_LENGTH)


def lowers_case(folder: Path) -> bool:
    """Whether sentence-transformers lowers the case of texts before its tokenizer."""
    return _optional_json(folder / "sentence_bert_config.json").get("do_lower_case") is True


def default_prompt(folder: Path) -> str:
    """Return the name of the prompt that sentence-transformers puts before texts; empty without."""
    name = _optional_json(folder / "config_sentence_transformers.json").get("default_prompt_name")
    return name if isinstance(name, str) else ""


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a vector is made of those of all tokens. `is_guessed`: the folder does not say."""

    pooling: Pooling
    is_normalized: bool
    is_guessed: bool = False


def embedding(folder: Path) -> Embedding:
    """Return how the folder's sentence-transformers modules pool; the mean without any."""
    path = folder / "modules.json"
    if not path.is_file():
        return Embedding("mean", is_normalized=False, is_guessed=True)
    modules = _decode(path)
    pooling: Pooling | None = None
    is_normalized = False
    for each in modules if isinstance(modules, list) else ():
        if not isinstance(each, dict):
            continue
        kind = str(each.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(folder / str(each.get("path", "1_Pooling")) / CONFIG)
        elif kind == "Normalize":
            is_normalized = True
        elif kind != "Transformer":
            known = "Transformer, Pooling and Normalize"
            raise ConfigError(f"modules.json: '{kind}' is not supported; expected {known}")
    return Embedding(pooling or "mean", is_normalized, is_guessed=pooling is None)


def _pooling(path: Path) -> Pooling:
    settings = _read_json(path)
    chosen = [
        each
        for each in POOLINGS
        if settings.get(f"pooling_mode_{each}{'_token' if each == 'cls' else ''}") is True
        or settings.get(f"pooling_mode_{each}_tokens") is True
        or settings.get("pooling_mode") == each
    ]
    if len(chosen) != 1:
        where = f"{path.parent.name}/{path.name}"
        raise ConfigError(
            f"{where}: {len(chosen)} pooling modes; expected one of {', '.join(POOLINGS)}"
        )
    return chosen[0]


def image_settings(folder: Path) -> ImageSettings:
    """Return how preprocessor_config.json wants images. ConfigError for kinds that do more."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        raise ConfigError(f"no {PREPROCESSOR}; it says how images are resized and normalised")
    settings = _read_json(path)
    name = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or "")
    kind = name.removesuffix("Fast").removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    if kind not in IMAGE_KINDS:
        known = ", ".join(IMAGE_KINDS)
        raise ConfigError(f"{PREPROCESSOR}: '{name}' is not supported; expected that of {known}")
    shortest, resize = _resize(settings)
    size = settings.get("crop_size") if settings.get("do_center_crop") else None
    crop = None if size is None else _height_and_width(size, "crop_size")
    if kind == "ConvNext" and 0 < shortest < WARPED_FROM:
        crop = (shortest, shortest)
        shortest = int(shortest / (_number(settings, "crop_pct", 0) or 224 / 256))
    elif kind == "ConvNext":
        shortest, resize = 0, (shortest, shortest)
    final = crop or resize
    if final is None:
        expected = "expected height and width, or crop_size"
        raise ConfigError(f"{PREPROCESSOR}: images would have any size; {expected}")
    is_scaled = settings.get("do_rescale", True)
    is_normalized = settings.get("do_normalize", True)
    return ImageSettings(
        *final,
        resize,
        shortest,
        int(_number(settings, "resample", 2)),
        _number(settings, "rescale_factor", 1 / 255) if is_scaled else 1.0,
        _channels(settings, "image_mean") if is_normalized else (0.0, 0.0, 0.0),
        _channels(settings, "image_std") if is_normalized else (1.0, 1.0, 1.0),
    )


def _resize(settings: Mapping[str, object]) -> tuple[int, tuple[int, int] | None]:
    """Return the shortest edge, or height and width, to resize to."""
    size = settings.get("size")
    if not settings.get("do_resize", True) or size is None:
        return 0, None
    if isinstance(size, dict) and isinstance(size.get("shortest_edge"), int):
        if size.get("longest_edge"):
            raise ConfigError(f"{PREPROCESSOR}: size.longest_edge is not supported")
        return size["shortest_edge"], None
    return 0, _height_and_width(size, "size")


def _height_and_width(size: object, key: str) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict):
        both = size.get("height"), size.get("width")
        if isinstance(both[0], int) and isinstance(both[1], int):
            return both[0], both[1]
    raise ConfigError(f"{PREPROCESSOR}: {key}: {size}; expected height and width")


def _number(settings: Mapping[str, object], key: str, default: float) -> float:
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float):
        raise ConfigError(f"{PREPROCESSOR}: {key}: {value}; expected a number")
    return float(value)


def _channels(settings: Mapping[str, object], key: str) -> tuple[float, float, float]:
    given = settings.get(key)
    values = [given] * 3 if isinstance(given, int | float) else given
    if not isinstance(values, list) or len(values) != 3:
        raise ConfigError(f"{PREPROCESSOR}: {key}: {given}; expected three numbers")
    return float(values[0]), float(values[1]), float(values[2])


def _optional_json(path: Path) -> Mapping[str, object]:
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> Mapping[str, object]:
    found = _decode(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name}: expected a JSON object")
    return found


def _decode(path: Path) -> object:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path.parent.name}/{path.name}: cannot be read: {error}") from None


class StoredTensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


# Made when this is imported: msgspec crashes when several threads are the first to use a type.
_headers = msgspec.json.Decoder(StoredTensor)


def read_header(file: Path) -> list[StoredTensor] | None:
    """Return the tensors in a safetensors file's header, read without any weights; None if the
    header is invalid."""
    try:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_BYTES:
                return None
            header = msgspec.json.decode(stream.read(size), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        return [_headers.decode(raw) for raw in header.values()]
    except (OSError, msgspec.MsgspecError):
        return None
