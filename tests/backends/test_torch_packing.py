"""Packed gives what padded gives; what is no encoder, or none such, is refused with the reason."""

import asyncio
import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doubles import RecordingSink

from penstock.backends import Batch, backend
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.serving.model import Model
from penstock.serving.proof import prove
from penstock.serving.warmups import warm_up_all
from penstock.types import Request, TensorSpec, from_array

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from fake_cublaslt import FakeCublasLt  # noqa: E402
from fake_gpu import FakeGpu  # noqa: E402
from packable import answer, texts, write  # noqa: E402

from penstock.backends import torch_packing  # noqa: E402
from penstock.backends.pytorch import Options, TorchRunner, load_module  # noqa: E402
from penstock.kernels.cublaslt import Products  # noqa: E402
from penstock.kernels.gemm import Multiplier  # noqa: E402
from penstock.kernels.packed_encoder import (  # noqa: E402
    LinearInput,
    PackedFp8Linear,
    PackedLinear,
    Scaling,
    lay_out,
    quantise_input,
    to_fp8,
)

PACKED = {"penstock.pack": "tokens"}


def packed(config: ModelConfig, **options: str):
    return backend("pytorch")(replace(config, options=PACKED | options))


def reason(config: ModelConfig, **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        packed(config, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 8},
        {"activation": "tanh"},
        {"activation": "relu", "layers": 1},
        {"width": 48, "heads": 4, "inner": 80},
    ],
)
@pytest.mark.parametrize("is_right", [False, True])
def test_packed_gives_what_padded_gives(tmp_path: Path, changes, is_right) -> None:
    config = write(tmp_path, **changes)
    plain, runner = backend("pytorch")(config), packed(config)
    for seed, lengths in enumerate([(1,), (32,), (32, 1, 7, 20), (5, 5), (32, 32, 32), (1, 1)]):
        inputs = texts(lengths, seed=seed, is_right=is_right)
        np.testing.assert_allclose(answer(runner, inputs), answer(plain, inputs), atol=2e-5)


HUGGING_FACE = """
from transformers import {kind}Config, {kind}{task}

def factory():
    return {kind}{task}({kind}Config(
        vocab_size=120, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=80, dim=64, n_layers=2, n_heads=4,
        hidden_dim=96, hidden_act="{activation}", activation="{activation}", embedding_size=64,
    )).eval()
"""


@pytest.mark.parametrize(
    ("kind", "task", "output", "activation"),
    [
        ("Bert", "Model", "pooler_output", "gelu"),
        ("Bert", "ForSequenceClassification", "logits", "gelu_new"),
        ("Bert", "ForTokenClassification", "logits", "relu"),
        ("Roberta", "ForSequenceClassification", "logits", "gelu"),
        ("DistilBert", "ForSequenceClassification", "logits", "gelu"),
        ("Electra", "Model", "last_hidden_state", "gelu"),
    ],
)
def test_encoders_of_hugging_face(tmp_path: Path, kind, task, output, activation) -> None:
    transformers = pytest.importorskip("transformers")
    config = write(tmp_path)
    source = HUGGING_FACE.format(kind=kind, task=task, activation=activation)
    Path(config.artifact).write_text(source)
    space: dict[str, object] = {}
    exec(source, space)
    torch.manual_seed(4)
    module = space["factory"]()
    assert isinstance(module, transformers.PreTrainedModel)
    is_by_token = "Token" in task or output == "last_hidden_state"
    size = {"pooler_output": 64, "last_hidden_state": 64}.get(output, 2)
    shape = (-1, size) if is_by_token else (size,)
    config = replace(config, outputs=(TensorSpec(output, "FP32", shape),))
    torch_save(module, tmp_path / "model.safetensors")
    inputs = texts((32, 1, 7, 20))
    plain, runner = backend("pytorch")(config), packed(config)
    has_positions = kind != "Roberta"
    assert runner.built()["pack"] == f"tokens: {'embeddings, ' * has_positions}2 layers"
    found, wanted = (
        next(iter(each.start(Batch(inputs, 4)).wait()))[output] for each in (runner, plain)
    )
    is_token = inputs["attention_mask"] != 0
    if is_by_token:
        found, wanted = found[is_token], wanted[is_token]
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def torch_save(module, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: each.contiguous() for name, each in module.state_dict().items()}, path)


def test_the_example_can_be_packed(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 of examples/sentiment, in its true shape with made-up weights."""
    source = Path(__file__).parents[2] / "examples" / "sentiment" / "model.py"
    config = write(tmp_path)
    Path(config.artifact).write_text(source.read_text())
    space: dict[str, object] = {"__file__": str(source), "__name__": "example"}
    exec(source.read_text(), space)
    torch.manual_seed(6)
    torch_save(space["SentenceEncoder"](), tmp_path / "model.safetensors")
    config = replace(config, outputs=(TensorSpec("embedding", "FP32", (384,)),))
    runner = packed(config, **{"penstock.factory": "encoder"})
    assert runner.built()["pack"] == "tokens: embeddings, 6 layers"


def test_an_answer_for_each_token_is_that_of_its_token(tmp_path: Path) -> None:
    config = write(tmp_path, output="tokens")
    inputs = texts((32, 1, 7))
    found, wanted = answer(packed(config), inputs), answer(backend("pytorch")(config), inputs)
    is_token = inputs["attention_mask"] != 0
    np.testing.assert_allclose(found[is_token], wanted[is_token], atol=2e-5)
    assert found.shape == wanted.shape


def test_a_mask_with_holes_is_no_other(tmp_path: Path) -> None:
    config = write(tmp_path)
    inputs = texts((32, 20))
    inputs["attention_mask"][0, 3:9] = 0
    inputs["attention_mask"][1, ::2] = 0
    wanted = answer(backend("pytorch")(config), inputs)
    np.testing.assert_allclose(answer(packed(config), inputs), wanted, atol=2e-5)


def test_what_was_built_is_said(tmp_path: Path) -> None:
    built = packed(write(tmp_path)).built()
    assert built["pack"] == "tokens: 2 layers"
    assert float(built["packed_against_padded"].split()[0]) < 1e-5
    assert built["dtype"] == "float32"


def test_less_precision_is_close(tmp_path: Path) -> None:
    config = write(tmp_path)
    runner = packed(config, **{"penstock.dtype": "bf16"})
    assert runner.built()["dtype"] == "bfloat16"
    inputs = texts((32, 1, 7, 20))
    wanted = answer(backend("pytorch")(config), inputs)
    np.testing.assert_allclose(answer(runner, inputs), wanted, atol=5e-2)


def test_rows_are_proven_apart_and_padding_too(tmp_path: Path) -> None:
    config = replace(write(tmp_path), options=PACKED)
    proof = prove(config, backend("pytorch")(config))
    assert (proof.unbatched, proof.unpadded) == ("", "")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"is_pre_norm": True}, "layer 0 has the parts of BERT's and computes something else"),
        ({"activation": "silu"}, "layer 0 has the parts of BERT's and computes something else"),
        ({"output": "peeks"}, "packed answers differ from padded ones by"),
        ({"output": "counts"}, "no float output"),
    ],
)
def test_what_cannot_be_packed_is_refused(tmp_path: Path, changes, expected) -> None:
    assert expected in reason(write(tmp_path, **changes))


def test_a_module_that_is_no_encoder_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path)
    Path(config.artifact).write_text(
        "import torch\n"
        "class Mean(torch.nn.Module):\n"
        "    def forward(self, input_ids, attention_mask):\n"
        "        return {'y': input_ids[:, :4].float()}\n"
        "factory = Mean\n"
    )
    Path(config.artifact).with_name("model.safetensors").unlink()
    assert "found 0 encoders" in reason(config)


def test_options_that_make_no_sense_are_refused_together(tmp_path: Path) -> None:
    config = write(tmp_path)
    assert "'rows' is not one of tokens" in reason(config, **{"penstock.pack": "rows"})
    assert "not together with penstock.compile" in reason(config, **{"penstock.compile": "default"})
    fused = {"penstock.fuse": "convolutions"}
    assert "not together with penstock.fuse" in reason(config, **fused)
    assert "not a file of" in reason(config, **{"penstock.fp8": "../fp8.json"})
    with pytest.raises(ConfigError, match="does not multiply in FP8"):
        backend("pytorch")(replace(config, options={"penstock.fp8": "fp8.json"}))
    assert "does not multiply in FP8" in reason(config, **{"penstock.fp8": "fp8.json"})


def test_without_one_mask_there_is_nothing_to_pack_by(tmp_path: Path) -> None:
    config = write(tmp_path)
    ids, mask = config.inputs
    floats = replace(config, inputs=(ids, replace(mask, datatype="FP32")), padding=None)
    assert "found 0" in reason(floats)
    unbatched = replace(config, max_batch_size=0, padding=None)
    assert "no batch dimension" in reason(unbatched)


def test_what_is_made_of_it_is_made_of_the_original(tmp_path: Path) -> None:
    loaded = load_module(replace(write(tmp_path), options=PACKED))
    assert loaded.packing is None
    loaded.close()


@pytest.mark.slow
def test_served_by_a_worker_every_answer_is_that_of_its_request(tmp_path: Path) -> None:
    """Requests of all lengths in one bucket, in a process of its own."""
    config = write(tmp_path)
    plain = backend("pytorch")(config)
    rows = [texts((length,), length, seed) for seed, length in enumerate((32, 1, 7, 20, 31, 2) * 8)]

    async def main() -> None:
        model = Model(replace(config, options=PACKED))
        await model.start()
        requests = []
        for row in rows:
            tensors = [from_array(name, "INT64", array) for name, array in row.items()]
            requests.append(Request(RecordingSink(), tensors, 0.0))
            model.submit(requests[-1])
        await model.drain()
        for request, row in zip(requests, rows, strict=True):
            (outputs,) = request.sink.outputs
            np.testing.assert_allclose(outputs["y"], answer(plain, row), atol=2e-5)
        await model.close()

    asyncio.run(main())


def test_more_positions_than_there_are_is_an_error_and_no_look_behind_the_end(tmp_path) -> None:
    config = write(tmp_path, names="hugging")
    runner = packed(config)
    assert "embeddings" in runner.built()["pack"]
    with pytest.raises(ValueError, match="513 positions; the model has 512"):
        answer(runner, texts((513,), 513))


class TestTokens:
    def test_the_buckets_end_with_all_places(self) -> None:
        assert torch_packing.token_buckets(384) == [64, 128, 192, 256, 320, 384]
        assert torch_packing.token_buckets(20) == [20]
        rungs = torch_packing.token_buckets(64 * 384)
        assert rungs[-1] == 64 * 384 and len(rungs) < 64
        pairs = list(zip(rungs, rungs[1:], strict=False))
        assert all(a < b for a, b in pairs)
        assert all(b <= 1.125 * a for a, b in pairs if a >= 512)
        assert {2048, 4096, 16384} <= set(rungs)

    @pytest.mark.parametrize("num_processors", [132, 108, 58, 20])
    def test_on_a_gpu_full_batches_leave_no_multiprocessor_without_a_tile(
        self, num_processors
    ) -> None:
        full = torch_packing.full_batch(num_processors)
        assert full == num_processors * 256
        rungs = torch_packing.token_buckets(3 * full, full=full)
        assert {full, full * 5 // 4, full * 2} <= set(rungs)
        assert all(each % 64 == 0 for each in rungs)
        pairs = list(zip(rungs, rungs[1:], strict=False))
        assert all(a < b <= 1.125 * a + 64 for a, b in pairs)
        (half,) = [each for each in rungs if full // 2 <= each < full // 2 + 64]
        assert torch_packing.budget(full // 2, 3 * full, full=full) == half

    def test_the_most_tokens_that_batches_are_given_are_a_bucket(self) -> None:
        assert 3000 in torch_packing.token_buckets(6144, 3000)
        assert torch_packing.budget(2990, 6144, 3000) == 3000
        assert torch_packing.token_buckets(384, 3000) == torch_packing.token_buckets(384)
        mask = np.zeros((16, 384), np.int64)
        masks = torch_packing.rehearsals(mask, is_captured=True, max_tokens=3000)
        assert max(int(each.sum()) for each in masks) == 3000

    @pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 1000, 6143, 6144])
    def test_a_budget_holds_what_it_is_for(self, num_tokens) -> None:
        found = torch_packing.budget(num_tokens, 6144)
        assert num_tokens <= found <= 1.125 * num_tokens + 64

    def test_rehearsals_end_with_the_fullest(self) -> None:
        mask = np.zeros((16, 384), np.int64)
        counts = [int(each.sum()) for each in torch_packing.rehearsals(mask, is_captured=True)]
        assert counts == sorted(set(counts)) and counts[-1] == mask.size
        assert counts[0] * 4 > mask.size and len(counts) > 8
        (only,) = torch_packing.rehearsals(mask, is_captured=False)
        assert only.all()

    def test_a_full_batch_runs_as_what_it_may_have_at_most(self) -> None:
        rungs = torch_packing.token_buckets(6144, 3000)
        assert 3000 in rungs and rungs[-1] == 6144
        assert torch_packing.budget(2900, 6144, 3000) == 3000
        assert torch_packing.budget(3001, 6144, 3000) > 3001, "whoever has more by itself"
        assert torch_packing.token_buckets(384, 3000) == torch_packing.token_buckets(384)

    @pytest.mark.parametrize("is_captured", [True, False])
    def test_no_more_than_that_is_rehearsed(self, is_captured) -> None:
        mask = np.zeros((16, 384), np.int64)
        made = torch_packing.rehearsals(mask, is_captured=is_captured, max_tokens=3000)
        counts = [int(each.sum()) for each in made]
        assert counts == sorted(set(counts)) and counts[-1] == 3000
        assert counts[0] * 4 > 3000 and (len(counts) > 8) == is_captured


class TestOnADevice:
    """As on a GPU, with a fake one: rungs of rows and tokens, graphs, zeros in rows nobody sent."""

    @pytest.fixture
    def runner(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        gpu = FakeGpu()
        monkeypatch.setattr("penstock.backends.pytorch.open_device", lambda name: gpu)
        config = write(tmp_path)
        packing, loaded = packed_module(config)
        options = Options(1, 1, "", None, "factory", False, has_cuda_graphs=True, is_packed=True)
        return gpu, config, TorchRunner(config, options, replace(loaded, packing=packing))

    def test_batches_between_rungs_give_their_own_rows(self, runner) -> None:
        gpu, config, packed = runner
        plain = backend("pytorch")(config)
        for seed, lengths in enumerate([(32, 1, 7), (32,) * 5, (1,) * 9, (20,), (32, 1, 7)]):
            inputs = texts(lengths, seed=seed)
            np.testing.assert_allclose(answer(packed, inputs), answer(plain, inputs), atol=2e-5)
        assert gpu.num_replays > 0

    def test_each_number_of_tokens_has_its_own_graph(self, runner) -> None:
        gpu, config, packed = runner
        answer(packed, texts((32,) * 16))
        before = gpu.num_captures
        answer(packed, texts((2,) * 16))
        assert gpu.num_captures == before + 1
        answer(packed, texts((3,) * 16))
        assert gpu.num_captures == before + 1

    def test_a_budget_of_tokens_has_a_graph_that_full_batches_fill(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gpu = FakeGpu()
        monkeypatch.setattr("penstock.backends.pytorch.open_device", lambda name: gpu)
        plain_config = write(tmp_path)
        policy = replace(plain_config.batching, max_tokens=200)
        config = replace(plain_config, batching=policy, options=PACKED)
        packing, loaded = packed_module(config)
        options = Options(1, 1, "", None, "factory", False, has_cuda_graphs=True, is_packed=True)
        packed = TorchRunner(config, options, replace(loaded, packing=packing))
        _, timings = warm_up_all(config, packed, prove(config, packed))
        assert set(timings[32]) == {1, 2, 4, 8, 16}
        before = gpu.num_captures
        plain = backend("pytorch")(plain_config)
        for lengths in ((20,) * 10, (32,) * 6, (12,) * 16, (9, 30, 4, 2), (31,)):
            inputs = texts(lengths)
            np.testing.assert_allclose(answer(packed, inputs), answer(plain, inputs), atol=2e-5)
        assert gpu.num_captures == before
        answer(packed, texts((32,) * 16))
        assert gpu.num_captures == before + 1, "a request that is larger than a batch"

    def test_warming_up_captures_what_will_come(self, runner) -> None:
        gpu, config, packed = runner
        proof = prove(config, packed)
        _, timings = warm_up_all(config, packed, proof)
        assert set(timings[32]) == {1, 2, 4, 8, 16}
        before = gpu.num_captures
        for lengths in ((32,) * 16, (20,) * 16, (9, 30, 4, 2), (5,), (31,)):
            answer(packed, texts(lengths))
        assert gpu.num_captures == before


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_what_is_closed_holds_no_weights(tmp_path: Path, monkeypatch, is_on_gpu: bool) -> None:
    if is_on_gpu:
        monkeypatch.setattr("penstock.backends.pytorch.open_device", lambda name: FakeGpu())
    made: list[weakref.ref] = []
    pack = torch_packing.pack

    def watched(*given):
        packing = pack(*given)
        made.append(weakref.ref(packing.stack.layers[0].qkv.weight))
        return packing

    monkeypatch.setattr(torch_packing, "pack", watched)
    config = write(tmp_path / "m")
    runner = backend("pytorch")(replace(config, options={"penstock.pack": "tokens"}))
    answer(runner, texts((5, 3)))
    assert made[0]() is not None
    runner.close()
    gc.collect()
    assert made[0]() is None, "the runner, which is still there, holds on to it"


class TestFp8:
    def test_ranges_are_read_strictly(self, tmp_path: Path) -> None:
        path = tmp_path / "fp8.json"
        values = ('"1"', "-1", "true", "Infinity", "NaN", "1e999")
        for text in ("[]", *(f'{{"0.qkv": {each}}}' for each in values), "{"):
            path.write_text(text)
            with pytest.raises(ConfigError, match="fp8.json"):
                torch_packing.read_ranges(path)
        path.write_text(json.dumps({"0.qkv": 3}))
        assert torch_packing.read_ranges(path) == {"0.qkv": 3.0}
        with pytest.raises(ConfigError, match="cannot be read"):
            torch_packing.read_ranges(tmp_path / "none.json")

    def test_ranges_are_the_largest_inputs(self, tmp_path: Path) -> None:
        packing, loaded = packed_module(write(tmp_path))
        inputs = tensors((32, 5))
        ranges = torch_packing.calibrated(packing, loaded_call(loaded), [inputs])
        assert list(ranges) == [
            f"{number}.{name}" for number in (0, 1) for name in ("qkv", "out", "inner", "outer")
        ]
        normed = loaded.module.embeddings(inputs["input_ids"])[inputs["attention_mask"] != 0]
        assert ranges["0.qkv"] == pytest.approx(float(normed.detach().abs().max()))
        assert all(0.01 < each < 100 for each in ranges.values())

    def test_wrong_ranges_are_all_named(self, tmp_path: Path) -> None:
        config = write(tmp_path, width=72, heads=2, inner=144)
        packing, _ = packed_module(config)
        with pytest.raises(ConfigError) as caught:
            torch_packing.quantise(packing, with_ranges(config, {"0.qkv": 1.0, "9.x": 1.0}))
        text = str(caught.value)
        assert "there is no product '9.x'" in text and "not multiples of 16" in text
        assert "expected penstock.dtype bf16" in text

    @pytest.mark.parametrize("left_out", [(), ("0.outer", "1.outer")])
    def test_answers_are_near(self, tmp_path: Path, left_out) -> None:
        config = write(tmp_path)
        wanted = answer(backend("pytorch")(config), texts((32, 9, 17)))
        packing, loaded = packed_module(config)
        call = loaded_call(loaded)
        ranges = torch_packing.calibrated(packing, call, [tensors((32, 20, 3), seed=8)])
        ranges = {name: each for name, each in ranges.items() if name not in left_out}
        loaded.module.bfloat16()
        torch_packing.quantise(packing, with_ranges(config, ranges))
        assert packing.facts()["fp8"] == f"{8 - len(left_out)} of 8 products"
        given = tensors((32, 9, 17))
        packing.lay_out(given, 32 + 9 + 17)
        found = call(given)["y"].detach().float().numpy()
        gap = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert 1e-4 < gap < 0.1

    def test_channels_with_large_weights_leave_the_others_theirs(self) -> None:
        """With one scale for all, a channel 30,000 times as large as the others would leave them
        only the smallest numbers that e4m3 has."""
        torch.manual_seed(1)
        weight = torch.randn(64, 48)
        weight[7] *= 30_000
        x = torch.randn(40, 48)
        product = PackedFp8Linear(PackedLinear(weight, torch.randn(64)), float(x.abs().max()))
        layout = lay_out(torch.ones(1, 40), 40)
        found = product(LinearInput(to_fp8(x, product.inverse)), layout)
        wanted = x @ weight.t() + product.bias
        gaps = (found - wanted).norm(dim=0) / wanted.norm(dim=0)
        assert float(gaps.max()) < 0.06

    def test_by_row_needs_no_ranges(self, tmp_path: Path) -> None:
        config = write(tmp_path)
        wanted = answer(backend("pytorch")(config), texts((32, 9, 17)))
        packing, loaded = packed_module(config)
        loaded.module.bfloat16()
        torch_packing.quantise(packing, replace(config, options={"penstock.fp8": "rowwise"}))
        assert packing.facts()["fp8"] == "8 of 8 products, each token by its own range"
        given = tensors((32, 9, 17))
        packing.lay_out(given, 32 + 9 + 17)
        found = loaded_call(loaded)(given)["y"].detach().float().numpy()
        gap = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert 1e-4 < gap < 0.1

    def test_by_row_tokens_of_all_sizes_keep_their_digits(self) -> None:
        """By one range for all, the small ones would be rounded to nothing."""
        torch.manual_seed(1)
        x = torch.randn(40, 48) * torch.logspace(-4, 4, 40)[:, None]
        x[3] = 0
        product = PackedFp8Linear(PackedLinear(torch.randn(64, 48), torch.zeros(64)), None)
        assert product.scaling == Scaling(None)
        layout = lay_out(torch.ones(1, 40), 40)
        found = product(quantise_input(x, product.scaling), layout)
        wanted = torch.zeros(40, 64)
        for row in range(40):
            largest = float(x[row].abs().max())
            one = PackedFp8Linear(PackedLinear(torch.randn(64, 48), torch.zeros(64)), largest)
            one.weight, one.scales = product.weight, product.scales * max(largest, 1e-6) / 448
            alone = lay_out(torch.ones(1, 1), 1)
            wanted[row] = one(quantise_input(x[row : row + 1], one.scaling), alone)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-9)
        exact = x @ (product.weight.float() * product.scales.t()).t()
        gaps = (found - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-12)
        assert float(gaps.max()) < 0.06

    def test_by_row_asks_for_bf16_and_for_a_gpu(self, tmp_path: Path) -> None:
        config = replace(write(tmp_path), options={"penstock.fp8": "rowwise"})
        packing, _ = packed_module(config)
        with pytest.raises(ConfigError, match="expected penstock.dtype bf16"):
            torch_packing.quantise(packing, config)
        assert "does not multiply in FP8" in reason(config, **{"penstock.fp8": "rowwise"})


class TestGelu:
    """In 16 bits the form with tanh is used where it is the nearer one, and is told."""

    def test_in_bf16_rounding_costs_more_than_the_form(self, tmp_path: Path, monkeypatch) -> None:
        packing, loaded = packed_module(write(tmp_path))
        loaded.module.bfloat16()
        monkeypatch.setattr(PackedLinear, "gelu", sums_in_fp32)
        torch_packing.choose_gelu(packing)
        assert all(layer.has_fast_gelu for layer in packing.stack.layers)
        gap = packing.stack.gelu_gap
        assert 1e-4 < gap.fast <= gap.exact < 1e-2
        assert packing.facts()["gelu"].startswith(f"with tanh: {gap.fast:.1e} away")

    def test_what_is_further_away_is_not_used(self, tmp_path: Path, monkeypatch) -> None:
        packing, loaded = packed_module(write(tmp_path))
        loaded.module.bfloat16()
        coarse = lambda self, taken: sums_in_fp32(self, taken) * 1.01  # noqa: E731
        monkeypatch.setattr(PackedLinear, "gelu", coarse)
        torch_packing.choose_gelu(packing)
        assert not any(layer.has_fast_gelu for layer in packing.stack.layers)
        assert "gelu" not in packing.facts()

    def test_never_in_fp32_and_never_for_others(self, tmp_path: Path) -> None:
        packing, _ = packed_module(write(tmp_path / "plain"))
        torch_packing.choose_gelu(packing)
        assert packing.stack.gelu_gap is None
        packing, loaded = packed_module(write(tmp_path / "relu", activation="relu"))
        loaded.module.bfloat16()
        torch_packing.choose_gelu(packing)
        assert not any(layer.has_fast_gelu for layer in packing.stack.layers)

    def test_a_model_with_that_form_is_computed_by_it(self, tmp_path: Path) -> None:
        packing, loaded = packed_module(write(tmp_path, activation="tanh"))
        assert all(layer.has_fast_gelu for layer in packing.stack.layers)
        loaded.module.bfloat16()
        torch_packing.choose_gelu(packing)
        assert packing.stack.gelu_gap is None

    def test_answers_stay_near(self, tmp_path: Path) -> None:
        config = write(tmp_path)
        wanted = answer(backend("pytorch")(config), texts((32, 9, 17)))
        packing, loaded = packed_module(config)
        loaded.module.bfloat16()
        for layer in packing.stack.layers:
            layer.has_fast_gelu = True
        given = tensors((32, 9, 17))
        packing.lay_out(given, 32 + 9 + 17)
        found = loaded_call(loaded)(given)["y"].detach().float().numpy()
        np.testing.assert_allclose(found, wanted, atol=5e-2)


class TestProducts:
    """As on a GPU, with a fake cuBLASLt and a fake clock, by which its second algorithm is best."""

    @pytest.fixture
    def library(self, monkeypatch: pytest.MonkeyPatch) -> FakeCublasLt:
        library = FakeCublasLt(num_algorithms=2)
        monkeypatch.setattr("penstock.kernels.cublaslt.ALIGNMENT", 64)

        class Clock:
            def seconds(self, call) -> float:
                before = len(library.used)
                call()
                return 1.0 - sum(library.used[before:])

            def done(self) -> None: ...

        def opened(device, folder) -> Multiplier:
            return Multiplier(Products(library, device), Clock())

        monkeypatch.setattr(torch_packing, "open_multiplier", opened)
        return library

    def test_all_products_of_a_layer_are_the_fastest_ones(self, tmp_path: Path, library) -> None:
        config = write(tmp_path)
        wanted = answer(backend("pytorch")(config), texts((32, 9, 17)))
        packing, loaded = packed_module(config)
        loaded.module.half()
        torch_packing.choose_products(packing, tmp_path)
        given = tensors((32, 9, 17))
        packing.lay_out(given, 32 + 9 + 17)
        call = loaded_call(loaded)
        packing.prepare(32 + 9 + 17, lambda: call(given))
        before = len(library.used)
        found = call(given)["y"].detach().float().numpy()
        np.testing.assert_allclose(found, wanted, atol=2e-2)
        assert library.used[before:] == [1] * len(packing.stack.products())
        assert packing.facts()["products"] == "4 by cublaslt"
        assert set(packing.files()) == {"fusion.json"}

    def test_a_wrong_answer_is_not_served(self, tmp_path: Path, library) -> None:
        packing, loaded = packed_module(write(tmp_path))
        loaded.module.half()
        torch_packing.choose_products(packing, tmp_path)
        torch_packing.check_kernels(packing)
        assert library.used[-1] == 1
        library.wrong = frozenset({1})
        with pytest.raises(BackendFailed, match="of the largest value away"):
            torch_packing.check_kernels(packing)

    def test_what_one_layer_was_checked_with_is_no_batch_that_was_prepared(
        self, tmp_path: Path, library
    ) -> None:
        """In FP8 its products are others than those of the check, which is made before."""
        config = write(tmp_path, inner=128)
        packing, loaded = packed_module(config)
        call = loaded_call(loaded)
        loaded.module.bfloat16()
        torch_packing.choose_products(packing, tmp_path)
        torch_packing.check_kernels(packing)
        assert packing.facts()["products_timed"] == "4 forms"
        torch_packing.quantise(packing, replace(config, options={"penstock.fp8": "rowwise"}))
        given = tensors((32, 32, 32, 32, 32, 32, 4))
        packing.lay_out(given, 196)
        packing.prepare(196, lambda: call(given))
        assert packing.facts()["products_timed"] == "8 forms"

    @pytest.mark.parametrize("is_planted", [False, True])
    def test_gelu_in_fp8_is_inside_the_product_where_that_is_no_less_exact(
        self, tmp_path: Path, library, is_planted
    ) -> None:
        config = write(tmp_path, inner=128)
        packing, loaded = packed_module(config)
        call = loaded_call(loaded)
        if is_planted:
            # A weight of something that is always 0; with one scale for all, it would leave the
            # other channels of this layer next to nothing.
            layer = packing.stack.layers[0]
            layer.first_norm.weight.data[3] = layer.first_norm.bias.data[3] = 0
            layer.inner.weight.data[7, 3] = 1e4
        given = tensors((32, 20, 3), seed=8)
        ranges = torch_packing.calibrated(packing, call, [given])
        packing.lay_out(given, 55)
        wanted = call(given)["y"].detach().float()
        loaded.module.bfloat16()
        torch_packing.choose_products(packing, tmp_path)
        torch_packing.quantise(packing, with_ranges(config, ranges))
        num_layers = len(packing.stack.layers)
        num_fused = num_layers - is_planted
        assert packing.facts()["fp8_gelu"].endswith(f": {num_fused} layers")
        packing.prepare(55, lambda: call(given))
        before = len(library.used)
        found = call(given)["y"].detach().float()
        # Four of each layer: GELU takes no step of its own.
        assert library.used[before:] == [1] * 4 * num_layers
        assert float((found - wanted).norm() / wanted.norm()) < 0.15

    @pytest.mark.parametrize("ranges", ["rowwise", "without the second"])
    def test_gelu_without_a_known_range_behind_it_stays_apart(
        self, tmp_path: Path, library, ranges
    ) -> None:
        config = write(tmp_path, inner=128)
        packing, loaded = packed_module(config)
        loaded.module.bfloat16()
        torch_packing.choose_products(packing, tmp_path)
        names = [each for each in packing.stack.products() if not each.endswith("outer")]
        asked = replace(config, options={"penstock.fp8": "rowwise"})
        if ranges != "rowwise":
            asked = with_ranges(config, dict.fromkeys(names, 4.0))
        torch_packing.quantise(packing, asked)
        assert "fp8_gelu" not in packing.facts()
        given = tensors((32, 20, 3))
        packing.lay_out(given, 55)
        assert loaded_call(loaded)(given)["y"].isfinite().all()

    def test_in_fp32_there_is_nothing_to_choose(self, tmp_path: Path, library) -> None:
        packing, _ = packed_module(write(tmp_path))
        torch_packing.choose_products(packing, tmp_path)
        assert packing.stack.multiplier is None and packing.files() == {}

    def test_without_the_library_torch_multiplies_and_why_is_said(self, tmp_path: Path) -> None:
        packing, loaded = packed_module(write(tmp_path))
        loaded.module.half()
        torch_packing.choose_products(packing, tmp_path)
        torch_packing.check_kernels(packing)
        packing.settle()
        assert packing.facts()["products"] == "by torch: 'cpu' is no NVIDIA GPU"


def sums_in_fp32(product: PackedLinear, taken: LinearInput):
    """As GPUs compute it: rounded once, at the end."""
    x = taken.values
    sums = x.float() @ product.weight.float().t() + product.bias.float()
    return torch.nn.functional.gelu(sums, approximate="tanh").to(x.dtype)


def packed_module(config: ModelConfig):
    loaded = load_module(config)
    loaded.close()
    return torch_packing.pack(loaded.module, loaded_call(loaded), config), loaded


def loaded_call(loaded):
    return lambda inputs: loaded.module(**inputs)


def tensors(lengths, seed: int = 5) -> dict:
    return {name: torch.from_numpy(each) for name, each in texts(lengths, seed=seed).items()}


def with_ranges(config: ModelConfig, ranges: dict[str, float]) -> ModelConfig:
    Path(config.artifact).with_name("fp8.json").write_text(json.dumps(ranges))
    return replace(config, options={"penstock.fp8": "fp8.json"})
