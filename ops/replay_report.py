"""What a replay showed, as rows. Definitions differ between tools, so the report prints its own."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import floor

from forebay.ops.bench_report import Reference, Row
from forebay.ops.replay import Answer, Replayed
from forebay.ops.trace import infinite_cache

LAG_LIMIT_S = 1.0

DEFINITIONS = """\
completed      answers that came whole, with their last frame; all latencies and tokens are of these
TTFT           from sending the request to the first chunk with text (content, reasoning or a tool call)
ITL            gap between two chunks with text of one answer, all answers pooled
E2E            from sending the request to the end of its answer
E2E from due   from the recorded time (divided by speed) to the end: waits in the client included
send lag       from when a request could go (due, and its session's last turn over) to sending it
cached share   sum of cached_tokens / sum of prompt_tokens, as the endpoint's usage says
infinite cache the same share if nothing were ever forgotten, from the trace's block ids, partial last blocks included
affinity       share of turns, the first of a session apart, answered by the cluster of the turn before
percentiles    linear between the two nearest values"""


def rows(replayed: Replayed) -> list[Row]:
    """Every figure of a replay; what was not observed has no row."""
    whole = [answer for answer in replayed.answers if answer.reply.error is None]
    return [
        *_accounts(replayed, whole),
        *_latencies(replayed.answers, whole),
        *_tokens(replayed, whole),
        *_cache(replayed.answers, whole),
        *_clusters(whole),
    ]


def schedule_kept(replayed: Replayed) -> bool:
    """Whether the client sent when it should; if not, latencies are those of another, milder load."""
    return percentile(_lags(replayed.answers), 99) <= LAG_LIMIT_S


def percentile(values: Iterable[float], p: float) -> float:
    """Linear interpolation, as numpy's default; 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * p / 100
    low = floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _accounts(replayed: Replayed, whole: Sequence[Answer]) -> list[Row]:
    errors = Counter(answer.reply.error for answer in replayed.answers if answer.reply.error is not None)
    counts = [
        ("sent", len(replayed.answers)),
        ("skipped, over the context", replayed.skipped),
        ("completed", len(whole)),
        ("failed", sum(errors.values())),
        *((f"failed: {kind}", number) for kind, number in sorted(errors.items())),
    ]
    return [
        *(Row(name=name, value=number, unit="requests") for name, number in counts),
        Row(name="duration", value=replayed.duration_s, unit="s"),
    ]


def _latencies(sent: Sequence[Answer], whole: Sequence[Answer]) -> list[Row]:
    replies = [answer.reply for answer in whole]
    series = {
        "TTFT": [reply.text_at_s[0] - reply.sent_s for reply in replies if reply.text_at_s],
        "ITL": [after - before for reply in replies for before, after in pairwise(reply.text_at_s)],
        "E2E": [reply.end_s - reply.sent_s for reply in replies],
        "E2E from due": [answer.reply.end_s - answer.due_s for answer in whole],
        "send lag": _lags(sent),
    }
    return [row for name, values in series.items() if values for row in _spread(name, values)]


def _lags(sent: Sequence[Answer]) -> list[float]:
    return [answer.reply.sent_s - answer.ready_s for answer in sent]


def _spread(name: str, values: Sequence[float]) -> list[Row]:
    mean = Row(name=f"{name} mean", value=sum(values) / len(values), unit="s")
    return [mean, *(Row(name=f"{name} p{p}", value=percentile(values, p), unit="s") for p in (50, 90, 99))]


def _tokens(replayed: Replayed, whole: Sequence[Answer]) -> list[Row]:
    sizes, requests = replayed.options.sizes, [answer.turn.request for answer in whole]
    planned = float(sum(map(sizes.prompt_tokens, requests))), float(sum(map(sizes.output_tokens, requests)))
    counted = _prompt_tokens(whole), sum(answer.reply.output_tokens or 0 for answer in whole)
    made = []
    for name, wanted, got in zip(("input", "output"), planned, counted, strict=True):
        made.append(Row(name=name, value=got, unit="tokens", reference=Reference(name="planned", value=wanted)))
        if replayed.duration_s > 0:
            made.append(Row(name=f"{name} rate", value=got / replayed.duration_s, unit="tokens/s"))
    return made


def _prompt_tokens(whole: Sequence[Answer]) -> int:
    return sum(answer.reply.prompt_tokens or 0 for answer in whole)


def _cache(sent: Sequence[Answer], whole: Sequence[Answer]) -> list[Row]:
    ideal = infinite_cache(answer.turn.request for answer in sent)
    made = [
        Row(name="infinite cache, by block", value=ideal.by_block, unit="share"),
        Row(name="infinite cache, by token", value=ideal.by_token, unit="share"),
    ]
    if prompt := _prompt_tokens(whole):
        seen = sum(answer.reply.cached_tokens or 0 for answer in whole) / prompt
        reference = Reference(name="infinite cache", value=ideal.by_token)
        made.append(Row(name="cached share", value=seen, unit="share", reference=reference))
    return made


def _clusters(whole: Sequence[Answer]) -> list[Row]:
    by_cluster = Counter(answer.reply.cluster for answer in whole if answer.reply.cluster is not None)
    sessions: dict[str, list[str | None]] = defaultdict(list)
    for answer in whole:
        sessions[answer.turn.session].append(answer.reply.cluster)
    moves = [before == after for clusters in sessions.values() for before, after in pairwise(clusters)]
    made = [Row(name=f"answered by {name}", value=n, unit="requests") for name, n in sorted(by_cluster.items())]
    made.append(Row(name="sessions", value=len(sessions), unit="sessions"))
    if by_cluster and moves:
        made.append(Row(name="affinity", value=sum(moves) / len(moves), unit="share"))
    return made
