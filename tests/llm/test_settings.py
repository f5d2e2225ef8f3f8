"""What a configuration says to an engine."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.llm.settings import NUMBERS, PREFIX, TEXTS, path_of, settings_of
from penstock.repository import parameters

CONFIG = ModelConfig("m", "1", "llm", "/models/m/1/config.json", (), (), 0, BatchPolicy(0))


def told(**options: str) -> ModelConfig:
    return replace(CONFIG, options={f"{PREFIX}{key}": text for key, text in options.items()})


def test_without_a_word_it_runs_on_a_cpu_as_the_model_is():
    found = settings_of(CONFIG)
    assert (found.path, found.device, found.dtype) == ("/models/m/1", "cpu", "float32")
    assert found.max_tokens >= found.max_sequences >= 1 and found.cache_bytes == 0
    assert found.ttft_s is None and found.tpot_s is None and not found.is_made_up


def test_on_a_gpu_it_takes_more_at_a_time():
    small, large = settings_of(CONFIG), settings_of(replace(CONFIG, device="cuda:0"))
    assert large.dtype == "bfloat16" and large.max_sequences > small.max_sequences


def test_what_is_told_holds():
    found = settings_of(
        told(dtype="float16", max_num_seqs="3", max_num_batched_tokens="7", block_size="32")
    )
    assert (found.dtype, found.max_sequences, found.max_tokens) == ("float16", 3, 7)
    assert found.block_size == 32 and found.max_drafted == 0
    assert settings_of(told(num_speculative_tokens="5")).max_drafted == 5
    found = settings_of(told(ttft_ms="200", tpot_ms="12.5", kv_cache_bytes="4096", threads="2"))
    assert (found.ttft_s, found.tpot_s) == (0.2, 0.0125)
    assert (found.cache_bytes, found.num_threads) == (4096, 2)


def test_threads_are_the_cores_that_another_program_has_assigned():
    assert settings_of(replace(CONFIG, num_cores=7)).num_threads == 7
    assert settings_of(replace(told(threads="2"), num_cores=7)).num_threads == 2


def test_many_sequences_alone_raise_what_a_step_takes():
    assert settings_of(told(max_num_seqs="1000")).max_tokens == 1000


def test_all_problems_are_told_together():
    config = told(
        dtype="int3", max_num_seqs="0", block_size="many", ttft_ms="-1", random_weights="perhaps"
    )
    with pytest.raises(ConfigError) as caught:
        settings_of(replace(config, num_instances=2))
    text = str(caught.value)
    for word in ("dtype: 'int3'", "max_num_seqs: '0'", "block_size: 'many'", "ttft_ms: '-1'"):
        assert word in text
    assert "random_weights: 'perhaps'" in text and "instance_group: 2" in text


@pytest.mark.parametrize("text", ["nan", "inf", "1.5", "", "1e99"])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ConfigError, match="max_num_seqs"):
        settings_of(told(max_num_seqs=text))


def test_a_step_has_a_token_for_each_sequence():
    with pytest.raises(ConfigError, match="expected at least 8"):
        settings_of(told(max_num_seqs="8", max_num_batched_tokens="4"))


@pytest.mark.parametrize(
    ("dtype", "device", "kind"),
    [("fp8", "cpu", "GPUs"), ("int8", "cuda:0", "CPUs"), ("int4", "cuda:0", "CPUs")],
)
def test_a_type_that_the_device_does_not_multiply_in_is_refused(dtype, device, kind):
    with pytest.raises(ConfigError, match=f"'{dtype}' is for {kind}, and this model is on"):
        settings_of(replace(told(dtype=dtype), device=device))


def test_where_the_files_are():
    assert path_of(CONFIG) == Path("/models/m/1")
    assert path_of(replace(CONFIG, artifact="/m.gguf")) == Path("/m.gguf")
    assert path_of(told(random_weights="true")) == Path("/models/m/1/config.json")


def test_config_pbtxt_knows_every_name():
    known = {f"{PREFIX}{name}" for name in (*NUMBERS, *TEXTS)}
    assert {each.key for each in parameters.PARAMETERS if each.backend == "llm"} == known
