"""The renderer process of a model, under templates and tokenizers that misbehave."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from engine_thread import RendererThread
from tiny_text import TOKENIZER
from tokenizers import Regex, pre_tokenizers

from penstock.errors import (
    BackendFailed,
    Cancelled,
    ConfigError,
    InvalidRequest,
    NotReady,
    Overloaded,
    TooLarge,
)
from penstock.llm.messages import TextSource
from penstock.llm.renderer import Renderer, RendererLife, TextLimits
from penstock.sampling_params import Constraint

SANE = "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
# Does what the first message says.
HARMFUL = (
    "{% set what = messages[0].content %}"
    "{% if what == 'loop' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif what == 'grow' %}"
    "{% set ns = namespace(text='x' * 4096) %}"
    "{% for i in range(60) %}{% set ns.text = ns.text + ns.text %}{% endfor %}"
    "{% elif what == 'talk' %}"
    "{% for i in range(99999) %}{{ 'word ' * 100 }}{% endfor %}"
    "{% elif what == 'refuse' %}{{ raise_exception('no such role') }}"
    "{% endif %}{{ what }}"
)
# More than a chat takes on a machine that stands still for seconds.
LIMITS = TextLimits(job_s=6.0)
PATIENT = TextLimits(job_s=60.0)


def write_text(folder, template=SANE, tokenizer=TOKENIZER):
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return TextSource(str(folder))


class Waiter:
    def __init__(self):
        self.outcome = asyncio.get_running_loop().create_future()
        self.has_left = False

    def is_gone(self):
        return self.has_left

    def encoded(self, tokens):
        self.outcome.set_result(tokens)

    def failed(self, error):
        self.outcome.set_exception(error)


@asynccontextmanager
async def started(source, limits=LIMITS, life=RendererLife):
    renderer = Renderer("smol", source, limits, life)
    try:
        async with asyncio.timeout(100):
            yield renderer, await renderer.process.start()
    finally:
        await renderer.close()


def chat(renderer, content, max_chars=10_000):
    waiter = Waiter()
    renderer.encode_chat([{"role": "user", "content": content}], {}, max_chars, waiter)
    return waiter.outcome


def encode(renderer, *texts):
    waiter = Waiter()
    renderer.encode(texts, True, waiter)
    return waiter.outcome


async def error_of(outcome):
    with pytest.raises(Exception) as caught:
        await outcome
    return caught.value


def test_texts_and_chats_become_tokens(tmp_path):
    async def scenario():
        async with started(write_text(tmp_path), PATIENT) as (renderer, vocabulary):
            long = "the cat " * 40_000
            assert await encode(renderer, "the cat", long) == [
                TOKENIZER.encode("the cat").ids,
                TOKENIZER.encode(long).ids,
            ]
            (tokens,) = await chat(renderer, "hi <|end|>")
            assert vocabulary.decode(tokens, keeps_special=True) == (
                "<|start|>user: hi <|end|><|end|>"
            )
            assert vocabulary.stop_tokens == {0} and vocabulary.template == SANE
            assert vocabulary.num_tokens == TOKENIZER.get_vocab_size()

    asyncio.run(scenario())


def check(renderer, constraint):
    waiter = Waiter()
    renderer.check(constraint, waiter)
    return waiter.outcome


class TestGrammars:
    def test_they_are_checked_once(self, tmp_path):
        good, bad = Constraint("regex", "a+"), Constraint("regex", "(")

        async def scenario():
            async with started(write_text(tmp_path), PATIENT) as (renderer, _):
                assert await check(renderer, good) == []
                with pytest.raises(InvalidRequest, match="unclosed group"):
                    await check(renderer, bad)
                os.kill(renderer.process.pid, signal.SIGSTOP)
                # Known by now, so nothing is asked.
                assert await check(renderer, good) == []
                with pytest.raises(InvalidRequest, match="unclosed group"):
                    check(renderer, bad)
                os.kill(renderer.process.pid, signal.SIGCONT)

        asyncio.run(scenario())

    def test_one_that_takes_too_long_is_the_clients_fault(self, tmp_path):
        slow = Constraint("regex", "(?:a{1000}){1000}{1000}")

        async def scenario():
            limits = TextLimits(job_s=0.001, char_s=0)
            async with started(write_text(tmp_path), limits) as (renderer, _):
                for _ in range(2):
                    with pytest.raises(
                        InvalidRequest, match="the grammar took longer than 0.001 s"
                    ):
                        await check(renderer, slow)
                assert renderer.process.num_restarts <= 1

        asyncio.run(scenario())


class TestHarmfulTemplates:
    @pytest.mark.slow
    def test_one_that_loops_is_ended_and_the_others_are_answered(self, tmp_path):
        async def scenario():
            async with started(write_text(tmp_path, HARMFUL)) as (renderer, vocabulary):
                first = renderer.process.pid
                bad = chat(renderer, "loop")
                others = [chat(renderer, f"hello {n}") for n in range(5)]
                plain = encode(renderer, "the cat")
                error = await error_of(bad)
                assert isinstance(error, BackendFailed)
                assert str(error).startswith("the model's chat template and tokenizer took longer")
                told = [vocabulary.decode(tokens) for (tokens,) in await asyncio.gather(*others)]
                assert told == [f"hello {n}" for n in range(5)]
                assert await plain == [TOKENIZER.encode("the cat").ids]
                assert renderer.process.pid != first and renderer.process.num_restarts == 1
                with pytest.raises(ProcessLookupError):
                    os.kill(first, 0)

        asyncio.run(scenario())

    def test_others_do_not_wait_for_one_that_is_slow(self, tmp_path):
        async def scenario():
            source = write_text(tmp_path, HARMFUL)
            async with started(source, TextLimits(job_s=90.0)) as (renderer, vocabulary):
                slow = [chat(renderer, "loop") for _ in range(2)]
                (tokens,) = await chat(renderer, "hello")
                assert vocabulary.decode(tokens) == "hello"
                assert not any(each.done() for each in slow) and renderer.process.num_restarts == 0
            for each in slow:
                await error_of(each)

        asyncio.run(scenario())

    def test_one_that_takes_all_memory_fails_alone(self, tmp_path):
        async def scenario():
            limits = TextLimits(job_s=60.0, memory_bytes=256 << 20)
            async with started(write_text(tmp_path, HARMFUL), limits) as (renderer, vocabulary):
                error = await error_of(chat(renderer, "grow"))
                assert isinstance(error, BackendFailed) and "memory" in str(error)
                (tokens,) = await chat(renderer, "hello")
                assert vocabulary.decode(tokens) == "hello"

        asyncio.run(scenario())

    def test_what_it_says_is_limited_and_refusals_are_the_clients(self, tmp_path):
        async def scenario():
            async with started(write_text(tmp_path, HARMFUL), PATIENT) as (renderer, _):
                large = await error_of(chat(renderer, "talk"))
                assert isinstance(large, TooLarge) and "10000 characters" in str(large)
                refused = await error_of(chat(renderer, "refuse"))
                assert isinstance(refused, InvalidRequest)
                assert str(refused) == "the chat template refuses the messages: no such role"
                assert renderer.process.num_restarts == 0

        asyncio.run(scenario())


@pytest.mark.slow
def test_a_pattern_of_a_tokenizer_that_never_ends_is_ended(tmp_path):
    tokenizer = type(TOKENIZER).from_str(TOKENIZER.to_str())
    slow = pre_tokenizers.Split(Regex(r"x*x*x*y"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([slow, pre_tokenizers.ByteLevel()])

    async def scenario():
        async with started(write_text(tmp_path, tokenizer=tokenizer)) as (renderer, _):
            error = await error_of(encode(renderer, "x" * 1000 + "zy"))
            assert isinstance(error, BackendFailed) and "tokenizer took longer" in str(error)
            assert await encode(renderer, "the") == [tokenizer.encode("the").ids]

    asyncio.run(scenario())


def test_a_process_that_dies_costs_nobody_else_an_answer(tmp_path):
    """Which of the jobs it died of is found by running them alone."""

    async def scenario():
        async with started(write_text(tmp_path), PATIENT) as (renderer, _):
            os.kill(renderer.process.pid, signal.SIGSTOP)
            outcomes = [encode(renderer, "the cat " * 200_000), encode(renderer, "the")]
            os.kill(renderer.process.pid, signal.SIGKILL)
            found = await asyncio.gather(*outcomes)
            assert found[1] == [TOKENIZER.encode("the").ids] and len(found[0][0]) > 200_000
            assert renderer.process.num_restarts == 1

    asyncio.run(scenario())


def test_a_job_alone_in_a_process_that_dies_fails(tmp_path):
    async def scenario():
        async with started(write_text(tmp_path), PATIENT) as (renderer, _):
            os.kill(renderer.process.pid, signal.SIGSTOP)
            outcome = encode(renderer, "the cat " * 200_000)
            os.kill(renderer.process.pid, signal.SIGKILL)
            error = await error_of(outcome)
            assert isinstance(error, BackendFailed) and "SIGKILL" in str(error)
            assert await encode(renderer, "the") == [TOKENIZER.encode("the").ids]

    asyncio.run(scenario())


def test_files_that_cannot_be_loaded_are_named(tmp_path):
    async def scenario():
        with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
            async with started(TextSource(str(tmp_path))):
                pass

    asyncio.run(scenario())


def test_files_that_are_gone_when_it_starts_again_are_told(tmp_path):
    async def scenario():
        async with started(write_text(tmp_path), PATIENT) as (renderer, _):
            (tmp_path / "tokenizer.json").unlink()
            os.kill(renderer.process.pid, signal.SIGKILL)
            while renderer.process.num_restarts == 0:
                await asyncio.sleep(0.01)
            error = await error_of(encode(renderer, "the"))
            assert isinstance(error, NotReady) and "tokenizer.json" in str(error)
            TOKENIZER.save(str(tmp_path / "tokenizer.json"))
            while True:
                try:
                    assert await encode(renderer, "the") == [TOKENIZER.encode("the").ids]
                    break
                except NotReady:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_loading_has_a_limit_too(tmp_path):
    async def scenario():
        with pytest.raises(ConfigError, match="loading took longer than 0.001 s"):
            async with started(write_text(tmp_path), TextLimits(load_s=0.001)):
                pass

    asyncio.run(scenario())


def test_too_many_jobs_are_refused_and_those_of_clients_that_left_are_dropped(tmp_path):
    async def scenario():
        limits = TextLimits(job_s=60.0, max_waiting=3)
        async with started(write_text(tmp_path), limits, RendererThread) as (renderer, _):
            outcomes = [encode(renderer, "the"), encode(renderer, "cat")]
            gone = Waiter()
            gone.has_left = True
            renderer.encode(["sat"], True, gone)
            with pytest.raises(Overloaded, match="3 texts wait"):
                encode(renderer, "on")
            assert await outcomes[1] == [TOKENIZER.encode("cat").ids]
            assert isinstance(await error_of(gone.outcome), Cancelled)
            await renderer.drain()
            await renderer.close()
            with pytest.raises(NotReady, match="unloaded"):
                encode(renderer, "the")

    asyncio.run(scenario())
