"""JSON schemas of all kinds, and engines of tiny models whose random weights would write none."""

import json

import jsonschema_rs
from hypothesis import strategies as st
from tiny_text import TOKENIZER

from penstock.llm.blocks import BlockPool
from penstock.llm.cache import Cache
from penstock.llm.constrained import ConstrainedSequences
from penstock.llm.engine import Engine
from penstock.llm.grammars import Grammars
from penstock.llm.messages import GenerateRequest
from penstock.llm.models.decoder import Decoder
from penstock.llm.pace import StepTimeModel
from penstock.llm.runner import CpuRunner
from penstock.llm.scheduler import Scheduler, StepLimits
from penstock.llm.text import Text
from penstock.sampling_params import Constraint

TEXT = Text(TOKENIZER)
VOCABULARY = TEXT.vocabulary
END = TOKENIZER.token_to_id("<|end|>")
STOPS = frozenset([END])


def encode(text):
    return TEXT.encode(text, is_whole=False)


GRAMMARS = Grammars(VOCABULARY, encode)
names = st.text('abcé"\\ ', min_size=1, max_size=4)
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
              st.integers(-50, 50), st.integers(0, 200)),
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 6)),
    st.sampled_from([
        {"type": "string", "pattern": "^[a-f]{2,4}$"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "uuid"},
        {"type": "number", "minimum": 0, "maximum": 1},
    ]),
    st.lists(st.one_of(names, st.integers(-9, 9), st.none()), min_size=1, max_size=4)
    .map(lambda values: {"enum": values}),
    st.builds(lambda value: {"const": value}, names),
)  # fmt: skip


def objects(inner):
    def build(properties, num_required):
        required = list(properties)[:num_required]
        found = {"type": "object", "properties": properties, "required": required}
        return {**found, "additionalProperties": False}

    return st.builds(build, st.dictionaries(names, inner, max_size=3), st.integers(0, 3))


def arrays(inner):
    return st.builds(
        lambda item, low, size: {
            "type": "array", "items": item, "minItems": low, "maxItems": low + size,
        },
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip


def either(inner):
    return st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})


schemas = st.recursive(
    leaves, lambda inner: st.one_of(objects(inner), arrays(inner), either(inner)), max_leaves=6
)


def of_schema(schema) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


def fits(text, schema) -> bool:
    options = {"validate_formats": True}
    return jsonschema_rs.validator_for(schema, **options).is_valid(json.loads(text))


def constrained_engine(decoder: Decoder, runner=None, num_blocks=600, **limits) -> Engine:
    limits = StepLimits(**{"max_sequences": 8, "max_tokens": 64, "max_length": 800, **limits})
    cache = Cache(decoder.shape, num_blocks, 4, "cpu", decoder.dtype)
    scheduler = Scheduler(BlockPool(num_blocks, 4), limits)
    made = (runner or (lambda decoder, cache, limits: CpuRunner(decoder, cache)))(
        decoder, cache, limits
    )
    engine = Engine(scheduler, made, StepTimeModel(), lambda: 0.0, num_ahead=made.num_ahead)
    engine.constrained = ConstrainedSequences(lambda: GRAMMARS)
    return engine


def run_all(engine: Engine, requests: list[GenerateRequest]):
    """The text and the reason of each sequence, by request and index."""
    streams, texts, reasons = {}, {}, {}
    for request in requests:
        engine.add(request)
    params = {each.id: each.params for each in requests}
    while not engine.is_idle:
        for event in engine.step():
            place = event.request, event.index
            stream = streams.setdefault(place, VOCABULARY.stream([5]))
            is_end = event.reason == "stop" and event.token in params[event.request].stop_token_ids
            texts[place] = texts.get(place, "") + ("" if is_end else stream.add(event.token))
            if event.reason:
                texts[place] += stream.rest()
                reasons[place] = event.reason
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return texts, reasons
