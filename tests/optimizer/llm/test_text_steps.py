"""Which datatypes and sizes of steps are worth trying, by device and SLO."""

import msgspec
import pytest

pytest.importorskip("torch")

from penstock.llm.messages import EngineSettings
from penstock.llm.settings import DTYPES
from penstock.optimizer.llm.text_search import (
    bits_of,
    dtype_offers,
    serving_offers,
    stage_of,
    tpot_limit_ms,
)
from penstock.optimizer.machine import Machine
from penstock.slo import parse

PLAIN = Machine("cpu", 4, 1 << 30, ("avx2",))
MODERN = msgspec.structs.replace(PLAIN, isa=("avx2", "avx512_bf16", "avx512_fp16"))
CPU = EngineSettings("p", "cpu", "float32", 4, 16, 0, 16, 256, 1000, 100)
GPU = msgspec.structs.replace(CPU, device="cuda:0", dtype="bfloat16")
ALL = ("auto", "float32", "bfloat16", "float16", "fp8", "int8", "int4")


def offered(settings, machine, dtypes=ALL, is_exhaustive=False):
    offers, skipped = dtype_offers(dtypes, settings, machine, is_exhaustive=is_exhaustive)
    return (
        [(stage_of(step), step.settings["dtype"]) for step in offers],
        [skip.step.settings["dtype"] for skip in skipped],
    )


def test_bits_are_in_the_name():
    assert [bits_of(each) for each in ALL[1:]] == [32, 16, 16, 8, 8, 4]
    assert set(DTYPES) <= {*ALL, "auto"} or all(bits_of(each) for each in DTYPES)


def test_on_a_cpu_narrower_ones_the_widest_first():
    tried, skipped = offered(CPU, MODERN)
    assert tried == [
        ("precision", "bfloat16"),
        ("precision", "float16"),
        ("quantise", "int8"),
        ("quantise", "int4"),
    ]
    assert skipped == ["fp8"]


def test_a_cpu_without_instructions_for_it_tries_no_half():
    tried, skipped = offered(CPU, PLAIN)
    assert [dtype for _, dtype in tried] == ["int8", "int4"]
    assert skipped == ["bfloat16", "float16", "fp8"]
    tried, skipped = offered(CPU, PLAIN, is_exhaustive=True)
    assert skipped == ["fp8"] and len(tried) == 4


@pytest.mark.parametrize("is_exhaustive", [False, True])
def test_on_a_gpu_only_what_its_engine_takes(is_exhaustive):
    tried, skipped = offered(GPU, PLAIN, is_exhaustive=is_exhaustive)
    assert tried == [("quantise", "fp8")] and skipped == ["int8", "int4"]


def test_what_is_narrow_already_has_little_left():
    eight = msgspec.structs.replace(CPU, dtype="int8")
    assert offered(eight, MODERN)[0] == [("quantise", "int4")]


@pytest.mark.parametrize(
    ("slo", "limit"),
    [
        ("p99 ttft < 1s", None),
        ("p99 tpot < 80ms, p50 tpot < 40ms", 40.0),
        ("p99 itl < 90ms", pytest.approx(90.0)),
    ],
)
def test_the_tightest_promise_for_a_token(slo, limit):
    assert tpot_limit_ms(parse(slo)) == limit


def knobs(settings, slo="p99 ttft < 1s"):
    return [
        [[step.settings for step in way] for way in knob]
        for knob in serving_offers(settings, parse(slo))
    ]


def test_steps_are_made_larger_or_smaller_and_hold_a_token_of_each():
    tokens, sequences = knobs(CPU)
    assert tokens == [
        [{"max_num_batched_tokens": "512"}, {"max_num_batched_tokens": "1024"}],
        [{"max_num_batched_tokens": "128"}, {"max_num_batched_tokens": "64"}],
    ]
    assert sequences == [
        [{"max_num_seqs": "32"}, {"max_num_seqs": "64"}],
        [{"max_num_seqs": "8"}, {"max_num_seqs": "4"}],
    ]


def test_all_that_is_offered_together_is_a_configuration():
    for settings in (CPU, GPU, msgspec.structs.replace(CPU, max_tokens=16)):
        tokens, sequences = knobs(settings)
        sizes = [int(*each.values()) for way in tokens for each in way] + [settings.max_tokens]
        most = [int(*each.values()) for way in sequences for each in way]
        assert all(size >= settings.max_sequences for size in sizes)
        assert max([*most, 0]) <= max(settings.max_sequences, min(sizes))


def test_a_promise_for_each_token_comes_first_unless_it_is_kept_already():
    slo = "p99 ttft < 1s, p99 tpot < 80ms"
    assert knobs(CPU, slo)[0] == [[{"tpot_ms": "80"}]]
    assert len(knobs(msgspec.structs.replace(CPU, tpot_s=0.1), slo)) == 2
