"""Decoder layers made of fused `operations`, over all tokens of a step and the paged KV cache.

Computes the same model as `Decoder.hidden`, with fewer passes over memory and only operations that
a CUDA graph can hold. `cuda_runner` calls it.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from penstock.kernels import Paged
from penstock.llm import operations
from penstock.llm.cache import Cache
from penstock.llm.models.decoder import Decoder
from penstock.llm.models.linear import Linear
from penstock.llm.operations import Places


class Fused:
    """Decoder over a paged KV cache; `table` [rows, blocks] is the block table."""

    def __init__(self, decoder: Decoder, cache: Cache, table: Tensor) -> None:
        self._decoder = decoder
        self._paged = [
            Paged(keys, values, table, cache.block_size)
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        self._head = Linear(decoder.head, None)

    def hidden(self, tokens: Tensor, places: Places) -> Tensor:
        """Return the final hidden states, [tokens, width], after the last RMSNorm."""
        decoder, epsilon = self._decoder, self._decoder.shape.epsilon
        layers = decoder.layers
        x = F.embedding(tokens, decoder.embeddings)
        y, x = operations.add_norm(None, x, layers[0].first_norm, epsilon, layers[0].qkv)
        for number, layer in enumerate(layers):
            mixed = self._mixed(number, layer.qkv(y), places)
            out = layer.out(operations.to_input(mixed, layer.out))
            y, x = operations.add_norm(out, x, layer.last_norm, epsilon, layer.gate_up)
            fed = layer.down(operations.gate(layer.gate_up(y), layer.down))
            after = layers[number + 1] if number + 1 < len(layers) else None
            norm = decoder.norm if after is None else after.first_norm
            linear = self._head if after is None else after.qkv
            y, x = operations.add_norm(fed, x, norm, epsilon, linear)
        assert isinstance(y, Tensor)
        return y

    def _mixed(self, number: int, qkv: Tensor, places: Places) -> Tensor:
        shape, paged = self._decoder.shape, self._paged[number]
        norms = self._decoder.layers[number].head_norms
        operations.rope_to_cache(qkv, paged, places, self._decoder.rope_table, norms, shape.epsilon)
        size = shape.head_size
        queries = qkv[:, : shape.num_heads * size].unflatten(1, (shape.num_heads, size))
        return operations.attend(queries, paged, places).flatten(1)
