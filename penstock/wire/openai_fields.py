"""Fields of OpenAI's API and of vLLM's extensions that this server does not act on.

Pure tables. Fields in the `OF_` tables would change the answer: a value that requests something is
refused by name. `HARMLESS` fields cannot change the answer, so they are ignored. Every other field
of either API works; a test compares the tables with the openai package's types. Fields that neither
API knows are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Asks = Sequence[object]
# By field: the values that request nothing.
_OF_TEXT: Mapping[str, Asks] = {
    "best_of": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "structural_tag": (None,),
    "prompt_logprobs": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "detokenize": (None, True),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None, []),
    "return_tokens_as_token_ids": (None, False),
    "return_token_ids": (None, False),
    "kv_transfer_params": (None, {}),
    "vllm_xargs": (None, {}),
    "max_repetition_pattern_size": (None, 0),
    "min_repetition_pattern_size": (None, 0),
    "repetition_min_count": (None, 0),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
}
OF_COMPLETIONS: Mapping[str, Asks] = {**_OF_TEXT, "suffix": (None, "")}
OF_CHATS: Mapping[str, Asks] = {
    **_OF_TEXT,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "store": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "echo": (None, False),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
    "chat_template": (None,),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "include_reasoning": (None, True),
}
OF_EMBEDDINGS: Mapping[str, Asks] = {
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "normalize": (None,),
    "use_activation": (None,),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "additional_data": (None,),
    "mm_processor_kwargs": (None, {}),
    "chat_template": (None,),
    "add_special_tokens": (None, True),
}
OF_TOKENIZE: Mapping[str, Asks] = {
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "tools": (None, []),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
}
# By field: why ignoring it changes nothing.
HARMLESS: Mapping[str, str] = {
    "user": "names the end user",
    "metadata": "is the client's own note",
    "safety_identifier": "names the end user",
    "service_tier": "there is one tier",
    "prompt_cache_key": "prompts are cached by their content and API key",
    "prompt_cache_options": "prompts are cached as long as there is room",
    "prompt_cache_retention": "prompts are cached as long as there is room",
    "prediction": "is a hint for speed",
    "parallel_tool_calls": "tools are refused",
    "spaces_between_special_tokens": "special tokens are not shown",
    "request_id": "ids are the server's own",
}
# Within stream_options.
OF_STREAMS: Mapping[str, Asks] = {"continuous_usage_stats": (None, False)}
HARMLESS_OF_STREAMS: Mapping[str, str] = {"include_obfuscation": "nothing is padded"}


def find_refused(fields: Mapping[str, object], refused: Mapping[str, Asks]) -> str | None:
    """Return the first field whose value requests something that is refused."""
    for name, value in fields.items():
        if name in refused and not any(_is_same(value, each) for each in refused[name]):
            return name
    return None


def _is_same(value: object, other: object) -> bool:
    """Compare as JSON does: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
