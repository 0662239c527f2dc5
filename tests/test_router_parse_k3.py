"""K3's streaming parser: every render parses back at every split of the stream, and no babble breaks it."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.router.answer import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from forebay.router.chat_k3 import render
from forebay.router.detokenize import Detokenizer
from forebay.router.parse_k3 import TAG_CHARS, StreamParserK3
from forebay.router.segment import Segment, Special, Text

MARKUP = re.compile(r"(<\|(?:open|close|sep|end_of_msg)\|>|\[EOS\])")
LOOKALIKE = '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="x" index="1"<|sep|>'


def segments_of(markup: str) -> list[Segment]:
    """Segments of a model's output written as one string; for outputs whose texts hold no marker."""
    return [Special(part) if MARKUP.fullmatch(part) else Text(part) for part in MARKUP.split(markup) if part]


@dataclass
class Answer:
    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    ended: list[int] = field(default_factory=list)


def collect(events: list[Event]) -> Answer:
    """Adds deltas up, and checks what holds for every stream of events."""
    answer = Answer()
    for event in events:
        match event:
            case ReasoningDelta(text):
                assert text
                answer.reasoning += text
            case ContentDelta(text):
                assert text
                answer.content += text
            case ToolCallStart(index, name):
                assert index == len(answer.calls)
                assert name
                answer.calls.append([name, ""])
            case ToolCallDelta(index, arguments):
                assert arguments
                assert index == len(answer.calls) - 1
                assert index not in answer.ended
                answer.calls[index][1] += arguments
            case ToolCallEnd(index):
                assert index == len(answer.calls) - 1
                answer.ended.append(index)
    return answer


def parse(segments: list[Segment], *, thinking: bool = False, cut: bool = False) -> Answer:
    parser = StreamParserK3(thinking)
    events = [event for segment in segments for event in parser.feed(segment)]
    return collect([*events, *parser.finish(cut=cut)])


def read(markup: str, *, thinking: bool = False, cut: bool = False) -> Answer:
    return parse(segments_of(markup), thinking=thinking, cut=cut)


def splits(segments: list[Segment]) -> list[list[Segment]]:
    """The stream with each text split in two at every place, and with a segment for every character."""
    every: list[Segment] = []
    streams = []
    for i, segment in enumerate(segments):
        if isinstance(segment, Special):
            every.append(segment)
            continue
        every += map(Text, segment.text)
        for at in range(len(segment.text) + 1):
            halves: list[Segment] = [Text(segment.text[:at]), Text(segment.text[at:])]
            streams.append([*segments[:i], *halves, *segments[i + 1 :]])
    return [every, *streams]


WORDS = st.text(max_size=6) | st.sampled_from(["", LOOKALIKE, '&quot; " &', "\n \t", "漢字🙂", "null"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from(["f", "&quot;", 'g "&amp;" h', "名", "<|sep|>"])
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(WORDS, VALUES, max_size=2)), max_size=2)


def answer_segments(message: dict[str, Any], thinking: bool) -> list[Segment]:
    """What the model says to give this message: its render less the generation prompt."""
    user = {"role": "user", "content": "q"}
    prompt = render([user], thinking=thinking)
    return render([user, message], thinking=thinking, generate=False)[len(prompt) :]


def assistant(content: str, reasoning: str, calls: list[tuple[str, Any]]) -> dict[str, Any]:
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": made}


@given(WORDS, WORDS, CALLS, st.booleans())
def test_every_render_parses_back_at_every_split(content: str, reasoning: str, calls: Any, thinking: bool) -> None:
    segments = answer_segments(assistant(content, reasoning, calls), thinking)
    expected = Answer(
        reasoning=reasoning if thinking and reasoning.strip() else "",
        content=content,
        calls=[[name, json.dumps(arguments, ensure_ascii=False)] for name, arguments in calls],
        ended=list(range(len(calls))),
    )
    for stream in [segments, *splits(segments)]:
        assert parse(stream, thinking=thinking) == expected


@given(NAMES, st.text().filter(lambda text: text.strip()))
def test_arguments_that_are_no_json_parse_back_as_they_are(name: str, arguments: str) -> None:
    answer = parse(answer_segments(assistant("", "", [(name, arguments + "{")]), False))
    assert answer.calls == [[name, arguments + "{"]]


class Letters:
    """A byte is its own token; the markers follow them."""

    names = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

    def name_of(self, token_id: int) -> str | None:
        return self.names[token_id - 256] if token_id >= 256 else None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def ids(self, segments: list[Segment]) -> list[int]:
        ids: list[int] = []
        for segment in segments:
            ids += [256 + self.names.index(segment.name)] if isinstance(segment, Special) else segment.text.encode()
        return ids


@given(WORDS, CALLS, st.integers(1, 7))
def test_a_render_parses_back_through_token_ids(content: str, calls: Any, step: int) -> None:
    segments = answer_segments(assistant(content, "", calls), False)
    ids, detokenizer, parser = Letters().ids(segments), Detokenizer(Letters()), StreamParserK3(False)
    events: list[Event] = []
    for i in range(0, len(ids), step):
        for segment in detokenizer.feed(ids[i : i + step]):
            events += parser.feed(segment)
    assert collect([*events, *parser.finish(cut=False)]) == parse(segments)


TOOLS = '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        # what stands after a marker and is no known tag is text
        ("a<|open|>b<|close|>c<|sep|>d", Answer(content="abcd")),
        ("a<|open|>message to you<|sep|>b", Answer(content="amessage to youb")),
        ('a<|open|>call tool="x<|sep|>b', Answer(content='acall tool="xb')),
        ("a<|sep|>b<|open|><|sep|>c", Answer(content="abc")),
        ("a<|open|>b[EOS]c", Answer(content="abc")),
        # a known tag counts without its <|sep|>
        ("a<|close|>response<|open|>think<|sep|>b", Answer(content="a", reasoning="b")),
        ("a<|close|>response<|close|>message<|end_of_msg|>", Answer(content="a")),
        # an element closes what stands in its way
        ("a<|open|>think<|sep|>b<|open|>response<|sep|>c", Answer(content="ac", reasoning="b")),
        ('a<|open|>tools<|sep|><|open|>call tool="f"<|sep|>', Answer("", "a", [["f", "{}"]], [0])),
        (
            TOOLS
            + '<|open|>argument key="a"<|sep|>1<|open|>argument key="b" type="number"<|sep|>2'
            + '<|open|>call tool="g"<|sep|>',
            Answer("", "", [["f", '{"a": "1", "b": 2}'], ["g", "{}"]], [0, 1]),
        ),
        ("a<|open|>message<|sep|>b", Answer(content="ab")),
        # one that may not stand there, or is not open, is passed over
        ('a<|open|>call tool="f"<|sep|>b<|close|>call<|sep|>c', Answer(content="abc")),
        ('a<|open|>argument key="f"<|sep|>b<|close|>argument<|sep|>c', Answer(content="abc")),
        ("a<|close|>think<|sep|>b<|close|>tools<|sep|>c", Answer(content="abc")),
        ('<|open|>tools<|sep|><|open|>call index="1"<|sep|>a<|open|>call tool=""<|sep|>b', Answer(content="ab")),
        (TOOLS + '<|open|>argument type="string"<|sep|>a', Answer("", "a", [["f", "{}"]], [0])),
        (
            TOOLS + '<|open|>json type="object"<|sep|>{}<|close|>json<|sep|><|open|>argument key="k"<|sep|>x',
            Answer("", "x", [["f", "{}"]], [0]),
        ),
        (
            TOOLS + '<|open|>argument key="k"<|sep|>x<|close|>argument<|sep|><|open|>json<|sep|>{}',
            Answer("", "{}", [["f", '{"k": "x"}']], [0]),
        ),
        # text between elements is content, less the white space at its end
        ("a<|close|>response<|sep|> \n<|open|>tools<|sep|>\n", Answer(content="a")),
        ("a<|close|>response<|sep|> b c \n<|open|>tools<|sep|>d ", Answer(content="a b cd")),
        ("a<|close|>message<|sep|> b", Answer(content="a b")),
        ("a<|close|>response<|sep|><|open|>tools<|sep|> <|close|>tools<|sep|>b", Answer(content="ab")),
        # values that are not the JSON they say become strings
        (
            TOOLS + '<|open|>argument key="a" type="number"<|sep|>many<|close|>argument<|sep|>'
            '<|open|>argument key="b" type="object"<|sep|> {"x":1}\n<|close|>argument<|sep|>'
            '<|open|>argument key="c" type="array"<|sep|><|close|>argument<|sep|>'
            '<|open|>argument key="d" type="number"<|sep|>NaN<|close|>argument<|sep|>'
            '<|open|>argument key="e" type="colour"<|sep|>"r"<|close|>argument<|sep|>',
            Answer("", "", [["f", '{"a": "many", "b": {"x":1}, "c": "", "d": "NaN", "e": "r"}']], [0]),
        ),
        (TOOLS + "<|open|>json<|sep|> \n", Answer("", "", [["f", " \n{}"]], [0])),
        # after the end of the message nothing counts
        ("a<|end_of_msg|>b<|open|>think<|sep|>c", Answer(content="a")),
        ("", Answer()),
    ],
)
def test_rules_for_what_a_model_gets_wrong(markup: str, expected: Answer) -> None:
    assert read(markup) == expected
    assert parse(splits(segments_of(markup))[0]) == expected


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("a<|close|>respon", Answer(content="a")),
        (TOOLS, Answer(calls=[["f", ""]])),
        (
            TOOLS + '<|open|>argument key="a" type="string"<|sep|>rm -rf /tmp',
            Answer(calls=[["f", '{"a": "rm -rf /tmp']]),
        ),
        (TOOLS + '<|open|>argument key="a" type="number"<|sep|>12', Answer(calls=[["f", '{"a": 12']])),
        (
            TOOLS + '<|open|>argument key="a" type="number"<|sep|>12<|close|>argument<|sep|>',
            Answer(calls=[["f", '{"a": 12']]),
        ),
        (TOOLS + '<|open|>json<|sep|>{"a": 1', Answer(calls=[["f", '{"a": 1']])),
        (TOOLS + "<|close|>call<|sep|>", Answer(calls=[["f", "{}"]], ended=[0])),
    ],
)
def test_a_stream_that_was_cut_leaves_its_call_open(markup: str, expected: Answer) -> None:
    assert read(markup, cut=True) == expected


def test_deltas_stream() -> None:
    """A string's characters are passed on at once; any other value when it is whole."""
    parser = StreamParserK3(False)
    for segment in segments_of(TOOLS + '<|open|>argument key="a" type="string"<|sep|>'):
        parser.feed(segment)
    assert parser.feed(Text('x"')) == [ToolCallDelta(0, 'x\\"')]
    for segment in segments_of('<|close|>argument<|sep|><|open|>argument key="b" type="number"<|sep|>'):
        parser.feed(segment)
    assert parser.feed(Text("1")) == []
    assert parser.feed(Text("2")) == []
    parser.feed(Special("<|close|>"))
    parser.feed(Text("argument"))
    assert parser.feed(Special("<|sep|>")) == [ToolCallDelta(0, "12")]


def test_a_babbling_tag_is_shown_when_it_grows_too_long() -> None:
    parser = StreamParserK3(False)
    assert parser.feed(Special("<|open|>")) == []
    assert parser.feed(Text("b" * TAG_CHARS)) == []
    assert parser.feed(Text("c")) == [ContentDelta("b" * TAG_CHARS + "c")]
    assert parser.feed(Text("d")) == [ContentDelta("d")]


BABBLE = st.lists(
    st.sampled_from(["<|open|>", "<|close|>", "<|sep|>", "<|sep|>", "[EOS]", "<|media_pad|>"]).map(Special)
    | st.sampled_from(
        [
            "message",
            "think",
            "response",
            "tools",
            "call",
            "json",
            "argument",
            'call tool="f"',
            'argument key="k"',
            'json type="object"',
            'argument key="k" type="number"',
            'call tool="',
            " ",
            "\n",
            "1",
            '"',
            "{",
            "漢",
        ]
    ).map(Text)
    | st.integers(0, 10**6).map(lambda i: Text(f"<{i}>")),
    max_size=40,
)


@given(BABBLE, st.booleans())
def test_babble_never_breaks_and_loses_no_word(segments: list[Segment], thinking: bool) -> None:
    answer = parse(segments, thinking=thinking)
    assert parse(splits(segments)[0], thinking=thinking) == answer
    shown = answer.reasoning + answer.content + "".join(arguments for _, arguments in answer.calls)
    for segment in segments:
        if isinstance(segment, Text) and segment.text.startswith("<"):
            assert segment.text in shown
    assert not re.search(r"<\|", shown)
    assert answer.ended == list(range(len(answer.calls)))
    parse(segments, thinking=thinking, cut=True)


@given(BABBLE, st.booleans())
def test_babble_never_poisons_its_session(segments: list[Segment], thinking: bool) -> None:
    """Whatever was parsed renders again as history, and parses back as it was."""
    answer = parse(segments, thinking=thinking)
    message = assistant(answer.content, answer.reasoning, [(name, arguments) for name, arguments in answer.calls])
    again = parse(answer_segments(message, True), thinking=True)
    assert again.content == answer.content
    assert [name for name, _ in again.calls] == [name for name, _ in answer.calls]
