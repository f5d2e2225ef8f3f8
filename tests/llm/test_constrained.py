"""Constrained sequences on engines with random weights: what ends by itself fits its grammar, on
runners that wait and that do not, whatever else a request asks for."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")

import constrained_text as ct  # noqa: E402
import tiny_llm as tiny  # noqa: E402
from fake_gpu import FakeGpu  # noqa: E402
from free_drafts import FreeDrafts  # noqa: E402
from tiny_text import TOKENIZER  # noqa: E402

from penstock.errors import BackendFailed, InvalidRequest  # noqa: E402
from penstock.llm.checkpoint import open_checkpoint  # noqa: E402
from penstock.llm.constrained import ConstrainedSequences  # noqa: E402
from penstock.llm.cuda_runner import CudaRunner  # noqa: E402
from penstock.llm.messages import GenerateRequest  # noqa: E402
from penstock.llm.models.decoder import Decoder  # noqa: E402
from penstock.sampling_params import Constraint, SamplingParams  # noqa: E402

PARAMS = SamplingParams(max_tokens=300, stop_token_ids=ct.STOPS, seed=1)
PROMPT = [5, 9, 2, 6, 5, 3]
NUMBERS = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0},
           "minItems": 2, "maxItems": 5}  # fmt: skip


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.write_folder(folder, vocab_size=TOKENIZER.get_vocab_size(), max_position_embeddings=1024)
    checkpoint = open_checkpoint(folder)
    found = Decoder(checkpoint.shape, checkpoint.weight, "cpu", torch.float32)
    checkpoint.close()
    return found


def late_runner(decoder, cache, limits):
    runner = CudaRunner(decoder, cache, FakeGpu(), limits, has_graphs=True)
    runner.prepare()
    return runner


@pytest.fixture(params=["waits", "launches ahead"])
def make(decoder, request):
    runner = None if request.param == "waits" else late_runner
    return lambda **limits: ct.constrained_engine(decoder, runner, **limits)


def schema_request(number, schema, **changes):
    params = replace(PARAMS, constraint=ct.of_schema(schema), **changes)
    return GenerateRequest(number, PROMPT[: 1 + number % 6], params)


@pytest.mark.parametrize("is_late", [False, True])
@settings(max_examples=8, deadline=None)
@given(found=st.lists(ct.schemas, min_size=4, max_size=4), seed=st.integers(0, 99))
def test_what_stops_fits_its_schema(decoder, is_late, found, seed):
    engine = ct.constrained_engine(decoder, late_runner if is_late else None)
    wanted = [
        {"seed": seed},
        {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 2.0, "num_logprobs": 2, "n": 2},
        {"temperature": 1.5, "top_k": 40, "logit_bias": {ct.END: 100.0}, "min_tokens": 5},
    ]  # fmt: skip
    requests = [schema_request(n, each, **wanted[n]) for n, each in enumerate(found)]
    requests.append(GenerateRequest(9, PROMPT, replace(PARAMS, max_tokens=30)))
    texts, reasons = ct.run_all(engine, requests)
    assert not engine.failures
    for (number, _), reason in reasons.items():
        if number < len(found) and reason == "stop":
            text = texts[number, _]
            assert ct.fits(text, found[number]), (text, found[number])


def test_most_of_them_do_stop(make):
    requests = [schema_request(n, NUMBERS, seed=n) for n in range(12)]
    texts, reasons = ct.run_all(make(), requests)
    assert set(reasons.values()) == {"stop"}
    assert all(ct.fits(text, NUMBERS) for text in texts.values())
    assert len(set(texts.values())) > 6


def test_a_seed_writes_the_same_alone_and_together(make):
    """Also if it is preempted and computed again, and with prompts found in the cache."""
    requests = [schema_request(n, NUMBERS, seed=n, n=2) for n in range(4)]
    alone = {}
    for request in requests:
        alone |= ct.run_all(make(), [request])[0]
    engine = make(num_blocks=14, max_length=50, max_sequences=6)
    for each in requests:
        each.params = replace(each.params, max_tokens=40)
    together, _ = ct.run_all(engine, requests)
    assert engine.scheduler.num_preemptions
    assert together == alone


def test_runners_agree(decoder):
    requests = [schema_request(n, NUMBERS, seed=n, temperature=0.7) for n in range(5)]
    found = [ct.run_all(ct.constrained_engine(decoder, each), requests) for each in
             (None, late_runner)]  # fmt: skip
    assert found[0] == found[1]


def test_others_in_the_batch_are_as_without(make):
    free = [GenerateRequest(n, PROMPT, replace(PARAMS, max_tokens=20, seed=n)) for n in (20, 21)]
    wanted, _ = ct.run_all(make(), free)
    mixed, _ = ct.run_all(make(), [schema_request(1, NUMBERS), *free])
    assert {place: mixed[place] for place in wanted} == wanted


def test_others_in_the_batch_may_draft(make):
    """They come first in steps, so masks are for later rows of logits."""
    repeating = replace(PARAMS, max_tokens=40, temperature=0.0)
    requests = [GenerateRequest(n, [n, 9, 2] * 4, repeating) for n in (20, 21)]
    requests += [schema_request(n, NUMBERS, seed=n) for n in range(6)]
    wanted = ct.run_all(make(), requests)
    engine = make()
    engine.scheduler.speculation = FreeDrafts(4, engine.pace)
    assert ct.run_all(engine, requests) == wanted
    assert engine.scheduler.num_accepted > 10


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Constraint("regex", "[a-c]{3}-\\d{2}"), "[a-c]{3}-[0-9]{2}"),
        (Constraint("lark", 'start: "yes" | "no" | "日本"'), "yes|no|日本"),
        (Constraint("lark", 'start: word (" " word)~2\nword: /[xy]{2}/'), "([xy]{2} ){2}[xy]{2}"),
        (Constraint("ebnf", 'root ::= "a" tail\ntail ::= "b" | "cc"'), "ab|acc"),
    ],
)
def test_patterns_grammars_and_choices(make, constraint, pattern):
    params = replace(PARAMS, constraint=constraint, n=4)
    texts, reasons = ct.run_all(make(), [GenerateRequest(1, PROMPT, params)])
    assert all(re.fullmatch(pattern, text) for text in texts.values()), texts
    assert set(reasons.values()) == {"stop"}


def test_a_limit_that_cuts_it_is_the_reason_unless_it_is_complete(make):
    params = replace(PARAMS, constraint=Constraint("regex", "a{4}"), max_tokens=3)
    assert ct.run_all(make(), [GenerateRequest(1, PROMPT, params)])[1] == {(1, 0): "length"}
    exact = replace(params, max_tokens=4)
    assert ct.run_all(make(), [GenerateRequest(1, PROMPT, exact)])[1] == {(1, 0): "stop"}


def test_min_tokens_hold_the_end_back_while_more_is_possible(make):
    params = replace(PARAMS, constraint=Constraint("regex", "a{1,9}"), min_tokens=7, n=3)
    texts, reasons = ct.run_all(make(), [GenerateRequest(1, PROMPT, params)])
    assert set(reasons.values()) == {"stop"} and all(7 <= len(each) <= 9 for each in texts.values())
    short = replace(params, constraint=Constraint("regex", "a{1,3}"))
    texts, _ = ct.run_all(make(), [GenerateRequest(1, PROMPT, short)])
    assert set(texts.values()) == {"aaa"}


def test_without_stop_tokens_it_ends_when_it_is_complete(make):
    params = replace(PARAMS, constraint=ct.of_schema(NUMBERS), stop_token_ids=frozenset())
    texts, reasons = ct.run_all(make(), [GenerateRequest(1, PROMPT, params)])
    assert reasons == {(1, 0): "stop"} and ct.fits(texts[1, 0], NUMBERS)


def test_many_come_and_go(make):
    """Some are aborted while their grammar is compiled or their step runs."""
    engine, chance = make(), random.Random(2)
    alive = set()
    for number in range(30):
        engine.add(schema_request(number, NUMBERS if number % 2 else {"type": "boolean"}))
        alive.add(number)
        for _ in range(chance.randrange(4)):
            alive -= {each.request for each in engine.step() if each.reason}
        if alive and chance.random() < 0.4:
            engine.give_up(alive.pop())
    while not engine.is_idle:
        engine.step()
    assert not engine.failures


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(make):
    engine = make()
    bad = replace(PARAMS, constraint=Constraint("regex", "("))
    texts, _ = ct.run_all(engine, [GenerateRequest(1, PROMPT, bad), schema_request(2, NUMBERS)])
    assert set(texts) == {(2, 0)}
    assert list(engine.failures) == [1] and "unclosed group" in str(engine.failures[1])


def test_a_failure_to_compile_that_is_not_the_clients_is_no_invalid_request(make):
    engine = make()

    def no_grammars():
        raise MemoryError("no room for the vocabulary")

    engine.constrained.open_grammars = no_grammars
    texts, _ = ct.run_all(engine, [schema_request(1, NUMBERS), GenerateRequest(2, PROMPT, PARAMS)])
    assert set(texts) == {(2, 0)}
    assert type(engine.failures[1]) is BackendFailed


def test_an_engine_without_grammars_refuses(decoder):
    engine = ct.constrained_engine(decoder)
    engine.constrained = None
    with pytest.raises(InvalidRequest, match="no grammars"):
        engine.add(schema_request(1, NUMBERS))


def test_grammars_are_compiled_once(decoder):
    engine = ct.constrained_engine(decoder)
    compiled = []

    class Counting:
        num_words, end_token = ct.GRAMMARS.num_words, ct.GRAMMARS.end_token

        def compile(self, constraint):
            compiled.append(constraint)
            return ct.GRAMMARS.compile(constraint)

    engine.constrained = ConstrainedSequences(Counting)
    ct.run_all(engine, [schema_request(n, NUMBERS, n=2) for n in range(5)])
    assert len(compiled) == 1
