"""Every field of the openai package's types and of vLLM's extensions works, is refused by name, or
is on the documented list of harmless ones."""

import json
from pathlib import Path

import pytest

openai_types = pytest.importorskip("openai.types")

from openai.types import chat as chat_types  # noqa: E402
from openai.types import completion_create_params, embedding_create_params  # noqa: E402
from openai.types import responses as response_types  # noqa: E402

from penstock.errors import InvalidRequest  # noqa: E402
from penstock.wire import openai_fields as tables  # noqa: E402
from penstock.wire import openai_prompts, openai_responses, openai_v1  # noqa: E402

DOC = (Path(__file__).parents[2] / "docs" / "llm.md").read_text()


# The parameters of vLLM's documentation, "extra parameters" and "sampling parameters".
def words(text):
    return text.split()


VLLM_TEXT = words("""
    use_beam_search top_k min_p repetition_penalty length_penalty early_stopping stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids
    add_special_tokens response_format guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern structured_outputs structural_tag priority
    request_id logits_processors return_tokens_as_token_ids return_token_ids cache_salt
    kv_transfer_params vllm_xargs max_repetition_pattern_size min_repetition_pattern_size
    repetition_min_count repetition_detection detokenize bad_words
""")
VLLM_CHAT = words("""
    best_of echo add_generation_prompt continue_final_message documents chat_template
    chat_template_kwargs mm_processor_kwargs media_io_kwargs include_reasoning reasoning_effort
    thinking_token_budget
""")
VLLM_TOKENIZE = words("""
    model prompt messages add_special_tokens return_token_strs add_generation_prompt
    continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
    tools
""")
VLLM_EMBEDDINGS = words("""
    truncate_prompt_tokens truncation_side additional_data add_special_tokens normalize
    use_activation embed_dtype endianness mm_processor_kwargs chat_template
""")


def annotations(*classes):
    return [name for each in classes for base in each.__mro__ for name in
            getattr(base, "__annotations__", ())]  # fmt: skip


CHAT = annotations(
    chat_types.completion_create_params.CompletionCreateParamsBase,
    chat_types.completion_create_params.CompletionCreateParamsStreaming,
)
COMPLETION = annotations(
    completion_create_params.CompletionCreateParamsBase,
    completion_create_params.CompletionCreateParamsStreaming,
)
RESPONSE = annotations(
    response_types.response_create_params.ResponseCreateParamsBase,
    response_types.response_create_params.ResponseCreateParamsStreaming,
)
EMBEDDING = annotations(embedding_create_params.EmbeddingCreateParams)
MESSAGES = [{"role": "user", "content": "hi"}]
# What reads them, what is required, the fields that work, those that are refused.
KINDS = {
    "chat": (
        openai_v1.read_chat,
        {"messages": MESSAGES},
        openai_v1.ChatBody.__struct_fields__,
        tables.OF_CHATS,
    ),
    "completion": (
        openai_prompts.read_completion,
        {"prompt": "hi"},
        openai_prompts.CompletionBody.__struct_fields__,
        tables.OF_COMPLETIONS,
    ),
    "response": (
        openai_responses.read_responses,
        {"input": "hi"},
        openai_responses.ResponsesBody.__struct_fields__,
        tables.OF_RESPONSES,
    ),
    "embedding": (
        openai_prompts.read_embeddings,
        {"input": "hi"},
        openai_prompts.EmbeddingsBody.__struct_fields__,
        tables.OF_EMBEDDINGS,
    ),
    "tokenize": (
        openai_prompts.read_tokenize,
        {"messages": MESSAGES},
        openai_prompts.TokenizeBody.__struct_fields__,
        tables.OF_TOKENIZE,
    ),
}
FIELDS = [("chat", name) for name in sorted({*CHAT, *VLLM_TEXT, *VLLM_CHAT})]
FIELDS += [("completion", name) for name in sorted({*COMPLETION, *VLLM_TEXT, "prompt_embeds"})]
FIELDS += [("response", name) for name in sorted(RESPONSE)]
FIELDS += [("embedding", name) for name in sorted({*EMBEDDING, *VLLM_EMBEDDINGS})]
FIELDS += [("tokenize", name) for name in sorted(VLLM_TOKENIZE)]


def read(kind, **fields):
    reader, required, *_ = KINDS[kind]
    return reader(json.dumps({"model": "m", **required, **fields}).encode())


def test_the_types_were_found():
    assert {"messages", "web_search_options", "function_call", "stream"} <= set(CHAT)
    assert {"prompt", "suffix", "stream"} <= set(COMPLETION) and "input" in EMBEDDING


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_field_works_or_is_refused_or_is_harmless(kind, name):
    *_, works, refused = KINDS[kind]
    known = [
        name in works and name not in tables.HARMLESS,
        name in refused,
        name in tables.HARMLESS,
    ]
    assert known.count(True) == 1, f"{name}: works, is refused, is harmless: {known}"


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in KINDS[kind][3]]
)
def test_a_refused_field_is_named_when_it_asks_for_something(kind, name):
    for value in ("something", {"type": "json_object"}, 7, [1]):
        with pytest.raises(InvalidRequest, match=f"{name} is not supported") as caught:
            read(kind, **{name: value})
        assert (caught.value.field, caught.value.code) == (name, "unsupported_parameter")
    for value in KINDS[kind][3][name]:
        assert read(kind, **{name: value}) == read(kind)


def test_true_is_not_one():
    with pytest.raises(InvalidRequest, match="best_of is not supported"):
        read("completion", best_of=True)


@pytest.mark.parametrize("name", tables.HARMLESS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_harmless_field_changes_nothing_and_is_documented(kind, name):
    # Responses repeat their metadata, an object of texts.
    is_repeated = (kind, name) == ("response", "metadata")
    value = {"a": "b"} if is_repeated else "something"
    found, plain = read(kind, **{name: value}), read(kind)
    assert found.chat == plain.chat if is_repeated else found == plain
    assert f"`{name}`" in DOC


def test_options_of_streams():
    known = chat_types.ChatCompletionStreamOptionsParam.__annotations__
    for name in {*known, "continuous_usage_stats"}:
        works = name == "include_usage"
        assert [works, name in tables.OF_STREAMS, name in tables.HARMLESS_OF_STREAMS].count(True)
    options = {"include_usage": True, "include_obfuscation": True}
    assert read("chat", stream=True, stream_options=options).has_usage


def test_fields_for_the_template_reach_it():
    found = read(
        "chat",
        reasoning_effort="low",
        documents=[{"title": "t", "text": "x"}],
        add_generation_prompt=False,
        chat_template_kwargs={"a": 1},
    )
    assert found.template_options == {
        "reasoning_effort": "low",
        "documents": [{"title": "t", "text": "x"}],
        "add_generation_prompt": False,
        "a": 1,
    }


def test_a_salt_separates_prompts():
    assert read("chat", cache_salt="a").params.cache_salt == "a"
