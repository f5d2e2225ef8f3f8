"""A language model of this process as a target: the same requests as over OpenAI's API."""

import asyncio

import pytest

pytest.importorskip("torch")

import text_server
from suites.target import Sent, TargetContract, run

import penstock
from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.kinds import open_target
from penstock.data import Sample
from penstock.errors import ConfigError

MESSAGES = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_server.write_model(tmp_path_factory.mktemp("in-process"))


def a_spec(folder, **others):
    return TargetSpec(str(folder), extra='{"ignore_eos": true, "temperature": 0}', **others)


def a_sample(num=4):
    return Sample(fields={"messages": MESSAGES}, max_tokens=num)


@pytest.mark.slow  # Each test loads the model.
class TestContract(TargetContract):
    @pytest.fixture(autouse=True)
    def _model(self, folder):
        self._folder = folder

    def spec(self):
        return a_spec(self._folder)

    def sample(self):
        return a_sample()

    def misfit(self):
        return Sample(fields={"prompt": "the cat"})


def test_says_what_it_is(folder):
    told, form = asyncio.run(open_target(a_spec(folder)).describe())
    assert told.protocol == "in process, OpenAI chat" and form.kind == "messages"
    assert (told.model, told.backend) == ("smol", "llm")
    assert told.server == f"penstock {penstock.__version__}" and told.model_digest
    _, form = asyncio.run(open_target(a_spec(folder, api="completions")).describe())
    assert form.kind == "prompt"


def test_a_model_without_a_template_says_what_to_do(tmp_path):
    folder = text_server.write_model(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no template for chats; give --api completions"):
        asyncio.run(open_target(a_spec(folder)).describe())


def test_pieces_have_times_and_tokens_are_counted(folder):
    async def scenario():
        target = open_target(a_spec(folder))
        await target.describe()
        await target.open(1)
        try:
            assert target.load_s > 0
            exchange = await Sent(target, target.encode(a_sample(6))).end()
            stream = exchange.stream
            assert exchange.failure is None and stream.num_output_tokens == 6
            assert stream.num_input_tokens > 3 and 1 <= len(stream.times) <= 6
            assert exchange.sent <= stream.times[0] <= stream.times[-1] <= exchange.done
        finally:
            await target.close()

    run(scenario())


def test_what_does_not_fit_fails_in_words_and_what_is_late_is_given_up(folder):
    async def scenario():
        target = open_target(a_spec(folder, timeout_s=0.001))
        await target.describe()
        await target.open(1)
        try:
            long = await Sent(target, target.encode(a_sample(100_000))).end()
            assert long.failure.startswith("invalid request: the prompt has")
            late = await Sent(target, target.encode(a_sample(200))).end()
            assert late.failure is None or late.failure == "no answer within 0.001 s"
        finally:
            await target.close()

    run(scenario())


def test_a_field_that_is_wrong_is_told_before_any_load(folder):
    target = open_target(TargetSpec(str(folder), extra='{"temperature": -3}'))
    with pytest.raises(ConfigError, match="input: temperature"):
        target.encode(a_sample())
