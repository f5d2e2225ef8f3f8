"""What an engine is made of."""

import random

import pytest

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402

from penstock.errors import ConfigError  # noqa: E402
from penstock.llm import loading  # noqa: E402
from penstock.llm.engine_loading import load  # noqa: E402
from penstock.llm.messages import GenerateRequest  # noqa: E402
from penstock.llm.models.families import LLAMA  # noqa: E402
from penstock.llm.scheduler import StepLimits  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402

EVEN = {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48}


@pytest.mark.parametrize(("small", "least"), [("fp8", 20), ("int8", 28), ("int4", 20)])
def test_in_small_types_most_tokens_are_those_of_the_model_as_it_is(tmp_path, small, least):
    tiny.write_folder(tmp_path, **EVEN)
    chance = random.Random(1)
    found = []
    for dtype in ("float32", small):
        engine, built = load(tiny.settings_of(tmp_path, dtype=dtype, max_waiting=64))
        assert built["dtype"] == dtype
        chance.seed(1)
        for number in range(30):
            tokens = [chance.randrange(50) for _ in range(6)]
            engine.add(
                GenerateRequest(number, tokens, SamplingParams(temperature=0.0, max_tokens=1))
            )
        tokens = {}
        while not engine.is_idle:
            tokens |= {piece.request: piece.token for piece in engine.step()}
        found.append(tokens)
    assert sum(found[0][n] == found[1][n] for n in range(30)) >= least


def test_sizes_that_fp8_does_not_take_are_told(tmp_path):
    tiny.write_folder(tmp_path)
    with pytest.raises(ConfigError) as error:
        load(tiny.settings_of(tmp_path, dtype="fp8"))
    assert error.value.problems == (
        "dtype fp8: hidden_size is 24; expected a multiple of 16",
        "dtype fp8: intermediate_size is 40; expected a multiple of 16",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_experts_count_their_tokens(tmp_path, dtype):
    config = tiny.OTHERS["experts"]
    tiny.write_folder(tmp_path, **config)
    engine, _ = load(tiny.settings_of(tmp_path, dtype=dtype))
    params = SamplingParams(temperature=0.0, max_tokens=4)
    engine.add(GenerateRequest(1, [3, 1, 4], params))
    loads = [engine.take_expert_load()]
    while not engine.is_idle:
        engine.step()
        loads.append(engine.take_expert_load())
    # Six tokens have each two experts in both layers; nothing is read while the engine is busy.
    assert [bool(each) for each in loads].count(True) == 2 and sum(loads[-1]) == 6 * 2 * 2
    assert len(loads[-1]) == 4


def test_fp8_is_not_for_experts(tmp_path):
    tiny.write_folder(tmp_path, **{**tiny.OTHERS["experts"], **EVEN})
    with pytest.raises(ConfigError, match="dtype fp8: not for mixtures of experts; expected bf"):
        load(tiny.settings_of(tmp_path, dtype="fp8"))


@pytest.mark.parametrize("config", [tiny.CONFIG, tiny.QWEN3], ids=["tied", "with a head"])
def test_int8_takes_any_size(tmp_path, config):
    weights = tiny.write_folder(tmp_path, **config)
    engine, built = load(tiny.settings_of(tmp_path, dtype="int8"))
    assert built["dtype"] == "int8"
    engine.add(
        GenerateRequest(1, [3, 1, 4], SamplingParams(temperature=0.0, num_logprobs=1, max_tokens=1))
    )
    (piece,) = engine.step()
    logprobs = tiny.by_hand(weights, config, [3, 1, 4])[-1].log_softmax(0)
    assert piece.logprobs is not None
    assert piece.logprobs.logprob == pytest.approx(float(logprobs[piece.token]), abs=0.1)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_what_cpus_multiply_in_is_not_for_gpus(tmp_path, dtype):
    tiny.write_folder(tmp_path)
    with pytest.raises(ConfigError, match=f"dtype {dtype} runs on CPUs only; on cuda:0 use"):
        loading.open_decoder(tiny.settings_of(tmp_path, dtype=dtype, device="cuda:0"))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"hidden_size": 32, "intermediate_size": 64}, "6 of 8 linear layers; 2 in float32"),
        ({"hidden_size": 24}, "0 of 8 linear layers; 8 in float32"),
        ({"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}, "8 of 8 linear layers"),
    ],
    ids=["heads", "width", "all"],
)
def test_products_whose_sizes_int4_does_not_take_stay_as_they_are(tmp_path, sizes, told):
    tiny.write_folder(tmp_path, **sizes)
    _, built = load(tiny.settings_of(tmp_path, dtype="int4"))
    assert built["int4"].startswith(told)


def test_weights_may_be_made_up_for_a_configuration(tmp_path):
    path = tiny.config_file(tmp_path)
    engine, built = load(tiny.settings_of(path, is_made_up=True))
    engine.add(GenerateRequest(1, [1, 2], SamplingParams(temperature=0.0, max_tokens=3)))
    assert sum(len(engine.step()) for _ in range(4)) == 3
    assert built["vocabulary"] == "50"


def test_a_step_needs_more_memory_the_more_it_holds():
    shape = LLAMA.shape_of_config(tiny.CONFIG)
    needed = [
        loading.step_bytes(shape, StepLimits(*each, 64)) for each in ((4, 16), (4, 32), (8, 32))
    ]
    assert needed == sorted(set(needed))


def test_blocks_have_a_power_of_two_of_tokens(tmp_path):
    path = tiny.config_file(tmp_path)
    with pytest.raises(ConfigError, match="block_size is 12; expected a power of two"):
        load(tiny.settings_of(path, is_made_up=True, block_size=12))
