"""The JSON text of one tool call's arguments, written while the call streams in."""

import json
from typing import Literal

from forebay.router.strict_json import NOT_JSON, parse_json


class ArgumentsText:
    """Every method returns the next part of the text, maybe an empty one.

    Either named arguments, which become the members of an object (a string's characters pass at once, any other value
    when it is whole), or one text that passes as it is: the model's own JSON.
    """

    def __init__(self) -> None:
        self._form: Literal["none", "members", "verbatim"] = "none"
        self._value: Literal["none", "string", "raw"] = "none"
        self._raw = ""
        self._blank = True

    def takes(self, form: Literal["members", "verbatim"]) -> bool:
        """A call has many members or one verbatim text, never both."""
        return self._form == "none" or (self._form == form == "members")

    def open_member(self, key: str, json_type: str) -> str:
        assert self.takes("members")
        lead = "{" if self._form == "none" else ", "
        self._form, self._value = "members", "string" if json_type == "string" else "raw"
        return f"{lead}{_quoted(key)}: " + ('"' if self._value == "string" else "")

    def open_verbatim(self) -> str:
        assert self.takes("verbatim")
        self._form = "verbatim"
        return ""

    def text(self, text: str) -> str:
        match self._form, self._value:
            case "verbatim", _:
                self._blank = self._blank and not text.strip()
                return text
            case _, "string":
                return _quoted(text)[1:-1]
            case _:
                self._raw += text
                return ""

    def close_value(self) -> str:
        """Ends a member or the verbatim text. A raw value that is not JSON becomes a string."""
        value, raw, self._value, self._raw = self._value, self._raw, "none", ""
        if value == "string":
            return '"'
        if value == "raw":
            return raw.strip() if parse_json(raw) is not NOT_JSON else _quoted(raw)
        return ""

    def close(self) -> str:
        """Ends the call: what has no arguments has an empty object."""
        if self._form == "members":
            return "}"
        return "{}" if self._blank else ""

    def cut(self) -> str:
        """What is held of a value that was cut off; the text stays open, so it is not JSON."""
        raw, self._raw = self._raw, ""
        return raw


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
