"""The written sources of the built-in model's training text, read from where their packages or folders lie.

Each reader yields plain passages or conversations; none keeps a copy. What was read is recorded by name and digest.
"""

import gzip
import html
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from forebay.cluster.lesson_talk import message
from forebay.cluster.lesson_values import held_out
from forebay.cluster.lessons import Lesson

BFCL_SETS = ("simple_python", "multiple", "parallel", "live_simple", "live_multiple")
BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def digest(files: Iterable[Path]) -> str:
    """SHA-256 over the names and bytes of files, in the order of their names."""
    total = sha256()
    for file in sorted(files):
        total.update(file.name.encode() + sha256(file.read_bytes()).digest())
    return total.hexdigest()


def python_docs(folder: Path, checking: bool) -> list[str]:
    """The reStructuredText sources below `folder` (Debian's python3.11-doc); `checking`: those kept from training."""
    files = sorted(folder.rglob("*.rst.txt"))
    return [file.read_text(encoding="utf-8") for file in files if held_out(file.name) == checking]


class _Plain(HTMLParser):
    """Text of a page, its scripts, styles and menus left out, a line for each block."""

    HIDDEN = ("script", "style", "head", "svg")
    BLOCKS = ("p", "div", "li", "tr", "h1", "h2", "h3", "pre", "br", "dt", "dd")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in self.HIDDEN

    def handle_data(self, data: str) -> None:
        if self._hidden <= 0:
            self.parts.append(data)


def sqlite_docs(folder: Path) -> list[str]:
    """The pages below `folder` (Debian's sqlite3-doc) as text."""
    return [_page_text(file) for file in sorted(folder.rglob("*.html"))]


def _page_text(file: Path) -> str:
    plain = _Plain()
    plain.feed(file.read_text(encoding="utf-8", errors="replace"))
    lines = (re.sub(r"[ \t]+", " ", line).strip() for line in html.unescape("".join(plain.parts)).splitlines())
    return re.sub(r"\n{2,}", "\n\n", "\n".join(lines))


def json_lines(file: Path) -> list[dict[str, Any]]:
    whole = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in whole.decode().splitlines()]


def tldr(file: Path, r: random.Random) -> Iterator[Lesson]:
    """Commands of the shell: what is wanted, and the line that does it."""
    for row in json_lines(file):
        task = row["task"].replace("[", "").replace("]", "")
        asked = r.choice(("How do I do this with {page}: {task}?", "{page}: {task}", "Give me a command: {task}"))
        question = asked.format(page=row["page"], task=task)
        yield _talk("tldr", question, row["command"].replace("{{", "").replace("}}", ""), f"{row['page']} can do this.")


def gsm8k(file: Path) -> Iterator[Lesson]:
    """School sums in words; the working is the reasoning."""
    for row in json_lines(file):
        working, _, answer = row["answer"].partition("\n#### ")
        yield _talk("gsm8k", row["question"], f"The answer is {answer}.", re.sub(r"<<[^>]*>>", "", working))


def _talk(kind: str, question: str, answer: str, thought: str) -> Lesson:
    turns = [message("user", question), message("assistant", answer, reasoning_content=thought)]
    return Lesson(kind=kind, messages=turns, tools=[], thinking=True, effort=None, kept_reasoning=True)


def tau_bench(file: Path) -> Iterator[Lesson]:
    """Recorded dialogues of an agent with its tools; the declarations are not recorded."""
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        for run in json.load(opened):
            turns = [_known_fields(turn) for turn in run["traj"]]
            yield Lesson(kind="tau", messages=turns, tools=[], thinking=False, effort=None, kept_reasoning=True)


def _known_fields(turn: dict[str, Any]) -> dict[str, Any]:
    kept = {name: turn[name] for name in ("role", "content", "tool_calls", "tool_call_id") if turn.get(name)}
    return {"content": "", **kept}


def bfcl(folder: Path) -> Iterator[Lesson]:
    """Function calls of the Berkeley leaderboard: questions, declarations and one accepted answer each."""
    for name in BFCL_SETS:
        answers = {row["id"]: row["ground_truth"] for row in json_lines(_bfcl_file(folder, "possible_answer", name))}
        for row in json_lines(_bfcl_file(folder, "", name)):
            if len(row["question"]) == 1 and row["id"] in answers:
                yield _bfcl_lesson(row, answers[row["id"]])
    for row in json_lines(_bfcl_file(folder, "", "irrelevance")):
        yield _bfcl_lesson(row, [])


def _bfcl_file(folder: Path, inner: str, name: str) -> Path:
    return folder / inner / f"BFCL_v4_{name}.json"


def _bfcl_lesson(row: dict[str, Any], truth: Sequence[dict[str, Any]]) -> Lesson:
    turns = [dict(turn) for turn in row["question"][0]]
    calls = [_bfcl_call(i, call) for i, call in enumerate(truth)]
    answer = "" if calls else "I am sorry, I cannot do that. None of my tools fits."
    turns.append(message("assistant", answer, reasoning_content="", **({"tool_calls": calls} if calls else {})))
    tools = [{"type": "function", "function": _json_schema(function)} for function in row["function"]]
    return Lesson(kind="bfcl", messages=turns, tools=tools, thinking=False, effort=None, kept_reasoning=True)


def _bfcl_call(place: int, call: dict[str, Any]) -> dict[str, Any]:
    ((name, accepted),) = call.items()
    arguments = {key: _first(values) for key, values in accepted.items() if _first(values) != ""}
    return {
        "id": f"call_{place}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def _first(accepted: Any) -> Any:
    """The first of several accepted values, at every level of an object."""
    value = accepted[0] if isinstance(accepted, list) and accepted else accepted
    return {key: _first(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _json_schema(node: Any) -> Any:
    if isinstance(node, list):
        return [_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {k: BFCL_TYPES.get(v, v) if k == "type" and isinstance(v, str) else _json_schema(v) for k, v in node.items()}
