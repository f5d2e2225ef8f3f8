"""Steps as they are run, beside the same model computed by hand and all at once."""

import random

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402

from penstock.llm.blocks import BlockPool  # noqa: E402
from penstock.llm.cache import Cache  # noqa: E402
from penstock.llm.checkpoint import open_checkpoint  # noqa: E402
from penstock.llm.models.decoder import Decoder  # noqa: E402
from penstock.llm.runner import CpuRunner  # noqa: E402
from penstock.llm.scheduler import Scheduler, StepLimits  # noqa: E402
from penstock.llm.sequence import Sequence  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402

SIZE = 4
GREEDY = SamplingParams(temperature=0.0)


class Model:
    def __init__(self, folder, config, num_blocks=64, **limits):
        self.config = config
        self.weights = tiny.write_folder(folder, **config)
        checkpoint = open_checkpoint(folder)
        decoder = Decoder(checkpoint.shape, checkpoint.weight, "cpu", torch.float32)
        checkpoint.close()
        cache = Cache(checkpoint.shape, num_blocks, SIZE, "cpu", torch.float32)
        self.runner = CpuRunner(decoder, cache)
        limits = {"max_sequences": 4, "max_tokens": 7, "max_length": 128, **limits}
        self.scheduler = Scheduler(BlockPool(num_blocks, SIZE), StepLimits(**limits))

    def step(self):
        step = self.scheduler.plan()
        if step.chunks:
            ran = self.runner.run(step)
            self.scheduler.commit(step, ran.tokens)

    def wanted(self, prompt, num_tokens):
        return tiny.continued(self.weights, self.config, prompt, num_tokens)


@pytest.fixture(params=[tiny.CONFIG, tiny.QWEN3], ids=["llama", "qwen3"])
def config(request):
    return request.param


def test_one_sequence_continues_as_by_hand(tmp_path, config):
    model = Model(tmp_path, config)
    sequence = Sequence(0, [3, 1, 4, 1, 5, 9, 2, 6, 5], replace(GREEDY, max_tokens=12))
    model.scheduler.add(sequence)
    while sequence.state != "ended":
        model.step()
    assert sequence.tokens[9:] == model.wanted([3, 1, 4, 1, 5, 9, 2, 6, 5], 12)


@pytest.mark.parametrize("is_exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("config", tiny.OTHERS.values(), ids=tiny.OTHERS)
def test_other_layers_continue_as_alone(tmp_path, config, is_exact):
    """Beyond their windows, some of them beside others of other lengths."""
    decoder = tiny.decoder_of(tmp_path, config)
    cache = Cache(decoder.shape, 64, SIZE, "cpu", torch.float32, is_exact=is_exact)
    runner, scheduler = (
        CpuRunner(decoder, cache),
        Scheduler(BlockPool(64, SIZE), StepLimits(4, 7, 128)),
    )
    chance = random.Random(1)
    prompts = [[chance.randrange(50) for _ in range(length)] for length in (1, 5, 8, 16, 21)]
    sequences = [
        Sequence(n, list(prompt), replace(GREEDY, max_tokens=14), float(n))
        for n, prompt in enumerate(prompts)
    ]
    for each in sequences:
        scheduler.add(each)
    while any(each.state != "ended" for each in sequences):
        step = scheduler.plan()
        scheduler.commit(step, runner.run(step).tokens)
    for prompt, each in zip(prompts, sequences, strict=True):
        assert each.tokens[len(prompt) :] == tiny.continued_alone(decoder, prompt, 14)


@pytest.mark.parametrize("seed", range(3))
def test_many_together_continue_as_alone(tmp_path, config, seed):
    """With prompts in chunks, blocks that others have computed, and some that must begin again."""
    model = Model(tmp_path, config, num_blocks=14)
    chance = random.Random(seed)
    shared = [chance.randrange(50) for _ in range(9)]
    prompts = [
        shared[: chance.randrange(3, 10)]
        + [chance.randrange(50) for _ in range(chance.randrange(6))]
        for _ in range(8)
    ]
    sequences = [
        Sequence(n, list(p), replace(GREEDY, max_tokens=16), float(n))
        for n, p in enumerate(prompts)
    ]
    due = list(sequences)
    while due or model.scheduler.waiting or model.scheduler.running:
        if due and chance.random() < 0.6:
            model.scheduler.add(due.pop(0))
        model.step()
    assert model.scheduler.num_preemptions > 0
    assert model.scheduler.pool.num_found > 0
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.tokens[len(prompt) :] == model.wanted(prompt, 16)


def test_a_seed_draws_the_same_alone_and_among_others(tmp_path, config):
    params = SamplingParams(temperature=1.0, seed=5, top_p=0.95, max_tokens=10)
    found = []
    for others in (0, 3):
        folder = tmp_path / str(others)
        folder.mkdir()
        model = Model(folder, config)
        sequences = [
            Sequence(n, [n + 1, 7, 3], replace(GREEDY, max_tokens=10) if n else params)
            for n in range(1 + others)
        ]
        for each in sequences:
            model.scheduler.add(each)
        while sequences[0].state != "ended":
            model.step()
        found.append(sequences[0].tokens)
    assert found[0] == found[1] and len(found[0]) == 13
