"""`forebay shapes NAME`: what a shape weighs, from the shape table, and its pages by degree of tensor parallelism."""

import sys
from pathlib import Path

from forebay.kernels.costs import describe, index_row_bytes, latent_row_bytes, state_bytes
from forebay.kernels.models import SHAPES
from forebay.kernels.shapes import ModelShape
from forebay.kvstore.layout import Layout, make_layout

BLOCK_TOKENS = 512
DEGREES = (1, 2, 4, 8)


def shapes(name: str) -> int:
    shape = _find(name)
    if shape is None:
        print(f"forebay: shapes by name: {', '.join(SHAPES)}", file=sys.stderr)
        return 1
    for row in describe(shape):
        print(f"{row.name:42} {_number(row.value):>14} {row.unit:14} {row.note}")
    print(f"\npages of {BLOCK_TOKENS}-token blocks, bf16 rows, fp32 states, by tensor parallelism")
    for tp in DEGREES:
        if shape.kda.heads % tp == 0:
            print(page_line(shape, tp))
    return 0


def page_line(shape: ModelShape, tp: int) -> str:
    layout = pages(shape, tp)
    tokens, size = layout.paged[0].page_tokens, layout.page_bytes / (1 << 20)
    return f"  TP{tp}   {tokens:5} tokens a page   {size:6.2f} MiB   {layout.padding:6.1%} padding of a state"


def pages(shape: ModelShape, tp: int) -> Layout:
    """A state page holds the recurrent matrices and the convolution tail of one layer's share."""
    return make_layout(
        block_tokens=BLOCK_TOKENS,
        global_layers=shape.global_layers,
        kda_layers=shape.kda_layers,
        latent_row_bytes=latent_row_bytes(shape),
        index_row_bytes=index_row_bytes(shape),
        state_bytes=state_bytes(shape, tp),
    )


def _find(name: str) -> ModelShape | None:
    if name in SHAPES:
        return SHAPES[name]
    from forebay.workers.config_fields import FolderError
    from forebay.workers.hf_config import read_config

    try:
        return read_config(_folder(name)).shape
    except FolderError as error:
        print(f"forebay: {error}", file=sys.stderr)
        return None


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from forebay.workers.demo import resolve

    return resolve(name)


def _number(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.4g}"
