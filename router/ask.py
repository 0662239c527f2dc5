"""What a request asks for, in token ids: from a checked body to the values that everything behind works with."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forebay.router import validate
from forebay.router.bodies import UNSERVED_CHAT, UNSERVED_COMPLETION, Body, ChatBody, CompletionBody
from forebay.router.chat import ChatFormat, chat_format
from forebay.router.config import ModelConfig, RouterConfig
from forebay.router.messages import RenderError, read_tools
from forebay.router.outcome import ApiError, invalid, unsupported
from forebay.router.segment import EncodeCache, encode
from forebay.router.session import Session, chat_opening, identify, ids_opening
from forebay.router.tokenizer import Tokenizer, load_tokenizer
from forebay.router.wire import Stop, WireSampling

ENCODE_CACHE_BYTES = 256 * 2**20
SEEDS = 2**63
EFFORTS: Mapping[str, str] = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}


class TextSide:
    """The served model's text: its tokenizer, its chat format (None: it has no chat) and the ids of known segments."""

    def __init__(self, model: ModelConfig) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(model.folder)
        self.format: ChatFormat | None = chat_format(self.tokenizer)
        self.cache = EncodeCache(ENCODE_CACHE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. Choice `i` is choice `i % n` of prompt `i // n`; `samplings` has one entry a prompt.

    `calls`: tool calls are part of the answer, else they are dropped. `ignored`: unknown fields of the body.
    """

    kind: Literal["chat", "completion"]
    model: str
    prompts: tuple[list[int], ...]
    n: int
    samplings: tuple[WireSampling, ...]
    seed: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    session: Session
    salt: str
    ignored: tuple[str, ...]
    thinking: bool = False
    calls: bool = False
    parallel_calls: bool = True
    stop: Stop = ""
    """How the session's turn before this one ended, as far as the messages tell."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)


def read_chat(raw: bytes, headers: Mapping[str, str], config: RouterConfig, text: TextSide) -> Ask:
    """POST /v1/chat/completions. ApiError says what is wrong."""
    body, ignored = validate.read_body(raw, ChatBody, UNSERVED_CHAT)
    _check_model(body.model, config.model)
    validate.check_numbers(body)
    if text.format is None:
        raise invalid("model", f"model: {config.model.name} has no chat format; use /v1/completions.")
    thinking, effort = _thinking(body, config.model.thinking)
    choice, calls = _tool_choice(body)
    prompt = _render(body, text, text.format, calls, choice, thinking, effort)
    validate.check_context("messages", len(prompt), config.model.context_tokens)
    asked, field = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, field = body.max_tokens, "max_tokens"
    logprobs = validate.chat_logprobs(body)
    return Ask(
        kind="chat",
        prompts=(prompt,),
        samplings=(_sampling(body, prompt, asked, field, logprobs, config, text),),
        thinking=thinking,
        calls=calls,
        stop=_stop_before(body.messages),
        parallel_calls=body.parallel_tool_calls is not False,
        **_shared(body, headers, chat_opening(body.messages), ignored, 1, config),
    )


def read_completion(raw: bytes, headers: Mapping[str, str], config: RouterConfig, text: TextSide) -> Ask:
    """POST /v1/completions. ApiError says what is wrong."""
    body, ignored = validate.read_body(raw, CompletionBody, UNSERVED_COMPLETION)
    _check_model(body.model, config.model)
    validate.check_numbers(body)
    prompts = _prompts(body.prompt, text, config)
    for prompt in prompts:
        validate.check_context("prompt", len(prompt), config.model.context_tokens)
    logprobs = validate.completion_logprobs(body)
    opening = ids_opening(prompts[0], config.model.block_tokens)
    return Ask(
        kind="completion",
        prompts=prompts,
        samplings=tuple(
            _sampling(body, prompt, body.max_tokens, "max_tokens", logprobs, config, text) for prompt in prompts
        ),
        **_shared(body, headers, opening, ignored, len(prompts), config),
    )


def _stop_before(messages: Sequence[Mapping[str, Any]]) -> Stop:
    """Who answers a tool call had one; who speaks after an answer had none."""
    if messages and messages[-1].get("role") == "tool":
        return "tool_use"
    return "end_turn" if any(message.get("role") == "assistant" for message in messages) else ""


def _check_model(name: str, model: ModelConfig) -> None:
    if name != model.name and name not in model.aliases:
        text = f"The model `{name[:200]}` does not exist."
        raise ApiError(404, text, outcome="not_found", param="model", code="model_not_found")


def _shared(
    body: Body, headers: Mapping[str, str], opening: bytes, ignored: list[str], prompts: int, config: RouterConfig
) -> dict[str, Any]:
    """The parts of an Ask that both endpoints make alike."""
    n = body.n or 1
    if n * prompts > config.choices_max:
        what = f"{n} choices" if prompts == 1 else f"{prompts} prompts with {n} choices each"
        raise invalid("n", f"n: {what}, at most {config.choices_max} are answered at once.")
    metadata_user = (body.metadata or {}).get("user_id")
    if metadata_user is not None and not isinstance(metadata_user, str):
        raise invalid("metadata.user_id", "metadata.user_id: must be a string.")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options: only allowed when stream is true.")
    return {
        "model": body.model,
        "n": n,
        "seed": secrets.randbelow(SEEDS) if body.seed is None else body.seed % SEEDS,
        "stops": validate.stops_of(body),
        "stream": bool(body.stream),
        "include_usage": bool(body.stream_options and body.stream_options.include_usage),
        "session": identify(headers, body.prompt_cache_key, body.user, metadata_user, opening),
        "salt": body.cache_salt or "",
        "ignored": tuple(ignored),
    }


def _sampling(
    body: Body,
    prompt: list[int],
    asked: int | None,
    field: str,
    logprobs: int | None,
    config: RouterConfig,
    text: TextSide,
) -> WireSampling:
    model = config.model
    tokens = validate.output_tokens(asked, field, len(prompt), model.context_tokens, config.output_tokens_default)
    tokenizer = text.tokenizer
    return validate.sampling(
        body, model, max_tokens=tokens, logprobs=logprobs, eos_ids=tokenizer.eos_ids, vocab=tokenizer.vocab_size
    )


def _render(
    body: ChatBody,
    text: TextSide,
    chat: ChatFormat,
    calls: bool,
    choice: object,
    thinking: bool,
    effort: str | None,
) -> list[int]:
    try:
        tools = read_tools(body.tools)
        segments = chat.render(
            body.messages, tools if calls else None, tool_choice=choice, thinking=thinking, effort=effort
        )
        return encode(segments, text.tokenizer, text.cache)
    except RenderError as error:
        raise invalid(error.field, f"{error.field}: {error.message}.") from error
    except RecursionError as error:
        raise invalid("messages", "messages: nested too deeply.") from error


def _thinking(body: ChatBody, default: bool) -> tuple[bool, str | None]:
    """Whether to think and how much: `chat_template_kwargs.thinking` decides, else `reasoning_effort` ("none": off)."""
    wanted = dict(body.chat_template_kwargs or {})
    thinking = wanted.pop("thinking", wanted.pop("enable_thinking", None))
    if thinking is not None and not isinstance(thinking, bool):
        raise invalid("chat_template_kwargs.thinking", "chat_template_kwargs.thinking: must be true or false.")
    if wanted:
        name = f"chat_template_kwargs.{next(iter(wanted))[:60]}"
        raise unsupported(name, "this field")
    effort = body.reasoning_effort
    if effort is not None and effort != "none" and effort not in EFFORTS:
        raise invalid("reasoning_effort", f"reasoning_effort: must be one of none, {', '.join(EFFORTS)}.")
    if thinking is None:
        thinking = default if effort is None else effort != "none"
    return thinking, EFFORTS.get(effort or "")


def _tool_choice(body: ChatBody) -> tuple[object, bool]:
    """What the format is told, and whether calls are part of the answer.

    `none` leaves the declarations out. A forced call (`required`, or a named function) needs constrained decoding.
    """
    choice = body.tool_choice
    if choice is not None and choice not in ("auto", "none"):
        known = choice == "required" or isinstance(choice, dict)
        if known:
            raise unsupported("tool_choice", "a forced tool call")
        raise invalid("tool_choice", 'tool_choice: must be "auto" or "none".')
    if choice == "auto" and not body.tools:
        raise invalid("tool_choice", "tool_choice: only allowed when tools are given.")
    return "auto", bool(body.tools) and choice != "none"


def _prompts(prompt: str | list[Any], text: TextSide, config: RouterConfig) -> tuple[list[int], ...]:
    if isinstance(prompt, str):
        return (text.tokenizer.encode_text(prompt),)
    if not prompt:
        raise invalid("prompt", "prompt: the list is empty.")
    vocab = text.tokenizer.vocab_size
    if all(type(each) is int for each in prompt):
        return (validate.check_ids("prompt", prompt, vocab),)
    if len(prompt) > config.choices_max:
        raise invalid("prompt", f"prompt: {len(prompt)} prompts, at most {config.choices_max} are answered at once.")
    if all(isinstance(each, str) for each in prompt):
        return tuple(text.tokenizer.encode_text(each) for each in prompt)
    if all(isinstance(each, list) for each in prompt):
        return tuple(validate.check_ids("prompt", each, vocab) for each in prompt)
    raise invalid("prompt", "prompt: must be a text, a list of token ids, or a list of either.")
