"""K3's streaming parser: segments of a model's turn to answer events, by the table of grammar_k3.

What a model may get wrong, and the rule for it:
* what stands after a marker and is no known tag is text; only the marker vanishes (a known tag counts even when another
  special token stands where its `<|sep|>` should);
* an element opened where it may stand further out closes what stands in its way; one that may not stand there at all
  or lacks what it needs is passed over, as is a close of what is not open: the tag vanishes, text goes on as before;
* text between elements is content, less the white space at its end;
* an argument that is not the JSON its type says becomes a string;
* a tag that the end of the stream cuts off vanishes; after `<|end_of_msg|>` nothing counts.
Special tokens are never shown.
"""

from forebay.router import grammar_k3 as grammar
from forebay.router.answer import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from forebay.router.call_arguments import ArgumentsText
from forebay.router.segment import Segment, Special, Text

TAG_CHARS = 8192  # longer is no tag: what a babbling model writes after a marker is shown, not kept


class StreamParserK3:
    """The parser of one choice, from after the generation prompt. How text is split into segments does not matter."""

    def __init__(self, thinking: bool) -> None:
        self._place = "think" if thinking else "response"
        self._marker: Special | None = None  # whose tag is being read into `_tag`
        self._tag = ""
        self._space = ""  # white space between elements: shown only if text follows
        self._calls = 0
        self._arguments = ArgumentsText()
        self._over = False

    def feed(self, segment: Segment) -> list[Event]:
        if self._over:
            return []
        match segment:
            case Text(text) if self._marker:
                self._tag += text
                return self._end_tag() if len(self._tag) > TAG_CHARS else []
            case Text(text):
                return self._show(text)
            case Special():
                return self._read_special(segment)

    def finish(self, *, cut: bool) -> list[Event]:
        """The stream is over. What a model left open when it ended its turn is closed. A call that was cut off stays
        open, so that nobody takes half a command for a whole one."""
        if self._over:
            return []
        self._over = True
        if cut:
            return self._delta(self._arguments.cut())
        return [*self._end_tag(), *self._leave_to(grammar.ROOT)]

    def _read_special(self, special: Special) -> list[Event]:
        if special == grammar.END_OF_MESSAGE:
            return self.finish(cut=False)
        events = self._end_tag()
        if special in (grammar.OPEN, grammar.CLOSE):
            self._marker = special
        return events

    def _end_tag(self) -> list[Event]:
        marker, header, self._marker, self._tag = self._marker, self._tag, None, ""
        tag = grammar.read_tag(header) if len(header) <= TAG_CHARS else None
        if marker is None or tag is None:
            return self._show(header)
        return self._open(*tag) if marker == grammar.OPEN else self._close(tag[0])

    def _open(self, element: str, attributes: dict[str, str]) -> list[Event]:
        parent = grammar.PARENT[element]
        if parent not in grammar.path(self._place) or not grammar.is_complete(element, attributes):
            return []
        if parent == "call" and not self._arguments.takes("members" if element == "argument" else "verbatim"):
            return []
        return [*self._leave_to(parent), *self._enter(element, attributes)]

    def _close(self, element: str) -> list[Event]:
        return self._leave_to(grammar.PARENT[element]) if element in grammar.path(self._place) else []

    def _enter(self, element: str, attributes: dict[str, str]) -> list[Event]:
        self._place, self._space = element, ""
        match element:
            case "call":
                self._calls += 1
                self._arguments = ArgumentsText()
                return [ToolCallStart(self._calls - 1, attributes["tool"])]
            case "argument":
                return self._delta(self._arguments.open_member(attributes["key"], attributes.get("type", "string")))
            case "json":
                return self._delta(self._arguments.open_verbatim())
            case _:
                return []

    def _leave_to(self, ancestor: str) -> list[Event]:
        events: list[Event] = []
        while self._place != ancestor:
            if self._place in ("argument", "json"):
                events += self._delta(self._arguments.close_value())
            elif self._place == "call":
                events += [*self._delta(self._arguments.close()), ToolCallEnd(self._calls - 1)]
            self._place, self._space = grammar.PARENT[self._place], ""
        return events

    def _show(self, text: str) -> list[Event]:
        match self._place:
            case "think":
                return [ReasoningDelta(text)] if text else []
            case "response":
                return [ContentDelta(text)] if text else []
            case "argument" | "json":
                return self._delta(self._arguments.text(text))
            case _:
                return self._show_stray(text)

    def _show_stray(self, text: str) -> list[Event]:
        shown = (self._space + text).rstrip()
        self._space = (self._space + text)[len(shown) :]
        return [ContentDelta(shown)] if shown else []

    def _delta(self, arguments: str) -> list[Event]:
        return [ToolCallDelta(self._calls - 1, arguments)] if arguments else []
