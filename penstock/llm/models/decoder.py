"""The decoder of all families: embeddings, layers, a norm and the output head.

It computes hidden states of the concatenated tokens of any sequences; `Attend` knows which tokens
see each other, and stores keys and values. The family's kind of layers has the rest.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.llm.models.rope import Rope, widen
from penstock.llm.models.shape import DecoderShape
from penstock.llm.models.weights import (
    EMBEDDINGS,
    HEAD,
    LAYERS,
    LINEARS,
    NORM,
    POSITIONS,
    Weights,
)
from penstock.llm.settings import ON_CPUS


class Attend(Protocol):
    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from queries [tokens, heads, size]; store keys and values."""


class Decoder:
    def __init__(
        self,
        shape: DecoderShape,
        weights: Weights,
        device: str,
        dtype: torch.dtype,
        quantised: str = "",
    ) -> None:
        """`weights` returns each weight by name, in any type, and is called once for each. Linear
        layers run in `quantised`: "fp8", "int8" or "int4"; the output head runs in INT8 beside the
        last two. Embeddings and everything between linear layers keep `dtype`."""
        self.shape = shape
        self.device, self.dtype = torch.device(device), dtype
        # Whether activations are rounded to fewer bits than FP32.
        self.rounds = bool(quantised) or dtype != torch.float32

        def place(*names: str, is_wide: bool = False) -> Tensor:
            kept = torch.float32 if is_wide else dtype
            parts = [weights(name).to(self.device, kept) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        self.embeddings = place(EMBEDDINGS)
        self._positions = place(POSITIONS) if shape.has_positions else None
        # Rounded as in training.
        self._factor = float(torch.tensor(shape.embedding_factor, dtype=dtype))
        linear, kind = LINEARS[quantised], shape.layer
        self.layers = [
            kind.make(shape, f"{LAYERS}.{n}", place, linear) for n in range(shape.num_layers)
        ]
        self.norm = kind.norm(shape, NORM, place)
        head = self.embeddings if shape.is_tied else place(HEAD)
        is_packed = quantised in ON_CPUS
        self._logits = LINEARS["int8" if is_packed else ""](head, None)
        # Packed weights replace the original ones.
        self._head = None if is_packed else head
        ropes = [shape.rope_of_layer(number) for number in range(shape.num_layers)]
        self._rope_tables = {each: self._table(each) for each in set(ropes)}
        # Of each layer.
        self.rope_tables = [self._rope_tables[each] for each in ropes]

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the final hidden states, [tokens, width], after the last norm."""
        x = self.embed(tokens, positions)
        rows = {each: widen(table[positions]) for each, table in self._rope_tables.items()}
        for number, layer in enumerate(self.layers):
            own = rows[self.shape.rope_of_layer(number)]
            x = layer(x, own, partial(attend, number))
        return self.norm(x)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embeddings)
        if self._positions is not None:
            x = x + self._positions[positions]
        return x if self._factor == 1 else x * self._factor

    @property
    def head(self) -> Tensor:
        """Weights of the output head; not available when packed."""
        assert self._head is not None
        return self._head

    def logits(self, hidden: Tensor) -> Tensor:
        return self.cap(self._logits(hidden))

    def cap(self, logits: Tensor) -> Tensor:
        """Cap what the output head returns, in place."""
        cap = self.shape.logit_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _table(self, rope: Rope) -> Tensor:
        return rope.table(self.shape.head_size, self.shape.max_length).to(self.device)
