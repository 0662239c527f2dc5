"""What an ingress and its workers count, as samples of the metric table (ops/metrics.py)."""

from collections.abc import Iterator

from forebay.cluster.beat import Kind
from forebay.cluster.ingress import Ingress
from forebay.ops.metrics import Sample

KINDS: tuple[Kind, ...] = ("prefill", "decode")


def samples(ingress: Ingress) -> Iterator[Sample]:
    counts, cluster = ingress.counts, {"cluster": ingress.cluster}
    yield Sample(name="forebay_open_jobs", labels=cluster, value=counts.open_jobs)
    for class_name, tokens in counts.lookup_tokens.items():
        yield Sample(name="forebay_lookup_tokens_total", labels={**cluster, "class": class_name}, value=tokens)
