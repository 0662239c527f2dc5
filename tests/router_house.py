"""A router over fake clusters, with a byte-level tokenizer of K3's structure: what the router's edge tests stand on."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from fake_ingress import FakeIngress, Reply, metric, running, until
from openai import OpenAI
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HuggingFace

from forebay.router.app import create_app
from forebay.router.ask import TextSide
from forebay.router.config import ClassConfig, ClassRule, ClusterConfig, ModelConfig, RouterConfig
from forebay.router.tokenizer_json import byte_characters

SPECIALS = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
END = 256 + SPECIALS.index("<|end_of_msg|>")
CONTEXT, BLOCK = 4096, 8
CLASS = ClassConfig(name="all", prefill_tokens_per_s=1e6, burst_tokens=1e6, resident_bytes=2**30)


def tokenizer_folder(folder: Path) -> Path:
    """One token a byte, then the special tokens."""
    letters = byte_characters()
    tokenizer = HuggingFace(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def ids(*parts: str) -> list[int]:
    """Token ids: a special token by its name, anything else as bytes."""
    return [
        token for part in parts for token in ([256 + SPECIALS.index(part)] if part in SPECIALS else list(part.encode()))
    ]


def tag(kind: str, text: str) -> list[int]:
    return ids(f"<|{kind}|>", text, "<|sep|>")


def spoken(text: str, thought: str | None = None) -> list[int]:
    """What a model generates that thinks (after the think tag) and answers, to the end of its turn."""
    think = [] if thought is None else [*ids(thought), *tag("close", "think"), *tag("open", "response")]
    return [*think, *ids(text), *tag("close", "response"), *tag("close", "message"), END]


def say(text: str, thought: str | None = None) -> Reply:
    return lambda job: spoken(text, thought)


@dataclass
class House:
    """A running router and its clusters. `log` are its log lines."""

    url: str
    clusters: dict[str, FakeIngress]
    app: Any
    log: list[dict[str, object]] = field(default_factory=list)

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, timeout=20)

    @property
    def text(self) -> TextSide:
        return self.app.state.fleet.text

    def metric(self, name: str, **labels: str) -> float:
        return metric(httpx.get(f"{self.url}/metrics").text, f"forebay_{name}", **labels)

    def post(self, path: str = "/v1/chat/completions", **kwargs: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", timeout=20, **kwargs)

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        return self.post(json=body(text, **fields.pop("body", {})), **fields)

    def at_rest(self) -> None:
        """Wait until nothing is held anywhere."""
        until(lambda: not any(each.open for each in self.clusters.values()))
        for name in ("open_streams", "reserved_tokens", "reserved_bytes", "queued_requests"):
            until(lambda name=name: self.metric(name) == 0)

    def wait_for_log(self, n: int = 1) -> dict[str, object]:
        until(lambda: len(self.log) >= n)
        return self.log[-1]


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    plain = {"chat_template_kwargs": {"thinking": False}}
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]} | plain | fields


def config_of(folder: Path, clusters: tuple[ClusterConfig, ...], **fields: Any) -> RouterConfig:
    model = ModelConfig(
        name="tiny",
        aliases=("tiny-latest",),
        folder=str(tokenizer_folder(folder)),
        context_tokens=CONTEXT,
        block_tokens=BLOCK,
        temperature=0.75,
        top_p=0.9,
        token_bytes=100,
        state_bytes=1000,
    )
    config = RouterConfig(
        clusters=clusters,
        model=model,
        classes=(CLASS,),
        rules=(ClassRule(class_name="all"),),
        probe_every_s=0.05,
        output_tokens_default=256,
    )
    return replace(config, **fields)


@contextlib.contextmanager
def house(folder: Path, reply: Reply, *, clusters: int = 2, ready: bool = True, **fields: Any) -> Iterator[House]:
    """Start fake clusters a, b, … and a router before them; wait until it takes them for ready."""
    with contextlib.ExitStack() as stack:
        fakes = {name: FakeIngress(reply, BLOCK) for name in "abcdefgh"[:clusters]}
        urls = {name: stack.enter_context(running(fake.app))[0] for name, fake in fakes.items()}
        config = config_of(folder, tuple(ClusterConfig(name=name, url=url) for name, url in urls.items()), **fields)
        log: list[dict[str, object]] = []
        app = create_app(config, log.append)
        url, _ = stack.enter_context(running(app))
        if ready:
            until(lambda: httpx.get(f"{url}/ready").json()["clusters"] == sorted(fakes))
        yield House(url, fakes, app, log)


def events(response: httpx.Response) -> list[Any]:
    """The data of a whole event stream; the terminator as it stands."""
    frames = [frame for frame in response.text.split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") for frame in frames), response.text
    data = [frame.removeprefix("data: ") for frame in frames]
    return [each if each == "[DONE]" else json.loads(each) for each in data]
