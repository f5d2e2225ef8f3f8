"""Language models on a real GPU: a small one with heads of a true size, by CUDA graphs and without,
beside the plain decoder in FP32; `make test-gpu`. Without one: tests/llm/test_cuda_runner.py."""

import random

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("triton")

import tiny_llm as tiny  # noqa: E402
from batch_invariance import differences  # noqa: E402

from penstock.backends.torch_cuda import Cuda  # noqa: E402
from penstock.llm import loading  # noqa: E402
from penstock.llm.batched_attention import BatchedAttention  # noqa: E402
from penstock.llm.cache import Cache, Span  # noqa: E402
from penstock.llm.checkpoint import open_checkpoint  # noqa: E402
from penstock.llm.constrained import ConstrainedSequences  # noqa: E402
from penstock.llm.cuda_runner import CudaRunner  # noqa: E402
from penstock.llm.engine import Engine  # noqa: E402
from penstock.llm.engine_loading import load  # noqa: E402
from penstock.llm.messages import GenerateRequest  # noqa: E402
from penstock.llm.models.decoder import Decoder  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402

SIZES = {
    "num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 1024,
}  # fmt: skip
LLAMA = {**tiny.CONFIG, **SIZES}
QWEN3 = {**tiny.QWEN3, **SIZES, "head_dim": 128, "num_attention_heads": 4}
# Layers that differ from Llama's, in sizes that the kernels take.
WINDOW = {"sliding_window": 40, "num_hidden_layers": 3}
OTHERS = {
    name: {**config, **SIZES, **WINDOW} for name, config in tiny.OTHERS.items() if name != "gpt2"
}
OTHERS["gpt2"] = {
    **tiny.OTHERS["gpt2"], "n_embd": 256, "n_head": 4, "n_positions": 1024, "vocab_size": 1000,
}  # fmt: skip
OTHERS["gemma3 with large heads"] = {**OTHERS["gemma3"], "head_dim": 256}
# Of logits as large as these; BF16 keeps two digits.
TOLERANCE = {"bfloat16": 0.05, "float16": 0.01, "fp8": 0.4}
GREEDY = SamplingParams(temperature=0.0)
OPTIONS = {
    "device": "cuda:0", "dtype": "bfloat16", "block_size": 16, "cache_bytes": 64 << 20,
    "max_sequences": 8, "max_tokens": 96, "max_length": 512, "max_waiting": 100,
}  # fmt: skip


@pytest.fixture(params=[LLAMA, QWEN3], ids=["llama", "qwen3"])
def config(request):
    return request.param


def an_engine(folder, **changes) -> Engine:
    engine, _ = load(tiny.settings_of(folder, **{**OPTIONS, **changes}))
    return engine


def without_graphs(folder) -> Engine:
    """The same, but for that."""
    engine = an_engine(folder)
    settings = tiny.settings_of(folder, **OPTIONS)
    decoder = loading.open_decoder(settings)
    limits = engine.scheduler.limits
    cache = loading.room(settings, decoder, limits)
    device = Cuda(settings.device)
    engine.runner = CudaRunner(decoder, cache, device, limits, has_graphs=False)
    engine.runner.prepare()
    return engine


def write(folder, config) -> None:
    """Weights that make tokens differ in likelihood and keep logits within reach of 16 bits."""
    torch.manual_seed(4)
    weights = tiny.weights_of(folder, **config)
    weights = {n: each / 3 if each.ndim > 1 else each for n, each in weights.items()}
    tiny.save_file(tiny.in_files(folder, weights), folder / "model.safetensors")


def plain_logits(folder, tokens) -> torch.Tensor:
    """Of all positions, in FP32 on the CPU, all at once."""
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.shape, checkpoint.weight, "cpu", torch.float32)
    checkpoint.close()
    cache = Cache(checkpoint.shape, len(tokens), 1, "cpu", torch.float32)
    spans = [Span(0, len(tokens), torch.arange(len(tokens)))]
    attend = BatchedAttention(cache, spans, spans)
    with torch.inference_mode():
        hidden = decoder.hidden(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        return decoder.logits(hidden)


def all_of(engine, due, chance=None):
    tokens, told = {}, {}
    while due or not engine.is_idle:
        while due and (chance is None or chance.random() < 0.4 or engine.is_idle):
            engine.add(due.pop(0))
        for piece in engine.step():
            tokens.setdefault(piece.request, []).append(piece.token)
            told.setdefault(piece.request, []).append(piece.logprobs)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return tokens, told


def is_near(folder, prompt, tokens, tolerance) -> None:
    """Every token is the most likely one, or next to it, of those before it."""
    logits = plain_logits(folder, [*prompt, *tokens])
    for at, token in enumerate(tokens):
        row = logits[len(prompt) + at - 1]
        spread = float(row.std())
        assert float(row.max() - row[token]) < 6 * tolerance * spread + 1e-3, at


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8"])
def test_likelihoods_are_those_of_the_plain_decoder(tmp_path, config, dtype):
    if dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no FP8")
    write(tmp_path, config)
    engine = an_engine(tmp_path, dtype=dtype)
    chance = random.Random(1)
    prompt = [chance.randrange(1000) for _ in range(150)]
    asked = GenerateRequest(
        1, prompt, SamplingParams(temperature=0.0, num_logprobs=5, max_tokens=40)
    )
    tokens, told = all_of(engine, [asked])
    logits = plain_logits(tmp_path, [*prompt, *tokens[1]])
    wanted = logits.log_softmax(1)
    spread = float(logits.std())
    gaps = [
        abs(each.logprob - float(wanted[len(prompt) + at - 1, token]))
        for at, (token, each) in enumerate(zip(tokens[1], told[1], strict=True))
    ]
    assert sum(gaps) / len(gaps) < TOLERANCE[dtype] * spread


def test_graphs_and_eager_steps_give_the_same_tokens(tmp_path, config):
    """As many sequences as no graph is for are filled up with nobody's."""
    write(tmp_path, config)
    chance = random.Random(2)
    prompts = [[chance.randrange(1000) for _ in range(chance.randrange(2, 90))] for _ in range(7)]

    def asked():
        return [
            GenerateRequest(n, each, replace(GREEDY, max_tokens=30))
            for n, each in enumerate(prompts)
        ]

    engine = an_engine(tmp_path)
    found, _ = all_of(engine, asked())
    assert engine.runner.num_replayed > 20
    eager = without_graphs(tmp_path)
    assert all_of(eager, asked())[0] == found
    assert eager.runner.num_replayed == 0
    for number, prompt in enumerate(prompts):
        is_near(tmp_path, prompt, found[number], TOLERANCE["bfloat16"])


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_drafted_tokens_are_those_of_the_plain_decoder(tmp_path, config):
    """In BF16, sums of other batch sizes may choose between two tokens that are equally likely."""
    write(tmp_path, config)
    engine = an_engine(tmp_path, max_drafted=6)
    chance = random.Random(2)
    parts = [[chance.randrange(1000) for _ in range(9)] for _ in range(6)]
    prompts = [part * (2 + n % 3) for n, part in enumerate(parts)]
    asked = [
        GenerateRequest(n, each, replace(GREEDY, max_tokens=60)) for n, each in enumerate(prompts)
    ]
    tokens, _ = all_of(engine, asked, chance)
    assert engine.scheduler.num_drafted > 0
    for number, prompt in enumerate(prompts):
        assert len(tokens[number]) == 60
        is_near(tmp_path, prompt, tokens[number], TOLERANCE["bfloat16"])


def test_other_layers_give_the_tokens_of_the_plain_decoder(tmp_path, config):
    """Beyond their windows, some by graphs."""
    write(tmp_path, config)
    chance = random.Random(6)
    prompts = [[chance.randrange(1000) for _ in range(length)] for length in (3, 39, 60, 150)]
    engine = an_engine(tmp_path)
    due = [
        GenerateRequest(n, each, replace(GREEDY, max_tokens=50)) for n, each in enumerate(prompts)
    ]
    found, _ = all_of(engine, due)
    assert (engine.runner.num_replayed > 20) == (config.get("head_dim") != 256)
    for number, prompt in enumerate(prompts):
        is_near(tmp_path, prompt, found[number], TOLERANCE["bfloat16"])


def test_experts_count_the_tokens_of_sequences_alone(tmp_path):
    """Not those that fill up a graph."""
    write(tmp_path, OTHERS["experts"])
    engine = an_engine(tmp_path)
    engine.read_expert_load()
    due = [GenerateRequest(n, [1, 2, 3], replace(GREEDY, max_tokens=5)) for n in range(3)]
    all_of(engine, due)
    torch.cuda.synchronize()
    # Five steps, and one that was launched before the end was known.
    num = sum(engine.read_expert_load()) // (2 * OTHERS["experts"]["num_hidden_layers"])
    assert 3 * 7 <= num <= 3 * 8


def test_preempted_and_shared_beginnings_give_what_each_gives_alone(tmp_path, config):
    """Up to ties, which are told by the logits of the plain decoder."""
    write(tmp_path, config)
    block = 2 * config["num_hidden_layers"] * 16 * config["num_key_value_heads"]
    block_bytes = block * config["head_dim"] * 2
    engine = an_engine(tmp_path, cache_bytes=34 * block_bytes)
    chance = random.Random(5)
    shared = [chance.randrange(1000) for _ in range(100)]
    prompts = [
        shared[: chance.choice([20, 64, 100])] + [chance.randrange(1000) for _ in range(5)]
        for _ in range(12)
    ]
    due = [
        GenerateRequest(n, each, replace(GREEDY, max_tokens=60)) for n, each in enumerate(prompts)
    ]
    found, _ = all_of(engine, due, chance)
    assert engine.scheduler.num_preemptions and engine.scheduler.pool.num_found
    for number, prompt in enumerate(prompts):
        assert len(found[number]) == 60
        is_near(tmp_path, prompt, found[number], TOLERANCE["bfloat16"])


def test_a_seed_draws_the_same_alone_and_among_others(tmp_path, config):
    """Other sums are rounded otherwise, so the first tokens are compared."""
    write(tmp_path, config)
    engine = an_engine(tmp_path, dtype="float16")
    sampling = SamplingParams(temperature=0.8, seed=77, top_p=0.9, top_k=40)
    alone, _ = all_of(engine, [GenerateRequest(1, [5, 6, 7], replace(sampling, max_tokens=8))])
    others = [
        GenerateRequest(n, [n, 3], SamplingParams(seed=n, max_tokens=12)) for n in range(2, 8)
    ]
    among, _ = all_of(
        engine, [GenerateRequest(1, [5, 6, 7], replace(sampling, max_tokens=8)), *others]
    )
    assert alone[1][:4] == among[1][:4]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8"])
def test_answers_do_not_depend_on_others_in_the_batch(tmp_path, dtype):
    """All tokens; logprobs may move in their last digits."""
    write(tmp_path, LLAMA)
    found = differences(an_engine(tmp_path, dtype=dtype), LLAMA["vocab_size"])
    assert [each for each in found if each[2][0] != each[3][0]] == []


def test_penalties_bias_and_stops(tmp_path):
    write(tmp_path, LLAMA)
    engine = an_engine(tmp_path)
    biased = SamplingParams(temperature=0.0, logit_bias={17: 1e4})
    banned = replace(biased, max_tokens=9, stop_token_ids=frozenset({17}), min_tokens=5)
    never = SamplingParams(temperature=0.0, presence_penalty=1e4)
    found, _ = all_of(
        engine,
        [
            GenerateRequest(1, [1, 2], replace(biased, max_tokens=4)),
            GenerateRequest(2, [1, 2], banned),
            GenerateRequest(3, [4, 5], replace(never, max_tokens=30)),
        ],
    )
    assert found[1] == [17] * 4
    assert 17 not in found[2][:5] and found[2][5:] == [17]
    assert len(set(found[3])) == 30


def test_a_step_costs_one_wait_and_is_told_of_by_its_marks(tmp_path):
    write(tmp_path, LLAMA)
    engine = an_engine(tmp_path)
    began = []
    run = engine.runner.run

    class Kept:
        def run(self, step):
            began.append(run(step))
            return began[-1]

    engine.runner = Kept()
    all_of(engine, [GenerateRequest(1, [1, 2, 3], replace(GREEDY, max_tokens=10))])
    assert len(began) == 10 and all(0 < each.device_s < 1 for each in began)


def test_what_is_constrained_fits_and_the_others_are_as_without(tmp_path):
    pytest.importorskip("llguidance")
    import constrained_text as ct

    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
              "minItems": 2, "maxItems": 5}  # fmt: skip
    write(tmp_path, QWEN3)
    free = [
        GenerateRequest(number, [5, 9, 2], SamplingParams(max_tokens=20, seed=number))
        for number in (20, 21)
    ]
    wanted, _ = all_of(an_engine(tmp_path), list(free))
    params = SamplingParams(max_tokens=200, constraint=ct.of_schema(schema))
    asked = [GenerateRequest(n, [5, 9, 2], replace(params, seed=n)) for n in range(4)]
    asked += [GenerateRequest(n, [5, 9, 2], replace(params, num_logprobs=2)) for n in (4, 5)]
    engine = an_engine(tmp_path)
    engine.constrained = ConstrainedSequences(lambda: ct.GRAMMARS, 4)
    found, _ = all_of(engine, [*asked, *free])
    assert not engine.failures
    for request in asked:
        stream = ct.VOCABULARY.stream([5])
        text = "".join(stream.add(token) for token in found[request.id]) + stream.rest()
        assert ct.fits(text, schema), text
    assert {number: found[number] for number in wanted} == wanted
