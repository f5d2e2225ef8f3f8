"""Fuse attention into one of ONNX Runtime's operators; if no pattern matches, the step fails. Other
fusions are left to ONNX Runtime, which does them when it loads the model."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import BackendFailed, ConfigError
from penstock.optimizer import onnx_model
from penstock.optimizer.passes import Build, BuildContext, Facts, Pass, PassContext, Proposals, Step
from penstock.optimizer.passes.building import is_onnx, quiet_log, write_onnx

if TYPE_CHECKING:
    from onnx import ModelProto

# Operators that fusion creates. They are ONNX Runtime's own, so OpenVINO cannot read them.
ATTENTION = ("Attention", "MultiHeadAttention")
FUSED = (
    *ATTENTION,
    *("BiasGelu", "EmbedLayerNormalization", "FastGelu", "Gelu"),
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
)
# Rows and lengths to compare the fused graph on, and the tolerance as a share of the largest value.
SHAPES = ((1, 16), (3, 9))
TOLERANCE = 1e-3


class TransformerFusion(Pass):
    name = "transformer-fusion"
    stage = "compile"

    def propose(self, context: PassContext) -> Proposals:
        facts = context.facts
        if not is_onnx(context.build):
            return self.skip("the model is not an ONNX file")
        if context.build.config.engine != "onnxruntime":
            return self.skip("fused operators are ONNX Runtime's own")
        if not facts.is_transformer:
            return self.skip("the model is no transformer: it has no Softmax with products")
        if facts.quantised:
            return self.skip("the model is quantised already")
        if any(name in facts.operators for name in ATTENTION):
            return self.skip("attention is fused already")
        return [Step(self.name, {"attention": form}) for form in ("packed", "heads")]

    def build(self, parent: Build, step: Step, target: Path, context: BuildContext) -> None:
        # It imports onnx, which takes a while.
        from penstock.optimizer.attention import FORMS, fuse

        form = step.settings.get("attention", "")
        if form not in FORMS:
            raise ConfigError([f"attention: '{form}' is not one of {', '.join(FORMS)}"])
        original = onnx_model.read(parent.artifact)
        model = onnx_model.optimised(original)
        if not fuse(model, form):
            model = _fused_by_library(model)
        if not any(node.op_type in ATTENTION for node in model.graph.node):
            raise BackendFailed("attention was not fused: no known pattern fits this graph")
        _check_answers(original, model)
        write_onnx(parent, model, target)

    def check(self, step: Step, before: Facts, after: Facts) -> list[str]:
        made = Counter(after.operators) - Counter(before.operators)
        made = Counter({name: made[name] for name in FUSED if name in made})
        if not made:
            return ["nothing was fused: no pattern fits this graph"]
        if not any(name in made for name in ATTENTION):
            listed = ", ".join(f"{count} {name}" for name, count in made.items())
            return [f"attention was not fused, only {listed}, as ONNX Runtime does at load"]
        return []


def _fused_by_library(model: ModelProto) -> ModelProto:
    """Fuse with ONNX Runtime's library, which knows more forms of attention than we do. It needs
    sympy; without it nothing is fused, and `check` reports that."""
    try:
        importlib.import_module("sympy")
    except ImportError:
        return model
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions("bert")
    # Their CPU kernels are slower than the operators they replace.
    options.enable_skip_layer_norm = False
    options.enable_embed_layer_norm = False
    with quiet_log("onnxruntime.transformers"):
        optimizer = optimize_model(model, "bert", opt_level=0, optimization_options=options)
    fused: ModelProto = optimizer.model
    return fused


def _check_answers(original: ModelProto, fused: ModelProto) -> None:
    """Raise BackendFailed unless both models agree on several shapes."""
    old, new = onnx_model.session(original), onnx_model.session(fused)
    for num_rows, size in SHAPES:
        feeds = onnx_model.made_up(original.graph, num_rows, size)
        given = onnx_model.run(new, feeds)
        for name, wanted in onnx_model.run(old, feeds).items():
            if not onnx_model.is_close(given[name], wanted, TOLERANCE):
                rows = f"{num_rows} rows of {size}"
                raise BackendFailed(f"output '{name}' is another one after fusion, for {rows}")
