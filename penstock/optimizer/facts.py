"""What a model's files and its loaded form really are: read back, never believed."""

from __future__ import annotations

import msgspec

from penstock.optimizer.candidates import Build


class Facts(msgspec.Struct):
    """Of one build. Counts are of the file; `built` is what the backend says it made of it."""

    backend: str
    # Of ONNX graphs: nodes by operator type, and how many of each kind are quantised.
    operators: dict[str, int] = {}
    # Bytes of weights by datatype (FP32, FP16, INT8, ...).
    weight_bytes: dict[str, int] = {}
    # Operator types that lie between DequantizeLinear and QuantizeLinear, with how many; dynamic
    # forms (MatMulInteger, DynamicQuantizeLinear and contrib twins) count too.
    quantised: dict[str, int] = {}
    # After the runtime's own optimisation, by operator type: what will really run.
    optimised_operators: dict[str, int] = {}
    # Runner.built(): providers, threads, precision, compiled graphs.
    built: dict[str, str] = {}
    num_parameters: int = 0
    file_bytes: int = 0
    # Why rows must not share a batch, as the proof at load found; empty: they may.
    batching_problem: str = ""
    # Why sequences are not padded although configured so; empty: they are, or none were.
    padding_problem: str = ""

    @property
    def is_transformer(self) -> bool:
        return any(name in self.operators for name in ("Attention", "MultiHeadAttention")) or (
            self.operators.get("Softmax", 0) >= 1 and self.operators.get("MatMul", 0) >= 8
        )

    @property
    def is_convolutional(self) -> bool:
        return self.operators.get("Conv", 0) > 0


def file_facts(build: Build) -> Facts:
    """What can be read without loading the model."""
    raise NotImplementedError
