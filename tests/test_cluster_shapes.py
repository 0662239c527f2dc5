"""`forebay shapes`: the published figures of K3.1 Pro, computed from the shape table."""

import pytest

from forebay.cluster.shapes import DEGREES, pages, shapes
from forebay.kernels.models import SHAPES


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert shapes(name) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "words",
    [
        "layers 93 layers 69 KDA + 24 global",
        "state, bf16 207 MiB/sequence",
        "state, fp32 414 MiB/sequence",
        "convolution tails, bf16 14.55 MiB/sequence",
        "latent rows 27,648 B/token",
        "latent rows at 1,000,000 tokens 27.65 GB",
        "latent rows read 56.62 MB/token",
        "break-even of a state 2,730.67 tokens",
        "index keys 3 KiB/token",
        "index keys at 1,000,000 tokens 3.07 GB",
        "indexer at 1,000,000 tokens 196.61 GFLOP/token",
        "dense attention at 1,000,000 tokens 1.47 TFLOP/token",
        "dense attention against the indexer 7.50 ×",
        "block representations 126 KiB/token",
        "TP1 6144 tokens a page",
        "TP8 1024 tokens a page",
    ],
)
def test_k3_1_pro(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in printed("k3.1-pro", capsys)


def test_page_sizes_by_degree() -> None:
    layouts = [pages(SHAPES["k3"], tp) for tp in DEGREES]
    assert [layout.paged[0].page_tokens for layout in layouts] == [6144, 3072, 1536, 1024]
    assert [round(100 * layout.padding) for layout in layouts] == [8, 8, 8, 31]


def test_the_built_in_model_has_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert "KDA" in printed("demo-random", capsys)


def test_an_unknown_name_is_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert shapes("nope") == 1
    errors = capsys.readouterr().err
    assert "k3.1-pro" in errors
    assert "nope" in errors
