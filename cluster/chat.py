"""`forebay chat`: a conversation in the terminal, over the same HTTP API that every client uses."""

import json
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

WAIT_S = 600.0
DIM, PLAIN = "\033[2m", "\033[0m"


class ChatError(Exception):
    """The endpoint refused, or is not there."""


def chat(url: str, model: str | None, max_tokens: int, api_key: str) -> int:
    session, messages = uuid.uuid4().hex, []
    try:
        name = model or _first_model(url, api_key)
        print(f"{name} at {url}; an empty line or Ctrl-D ends")
        while line := _read_line():
            messages.append({"role": "user", "content": line})
            body = {"model": name, "messages": messages, "max_tokens": max_tokens, "stream": True}
            answer = _print_answer(_deltas(url, body, api_key, session))
            messages.append({"role": "assistant", "content": answer})
    except ChatError as error:
        print(f"forebay: {error}", file=sys.stderr)
        return 1
    return 0


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _print_answer(deltas: Iterator[dict[str, Any]]) -> str:
    """Prints as it comes, reasoning dimmed; returns the content."""
    content = ""
    for delta in deltas:
        if reasoning := delta.get("reasoning_content"):
            print(f"{DIM}{reasoning}{PLAIN}" if sys.stdout.isatty() else reasoning, end="", flush=True)
        if text := delta.get("content"):
            content += text
            print(text, end="", flush=True)
    print()
    return content


def _first_model(url: str, api_key: str) -> str:
    with _open(f"{url}/v1/models", None, api_key, "") as answer:
        return str(json.load(answer)["data"][0]["id"])


def _deltas(url: str, body: dict[str, Any], api_key: str, session: str) -> Iterator[dict[str, Any]]:
    with _open(f"{url}/v1/chat/completions", body, api_key, session) as answer:
        for line in answer:
            data = line.decode().removeprefix("data:").strip()
            if not line.startswith(b"data:") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise ChatError(event["error"]["message"])
            yield from (choice["delta"] for choice in event["choices"])


def _open(url: str, body: dict[str, Any] | None, api_key: str, session: str) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    if session:
        headers["x-session-id"] = session
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=WAIT_S)
    except urllib.error.HTTPError as error:
        raise ChatError(f"{error.code}: {error.read().decode(errors='replace')[:500]}") from None
    except OSError as error:
        raise ChatError(f"no endpoint answers at {url}: {error}") from None
