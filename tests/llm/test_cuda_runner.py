"""Steps that are begun and not waited for, on a GPU that is none: with the same tokens as by hand,
or as the runner that waits. On a real one: tests/gpu/test_llm_cuda.py."""

import random

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402
from doubles import FakeClock  # noqa: E402
from fake_gpu import FakeGpu  # noqa: E402

from penstock.llm import cuda_runner, operations  # noqa: E402
from penstock.llm.blocks import BlockPool  # noqa: E402
from penstock.llm.cache import Cache  # noqa: E402
from penstock.llm.checkpoint import open_checkpoint  # noqa: E402
from penstock.llm.cuda_runner import CudaRunner, buckets  # noqa: E402
from penstock.llm.engine import Engine  # noqa: E402
from penstock.llm.messages import GenerateRequest  # noqa: E402
from penstock.llm.models.decoder import Decoder  # noqa: E402
from penstock.llm.pace import StepTimeModel  # noqa: E402
from penstock.llm.runner import CpuRunner  # noqa: E402
from penstock.llm.scheduler import Scheduler, StepLimits  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402

SIZE = 4
GREEDY = SamplingParams(temperature=0.0)


class Model:
    def __init__(self, folder, config=tiny.CONFIG, num_blocks=64, dtype=torch.float32):
        self.config, self.num_blocks, self.dtype = config, num_blocks, dtype
        self.weights = tiny.write_folder(folder, **config)
        checkpoint = open_checkpoint(folder)
        self.decoder = Decoder(checkpoint.shape, checkpoint.weight, "cpu", dtype)
        checkpoint.close()
        self.gpu = FakeGpu()

    def engine(self, is_late=True, has_graphs=True, **limits) -> Engine:
        limits = StepLimits(**{"max_sequences": 6, "max_tokens": 11, "max_length": 64, **limits})
        cache = Cache(self.decoder.shape, self.num_blocks, SIZE, "cpu", self.dtype)
        scheduler = Scheduler(BlockPool(self.num_blocks, SIZE), limits)
        if not is_late:
            return Engine(scheduler, CpuRunner(self.decoder, cache), StepTimeModel(), FakeClock())
        runner = CudaRunner(self.decoder, cache, self.gpu, limits, has_graphs=has_graphs)
        runner.prepare()
        return Engine(scheduler, runner, StepTimeModel(), FakeClock(), num_ahead=runner.num_ahead)


def all_of(engine: Engine, due: list[GenerateRequest], chance: random.Random | None = None):
    """Tokens and likelihoods of each request."""
    tokens: dict[int, list[int]] = {}
    told: dict[int, list] = {}
    while due or not engine.is_idle:
        while due and (chance is None or chance.random() < 0.4 or engine.is_idle):
            engine.add(due.pop(0))
        for piece in engine.step():
            tokens.setdefault(piece.request, []).append(piece.token)
            told.setdefault(piece.request, []).append(piece.logprobs)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return tokens, told


def test_graphs_are_for_these_numbers_of_tokens():
    assert buckets(1) == [1]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert buckets(512)[-4:] == [416, 448, 480, 512]
    for most in range(1, 600):
        found = buckets(most)
        assert found == sorted(set(found)) and found[-1] == most


@pytest.mark.parametrize("config", [tiny.CONFIG, tiny.QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("most_seen", [0, 40, 1 << 18])
@pytest.mark.parametrize("has_graphs", [True, False])
def test_many_together_continue_as_by_hand(tmp_path, monkeypatch, config, has_graphs, most_seen):
    """With prompts in chunks, blocks that others have computed, and some that must begin again; no
    prompt in a graph, or some, or all of them."""
    monkeypatch.setattr(cuda_runner, "MOST_SEEN", most_seen)
    model = Model(tmp_path, config, num_blocks=12)
    engine = model.engine(has_graphs=has_graphs)
    chance = random.Random(3)
    shared = [chance.randrange(50) for _ in range(9)]
    prompts = [
        shared[: chance.randrange(3, 10)]
        + [chance.randrange(50) for _ in range(chance.randrange(6))]
        for _ in range(6)
    ]
    due = [
        GenerateRequest(n, prompt, replace(GREEDY, max_tokens=12))
        for n, prompt in enumerate(prompts)
    ]
    found, _ = all_of(engine, due, chance)
    assert engine.scheduler.num_preemptions and engine.scheduler.pool.num_found
    for number, prompt in enumerate(prompts):
        assert found[number] == tiny.continued(model.weights, config, prompt, 12)
    assert bool(engine.runner.num_replayed) == has_graphs
    assert bool(engine.runner.num_eager) == (not has_graphs or most_seen < 1 << 18)


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("config", tiny.OTHERS.values(), ids=tiny.OTHERS)
def test_other_layers_continue_as_alone(tmp_path, config, has_graphs):
    decoder = tiny.decoder_of(tmp_path, config)
    limits = StepLimits(max_sequences=6, max_tokens=11, max_length=64)
    cache = Cache(decoder.shape, 64, SIZE, "cpu", torch.float32)
    runner = CudaRunner(decoder, cache, FakeGpu(), limits, has_graphs=has_graphs)
    runner.prepare()
    scheduler = Scheduler(BlockPool(64, SIZE), limits)
    engine = Engine(scheduler, runner, StepTimeModel(), FakeClock(), num_ahead=runner.num_ahead)
    chance = random.Random(3)
    prompts = [[chance.randrange(50) for _ in range(length)] for length in (1, 5, 14, 20)]
    due = [
        GenerateRequest(n, prompt, replace(GREEDY, max_tokens=12))
        for n, prompt in enumerate(prompts)
    ]
    found, _ = all_of(engine, due, chance)
    for number, prompt in enumerate(prompts):
        assert found[number] == tiny.continued_alone(decoder, prompt, 12)


def test_a_short_rest_of_a_prompt_is_a_graph(tmp_path, monkeypatch):
    """What follows a prefix that is known: as soon as its tokens see too much it is none."""
    model = Model(tmp_path)
    prompt = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    wanted = tiny.continued(model.weights, model.config, prompt, 3)
    # Of ten tokens two blocks are found again, and two tokens see nine and ten keys.
    for most_seen, num_eager in ((19, 0), (18, 1)):
        engine = model.engine()
        all_of(engine, [GenerateRequest(1, prompt, replace(GREEDY, max_tokens=3))])
        monkeypatch.setattr(cuda_runner, "MOST_SEEN", most_seen)
        engine.runner.num_eager = 0
        found, _ = all_of(engine, [GenerateRequest(2, prompt, replace(GREEDY, max_tokens=3))])
        assert found[2] == wanted and engine.runner.num_eager == num_eager
        assert engine.scheduler.pool.num_found == 2 * SIZE


def test_what_cannot_be_captured_runs_without_and_is_said(tmp_path):
    model = Model(tmp_path)
    model.gpu.capture_errors = [RuntimeError("not permitted\nwhen capturing")] * 5
    engine = model.engine()
    found, _ = all_of(engine, [GenerateRequest(1, [3, 1, 4], replace(GREEDY, max_tokens=5))])
    assert found[1] == tiny.continued(model.weights, model.config, [3, 1, 4], 5)
    assert engine.runner.num_replayed == 0
    assert engine.runner.facts() == {
        "cuda_graphs": "0",
        "without_cuda_graph": "5 sizes, 11 first: not permitted",
    }
    assert model.engine().runner.facts() == {"cuda_graphs": "5"}
    assert model.engine(has_graphs=False).runner.facts() == {"cuda_graphs": "off"}


def test_tokens_are_not_waited_for_before_the_next_step_is_begun(tmp_path):
    model = Model(tmp_path)
    engine = model.engine()
    engine.add(GenerateRequest(1, [3, 1, 4], replace(GREEDY, max_tokens=4)))
    waited = len(model.gpu.waited)
    assert engine.step() == []
    assert len(model.gpu.waited) == waited
    assert [piece.token for piece in engine.step()] == tiny.continued(
        model.weights, model.config, [3, 1, 4], 1
    )
    all_of(engine, [])


def test_a_token_that_ends_it_is_the_last(tmp_path):
    model = Model(tmp_path)
    wanted = tiny.continued(model.weights, model.config, [3, 1, 4], 10)
    params = replace(GREEDY, max_tokens=10, stop_token_ids=frozenset({wanted[4]}))
    found, _ = all_of(model.engine(), [GenerateRequest(1, [3, 1, 4], params)])
    assert found[1] == wanted[: wanted.index(wanted[4]) + 1]


SAMPLINGS = [
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=1.5, seed=2**40 + 3, top_k=7),
    SamplingParams(temperature=0.7, seed=11, top_p=0.8),
    SamplingParams(temperature=1.1, seed=8, min_p=0.1, top_p=0.95),
    GREEDY,
    SamplingParams(temperature=0.0, num_logprobs=3),
    SamplingParams(temperature=0.8, seed=9, num_logprobs=0, logit_bias={7: 3.0, 9: -5.0}),
    SamplingParams(temperature=0.8, seed=3, presence_penalty=0.7, frequency_penalty=0.2),
    SamplingParams(temperature=0.0, repetition_penalty=1.4),
]


def test_tokens_are_drawn_as_by_the_runner_that_waits(tmp_path):
    model = Model(tmp_path)

    def asked():
        stops = frozenset(range(0, 50, 2))
        return [
            GenerateRequest(
                n, [n + 1, 7, 3], replace(each, max_tokens=12, stop_token_ids=stops, min_tokens=n)
            )
            for n, each in enumerate(SAMPLINGS)
        ]

    found, told = all_of(model.engine(), asked())
    wanted, wanted_told = all_of(model.engine(is_late=False), asked())
    assert found == wanted
    assert [len(found[n]) > n for n in range(len(SAMPLINGS))] == [True] * len(SAMPLINGS)
    for number, likelihoods in wanted_told.items():
        for one, other in zip(told[number], likelihoods, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
                assert list(one.top_tokens) == list(other.top_tokens)


def test_a_request_that_is_given_up_while_it_runs_leaves_nothing(tmp_path):
    engine = Model(tmp_path).engine()
    for number in range(4):
        engine.add(GenerateRequest(number, [number, 2, 3], replace(GREEDY, max_tokens=20)))
    engine.step()
    engine.step()
    engine.give_up(0)
    engine.give_up(2)
    found, _ = all_of(engine, [])
    assert set(found) == {1, 3}


@pytest.mark.slow
def test_more_sequences_than_rows_take_turns(tmp_path):
    """Each row of the table is used by one after the other, and by those that come back."""
    model = Model(tmp_path)
    engine = model.engine(max_sequences=2)
    prompts = [[number % 50, 5] for number in range(12)]
    due = [
        GenerateRequest(number, each, replace(GREEDY, max_tokens=3))
        for number, each in enumerate(prompts)
    ]
    found, _ = all_of(engine, due)
    for number, prompt in enumerate(prompts):
        assert found[number] == tiny.continued(model.weights, model.config, prompt, 3)


def test_kernels_compute_the_same(tmp_path, monkeypatch):
    """Interpreted, in FP16: logits are close, so that only near ties may differ."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has the real kernels")
    sizes = {"head_dim": 16, "hidden_size": 32}
    model = Model(tmp_path, {**tiny.QWEN3, **sizes}, dtype=torch.float16)
    prompts = [[3, 1, 4, 1, 5], [2, 7]]
    limits = {"max_sequences": 2, "max_tokens": 4}

    def asked():
        return [
            GenerateRequest(n, each, SamplingParams(temperature=0.0, num_logprobs=5, max_tokens=2))
            for n, each in enumerate(prompts)
        ]

    _, wanted = all_of(model.engine(**limits), asked())
    monkeypatch.setattr(operations, "uses_kernels", lambda x: x.dtype == torch.float16)
    _, found = all_of(model.engine(**limits), asked())
    for number in wanted:
        one, other = found[number][0], wanted[number][0]
        assert one.logprob == pytest.approx(other.logprob, abs=0.05)


@pytest.mark.parametrize("is_late", [True, False])
def test_how_likely_a_prompt_was_is_as_by_hand(tmp_path, is_late):
    """In chunks, beside others, after it was computed by somebody else and by itself again."""
    model = Model(tmp_path, num_blocks=14)
    engine = model.engine(is_late=is_late)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [3, 1, 4, 1, 5, 9], [2, 7], [8]]
    wanting = SamplingParams(temperature=0.0, num_prompt_logprobs=2)
    due = [GenerateRequest(9, prompts[0], replace(GREEDY, max_tokens=6))]
    due += [
        GenerateRequest(number, prompt, replace(wanting, max_tokens=6))
        for number, prompt in enumerate(prompts)
    ]
    due.append(GenerateRequest(5, prompts[0], replace(wanting, max_tokens=2, n=2)))
    told: dict[int, dict[int, object]] = {}
    while due or not engine.is_idle:
        if due:
            engine.add(due.pop(0))
        engine.step()
        for each in engine.prompt_logprobs:
            told.setdefault(each.request, {}).update(enumerate(each.logprobs, each.start))
        engine.prompt_logprobs = []
    assert engine.scheduler.num_preemptions and set(told) == {0, 1, 2, 5}
    for number, prompt in {**dict(enumerate(prompts[:3])), 5: prompts[0]}.items():
        logprobs = tiny.by_hand(model.weights, model.config, prompt).log_softmax(-1)
        assert set(told[number]) == set(range(1, len(prompt)))
        for place, found in told[number].items():
            wanted = logprobs[place - 1]
            assert found.logprob == pytest.approx(float(wanted[prompt[place]]), abs=1e-4)
            assert list(found.top_tokens) == wanted.topk(2).indices.tolist()
            assert list(found.top_logprobs) == pytest.approx(wanted.topk(2).values.tolist(), 1e-3)
