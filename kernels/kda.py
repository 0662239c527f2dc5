"""Kimi Delta Attention, a gated delta rule with one decay per channel: chunked form for prefill, recurrent for decode.

One step, for each head, with state S [K, V], alpha = exp(g), q and k L2-normalised and q scaled by K^-0.5:
    S <- diag(alpha) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

The chunked form solves CHUNK steps at once. With G the running sum of g inside a chunk, D_ij = exp(G_i - G_j), j <= i:
    A_ij = beta_i sum_d k_id k_jd D_ijd (j < i);   (I + A) U = beta (V - (K e^G) S)
    O = (Q e^G) S + P U,  P_ij = sum_d q_id k_jd D_ijd (j <= i);   S <- e^(G_last) S + sum_j (k_j D_last,j) u_j^T

D is formed pair by pair, so nothing positive is ever exponentiated: the usual split into e^(G_i) and e^(-G_j) overflows
fp32 after 17 steps at the bounded gate's limit, and after one or two with the unbounded softplus gate. Chunks lie on
absolute multiples of CHUNK; a last, partial chunk is filled with steps that change nothing (k = 0, g = 0, beta = 0),
and since a row of every product here reads only itself and earlier rows, filling changes no bit of the real ones.
G is kept in float64: the softplus gate takes it to -1000 in a chunk, where fp32 blurs a difference near 0 by 1e-4.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import exact, norms
from forebay.kernels.shapes import Gate

CHUNK = 16


def gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, kind: Gate, lower_bound: float) -> Tensor:
    """Log decay g [T, H, K] <= 0, fp32, of the raw gate z [T, H, K], A_log [H], dt_bias [H*K]."""
    rate = torch.exp(A_log.float())[:, None]
    raw = z.float() + dt_bias.float().view(z.shape[-2], z.shape[-1])
    if kind == "bounded":
        return lower_bound * exact.sigmoid(rate * raw)
    return -rate * exact.softplus(raw)


def _chunked(x: Tensor, chunks: int) -> Tensor:
    """[T, H, D] -> fp32 [chunks, H, CHUNK, D], zero filled."""
    filled = F.pad(x.float(), (0, 0, 0, 0, 0, chunks * CHUNK - x.shape[0]))
    return filled.view(chunks, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()


def _half_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """sum_d x_id k_jd exp(G_i - G_j)_d of x = q and x = k for j <= i, all [..., C, K] -> [..., C, C]; junk above."""
    decay = (total[..., :, None, :] - total[..., None, :, :]).float().clamp_(max=0.0).exp_()
    decayed = decay * k[..., None, :, :]
    return (decayed * q[..., :, None, :]).sum(-1), (decayed * k[..., :, None, :]).sum(-1)


def _pair_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Lower-triangular P [N, H, C, C] of q with k (diagonal included) and of k with k; total = the running sum of g.

    Pair by pair only inside each half of the chunk; between the halves the decay splits, at the first half's end, into
    two factors that are both at most 1.
    """
    half = CHUNK // 2
    q2, k2, total2 = (x.view(*x.shape[:2], 2, half, -1) for x in (q, k, total))
    qk, kk = _half_products(q2, k2, total2)
    middle = total[:, :, half - 1 : half]
    late = (total[:, :, half:] - middle).float().exp()
    early = k[:, :, :half] * (middle - total[:, :, :half]).float().exp()
    across = exact.matmul(torch.cat((q[:, :, half:] * late, k[:, :, half:] * late), dim=2), early.transpose(2, 3))
    return _assemble(qk, across[:, :, :half]), _assemble(kk, across[:, :, half:])


def _assemble(inside: Tensor, across: Tensor) -> Tensor:
    """The two diagonal blocks [N, H, 2, C/2, C/2] and the block below them [N, H, C/2, C/2] as [N, H, C, C]."""
    upper = F.pad(inside[:, :, 0].tril(), (0, across.shape[-1]))
    lower = torch.cat((across, inside[:, :, 1].tril()), dim=-1)
    return torch.cat((upper, lower), dim=2)


def chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens of one sequence that start at a multiple of CHUNK (the caller's duty) and may end anywhere.

    q, k [T, H, K] raw, v [T, H, V], g [T, H, K] log decay, beta [T, H] after sigmoid, state [H, K, V] fp32.
    Returns (o [T, H, V] in v's dtype, the state after T tokens, fp32). Differentiable.
    """
    tokens, heads, key_dim = q.shape
    chunks = -(-tokens // CHUNK)
    qc = _chunked(norms.l2_norm(q.float()) * key_dim**-0.5, chunks)
    kc = _chunked(norms.l2_norm(k.float()), chunks)
    vc = _chunked(v, chunks)
    bc = _chunked(beta[..., None], chunks)
    total = _chunked(g, chunks).cumsum(-2, dtype=torch.float64)
    grown = total.float().exp()
    qk, kk = _pair_products(qc, kc, total)
    rhs = bc * torch.cat((vc, kc * grown), dim=-1)
    solved = torch.linalg.solve_triangular((bc * kk).tril(-1), rhs, upper=False, unitriangular=True)
    u_free, w = solved.split((v.shape[-1], key_dim), dim=-1)
    reads = torch.cat((qc * grown, w), dim=-2)
    end_decay = grown[..., -1, :, None]
    k_end_t = (kc * (total[..., -1:, :] - total).float().exp()).transpose(-1, -2)
    from_state, updates = [], []
    # Unbound, not indexed: the gradient of an index is a whole tensor of zeros for every chunk.
    for r, free, decay, k_t in zip(*(x.unbind(0) for x in (reads, u_free, end_decay, k_end_t)), strict=True):
        read = exact.bmm(r, state)
        u = free - read[:, CHUNK:]
        state = exact.baddbmm(state * decay, k_t, u)
        from_state.append(read[:, :CHUNK])
        updates.append(u)
    o = torch.stack(from_state) + exact.matmul(qk, torch.stack(updates))
    return o.transpose(1, 2).reshape(chunks * CHUNK, heads, -1)[:tokens].to(v.dtype), state


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences: q, k, g [B, H, K], v [B, H, V], beta [B, H], state [B, H, K, V] fp32.

    Returns (o [B, H, V] in v's dtype, the new state); the given state is not changed.
    """
    q32 = norms.l2_norm(q.float())[..., None] * q.shape[-1] ** -0.5
    k32 = norms.l2_norm(k.float())[..., None]
    state = state * torch.exp(g.float())[..., None]
    u = beta.float()[..., None] * (v.float() - (state * k32).sum(-2))
    state = state + k32 * u[..., None, :]
    return (state * q32).sum(-2).to(v.dtype), state
