"""Real models on ONNX Runtime: which may be batched and padded, and which only look as if."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.backends import Batch
from penstock.backends.finished import Finished
from penstock.backends.onnxruntime import load
from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding
from penstock.serving.proof import agreed, prove
from penstock.types import TensorSpec
from penstock.wire.frames import Proof

PAD_X = Padding((PadAxis("x", 0),), (4, 16))
FREE = (TensorSpec("x", "FP32", (-1,)),)


def node(kind: str, *inputs: str, out: str = "y", **attributes: object) -> object:
    return helper.make_node(kind, list(inputs), [out], **attributes)


@pytest.fixture
def proof_of(tmp_path: Path, write_onnx):
    """Writes the model and tries it out."""

    def proof_of(nodes, inputs, outputs, initializers=(), **changes) -> Proof:
        def full(specs):
            return {s.name: (s.datatype, ["n", *_named(s.shape)]) for s in specs}

        path = write_onnx(
            tmp_path / "model.onnx",
            nodes,
            full(inputs),
            full(outputs),
            [numpy_helper.from_array(values, name) for name, values in initializers],
        )
        config = ModelConfig(
            "m", "1", "onnxruntime", str(path), inputs, outputs, 8, BatchPolicy(8, is_dynamic=True)
        )
        # The model runs on the CPU, whatever device the proof is for.
        device = changes.pop("device", config.device)
        config = replace(config, **changes)
        return prove(replace(config, device=device), load(config))

    return proof_of


def _named(shape: tuple[int, ...]) -> list[int | str]:
    return [f"free{axis}" if size < 0 else size for axis, size in enumerate(shape)]


WEIGHTS = np.random.default_rng(1).standard_normal((6, 3)).astype(np.float32)
X6, Y3, Y6 = (
    TensorSpec("x", "FP32", (6,)),
    TensorSpec("y", "FP32", (3,)),
    TensorSpec("y", "FP32", (6,)),
)


def test_a_layer_may_be_batched(proof_of):
    proof = proof_of([node("MatMul", "x", "w")], (X6,), (Y3,), [("w", WEIGHTS)])
    assert proof == Proof()


@pytest.mark.parametrize(
    ("nodes", "initializers"),
    [
        ([node("Softmax", "x", axis=0)], []),
        # Each row depends on those before it only, or on those behind it only.
        ([node("CumSum", "x", "axis")], [("axis", np.array(0))]),
        ([node("CumSum", "x", "axis", reverse=1)], [("axis", np.array(0))]),
        # Centred on the batch, as a batch normalisation that was left in training mode.
        (
            [node("ReduceMean", "x", out="mean", axes=[0], keepdims=1), node("Sub", "x", "mean")],
            [],
        ),
        # Scaled by the largest value of the whole batch, as dynamic quantisation does.
        (
            [
                node("ReduceMax", "x", out="max", keepdims=0),
                node("Div", "x", "max", out="small"),
                node("Mul", "small", "levels", out="fine"),
                node("Round", "fine", out="whole"),
                node("Div", "whole", "levels"),
            ],
            [("levels", np.array(127, np.float32))],
        ),
        # No row's value matters to another, but their number does.
        (
            [
                node("Shape", "x", out="shape"),
                node("Gather", "shape", "zero", out="rows"),
                node("Cast", "rows", out="count", to=TensorProto.FLOAT),
                node("Div", "x", "count"),
            ],
            [("zero", np.array(0))],
        ),
    ],
    ids=["softmax", "forward", "backward", "centred", "scaled", "counted"],
)
def test_rows_that_influence_each_other_are_noticed(proof_of, nodes, initializers):
    proof = proof_of(nodes, (X6,), (Y6,), initializers)
    assert proof.unbatched.startswith("answers depend on what else is in the batch: output 'y'")
    assert "of its largest value" in proof.unbatched


def test_a_recurrent_layer_over_the_batch_is_noticed(proof_of):
    """An LSTM takes [sequence, batch, features]; without transposing, the batch is the sequence."""
    random = np.random.default_rng(2)
    proof = proof_of(
        [
            node("Unsqueeze", "x", "one", out="sequence"),
            helper.make_node("LSTM", ["sequence", "w", "r"], ["out"], hidden_size=3),
            node("Squeeze", "out", "ones"),
        ],
        (X6,),
        (Y3,),
        [
            ("one", np.array([1])),
            ("ones", np.array([1, 2])),
            ("w", random.standard_normal((1, 12, 6)).astype(np.float32)),
            ("r", random.standard_normal((1, 12, 3)).astype(np.float32)),
        ],
    )
    assert "answers depend on what else is in the batch" in proof.unbatched


def test_integers_are_kept_small_enough_for_tables(proof_of):
    table = WEIGHTS[:2]
    ids, y = TensorSpec("ids", "INT64", (-1,)), TensorSpec("y", "FP32", (-1, 3))
    proof = proof_of([node("Gather", "table", "ids")], (ids,), (y,), [("table", table)])
    assert proof == Proof()


def test_a_tolerance_allows_what_dynamic_quantisation_does(proof_of):
    nodes = [
        node("ReduceMax", "x", out="max", keepdims=0),
        node("Mul", "max", "share", out="bit"),
        node("Add", "x", "bit"),
    ]
    share = [("share", np.array(0.01, np.float32))]
    assert proof_of(nodes, (X6,), (Y6,), share).unbatched
    assert not proof_of(nodes, (X6,), (Y6,), share, tolerance=0.1).unbatched


def test_padding_may_move_what_is_computed_in_bf16(proof_of):
    """By less than BF16 rounds; but rows must not influence each other in any datatype."""
    nodes = [
        node("ReduceMean", "x", out="mean", axes=[1], keepdims=1),
        node("Mul", "mean", "share", out="bit"),
        node("Add", "x", "bit"),
    ]
    y = (TensorSpec("y", "FP32", (-1,)),)
    bf16 = {"penstock.dtype": "bf16"}
    for share, options, is_accepted in ((0.02, {}, False), (0.02, bf16, True), (0.5, bf16, False)):
        shares = [("share", np.array(share, np.float32))]
        proof = proof_of(nodes, FREE, y, shares, padding=PAD_X, options=options)
        assert bool(proof.unpadded) is not is_accepted, (share, options)
    nodes = [
        node("ReduceMax", "x", out="max", keepdims=0),
        node("Mul", "max", "share", out="bit"),
        node("Add", "x", "bit"),
    ]
    share = [("share", np.array(0.01, np.float32))]
    assert proof_of(nodes, (X6,), (Y6,), share, options=bf16).unbatched


def test_a_model_that_cannot_be_tried_is_batched_with_a_note(proof_of):
    x, y = TensorSpec("x", "BYTES", (2,)), TensorSpec("y", "BYTES", (2,))
    proof = proof_of([node("Identity", "x")], (x,), (y,))
    assert proof == Proof(
        notes=("not checked whether rows of a batch influence each other: it takes BYTES",)
    )


def test_a_model_that_is_not_batched_is_not_tried(proof_of):
    softmax = [node("Softmax", "x", axis=0)]
    assert proof_of(softmax, (X6,), (Y6,), batching=BatchPolicy(8)) == Proof()


# Padding.


def test_outputs_as_long_as_the_input_are_cut_back(proof_of):
    proof = proof_of([node("Relu", "x")], FREE, (TensorSpec("y", "FP32", (-1,)),), padding=PAD_X)
    assert proof == Proof(crops=(("y", 0),))


def test_a_sum_over_zeros_is_harmless(proof_of):
    y = (TensorSpec("y", "FP32", (1,)),)
    nodes = [node("ReduceSum", "x", "axes", keepdims=1)]
    assert proof_of(nodes, FREE, y, [("axes", np.array([1]))], padding=PAD_X) == Proof()


def test_a_mean_over_padding_is_not(proof_of):
    y = (TensorSpec("y", "FP32", (1,)),)
    proof = proof_of([node("ReduceMean", "x", axes=[1], keepdims=1)], FREE, y, padding=PAD_X)
    assert proof.unpadded.startswith("padding changes answers: output 'y' moved by")
    assert "with 1 filled up to 4" in proof.unpadded
    assert not proof.unbatched


def test_a_mean_that_heeds_its_mask_is(proof_of):
    inputs = (*FREE, TensorSpec("mask", "INT64", (-1,)))
    nodes = [
        node("Cast", "mask", out="m", to=TensorProto.FLOAT),
        node("Mul", "x", "m", out="kept"),
        node("ReduceSum", "kept", "axes", out="sum", keepdims=1),
        node("ReduceSum", "m", "axes", out="count", keepdims=1),
        node("Div", "sum", "count"),
    ]
    axes = (PadAxis("x", 0, 123.0), PadAxis("mask", 0))
    y = (TensorSpec("y", "FP32", (1,)),)
    initializers = [("axes", np.array([1]))]
    padding = Padding(axes, (4, 16))
    assert proof_of(nodes, inputs, y, initializers, padding=padding).unpadded == ""
    ignored = [nodes[0], node("Identity", "x", out="kept"), *nodes[2:]]
    assert "changes answers" in proof_of(ignored, inputs, y, initializers, padding=padding).unpadded


def test_an_output_of_another_length_cannot_be_cut_back(proof_of):
    y = (TensorSpec("y", "FP32", (-1,)),)
    proof = proof_of([node("Concat", "x", "x", axis=1)], FREE, y, padding=PAD_X)
    assert "output 'y' is 8 long instead of 2 and cannot be cut back" in proof.unpadded


def test_padding_is_refused_where_nothing_is_batched(proof_of):
    y = (TensorSpec("y", "FP32", (-1,)),)
    proof = proof_of([node("Relu", "x")], FREE, y, padding=PAD_X, batching=BatchPolicy(8))
    assert proof.unpadded == "the model is not batched dynamically"


def test_on_a_gpu_single_requests_are_padded_too(proof_of):
    """Each length would need a CUDA graph of its own."""
    y = (TensorSpec("y", "FP32", (-1,)),)
    changes = {"padding": PAD_X, "batching": BatchPolicy(1), "max_batch_size": 1, "device": "gpu:0"}
    assert proof_of([node("Relu", "x")], FREE, y, **changes).unpadded == ""
    mean = [node("ReduceMean", "x", axes=[1], keepdims=1)]
    refused = proof_of(mean, FREE, (TensorSpec("y", "FP32", (1,)),), **changes)
    assert "changes answers" in refused.unpadded


def test_padding_that_cannot_be_run_is_refused(proof_of):
    y = (TensorSpec("y", "FP32", (2,)),)
    # Slices of six are made: no length of a bucket allows that.
    nodes = [
        helper.make_node("Split", ["x", "sizes"], ["y", "rest"], axis=1),
    ]
    proof = proof_of(nodes, FREE, y, [("sizes", np.array([2, 5]))], padding=PAD_X)
    assert proof.unpadded.startswith("padding could not be checked: it fails on made-up inputs: ")


def test_only_the_padded_axis_is_cut_back(proof_of):
    """Another axis of any length is the request's own."""
    x, y = TensorSpec("x", "FP32", (-1, -1)), TensorSpec("y", "FP32", (-1, -1))
    proof = proof_of([node("Relu", "x")], (x,), (y,), padding=PAD_X)
    assert proof == Proof(crops=(("y", 0),))
    swapped = proof_of([node("Transpose", "x", perm=[0, 2, 1])], (x,), (y,), padding=PAD_X)
    assert swapped == Proof(crops=(("y", 1),))


def test_another_input_may_have_a_free_axis_that_is_not_padded(proof_of):
    inputs = (*FREE, TensorSpec("b", "FP32", (-1,)))
    outputs = (TensorSpec("y", "FP32", (-1,)), TensorSpec("z", "FP32", (-1,)))
    nodes = [node("Relu", "x"), node("Relu", "b", out="z")]
    assert proof_of(nodes, inputs, outputs, padding=PAD_X) == Proof(crops=(("y", 0),))


LABEL = [
    node("ReduceMean", "f", out="mean", axes=[1], keepdims=1),
    node("Greater", "mean", "limit", out="above"),
    node("Cast", "above", to=TensorProto.INT64),
]


def test_an_answer_that_never_varies_proves_nothing(proof_of):
    """Labels of a mean without its mask: padded or not, it is 0 for all short rows of ones."""
    ids, y = (TensorSpec("ids", "INT64", (-1,)),), (TensorSpec("y", "INT64", (1,)),)
    nodes = [node("Cast", "ids", out="f", to=TensorProto.FLOAT), *LABEL]
    padding = Padding((PadAxis("ids", 0),), (4, 16))
    never = [("limit", np.array(1000, np.float32))]
    proof = proof_of(nodes, ids, y, never, padding=padding)
    assert "it gives the same answer to all made-up inputs" in proof.unpadded
    assert "it gives the same answer to all made-up inputs" in proof.notes[0]
    sometimes = [("limit", np.array(40, np.float32))]
    assert "changes answers" in proof_of(nodes, ids, y, sometimes, padding=padding).unpadded


def test_a_model_that_samples_is_batched_with_a_note(proof_of):
    nodes = [node("RandomNormalLike", "x", out="noise"), node("Add", "x", "noise")]
    proof = proof_of(nodes, (X6,), (Y6,))
    assert not proof.unbatched
    assert "the same batch does not give the same answers twice" in proof.notes[0]


def test_instances_agree_on_the_least():
    good, other = Proof(crops=(("y", 0),)), Proof(crops=(("y", 1),))
    assert agreed([good, good]) == good
    assert "disagree" in agreed([good, other]).unpadded
    assert agreed([good, Proof(unpadded="no", crops=(("y", 0),))]).unpadded == "no"
    assert agreed([good, Proof("no")]).unbatched == "no"
    assert agreed([Proof(notes=("a",)), Proof(notes=("a", "b"))]).notes == ("a", "b")


class Rounding:
    """Rows keep apart; but what a batch of one gives is off by this share, as by another kernel."""

    needs_requests = keeps_rows_apart = runs_ahead = False
    inputs = outputs = ()

    def __init__(self, share: float) -> None:
        self._share = share

    def start(self, batch: Batch) -> Finished:
        values = batch.inputs["x"] * (1 + self._share * (batch.num_rows == 1))
        return Finished({"y": values.astype(np.float32)})


@pytest.mark.parametrize(
    ("device", "share", "may_batch"),
    [
        ("cpu", 2e-3, False),
        ("cuda", 2e-3, True),
        ("cuda", 2e-2, False),
    ],
)
def test_on_a_gpu_shapes_may_differ_by_the_rounding_of_tf32(device, share, may_batch):
    policy = BatchPolicy(8, is_dynamic=True)
    config = ModelConfig("m", "1", "pytorch", "", (X6,), (Y6,), 8, policy, device=device)
    assert (prove(config, Rounding(share)).unbatched == "") is may_batch
