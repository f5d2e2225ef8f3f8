"""A language model of several shards and one core on one event loop, its engine in a thread: every
frame is encoded, and each shard has a renderer and a socket to the engine."""

import asyncio
import os
import socket

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from engine_thread import EngineThread, RendererThread
from text_server import NAME, write_model

from penstock.config import LLM
from penstock.errors import BackendFailed, ConfigError, NotReady, Overloaded, QuotaExceeded
from penstock.llm import language_model
from penstock.llm.language_model import LanguageModel
from penstock.llm.open_generations import TextShard
from penstock.llm.sharded_text import ShardedText
from penstock.repository import layout
from penstock.sampling_params import SamplingParams
from penstock.serving.catalog import Catalog
from penstock.serving.quotas import Quota, Quotas
from penstock.serving.scrape import Pending, expose
from penstock.serving.shard import Shard, decode_readings
from penstock.serving.shards import ShardGone, Shards
from penstock.serving.shared_tokens import SharedTokens
from penstock.wire import frames

KEY = b"team-a"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
PROMPTS = ("the cat", "the cat sat on the mat", "def f(x):", "a naïve café", "日本語")


class TextSession:
    """A shard whose process is this one; `end` as a killed process does."""

    def __init__(self, shards, number, quotas):
        self._shards, self._number, self._quotas = shards, number, quotas
        self.is_open = True
        # Tensors, which texts have none of.
        self.parcels = None
        self.start_renderer = RendererThread
        self.tokens = SharedTokens(self._tell, asyncio.get_running_loop().call_soon)
        self.tokens.replace(quotas.token_rates)
        self.shard = Shard(self._tell, shards.blocks.page, number, self._make)

    def _make(self, config, core):
        place = TextShard(core, self.tokens, self._shards.number)
        model = LanguageModel(config, start_renderer=self.start_renderer, shard=place)
        return model, model.part

    @property
    def model(self):
        return self.shard.table.find(NAME)

    def send(self, frame, fds=()):
        (sent,) = frames.decode_all_to_shard(frames.join([frames.encode(frame)]))
        sock = socket.socket(fileno=os.dup(fds[0])) if fds else None
        asyncio.get_running_loop().call_soon(self._hear, sent, sock)

    def _hear(self, sent, sock):
        if self.is_open:
            self.shard.receive(sent, sock)
        elif sock is not None:
            sock.close()

    def _tell(self, frame):
        (sent,) = frames.decode_all_from_shard(frames.join([frames.encode(frame)]))
        asyncio.get_running_loop().call_soon(self._hear_shard, sent)

    def _hear_shard(self, sent):
        if not self.is_open:
            return
        now = asyncio.get_running_loop().time()
        match sent:
            case frames.FromPart():
                self._shards.receive(self._number, sent)
            case frames.TakeTokens(call, key, amount):
                wait_s = self._quotas.take_tokens(key, amount, now)
                self.tokens.taken(frames.TokensTaken(call, wait_s))
            case frames.UseTokens(key, amount):
                self._quotas.use_tokens(key, amount, now)

    async def ask(self, question):
        await asyncio.sleep(0)
        if not self.is_open:
            raise ShardGone("it has ended")
        return await self.shard.answer(frames.decode_shard_question(frames.encode(question)))

    def kill(self):
        self.is_open = False

    async def end(self):
        """Its sockets close, and the core hears of it."""
        self.is_open = False
        self._shards.lose(self._number)
        await self.shard.close()


class Sink:
    def __init__(self):
        self.tokens, self.texts = {}, {}
        self.totals = self.error = None
        self.ended = asyncio.Event()

    def token(self, event):
        self.tokens.setdefault(event.index, []).append(event.token)
        self.texts[event.index] = self.texts.get(event.index, "") + event.text

    def finished(self, totals):
        assert self.totals is None and self.error is None
        self.totals = totals
        self.ended.set()

    def failed(self, error):
        assert self.totals is None and self.error is None
        self.error = error
        self.ended.set()


class Tokens:
    """What a renderer answers."""

    def __init__(self):
        self.found = asyncio.get_running_loop().create_future()

    def is_gone(self):
        return False

    def encoded(self, tokens):
        self.found.set_result(tokens)

    def failed(self, error):
        self.found.set_exception(error)


async def ask(model, prompt, caller=b"", **options):
    """Tokenize and submit a prompt; its generation."""
    asker = Tokens()
    model.encode([prompt], True, asker)
    (tokens,) = await asker.found
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **options})
    generation = model.new_generation(tokens, params, Sink())
    generation.caller = caller
    model.submit(generation)
    return generation


async def ended(generation):
    async with asyncio.timeout(60):
        await generation.sink.ended.wait()
    return generation.sink


class TextCore:
    def __init__(self, num_shards, quotas=None):
        self.quotas = quotas or Quotas()
        self.shards = Shards(num_shards)
        self.catalog = Catalog(makers={LLM: self._make}, shards=self.shards)
        self.sessions = [self.session(number) for number in range(num_shards)]

    def session(self, number):
        return TextSession(self.shards, number, self.quotas)

    def _make(self, config, quotas):
        return ShardedText(config, self.shards, EngineThread, RendererThread)

    @property
    def model(self):
        return self.catalog.find(NAME)

    @property
    def models(self):
        return [each.model for each in self.sessions]

    async def load(self, folder, **parameters):
        told = {f"penstock.{name}": str(value) for name, value in parameters.items()}
        await self.catalog.load(layout.read(write_model(folder, told)))

    async def restart(self, number):
        await self.sessions[number].end()
        self.sessions[number] = self.session(number)
        await self.shards.open(number, self.sessions[number])

    async def until_idle(self):
        """Read the figures until nothing runs and no block is held."""
        async with asyncio.timeout(60):
            while True:
                await self.catalog.refresh()
                if not any(figures(self)[name] for name in GAUGES):
                    return
                await asyncio.sleep(0.01)


def run(scenario, num_shards=2, quotas=None):
    async def main():
        core = TextCore(num_shards, quotas)
        for number, session in enumerate(core.sessions):
            await core.shards.open(number, session)
        try:
            async with asyncio.timeout(120):
                await scenario(core)
        finally:
            await core.catalog.close()
            for session in core.sessions:
                await session.shard.close()
            core.shards.close()

    asyncio.run(main())


def figures(core):
    """The sum of each text metric, by its name."""
    text = expose([Pending(core.model.metrics, 0, 1)]).decode()
    found = {}
    for line in text.splitlines():
        if line.startswith("penstock:") and "_bucket" not in line:
            name, _, value = line.removeprefix("penstock:").rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0) + float(value)
    return found


async def alone(folder):
    """What one process answers: greedy, seeded, and several choices."""
    (config,) = layout.read(folder).configs
    model = LanguageModel(config, EngineThread, RendererThread)
    await model.start()
    found = [
        (await ended(await ask(model, prompt, **options))).texts
        for prompt in PROMPTS
        for options in OPTIONS
    ]
    await model.close()
    return found


OPTIONS = ({}, {"temperature": 1.2, "seed": 7}, {"temperature": 1.0, "seed": 3, "n": 3})


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_answers_are_those_of_one_process_and_counts_add_up(tmp_path, num_shards):
    async def scenario(core):
        await core.load(tmp_path)
        expected = await alone(tmp_path / NAME)
        for turn in range(2):
            asked = [
                await ask(core.models[(number + turn) % num_shards], prompt, **options)
                for number, prompt in enumerate(PROMPTS)
                for options in OPTIONS
            ]
            assert [(await ended(each)).texts for each in asked] == expected
        await core.catalog.refresh()
        metrics, found = core.model.metrics, figures(core)
        num_asked = 2 * len(PROMPTS) * len(OPTIONS)
        assert metrics.num_success == found["request_success_total"] == num_asked
        assert found["generation_tokens_total"] == 2 * len(PROMPTS) * 8 * (1 + 1 + 3)
        totals = [each.model.metrics.num_success for each in core.sessions]
        assert sum(totals) == num_asked and all(totals)
        # All shards have requests with the same prompts: the engine finds them in its one cache.
        assert found["prefix_cache_queries_total"] >= found["prompt_tokens_total"]
        await core.until_idle()
        assert core.model.explain().instances[0].state == "idle"
        assert len({each.loaded_at for each in core.models}) == 1

    run(scenario, num_shards)


def test_all_shards_share_the_prefix_cache(tmp_path):
    async def scenario(core):
        await core.load(tmp_path)
        prompt = "on the mat " * 12
        known = []
        for model in core.models:
            known.append((await ended(await ask(model, prompt))).totals.num_cached)
        assert known[0] == 0 and all(each > 0 for each in known[1:])

    run(scenario, 3)


def test_the_queue_is_one_for_all_shards(tmp_path):
    """Its limit is the engine's: two shards cannot queue more than one could."""

    async def scenario(core):
        await core.load(tmp_path, max_waiting=2, max_num_seqs=1, max_num_batched_tokens=1)
        asked = [
            await ask(core.models[number % 2], "the cat", max_tokens=40) for number in range(8)
        ]
        errors = [(await ended(each)).error for each in asked]
        refused = [each for each in errors if each is not None]
        assert all(each.reason == "queue_full" for each in refused)
        # One runs, two wait; one more may have been begun or ended meanwhile.
        assert 2 <= sum(each is None for each in errors) <= 5
        await core.catalog.refresh()
        assert core.model.metrics.num_refused["queue_full"] == len(refused)

    run(scenario)


def test_a_promised_first_token_counts_what_other_shards_queue(tmp_path):
    """One text at a time: one shard queues as many as the promise allows, and others get none."""

    async def scenario(core):
        await core.load(tmp_path, ttft_ms=300, max_num_seqs=1, max_num_batched_tokens=64)
        first, second = core.models
        many, error = [], None
        # The engine goes on meanwhile, so that one more text may be in time again.
        while error is None:
            num_refused = sum(each.sink.error is not None for each in many)
            while sum(each.sink.error is not None for each in many) == num_refused:
                many.append(await ask(first, "the cat", max_tokens=250))
                assert len(many) < 1000
            error = (await ended(await ask(second, "the cat"))).error
        assert isinstance(error, Overloaded) and error.reason == "predicted_late"
        for each in many:
            first.cancel(each)
        # Until the engine has heard of it.
        while (await ended(await ask(second, "the cat"))).error is not None:
            await asyncio.sleep(0.001)
        await core.catalog.refresh()
        assert core.model.metrics.num_refused["predicted_late"] >= 2

    run(scenario)


def test_a_shard_that_dies_loses_only_its_own_texts(tmp_path):
    async def scenario(core):
        await core.load(tmp_path)
        mine = [await ask(core.models[0], "the cat", max_tokens=200) for _ in range(3)]
        others = [await ask(core.models[1], "the cat", max_tokens=150) for _ in range(3)]
        while not all(each.sink.tokens for each in (*mine, *others)):
            await asyncio.sleep(0.001)
        await core.catalog.refresh()
        before = figures(core)["generation_tokens_total"]
        await core.restart(0)
        assert [(await ended(each)).error for each in others] == [None] * 3
        # The engine has ended those of the dead shard: no block is held, nothing runs.
        await core.until_idle()
        assert all(each.sink.totals is None for each in mine)
        # What the dead one had counted is not lost, and its successor answers.
        assert figures(core)["generation_tokens_total"] >= before
        assert (await ended(await ask(core.models[0], "the cat"))).error is None
        assert core.model.metrics.num_restarts == 0

    run(scenario)


def test_a_dead_engine_is_told_to_all_shards_and_replaced(tmp_path):
    async def scenario(core):
        await core.load(tmp_path)
        asked = [await ask(model, "the cat", max_tokens=200) for model in core.models]
        EngineThread.last.kill()
        for each in asked:
            error = (await ended(each)).error
            assert isinstance(error, BackendFailed) and "the engine was killed" in str(error)
        # A shard that starts now hears of it, too.
        await core.restart(1)
        while not all(model.is_ready for model in core.models):
            await asyncio.sleep(0.01)
        for model in core.models:
            assert (await ended(await ask(model, "the cat"))).error is None
        await core.catalog.refresh()
        assert core.model.metrics.num_restarts == core.model.metrics.num_deaths["crash"] == 1

    run(scenario)


def test_an_engine_that_one_shard_finds_hung_is_replaced_for_all(tmp_path):
    async def scenario(core):
        await core.load(tmp_path)
        other = await ask(core.models[1], "the cat", max_tokens=200)
        (part,) = core.model.opening.parts
        for life, silent_s in ((0, 5.0), (2, 6.0), (1, 7.0)):
            core.shards.receive(0, frames.FromPart(part, frames.EngineHung(life, silent_s)))
        error = (await ended(other)).error
        assert "the engine said nothing for 7 s and was killed" in str(error)
        while not all(model.is_ready for model in core.models):
            await asyncio.sleep(0.01)
        assert (await ended(await ask(core.models[0], "the cat"))).error is None
        await core.catalog.refresh()
        assert core.model.metrics.num_deaths == {"crash": 0, "hang": 1}

    run(scenario)


def test_tokens_of_a_key_are_counted_over_all_shards(tmp_path):
    """The rate is so low that nothing comes back while the test runs."""

    async def scenario(core):
        await core.load(tmp_path)
        first = await ask(core.models[0], "the cat", KEY)
        assert (await ended(first)).error is None
        used = first.num_prompt + 8
        for model in core.models:
            refused = await ended(await ask(model, "the cat", KEY))
            assert isinstance(refused.error, QuotaExceeded)
            assert refused.error.retry_after_s == pytest.approx((used) / 0.001, rel=0.01)
            assert (await ended(await ask(model, "the cat", b"other"))).error is None
        # One that leaves while the core is asked is not started.
        left = await ask(core.models[1], "the cat", KEY)
        core.models[1].cancel(left)
        await core.models[1].drain()
        assert left.is_ended and left.sink.error is None and left.sink.totals is None
        await core.catalog.refresh()
        assert core.model.metrics.num_refused["quota"] == 2

    run(scenario, 2, Quotas({KEY: Quota(tokens_per_s=0.001)}))


def test_texts_that_run_when_it_is_unloaded_finish_and_all_shards_close_it(tmp_path):
    async def scenario(core):
        await core.load(tmp_path)
        asked = [await ask(model, "the cat", max_tokens=100) for model in core.models]
        await core.catalog.unload(NAME)
        assert [(await ended(each)).error for each in asked] == [None, None]
        for session in core.sessions:
            while decode_readings(await session.ask(frames.ReadModels())):
                await asyncio.sleep(0.01)

    run(scenario)


def test_what_cannot_be_loaded_says_why(tmp_path):
    async def scenario(core):
        folder = write_model(tmp_path)
        (folder / "tokenizer.json").write_text("nonsense")
        await core.catalog.load(layout.read(folder))
        (failure,) = core.catalog.failures
        assert "tokenizer" in failure.problems[0]
        for session in core.sessions:
            with pytest.raises(NotReady, match="could not be loaded"):
                assert session.model

    run(scenario)


def test_a_shard_whose_renderer_cannot_load_says_so_and_tries_again(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "LOAD_AGAIN_S", 0.05)

    async def scenario(core):
        await core.load(tmp_path)
        await core.sessions[1].end()
        core.sessions[1] = session = core.session(1)
        is_broken = True

        def start(loop, on_death):
            if is_broken:
                raise OSError("no memory")
            return RendererThread(loop, on_death)

        session.start_renderer = start
        monkeypatch.setattr("penstock.llm.renderer.backoff_s", lambda num_deaths: 0.01)
        await core.shards.open(1, session)
        with pytest.raises(NotReady, match="cannot encode texts"):
            await ask(session.model, "the cat")
        assert not session.model.is_ready and core.model.is_ready
        is_broken = False
        while not session.model.is_ready:
            await asyncio.sleep(0.01)
        assert (await ended(await ask(session.model, "the cat"))).error is None

    run(scenario)


def test_invalid_parameters_are_refused_before_anything_starts(tmp_path):
    async def scenario(core):
        (config,) = layout.read(write_model(tmp_path, {"penstock.max_num_seqs": "no"})).configs
        with pytest.raises(ConfigError, match="max_num_seqs: 'no'"):
            ShardedText(config, core.shards)

    run(scenario)
