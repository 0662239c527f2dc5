"""`forebay check model`: what the served model can do, through the endpoint and OpenAI's client.

Tool tasks have values that no lesson had; an agent loop executes the tools. A case is a criterion: it passes when its
bound is met, and its share is printed. Long texts are Python's own help topics with facts planted in them.
"""

import gzip
import json
import lzma
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forebay.cluster import corpus_rows, corpus_sources, lesson_tools
from forebay.cluster.check import Tally
from forebay.cluster.corpus_text import needle, prose
from forebay.cluster.lesson_tasks import Task
from forebay.cluster.lessons import Lesson, missing_tool_case, task_case
from forebay.router.tokenizer import load_tokenizer
from forebay.workers import demo, train_check, train_weights
from forebay.workers.hf_config import read_config

SEED = 1 << 50
ONE_STEP, TWO_STEP, NO_TOOL, LONG = 150, 60, 60, 50
LONG_CHARACTERS = 28_000
TURNS_MAX, ANSWER_TOKENS = 4, 256
AT_ONCE = 4
TEXT_NAME, TEXT_TOKENS, BITS_BOUND, LOAD_BOUND = "bits per byte of kept documentation", 1024, 1.6, 2.0

C = TypeVar("C")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Criterion:
    """A share that must be reached."""

    name: str
    bound: float


CALLS = Criterion("one call: right tool, exact arguments", 0.90)
ANSWERS = Criterion("one call: the answer states the result", 0.85)
CHAINS = Criterion("two calls: both right and the result stated", 0.70)
RESTRAINT = Criterion("no fitting tool: none is called", 0.90)
RECALL = Criterion("a fact in 8k tokens, cold", 0.80)
SAME = Criterion("the same answer after a warm resume", 1.0)
REUSED = Criterion("the warm resume reused its prefix", 1.0)


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model: text, calls as (tool, arguments), the message to send back, tokens found in the cache."""

    text: str
    calls: tuple[tuple[str, Any], ...]
    message: dict[str, Any]
    cached_tokens: int


Ask = Callable[[list[dict[str, Any]], list[dict[str, Any]]], Reply]
"""A turn: messages and tools in, a reply out."""


def endpoint(url: str, model: str, key: str, thinking: bool) -> Ask:
    """Turns through an endpoint's chat completions, at temperature 0. Needs the package `openai`."""
    from openai import OpenAI

    client: Any = OpenAI(base_url=url, api_key=key, timeout=600)
    mode = {"chat_template_kwargs": {"thinking": thinking}}

    def ask(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Reply:
        declared: dict[str, Any] = {"tools": tools} if tools else {}
        completion: Any = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=ANSWER_TOKENS, extra_body=mode, **declared
        )
        said = completion.choices[0].message
        message = said.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        details = completion.usage.prompt_tokens_details
        calls = tuple((call.function.name, _parsed(call.function.arguments)) for call in said.tool_calls or ())
        return Reply(said.content or "", calls, message, (details and details.cached_tokens) or 0)

    return ask


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@dataclass(frozen=True, slots=True)
class Outcome:
    """An agent loop's end: every call that was made, and the last text."""

    calls: tuple[tuple[str, Any], ...]
    answer: str


def agent(ask: Ask, question: str, tools: list[dict[str, Any]]) -> Outcome:
    """Asks, executes what is called and asks again, until the model answers without a call."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    made: list[tuple[str, Any]] = []
    reply = ask(messages, tools)
    for _ in range(TURNS_MAX):
        if not reply.calls:
            break
        made += reply.calls
        messages.append(reply.message)
        for call, (name, arguments) in zip(reply.message["tool_calls"], reply.calls, strict=True):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": _executed(name, arguments)})
        reply = ask(messages, tools)
    return Outcome(tuple(made), reply.text)


def _executed(name: str, arguments: Any) -> str:
    try:
        return lesson_tools.run(name, arguments) if isinstance(arguments, dict) else "error: no arguments"
    except lesson_tools.ToolError as error:
        return f"error: {error}"


def called_right(task: Task, outcome: Outcome) -> bool:
    return list(outcome.calls) == [(step.tool, dict(step.arguments)) for step in task.steps]


def run_tasks(ask: Ask, count: int, two_steps: bool) -> list[tuple[Task, Outcome]]:
    cases = [task_case(SEED + seed, checking=True, two_steps=two_steps) for seed in range(count)]
    return _at_once(lambda case: (case[0], agent(ask, case[0].question, case[1])), cases)


def _at_once(run: Callable[[C], R], cases: Iterable[C]) -> list[R]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(run, cases))


def check_model(url: str, model: str, thinking: bool = False, python_docs: Path | None = None) -> int:
    """Prints every criterion; the exit status is 1 where one is missed. `python_docs`: where Debian's python3.11-doc
    lies; without it, the two criteria about text are not run. They look at the weights of `model` themselves."""
    ask, tally = endpoint(url, model, key="none", thinking=thinking), Tally()
    check_tools(ask, tally)
    check_long(ask, tally)
    if python_docs is None:
        tally.line(None, TEXT_NAME, "not run: no --python-docs")
    else:
        check_text(demo.resolve(model), python_docs, tally)
    return tally.close()


def check_text(folder: Path, python_docs: Path, tally: Tally) -> None:
    """Bits per byte of the documentation kept from training, and how evenly the experts are used on it."""
    tokenizer, shape = load_tokenizer(folder), read_config(folder).shape
    texts = corpus_sources.python_docs(python_docs, checking=True)
    documents = [part for text in texts for part in corpus_rows.passages(text, tokenizer, TEXT_TOKENS)]
    ids, weights = corpus_rows.pack(documents, TEXT_TOKENS, shape.pad_id, seed=0)
    whole = "".join(texts).encode()
    file = {"check_docs_ids": ids, "check_docs_weights": weights, "check_docs_bytes": len(whole)}
    bits, load = train_check.bits_per_byte(shape, train_weights.read(shape, folder), file, batch=4)
    packed = 8 * len(gzip.compress(whole, 9)) / len(whole), 8 * len(lzma.compress(whole, preset=9)) / len(whole)
    detail = f"{bits:.3f}, bound {BITS_BOUND}; gzip -9 {packed[0]:.3f}, xz -9 {packed[1]:.3f}"
    tally.line(bits < BITS_BOUND, TEXT_NAME, detail)
    tally.line(load < LOAD_BOUND, "experts: largest load over the mean", f"{load:.2f}, bound {LOAD_BOUND}")


def check_tools(ask: Ask, tally: Tally) -> None:
    single = run_tasks(ask, ONE_STEP, two_steps=False)
    _judge(tally, CALLS, [called_right(*case) for case in single])
    _judge(tally, ANSWERS, [task.says in outcome.answer for task, outcome in single])
    double = run_tasks(ask, TWO_STEP, two_steps=True)
    _judge(tally, CHAINS, [called_right(*case) and case[0].says in case[1].answer for case in double])
    cases = [missing_tool_case(SEED + seed, checking=True) for seed in range(NO_TOOL)]
    silent = _at_once(lambda case: not agent(ask, case[0].question, case[1]).calls, cases)
    _judge(tally, RESTRAINT, silent)


def long_cases() -> list[Lesson]:
    from pydoc_data.topics import topics

    texts = prose(list(topics.values()))
    return [needle(SEED + seed, texts, LONG_CHARACTERS, facts=1, checking=True) for seed in range(LONG)]


def check_long(ask: Ask, tally: Tally) -> None:
    cases = [(case.messages[0], case.messages[1]["content"]) for case in long_cases()]
    cold = _at_once(lambda case: ask([case[0]], []), cases)
    _judge(tally, RECALL, [wanted in reply.text for (_, wanted), reply in zip(cases, cold, strict=True)])
    warm = _at_once(lambda case: ask([case[0]], []), cases)
    _judge(tally, SAME, [a.text == b.text for a, b in zip(cold, warm, strict=True)])
    _judge(tally, REUSED, [reply.cached_tokens > 0 for reply in warm])


def _judge(tally: Tally, criterion: Criterion, results: Sequence[bool]) -> None:
    share = sum(results) / len(results)
    detail = f"{share:6.1%} of {len(results)}, bound {criterion.bound:.0%}"
    tally.line(share >= criterion.bound, criterion.name, detail)
