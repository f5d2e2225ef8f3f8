"""Names and shapes of a decoder's weights. Names are those of Hugging Face's Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from penstock.llm.models.fp8 import fp8_linear
from penstock.llm.models.int4 import int4_linear
from penstock.llm.models.int8 import int8_linear
from penstock.llm.models.layer import MakeLinear
from penstock.llm.models.linear import Linear
from penstock.llm.models.shape import DecoderShape

Weights = Callable[[str], Tensor]
# Linear layers by their datatype; "": that of the other layers.
LINEARS: Mapping[str, MakeLinear] = {
    "": Linear,
    "fp8": fp8_linear,
    "int8": int8_linear,
    "int4": int4_linear,
}
EMBEDDINGS, POSITIONS = "model.embed_tokens.weight", "model.embed_positions.weight"
NORM, HEAD, LAYERS = "model.norm", "lm_head.weight", "model.layers"


def weight_sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, by name."""
    width = shape.width
    found: dict[str, tuple[int, ...]] = {EMBEDDINGS: (shape.vocabulary, width)}
    if shape.has_positions:
        found[POSITIONS] = shape.max_length, width
    found[f"{NORM}.weight"] = (width,)
    if shape.layer.has_norm_bias:
        found[f"{NORM}.bias"] = (width,)
    if not shape.is_tied:
        found[HEAD] = shape.vocabulary, width
    layer = shape.layer.sizes(shape)
    for number in range(shape.num_layers):
        found |= {f"{LAYERS}.{number}.{name}": size for name, size in layer.items()}
    return found
