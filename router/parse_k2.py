"""The streaming parser of Kimi Linear and Kimi K2.

What a model may get wrong, and the rule for it: a call begins at its marker, with or without a section around it; the
head of a call that never gets arguments, or has no name in it, is content; text in a section but in no call is content,
less the white space at its end; a marker that does not belong where it stands vanishes; a head that the end of the
stream cuts off vanishes; after `<|im_end|>` nothing counts. Special tokens are never shown.
"""

from typing import Literal

from forebay.router import chat_k2
from forebay.router.answer import ContentDelta, Event, ReasoningDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from forebay.router.segment import Segment, Special, Text

THINK, THINK_END = Special("<think>"), Special("</think>")  # only where the tokenizer has them as special tokens
HEAD_CHARS = 8192  # longer is no head of a call


class StreamParserK2:
    """The parser of one choice, from after the generation prompt. How text is split into segments does not matter."""

    def __init__(self, thinking: bool) -> None:
        self._place: Literal["think", "content", "section", "head", "arguments"] = "think" if thinking else "content"
        self._head = ""
        self._space = ""  # white space in a section: shown only if text follows
        self._blank = True  # the arguments so far
        self._calls = 0
        self._over = False

    def feed(self, segment: Segment) -> list[Event]:
        if self._over:
            return []
        match segment:
            case Text(text):
                return self._show(text)
            case Special():
                return self._read_special(segment)

    def finish(self, *, cut: bool) -> list[Event]:
        """The stream is over. What a model left open as it ended its turn is closed; a call cut off is not."""
        if self._over:
            return []
        self._over = True
        return [] if cut else self._leave_call()

    def _read_special(self, special: Special) -> list[Event]:
        if special == chat_k2.END:
            return self.finish(cut=False)
        if special == chat_k2.ARGUMENTS_BEGIN and self._place == "head":
            return self._start_call()
        if special not in _LEADS_TO:
            return []
        events = self._leave_call()
        self._place, self._space = _LEADS_TO[special], ""
        return events

    def _start_call(self) -> list[Event]:
        named = chat_k2.CALL_ID.fullmatch(self._head)
        if named is None:
            return self._leave_call()
        call_id, self._head, self._place, self._blank = self._head.strip(), "", "arguments", True
        self._calls += 1
        return [ToolCallStart(self._calls - 1, named[1], call_id)]

    def _leave_call(self) -> list[Event]:
        """Ends the call or gives back the head of one that is none."""
        place, head = self._place, self._head
        if place == "head":
            self._place, self._head = "section", ""
            return self._show(head)
        if place == "arguments":
            self._place = "section"
            empty = [ToolCallDelta(self._calls - 1, "{}")] if self._blank else []
            return [*empty, ToolCallEnd(self._calls - 1)]
        return []

    def _show(self, text: str) -> list[Event]:
        match self._place:
            case "think":
                return [ReasoningDelta(text)] if text else []
            case "content":
                return [ContentDelta(text)] if text else []
            case "section":
                shown = (self._space + text).rstrip()
                self._space = (self._space + text)[len(shown) :]
                return [ContentDelta(shown)] if shown else []
            case "head":
                self._head += text
                return self._leave_call() if len(self._head) > HEAD_CHARS else []
            case "arguments":
                self._blank = self._blank and not text.strip()
                return [ToolCallDelta(self._calls - 1, text)] if text else []


_LEADS_TO: dict[Special, Literal["think", "content", "section", "head"]] = {
    THINK: "think",
    THINK_END: "content",
    chat_k2.SECTION_BEGIN: "section",
    chat_k2.SECTION_END: "content",
    chat_k2.CALL_BEGIN: "head",
    chat_k2.CALL_END: "section",
}
