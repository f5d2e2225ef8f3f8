"""A model family: names of its configuration fields and weights.

A family maps a configuration to a `DecoderShape`, and the decoder's weights to those of files,
whose names and layout may differ. `families` has those like Llama; `gemma`, `gpt2`, `opt` and
`mixtures` the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict, cast

import torch
from torch import Tensor

from penstock.llm.models.layer import LayerKind
from penstock.llm.models.reader import Reader
from penstock.llm.models.rope import Rope, rope_of_config, rope_of_gguf
from penstock.llm.models.shape import DecoderShape
from penstock.llm.models.swiglu import SWIGLU
from penstock.llm.models.weights import LAYERS, POSITIONS, weight_sizes
from penstock.types import Array

LABEL = "config.json"
# Fields of a shape: their keys in config.json, and in GGUF files after the family's name.
KEYS = {
    "num_layers": "num_hidden_layers",
    "width": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
    "max_length": "max_position_embeddings",
}
GGUF_KEYS = {
    "num_layers": "block_count",
    "width": "embedding_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_size": "attention.key_length",
    "inner": "feed_forward_length",
    "vocabulary": "vocab_size",
    "max_length": "context_length",
}
# Parts of the decoder's names, and what they are in GGUF files.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embed_positions": "position_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
QKV = tuple(f"self_attn.{each}_proj" for each in "qkv")
LAYER = re.compile(rf"{re.escape(LAYERS)}\.(\d+)\.(.*)")
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)_proj")
FULL, SLIDING = "full_attention", "sliding_attention"
Extend = Callable[[Reader, DecoderShape], DecoderShape]


class ShapeSizes(TypedDict):
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    max_length: int


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A weight in a file: the rows from `start` on of the tensor with this name."""

    name: str
    start: int = 0
    # The tensor is [inputs, outputs], and rows are its columns.
    is_transposed: bool = False
    # Which matrix of a tensor that has several.
    matrix: int | None = None


def keep(reader: Reader, shape: DecoderShape) -> DecoderShape:
    return shape


@dataclass(frozen=True, slots=True)
class ModelFamily:
    # Also the prefix of its keys in GGUF files.
    name: str
    # Names of the architecture in config.json and in GGUF files.
    architectures: tuple[str, ...]
    layer: LayerKind = SWIGLU
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    epsilon_key: str = "rms_norm_eps"
    epsilon: float = 1e-6
    gguf_epsilon_key: str = "attention.layer_norm_rms_epsilon"
    # Settings that are supported only with these values.
    served: Mapping[str, object] = field(
        default_factory=lambda: {"mlp_bias": False, "hidden_act": "silu"}
    )
    # Completes a shape by settings that only this family has.
    of_config: Extend = keep
    of_gguf: Extend = keep
    # RMSNorm on each head of queries and keys.
    has_qk_norm: bool = False
    # Whether queries, keys and values have a bias; None: config.json says so, for all of attention.
    has_qkv_bias: bool | None = None
    has_out_bias: bool = False
    # Embeddings of positions, in place of RoPE.
    has_positions: bool = False
    # Rows of position embeddings in safetensors files before that of position 0.
    num_rows_before: int = 0
    # Which layers `sliding_window` of config.json is for: all of them, or with `use_sliding_window`
    # those from `max_window_layers` on; or `of_config` reads it.
    windows: Literal["none", "all", "late", "own"] = "none"
    # Parts of the decoder's names in safetensors files, replaced in this order.
    renames: tuple[tuple[str, str], ...] = ()
    # Beginning of names that some files leave out.
    optional_prefix: str = ""
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    # Linear layers of files that are several of the decoder's, one after the other.
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Linear layers are [inputs, outputs] in safetensors files.
    is_transposed: bool = False
    # Norms of safetensors files are stored less 1.
    has_low_norms: bool = False
    # Defaults of config.json; head size None: the width divided by the number of heads.
    head_size: int | None = None
    theta: float = 10_000.0
    is_tied: bool = False
    # GGUF files store RoPE pairs next to each other; the decoder has them half a head apart.
    has_adjacent_pairs: bool = False

    # Shapes.

    def shape_of_config(self, values: Mapping[str, object]) -> DecoderShape:
        reader = Reader(values, LABEL)
        is_tied = reader.flag("tie_word_embeddings", self.is_tied)
        has_bias = reader.flag("attention_bias", False) and self.has_qkv_bias is None
        epsilon = reader.real(self.epsilon_key, self.epsilon)
        _refuse_quantised(reader)
        reader.accept(self.served)
        sizes = _sizes(reader, self.keys, self.head_size)
        rope = NO_ROPE
        if not self.has_positions:
            rope = rope_of_config(reader, sizes["head_size"], self.theta)
        if rope.kind == "yarn":
            sizes["max_length"] = max(sizes["max_length"], int(rope.factor * rope.original_length))
        if rope.kind == "longrope":
            sizes["max_length"] = min(sizes["max_length"], rope.original_length)
        windows = self._windows(reader, sizes["num_layers"], sizes["max_length"])
        reader.check()
        shape = DecoderShape(
            **sizes,
            epsilon=epsilon,
            rope=rope,
            layer=self.layer,
            is_tied=is_tied,
            has_qk_norm=self.has_qk_norm,
            has_qkv_bias=has_bias or bool(self.has_qkv_bias),
            has_out_bias=has_bias or self.has_out_bias,
            has_positions=self.has_positions,
            windows=windows,
        )
        shape = self.of_config(reader, shape)
        reader.check()
        return shape

    def _windows(self, reader: Reader, num_layers: int, max_length: int) -> tuple[int, ...]:
        """Read which layers have a window; empty if none has one within the model's length."""
        if self.windows == "own":
            return ()
        has_windows = self.windows != "none"
        if not has_windows:
            reader.accept({"use_sliding_window": False})
        accepted = (FULL, SLIDING) if has_windows else (FULL,)
        kinds = reader.names("layer_types", num_layers, accepted)
        is_used = self.windows == "all" or reader.flag("use_sliding_window", False)
        if not has_windows or not is_used or reader.values.get("sliding_window") is None:
            if SLIDING in kinds and has_windows:
                reader.problems.append(
                    f"{reader.label}: layer_types has {SLIDING!r} without a sliding_window in use"
                )
            return ()
        window = reader.whole("sliding_window")
        first = reader.whole("max_window_layers", 28) if self.windows == "late" else 0
        kinds = kinds or [SLIDING if number >= first else FULL for number in range(num_layers)]
        return windows_of(kinds, window, max_length)

    def shape_of_gguf(self, values: Mapping[str, object]) -> DecoderShape:
        reader, prefix = Reader(values, "GGUF"), self.name
        tokens = values.get("tokenizer.ggml.tokens")
        epsilon = reader.real(f"{prefix}.{self.gguf_epsilon_key}")
        keys = {name: f"{prefix}.{key}" for name, key in GGUF_KEYS.items()}
        sizes = _sizes(reader, keys, None, len(tokens) if isinstance(tokens, list) else None)
        rope = NO_ROPE
        if not self.has_positions:
            rope = rope_of_gguf(reader, prefix, sizes["head_size"], sizes["max_length"])
        reader.check()
        # A separate output head is found among the tensors later.
        shape = DecoderShape(
            **sizes,
            epsilon=epsilon,
            rope=rope,
            layer=self.layer,
            is_tied=True,
            has_qk_norm=self.has_qk_norm,
            has_qkv_bias=bool(self.has_qkv_bias),
            has_out_bias=self.has_out_bias,
            has_positions=self.has_positions,
        )
        shape = self.of_gguf(reader, shape)
        window = reader.values.get(key := f"{prefix}.attention.sliding_window")
        if window and not shape.windows:
            reader.problems.append(f"GGUF: {key} is {window!r}; expected none in this family")
        reader.check()
        return shape

    # Weights.

    def file_places(self, shape: DecoderShape) -> dict[str, FilePlace]:
        """Return where a Hugging Face file has each weight, by the decoder's names."""
        sizes = weight_sizes(shape)
        places = {name: self._file_place(name) for name in sizes}
        places |= _joined_places(sizes, self.joined, self._file_place)
        return places

    def _file_place(self, name: str) -> FilePlace:
        found = name
        for part, other in self.renames:
            found = found.replace(part, other)
        is_linear = name.startswith(LAYERS) and name.endswith("_proj.weight")
        start = self.num_rows_before if name == POSITIONS else 0
        return FilePlace(found, start, self.is_transposed and is_linear)

    def from_file(self, name: str, values: Tensor, shape: DecoderShape) -> Tensor:
        """Convert a weight from its layout in a Hugging Face file to the decoder's. If only a part
        of each head is rotated, that part begins both halves of a head here."""
        if self.has_low_norms and name.endswith("norm.weight"):
            return values.float() + 1
        half, num_pairs = shape.head_size // 2, shape.rope.num_pairs(shape.head_size)
        if num_pairs in (0, half) or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return values
        rotated, rest = torch.arange(2 * num_pairs), torch.arange(2 * num_pairs, 2 * half)
        order = torch.cat(
            [part for pair in zip(rotated.chunk(2), rest.chunk(2), strict=True) for part in pair]
        )
        return values.unflatten(0, (-1, shape.head_size))[:, order].flatten(0, 1)

    def gguf_places(self, shape: DecoderShape) -> dict[str, FilePlace]:
        """Return where a GGUF file has each weight, by the decoder's names."""
        sizes = weight_sizes(shape)
        places = {name: self._gguf_place(name) for name in sizes}
        return places | _joined_places(sizes, self.gguf_joined, self._gguf_place)

    def _gguf_place(self, name: str) -> FilePlace:
        whole, _, ending = name.rpartition(".")
        if not (match := LAYER.fullmatch(whole)):
            return FilePlace(f"{self._gguf_name(whole)}.{ending}")
        number, part = match[1], match[2]
        if expert := EXPERT.fullmatch(part):
            name = f"blk.{number}.ffn_{expert[2]}_exps.{ending}"
            return FilePlace(name, matrix=int(expert[1]))
        return FilePlace(f"blk.{number}.{self._gguf_name(part)}.{ending}")

    def _gguf_name(self, name: str) -> str:
        return {**GGUF_NAMES, **self.gguf_names}.get(name, name)

    def from_gguf(self, name: str, values: Array, shape: DecoderShape) -> Array:
        """Convert a weight from its GGUF layout to the decoder's."""
        if not self.has_adjacent_pairs or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return values
        pairs = values.reshape(-1, shape.head_size // 2, 2, values.shape[1])
        return pairs.swapaxes(1, 2).reshape(values.shape)


# Position embeddings are in the embeddings, and heads are not rotated.
NO_ROPE = Rope(share=0.0)


def _refuse_quantised(reader: Reader) -> None:
    """Refuse checkpoints whose weights are packed, by the name of their method."""
    told = reader.part("quantization_config") or reader.part("compression_config")
    if told:
        reader.problems.append(
            f"{reader.label}: weights quantised by {told.get('quant_method', 'unknown')!r} are not "
            "served; expected unquantised weights, whose linear layers penstock.dtype quantises, "
            "or a GGUF file"
        )


def windows_of(kinds: list[str], window: int, max_length: int) -> tuple[int, ...]:
    """Return the window of each layer; empty if no window is shorter than the model's length."""
    found = tuple(window if kind == SLIDING else 0 for kind in kinds)
    return found if any(found) and window < max_length else ()


def _joined_places(
    sizes: Mapping[str, tuple[int, ...]],
    joined: Mapping[str, tuple[str, ...]],
    place: Callable[[str], FilePlace],
) -> dict[str, FilePlace]:
    """Return the places of weights that are parts of one in the file; `joined` names the latter."""
    found: dict[str, FilePlace] = {}
    starts: dict[str, int] = {}
    whole_of = {part: whole for whole, parts in joined.items() for part in parts}
    for name, size in sizes.items():
        match = LAYER.fullmatch(name)
        part, _, ending = match[2].rpartition(".") if match else ("", "", "")
        if match and part in whole_of:
            whole = place(f"{LAYERS}.{match[1]}.{whole_of[part]}.{ending}")
            start = starts.get(whole.name, 0)
            is_transposed = whole.is_transposed or place(name).is_transposed
            found[name] = FilePlace(whole.name, start, is_transposed)
            starts[whole.name] = start + size[0]
    return found


def _sizes(
    reader: Reader, keys: Mapping[str, str], head_size: int | None, vocabulary: int | None = None
) -> ShapeSizes:
    """Read the sizes; raise ConfigError with all problems of the reader."""
    sizes = {name: reader.whole(keys[name]) for name in ("width", "num_heads")}
    defaults = {
        "num_kv_heads": sizes["num_heads"],
        "head_size": head_size or sizes["width"] // sizes["num_heads"],
        "inner": 4 * sizes["width"] if keys["inner"] == "n_inner" else None,
        "vocabulary": vocabulary,
    }
    for name in keys.keys() - sizes.keys():
        found = reader.values.get(keys[name])
        default = defaults.get(name)
        # null is the default, as in transformers.
        sizes[name] = default if found is None and default else reader.whole(keys[name], default)
    reader.check()
    return cast("ShapeSizes", sizes)
