"""How fast prefill makes cache, and how fast a link must be to carry it away meanwhile.

Cache is latent rows and index keys, which grow with the prompt, and KDA states, of which a prefill keeps one wherever
the store's policy keeps a checkpoint, and hands over the last. A tier or a handoff on a slower link than said here ends
later than the prefill itself; and fetching a prefix over it takes longer than computing it again.
"""

from forebay.kernels import costs
from forebay.kernels.shapes import ModelShape
from forebay.kvstore.policy import DEFAULT_CHECKPOINTS, checkpoints_for

POOL_COPIES = 2


def rates(shape: ModelShape, block_tokens: int, tokens: int, prefill_s: float) -> dict[str, float]:
    """GB/s, by what it is a rate of, for a prompt of `tokens` tokens prefilled from nothing in `prefill_s` seconds."""
    rows = tokens * len(shape.global_layers) * (costs.latent_row_bytes(shape) + (costs.index_row_bytes(shape) or 0))
    state = len(shape.kda_layers) * costs.state_bytes(shape)
    kept = checkpoints_for(DEFAULT_CHECKPOINTS, n_prompt=tokens, hit_tokens=0, block_tokens=block_tokens)
    stored = rows + len(kept) * state
    n_bytes = {
        "cache made": rows + state,
        "link for the handoff": rows + state,
        "link for DRAM or SSD, written through": stored,
        f"link for the pool, {POOL_COPIES} copies written through": POOL_COPIES * stored,
    }
    return {name: each / prefill_s / 1e9 for name, each in n_bytes.items()}
