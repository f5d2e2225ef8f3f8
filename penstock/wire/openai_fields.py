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
    **dict.fromkeys((
        "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag",
        "prompt_logprobs", "allowed_token_ids", "truncate_prompt_tokens", "repetition_detection",
        "thinking_token_budget",
    ), (None,)),
    **dict.fromkeys((
        "use_beam_search", "early_stopping", "include_stop_str_in_output",
        "return_tokens_as_token_ids", "return_token_ids",
    ), (None, False)),
    **dict.fromkeys((
        "max_repetition_pattern_size", "min_repetition_pattern_size", "repetition_min_count",
    ), (None, 0)),
    **dict.fromkeys(("skip_special_tokens", "detokenize"), (None, True)),
    **dict.fromkeys(("bad_words", "logits_processors", "prompt_embeds"), (None, [])),
    **dict.fromkeys(("kv_transfer_params", "vllm_xargs"), (None, {})),
    "best_of": (None, 1),
    "length_penalty": (None, 1.0),
}  # fmt: skip
OF_COMPLETIONS: Mapping[str, Asks] = {**_OF_TEXT, "suffix": (None, "")}
_OF_MEDIA: Mapping[str, Asks] = {"mm_processor_kwargs": (None, {}), "media_io_kwargs": (None, {})}
OF_CHATS: Mapping[str, Asks] = {
    **_OF_TEXT,
    **_OF_MEDIA,
    **dict.fromkeys(("audio", "moderation", "web_search_options", "chat_template"), (None,)),
    **dict.fromkeys((
        "store", "echo", "continue_final_message", "add_special_tokens",
    ), (None, False)),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "verbosity": (None, "medium"),
    "include_reasoning": (None, True),
}  # fmt: skip
OF_RESPONSES: Mapping[str, Asks] = {
    **_OF_TEXT,
    # Fields of chats that have another name here, or no meaning.
    **dict.fromkeys((
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "response_format", "max_tokens", "max_completion_tokens", "min_p", "repetition_penalty",
        "logprobs", "messages", "reasoning_effort",
    ), (None,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), (None, 0)),
    **dict.fromkeys(("stop", "stop_token_ids", "functions"), (None, [])),
    "logit_bias": (None, {}),
    "ignore_eos": (None, False),
    "n": (None, 1),
    **dict.fromkeys((
        "previous_response_id", "conversation", "prompt", "max_tool_calls", "moderation",
        "context_management", "access_programs", "image",
    ), (None,)),
    **dict.fromkeys(("store", "background"), (None, False)),
    "truncation": (None, "disabled"),
}  # fmt: skip
OF_EMBEDDINGS: Mapping[str, Asks] = {
    **dict.fromkeys((
        "truncate_prompt_tokens", "truncation_side", "normalize", "use_activation",
        "additional_data", "chat_template",
    ), (None,)),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "mm_processor_kwargs": (None, {}),
    "add_special_tokens": (None, True),
}  # fmt: skip
OF_TOKENIZE: Mapping[str, Asks] = {
    **_OF_MEDIA,
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "tools": (None, []),
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
    "spaces_between_special_tokens": "special tokens are not shown",
    "request_id": "ids are the server's own",
}
# Within stream_options.
OF_STREAMS: Mapping[str, Asks] = {"continuous_usage_stats": (None, False)}
HARMLESS_OF_STREAMS: Mapping[str, str] = {"include_obfuscation": "nothing is padded"}
