"""The bodies of OpenAI's requests as types, and which of their fields are known but not served."""

from collections.abc import Mapping
from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: asked for or not, there is none


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints share: OpenAI's fields, then the extensions that the field's servers agree on."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None


class ChatBody(Body, frozen=True, kw_only=True):
    """/v1/chat/completions. `messages` and `tools` are read by the chat format."""

    messages: Any
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """/v1/completions. `prompt` is one text, one list of token ids, or a list of either."""

    prompt: str | list[Any]
    logprobs: int | None = None


# Known fields that are not served, with the values that ask for nothing and are let pass (null always is).
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "draft_model": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "previous_response_id": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "speculative_config": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
UNSERVED_CHAT: Mapping[str, tuple[Any, ...]] = _UNSERVED | {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": (),
    "functions": ([],),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
UNSERVED_COMPLETION: Mapping[str, tuple[Any, ...]] = _UNSERVED | {
    "echo": (False,),
    "prompt_embeds": (),
    "suffix": ("",),
}
