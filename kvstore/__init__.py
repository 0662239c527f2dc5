"""kvstore: what may be reused and where it lies. Pages, states, checkpoints, tiers."""
