"""Sparse global attention: a lightning indexer scores all past tokens, exact top-k chooses, attention reads the chosen
rows.

score(t, s) = sum_j w_tj Hi^-0.5 relu(Di^-0.5 q_tj . k_s) over index heads j; one key k_s a token, shared by all index
heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import exact, mla

KEY_TILE = 64
GROUP = 8
FP8_MAX = 448.0


def rope_half_split(x: Tensor, positions: Tensor, rope_dim: int, theta: float) -> Tensor:
    """Rotates the first rope_dim of x [T, ..., D] by positions int64 [T]; halves are paired (i, i + rope_dim/2), not
    neighbours.
    """
    if rope_dim == 0:
        return x
    half = rope_dim // 2
    # Frequencies and angles in fp32, as released code has them: at long contexts their rounding is part of the model.
    frequency = 1.0 / theta ** (torch.arange(half, device=x.device).float() * 2 / rope_dim)
    angle = (positions.float()[:, None] * frequency).view(-1, *(1,) * (x.dim() - 2), half).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    low, high, rest = x.float().tensor_split((half, rope_dim), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).to(x.dtype)


def index_scores(q: Tensor, w: Tensor, keys: Tensor, start: int) -> Tensor:
    """Scores fp32 [T, S] of T queries at positions start .. start+T-1 over keys of positions 0 .. S-1; -inf where not
    visible.

    q [T, Hi, Di]; w [T, Hi] as weights_proj gives it (both scales are applied here); keys [S, Di].
    """
    tokens, heads, dim = q.shape
    length = keys.shape[0]
    queries = exact.pad_rows(q.float().transpose(0, 1))
    scaled = w.float() * (heads * dim) ** -0.5
    tiles = exact.pad_rows(keys.float(), KEY_TILE).t()
    total = torch.zeros(tokens, tiles.shape[1], device=q.device)
    for head in range(heads):
        total += exact.matmul(queries[head], tiles)[:tokens].relu_().mul_(scaled[:, head, None])
    unseen = torch.ones(tokens, length - start, dtype=torch.bool, device=q.device).triu_(1)
    total[:, start:length].masked_fill_(unseen, float("-inf"))
    return total[:, :length]


def index_scores_decode(q: Tensor, w: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
    """Scores fp32 [B, S] of one query of each of B sequences over its own keys [B, S, Di]; -inf from its length on.

    q [B, Hi, Di]; w [B, Hi]; lengths int64 [B] (its own token included).
    """
    batch, heads, dim = q.shape
    length = keys.shape[1]
    tiles = F.pad(keys.float(), (0, 0, 0, -length % KEY_TILE)).view(-1, KEY_TILE, dim)
    count = tiles.shape[0] // batch
    queries = q.float()[:, None].expand(-1, count, -1, -1).reshape(-1, heads, dim)
    scaled = (w.float() * (heads * dim) ** -0.5)[:, None, :, None]
    raw = exact.bmm(queries, tiles.transpose(1, 2)).relu_().view(batch, count, heads, KEY_TILE)
    total: Tensor = (raw * scaled).sum(2).view(batch, -1)[:, :length]
    beyond = torch.arange(length, device=q.device) >= lengths[:, None]
    return total.masked_fill(beyond, float("-inf"))


def top_k(scores: Tensor, k: int) -> Tensor:
    """Positions int64 [T, k] of the k largest scores [T, S] of each row, ascending, -1 at the end where fewer are
    above -inf.

    Ties at the cut go to the lowest positions, so the set does not depend on the selection's algorithm.
    """
    length = scores.shape[1]
    if length <= k:
        chosen = torch.arange(length, device=scores.device).expand(scores.shape[0], -1)
        return _ascending(chosen, scores > float("-inf"), k)
    values, chosen = _largest(scores, k + 1)
    cut, chosen = values[:, k - 1 : k], chosen[:, :k]
    tied = ((values[:, k:] == cut) & (cut > float("-inf"))).squeeze(1)
    if tied.any():
        chosen[tied] = _top_k_of_tied(scores[tied], cut[tied], k)
    return _ascending(chosen, values[:, :k] > float("-inf"), k)


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values and their positions. The groups with the k largest maxima hold all of them: choose there."""
    tokens, length = scores.shape
    if length < 4 * GROUP * k:
        values, position = scores.topk(k, dim=1)
        return values, position
    groups = -(-length // GROUP)
    padded = F.pad(scores, (0, groups * GROUP - length), value=float("-inf"))
    best = padded.view(tokens, GROUP, groups).amax(1).topk(k, dim=1, sorted=False).indices
    position = (best[:, None] + groups * torch.arange(GROUP, device=scores.device)[:, None]).flatten(1)
    values, place = padded.gather(1, position).topk(k, dim=1)
    return values, position.gather(1, place).clamp_(max=length - 1)


def _top_k_of_tied(scores: Tensor, cut: Tensor, k: int) -> Tensor:
    above, equal = scores > cut, scores == cut
    room = k - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1) <= room))
    return kept.nonzero()[:, 1].view(-1, k)


def _ascending(chosen: Tensor, valid: Tensor, k: int) -> Tensor:
    beyond = torch.iinfo(torch.int64).max
    ordered = torch.where(valid, chosen, beyond).sort(1).values
    return F.pad(ordered.masked_fill(ordered == beyond, -1), (0, k - ordered.shape[1]), value=-1)


def sparse_attend(q: Tensor, rows: Tensor, idx: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """Absorbed attention of each query over its chosen rows; with top-k >= length the same bits as `mla.attend_decode`.

    q [T, H, nope+pe] (T tokens of one sequence, or one token of each of T sequences); rows [T, k, r+pe] gathered at
    idx.clamp(min=0); idx [T, k] as `top_k` gives it (-1: no row); w_uk [H, nope, r]; w_uv [H, r, v].
    Returns o [T, H, v].
    """
    latent = mla.attend_latent(mla.absorb(q, w_uk), rows, idx >= 0, w_uk.shape[-1])
    return exact.head_linear(latent, w_uv.float()).to(q.dtype)


def quantize_keys(keys: Tensor) -> Tensor:
    """Index keys [S, Di] as rows of uint8 [S, Di + 4]: Di e4m3 codes, then one power-of-two fp32 scale."""
    amax = keys.float().abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX)))
    codes = (keys.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((codes, scale.view(torch.uint8)), dim=-1)


def dequantize_keys(rows: Tensor) -> Tensor:
    """The fp32 keys [..., Di] of rows uint8 [..., Di + 4] made by `quantize_keys`."""
    codes, scale = rows[..., :-4].contiguous(), rows[..., -4:].contiguous()
    return codes.view(torch.float8_e4m3fn).float() * scale.view(torch.float32)
