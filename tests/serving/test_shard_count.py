from dataclasses import replace
from pathlib import Path

import pytest

from penstock import server
from penstock.api.serve_options import ServeOptions
from penstock.config import LLM, BatchPolicy, ModelConfig
from penstock.serving.shard_count import ShardChoice, choose, cores_of


def model(backend: str, device: str = "cpu", count: int = 1, **options: str) -> ModelConfig:
    batching = BatchPolicy(8)
    config = ModelConfig(backend, "1", backend, "", (), (), 8, batching, count, device)
    return replace(config, options=options)


GPU = model("pytorch", "cuda:0")


@pytest.mark.parametrize(
    ("num_cores", "configs", "number"),
    [
        (1, [GPU], 1),
        (2, [GPU], 1),
        (4, [GPU], 1),
        (6, [GPU], 2),
        (8, [GPU], 4),
        (16, [GPU], 8),
        (64, [GPU], 8),
        (64, [], 8),
        # Without threads of its own, a model leaves the other cores to the shards.
        (16, [model("null", count=2)], 8),
        (16, [model("python", count=8)], 4),
        # A model with a thread on each core needs them itself.
        (64, [model("onnxruntime")], 1),
        (64, [model("openvino", count=4)], 1),
        (64, [model(LLM)], 1),
        (16, [model("onnxruntime", intra_op_thread_count="4")], 7),
        (16, [model("onnxruntime", count=2, intra_op_thread_count="4")], 4),
        (16, [GPU, model("onnxruntime")], 1),
        # ONNX files on a GPU, and two instances in one worker.
        (8, [model("onnxruntime", "cuda:0", 2)], 4),
        # Language models alone gain nothing.
        (8, [model(LLM, "cuda:0")], 1),
        (8, [model(LLM, "cuda:0"), GPU], 3),
    ],
)
def test_choices(num_cores: int, configs: list[ModelConfig], number: int) -> None:
    assert choose(num_cores, configs).number == number


def test_each_gpu_takes_a_core() -> None:
    spread = replace(GPU, num_instances=8, spread=tuple(f"cuda:{n}" for n in range(8)))
    assert cores_of([spread], 16) == 8
    assert choose(16, [spread]) == ShardChoice(4, "models use 8 of 16 cores")


def test_versions_of_a_model_count_once() -> None:
    old = model("onnxruntime", intra_op_thread_count="4")
    new = replace(old, version="2", options={"intra_op_thread_count": "6"})
    assert cores_of([old, new], 16) == 6


def test_the_reason_is_told() -> None:
    assert str(choose(2, [])) == "1 shard: 2 cores"
    assert str(choose(16, [GPU])) == "8 shards: models use 1 of 16 cores"
    assert str(choose(16, [model("onnxruntime")])) == "1 shard: models use all of 16 cores"
    assert str(choose(64, [], ["no"])) == "1 shard: no"


SHARE = (
    '[[key]]\nname = "a"\nsecret = "sixteen characters"\nscopes = ["infer"]\nqueue_share = 0.5\n'
)


class TestChosen:
    """`server.choose_shards`: what one process must do leads to one shard, not to an error."""

    @pytest.fixture(autouse=True)
    def many_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "usable_cores", lambda: 16)

    def choose(self, *configs: ModelConfig, **options: object) -> str:
        return str(server.choose_shards(configs, ServeOptions(**{"shards": 0} | options)))

    def test_several(self) -> None:
        assert self.choose(GPU) == "8 shards: models use 1 of 16 cores"

    def test_default(self) -> None:
        assert server.choose_shards([GPU], ServeOptions()).number == 8

    def test_given(self) -> None:
        assert self.choose(GPU, shards=3) == "3 shards: --shards 3"
        assert self.choose(model(LLM, "cuda:0"), shards=3) == "3 shards: --shards 3"

    def test_refusals(self, tmp_path: Path) -> None:
        explicit = {"model_control_mode": "explicit", "load_model": ("pytorch",)}
        assert "loaded later" in self.choose(GPU, **explicit)
        assert self.choose(GPU, **explicit | {"load_model": ("*",)}).startswith("8 shards")
        keys = tmp_path / "keys.toml"
        secrets = [
            SHARE.replace("sixteen", f"sixteen {n}").replace('"a"', f'"a{n}"') for n in range(99)
        ]
        keys.write_text("".join(secrets))
        assert self.choose(GPU, api_keys=str(keys)) == f"1 shard: {keys} has 99 queue_shares"
        keys.write_text(SHARE)
        assert self.choose(GPU, api_keys=str(keys)).startswith("8 shards")
