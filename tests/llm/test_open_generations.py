"""The open requests of a language model, with a real engine in a thread and in a process."""

import asyncio
import itertools
import os
import signal
import time
from contextlib import asynccontextmanager

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import tiny_llm as tiny  # noqa: E402
from doubles import FakeClock  # noqa: E402
from engine_thread import EngineThread  # noqa: E402
from tiny_text import TOKENIZER, WITH_BYTES  # noqa: E402

from penstock.errors import (  # noqa: E402
    BackendFailed,
    ConfigError,
    InvalidRequest,
    NotReady,
    Overloaded,
    QuotaExceeded,
)
from penstock.llm import messages  # noqa: E402
from penstock.llm.engine_supervisor import EngineLife, EngineSupervisor  # noqa: E402
from penstock.llm.generation import Generation  # noqa: E402
from penstock.llm.messages import GenerateRequest, pack_tokens  # noqa: E402
from penstock.llm.open_generations import OpenGenerations  # noqa: E402
from penstock.llm.text import Text  # noqa: E402
from penstock.sampling_params import SamplingParams  # noqa: E402
from penstock.serving.metrics import ModelMetrics  # noqa: E402
from penstock.serving.quotas import Quota, Quotas  # noqa: E402

TEXT = Text(TOKENIZER).vocabulary
CONFIG = {**tiny.CONFIG, "vocab_size": TEXT.num_tokens, "max_position_embeddings": 256}
IDS = itertools.count()


class Sink:
    def __init__(self):
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.totals = self.error = None
        self.ended = asyncio.Event()

    def token(self, event):
        assert self.error is None and self.totals is None
        self.texts[event.index] = self.texts.get(event.index, "") + event.text
        self.tokens.setdefault(event.index, []).append(event.token)
        if event.reason:
            self.reasons[event.index] = event.reason

    def finished(self, totals):
        assert self.totals is None and self.error is None
        self.totals = totals
        self.ended.set()

    def failed(self, error):
        assert self.totals is None and self.error is None
        self.error = error
        self.ended.set()


def a_generation(prompt="the cat", arrived=0.0, caller=b"", **options) -> Generation:
    tokens = TOKENIZER.encode(prompt).ids if isinstance(prompt, str) else prompt
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **options})
    request = GenerateRequest(next(IDS), pack_tokens(tokens), params)
    return Generation(request, Sink(), caller, arrived)


class Whole(OpenGenerations):
    """With the engine of its own, as the only shard has it."""

    def __init__(self, metrics, settings, text, life=EngineLife, clock=time.monotonic, **quotas):
        self.engine = EngineSupervisor(settings, metrics, life, clock)
        super().__init__(metrics, settings, self.engine, clock, **quotas)
        self.vocabulary = text
        self.engine.join(0, self)

    def received(self, datagram):
        message = messages.decode_engine_to_shard(datagram)
        if isinstance(message, messages.StepReport):
            self.last_report = message
        super().received(datagram)

    async def stop(self):
        self.close()
        await self.engine.close()


@asynccontextmanager
async def started(folder, life=EngineThread, text=TEXT, quotas=None, **changes):
    tiny.write_folder(folder, **CONFIG)
    settings = tiny.settings_of(folder, max_length=200, **changes)
    model = Whole(ModelMetrics("smol", ""), settings, text, life, quotas=quotas)
    await model.engine.process.start()
    try:
        yield model
    finally:
        await model.stop()


async def ended(generation, timeout_s=60):
    async with asyncio.timeout(timeout_s):
        await generation.sink.ended.wait()
    return generation.sink


async def answered(model, generation):
    model.submit(generation)
    return await ended(generation)


def run(scenario):
    asyncio.run(scenario())


def test_text_comes_in_pieces_and_is_the_whole(tmp_path):
    async def scenario():
        async with started(tmp_path) as model:
            prompt = "the cat sat on the mat, a naïve café"
            generation = a_generation(prompt, max_tokens=12)
            sink = await answered(model, generation)
            assert sink.texts[0] == TEXT.decode(sink.tokens[0])
            assert sink.reasons == {0: "length"} and model.is_idle
            assert (sink.totals.num_prompt, sink.totals.num_generated) == (
                generation.num_prompt,
                12,
            )
            again = a_generation(prompt, max_tokens=12)
            assert (await answered(model, again)).texts == sink.texts
            assert again.sink.totals.num_cached > 0

    run(scenario)


def test_a_word_after_a_prompt_keeps_its_space(tmp_path):
    async def scenario():
        text, word = Text(WITH_BYTES).vocabulary, WITH_BYTES.token_to_id("▁the")
        async with started(tmp_path, text=text) as model:
            always = {word: 100.0}
            asked = a_generation(WITH_BYTES.encode("the cat").ids, max_tokens=3, logit_bias=always)
            assert (await answered(model, asked)).texts[0] == " the the the"
            # Behind what nobody sees it is the first.
            first = a_generation([1], max_tokens=2, logit_bias=always)
            assert (await answered(model, first)).texts[0] == "the the"

    run(scenario)


def test_a_text_ends_it_and_is_not_sent(tmp_path):
    async def scenario():
        async with started(tmp_path) as model:
            first = a_generation(max_tokens=30)
            whole = (await answered(model, first)).texts[0]
            stop = whole[4:7]
            second = a_generation(max_tokens=30, stop=(stop,))
            sink = await answered(model, second)
            assert sink.texts[0] == whole[: whole.index(stop)] and sink.reasons == {0: "stop"}
            assert sink.totals.num_generated < 30

    run(scenario)


@pytest.mark.parametrize("options", [{}, {"n": 2, "seed": 1, "temperature": 0.3}])
def test_a_text_that_came_with_others_at_once_ends_it_too(tmp_path, options):
    """Several drafted tokens in one report: those after the stop string are neither sent nor
    counted."""

    async def scenario():
        (tmp_path / "plain").mkdir()
        (tmp_path / "drafts").mkdir()
        async with started(tmp_path / "plain", max_tokens=32) as model:
            whole = await answered(model, a_generation(max_tokens=60, **options))
            # Where texts repeat themselves by now.
            stop = whole.texts[0][len(whole.texts[0]) // 2 :][:4]
            stopped = await answered(model, a_generation(max_tokens=60, stop=(stop,), **options))
        async with started(tmp_path / "drafts", max_tokens=32, max_drafted=6) as model:
            found = await answered(model, a_generation(max_tokens=60, stop=(stop,), **options))
            metrics = model.metrics
            assert metrics.num_accepted > 0 and metrics.num_drafted >= metrics.num_accepted
        assert found.texts == stopped.texts and found.reasons == stopped.reasons
        assert found.tokens == stopped.tokens and found.totals == stopped.totals

    run(scenario)


def test_a_token_that_ends_it_is_no_text(tmp_path):
    async def scenario():
        async with started(tmp_path) as model:
            first = a_generation(max_tokens=20)
            tokens = (await answered(model, first)).tokens[0]
            end = next(each for each in tokens if each != tokens[0])
            second = a_generation(max_tokens=20, stop_token_ids=frozenset({end}))
            sink = await answered(model, second)
            assert sink.texts[0] == TEXT.decode(tokens[: tokens.index(end)])
            assert sink.reasons == {0: "stop"}

    run(scenario)


def test_several_at_once(tmp_path):
    async def scenario():
        async with started(tmp_path) as model:
            many = a_generation(n=3, temperature=1.5, seed=3)
            others = [a_generation(prompt) for prompt in ("a naïve", "def f", "日本語")]
            for each in (many, *others):
                model.submit(each)
            for each in (many, *others):
                await ended(each)
            assert len({tuple(each) for each in many.sink.tokens.values()}) == 3
            await model.drain()

    run(scenario)


def test_nobody_hears_of_what_was_given_up(tmp_path):
    async def scenario():
        async with started(tmp_path) as model:
            many = [a_generation(max_tokens=100) for _ in range(6)]
            for each in many:
                model.submit(each)
            await asyncio.sleep(0.05)
            for each in many:
                model.cancel(each)
                model.cancel(each)
            seen = [dict(each.sink.texts) for each in many]
            last = a_generation(max_tokens=2)
            await answered(model, last)
            assert [each.sink.texts for each in many] == seen and model.is_idle
            assert model.last_report.num_free_blocks == model.engine.ready.num_blocks

    run(scenario)


@pytest.mark.parametrize(
    ("generation", "text"),
    [
        (dict(prompt=[]), "the prompt is empty"),
        (dict(prompt=[5, 100_000]), "token 100000; expected 0 to"),
        (dict(prompt=[1] * 201), "the prompt has 201 tokens; expected at most 200"),
        (dict(max_tokens=500), "expected at most 200 together"),
        (dict(logit_bias={-1: 1.0}), "token -1; expected 0 to"),
        (dict(seed=1 << 70), "a number has more than 64 bits"),
        (dict(cache_salt="x" * (2 << 20)), "bytes; expected at most"),
        (dict(max_tokens=0), "0 tokens are asked for; expected at least 1"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, generation, text):
    async def scenario():
        async with started(tmp_path) as model:
            asked = a_generation(**generation)
            sink = await answered(model, asked)
            assert isinstance(sink.error, InvalidRequest) and text in str(sink.error)

    run(scenario)


def test_a_full_queue_refuses(tmp_path):
    async def scenario():
        async with started(tmp_path, max_waiting=1, max_sequences=1, max_tokens=1) as model:
            many = [a_generation(max_tokens=60) for _ in range(6)]
            for each in many:
                model.submit(each)
            errors = []
            for each in many:
                if (await ended(each)).error is not None:
                    errors.append(each.sink.error)
            assert errors and all(isinstance(each, Overloaded) for each in errors)
            assert errors[0].reason == "queue_full"

    run(scenario)


class Ticking:
    """A clock that goes on by a second whenever somebody looks."""

    now = 1000.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_what_it_does_is_counted(tmp_path):
    async def scenario():
        tiny.write_folder(tmp_path, **CONFIG)
        counted = ModelMetrics("smol", "1")
        settings = tiny.settings_of(tmp_path, max_length=200, max_tokens=4)
        model = Whole(counted, settings, TEXT, EngineThread, Ticking())
        await model.engine.process.start()
        found = model.metrics
        prompt = "the cat sat on the mat, a naïve café"
        first, again = a_generation(prompt, arrived=500.0), a_generation(prompt, n=2)
        await answered(model, first)
        assert (found.num_running, found.num_waiting, found.cache_use) == (0, 0, 0.0)
        num_prompt = first.num_prompt
        assert found.num_prompt_tokens == num_prompt and found.num_generated_tokens == 8
        assert found.first_token_s.total > 500 and found.next_token_s.count == 7
        # A prompt takes several steps; the last token is not computed.
        assert found.step_tokens.total == num_prompt + 7
        assert found.step_tokens.count == -(-num_prompt // 4) + 7
        assert found.num_asked == num_prompt and found.num_cached == 0 and found.queue_s.count == 1
        await answered(model, again)
        assert found.num_cached >= 2 * (num_prompt // 4 - 1) * 4 and found.queue_s.count == 2
        assert found.num_ended["length"] == 2 and counted.num_success == 2
        model.submit(a_generation([]))
        wrong = a_generation(max_tokens=500)
        await answered(model, wrong)
        assert counted.num_refused["invalid"] == 2 and found.request_s.count == 2
        left = a_generation(max_tokens=100)
        model.submit(left)
        while not left.sink.texts:
            await asyncio.sleep(0.001)
        assert found.num_running == 1 and found.cache_use > 0
        model.cancel(left)
        assert found.num_running == 0 and found.cache_use == 0.0
        assert found.num_ended["abort"] == 1 and counted.num_failures["CANCELED"] == 1
        await asyncio.sleep(0.05)
        # What the engine told before it knew is of nobody any more.
        assert found.num_running == 0
        await model.stop()

    run(scenario)


def test_what_cannot_be_loaded_says_why(tmp_path):
    async def scenario():
        model = Whole(ModelMetrics("smol", ""), tiny.settings_of(tmp_path), TEXT, EngineThread)
        with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
            await model.engine.process.start()
        await model.stop()

    run(scenario)


def test_before_it_is_loaded_nothing_is_taken(tmp_path):
    async def scenario():
        model = Whole(ModelMetrics("smol", ""), tiny.settings_of(tmp_path), TEXT, EngineThread)
        asked = a_generation()
        model.submit(asked)
        assert isinstance(asked.sink.error, NotReady)

    run(scenario)


def test_whoever_waits_when_it_is_unloaded_is_told(tmp_path):
    async def scenario():
        async with started(tmp_path) as model:
            asked = a_generation(max_tokens=150)
            model.submit(asked)
        assert isinstance(asked.sink.error, NotReady) and "unloaded" in str(asked.sink.error)
        late = a_generation()
        model.submit(late)
        assert isinstance(late.sink.error, NotReady)

    run(scenario)


def test_while_it_is_unloaded_nothing_more_is_taken(tmp_path):
    async def scenario():
        async with started(tmp_path) as model:
            closing = asyncio.ensure_future(model.stop())
            await asyncio.sleep(0)
            late = a_generation()
            model.submit(late)
            assert isinstance(late.sink.error, NotReady)
            await closing

    run(scenario)


def test_one_that_is_closed_while_it_loads_is_not_waited_for(tmp_path):
    async def scenario():
        tiny.write_folder(tmp_path, **CONFIG)
        model = Whole(ModelMetrics("smol", ""), tiny.settings_of(tmp_path), TEXT, EngineThread)
        starting = asyncio.ensure_future(model.engine.process.start())
        await asyncio.sleep(0)
        await model.stop()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(scenario)


def test_a_sink_that_fails_is_nobody_elses_problem(tmp_path):
    class Broken(Sink):
        def token(self, event):
            raise ValueError("cannot write")

    async def scenario():
        async with started(tmp_path) as model:
            broken, other = a_generation(), a_generation("a naïve")
            broken.sink = Broken()
            model.submit(broken)
            assert (await answered(model, other)).error is None
            assert isinstance((await ended(broken)).error, BackendFailed)
            assert model.is_idle

    run(scenario)


@pytest.mark.slow
def test_an_engine_that_says_nothing_is_replaced(tmp_path):
    """A real process, stopped as if a driver never came back."""

    async def scenario():
        tiny.write_folder(tmp_path, **CONFIG)
        settings = tiny.settings_of(tmp_path, max_length=200, hang_s=6.0)
        counts = ModelMetrics("smol", "1")
        model = Whole(counts, settings, TEXT)
        await model.engine.process.start()
        try:
            assert (await answered(model, a_generation())).error is None
            await asyncio.sleep(6.5)
            # Nobody waits: silence is no fault.
            stopped = model.engine.process.pid
            assert model.engine.state == "READY" and model.engine.process.num_restarts == 0
            os.kill(stopped, signal.SIGSTOP)
            told = await answered(model, a_generation())
            assert isinstance(told.error, BackendFailed) and "said nothing for" in str(told.error)
            assert counts.num_deaths == {"crash": 0, "hang": 1}
            async with asyncio.timeout(60):
                while model.engine.state != "READY":
                    await asyncio.sleep(0.02)
            assert model.engine.process.pid != stopped
            assert (await answered(model, a_generation())).error is None
        finally:
            await model.stop()

    run(scenario)


def test_a_dead_engine_is_told_of_and_replaced(tmp_path):
    async def scenario():
        lives = []

        def life(loop, on_death):
            lives.append(EngineThread(loop, on_death))
            return lives[-1]

        async with started(tmp_path, life) as model:
            asked = a_generation(max_tokens=150)
            model.submit(asked)
            await asyncio.sleep(0.02)
            lives[0].kill()
            sink = await ended(asked)
            assert isinstance(sink.error, BackendFailed)
            assert "the engine was killed by SIGKILL" in str(sink.error)
            async with asyncio.timeout(60):
                while model.engine.state != "READY":
                    await asyncio.sleep(0.01)
            again = a_generation()
            assert (await answered(model, again)).error is None
            counts = model.metrics.model
            assert model.engine.process.num_restarts == counts.num_restarts == 1
            assert counts.num_deaths == {"crash": 1, "hang": 0}
            assert model.metrics.num_ended["error"] == 1 and model.metrics.num_running == 0

    run(scenario)


def test_in_a_process_that_is_killed(tmp_path):
    async def scenario():
        tiny.write_folder(tmp_path, **CONFIG)
        model = Whole(ModelMetrics("smol", ""), tiny.settings_of(tmp_path, max_length=200), TEXT)
        await model.engine.process.start()
        first = a_generation()
        assert (await answered(model, first)).error is None
        asked = a_generation(max_tokens=190)
        os.kill(model.engine.process.pid, signal.SIGSTOP)  # It cannot be done before it is killed.
        model.submit(asked)
        os.kill(model.engine.process.pid, signal.SIGKILL)
        assert isinstance((await ended(asked)).error, BackendFailed)
        async with asyncio.timeout(60):
            while model.engine.state != "READY":
                await asyncio.sleep(0.05)
        again = a_generation()
        assert (await answered(model, again)).texts == first.sink.texts
        await model.stop()

    run(scenario)


def test_a_key_gets_its_share_of_the_queue_back_however_its_texts_end(tmp_path):
    """The model holds 8 texts, running and waiting, and the key has a quarter of them."""
    quotas = Quotas({b"team-a": Quota(queue_share=0.25)})

    async def scenario():
        async with started(tmp_path, quotas=quotas, max_waiting=4, max_sequences=4) as model:
            for turn in range(4):
                first = a_generation(max_tokens=100, n=2, caller=b"team-a")
                second = a_generation(caller=b"team-a")
                other = a_generation(caller=b"team-b")
                for each in (first, second, other):
                    model.submit(each)
                error = second.sink.error
                assert isinstance(error, QuotaExceeded) and "its share is 2 of 8" in str(error)
                assert second.is_ended
                if turn % 2:
                    model.cancel(first)
                else:
                    assert (await ended(first)).error is None
                assert (await ended(other)).error is None
            assert model.is_idle

    run(scenario)


def test_a_key_that_used_up_its_tokens_waits_until_they_are_back(tmp_path):
    """Prompts and answers count, and an answer may overdraw what is left."""
    clock = FakeClock()
    quotas = Quotas({b"team-a": Quota(tokens_per_s=10)})

    async def scenario():
        tiny.write_folder(tmp_path, **CONFIG)
        settings = tiny.settings_of(tmp_path, max_length=200)
        metrics = ModelMetrics("smol", "")
        model = Whole(metrics, settings, TEXT, EngineThread, clock, quotas=quotas)
        await model.engine.process.start()
        prompt = [1, 2, 3, 4, 5]
        sink = await answered(model, a_generation(prompt, max_tokens=25, caller=b"team-a"))
        assert sink.totals.num_prompt + sink.totals.num_generated == 30
        refused = await answered(model, a_generation(prompt, caller=b"team-a"))
        assert isinstance(refused.error, QuotaExceeded)
        # 10 were there, 30 are used: 20 below zero, and one more is needed.
        assert refused.error.retry_after_s == pytest.approx(2.1)
        assert (await answered(model, a_generation(prompt, caller=b"team-b"))).error is None
        clock.advance(2.0)
        assert (await answered(model, a_generation(prompt, caller=b"team-a"))).error is not None
        clock.advance(0.11)
        assert (await answered(model, a_generation(prompt, caller=b"team-a"))).error is None
        await model.stop()

    run(scenario)
