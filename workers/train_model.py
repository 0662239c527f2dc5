"""The forward pass over a batch, differentiable: the operators of serving, with sequences folded into heads and rows.

Everything is time-major: a batch of B rows of T tokens is [T·B, ·], token t of row b at t·B + b. So KDA sees B·H heads,
the convolution B·C channels, and all else single tokens; attention alone looks at rows one by one.

Two things differ from serving in form, not in value: routed experts are computed all at once and weighted (zero where
not chosen), and sparse attention masks what the indexer did not choose. No step waits for the device.

The indexer learns to rank keys as attention weighs them: at some tokens of each row, its softmax over visible keys is
pulled to the mean of the heads' attention. Its inputs carry no gradient further.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.kernels import balance, conv, exact, kda, moe, norms
from forebay.kernels.shapes import ModelShape
from forebay.workers.attention import KEY_NORM_EPS
from forebay.workers.layers import DenseWeights, GlobalWeights, KdaWeights, ModelWeights, MoeWeights
from forebay.workers.residual import BlockQueries, BlockResidual


@dataclass(slots=True)
class Found:
    """What a pass finds beside its output: the indexers' losses, and each MoE layer's margin counts [E, BINS], loads
    [E] and unevenness."""

    index_losses: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)
    unevenness: list[Tensor] = field(default_factory=list)


class Batch:
    """One forward pass over `ids` int64 [T, B]. `probes` int64 [B, n]: the times at which the indexer learns, or None.
    `sparse`: attention reads only what the indexer chooses, as in serving."""

    def __init__(
        self, shape: ModelShape, weights: ModelWeights, ids: Tensor, probes: Tensor | None, sparse: bool
    ) -> None:
        self.shape, self.weights, self.ids = shape, weights, ids
        self.probes, self.sparse = probes, sparse
        self.tokens, self.rows = ids.shape
        self.found = Found()

    def hidden(self) -> Tensor:
        """The normed stream before the head, [T·B, hidden]."""
        shape, w = self.shape, self.weights
        assert w.residual_queries is not None
        assert shape.attn_res_block is not None
        queries = BlockQueries(w.residual_queries, shape.attn_res_block, shape.norm_eps)
        stream = BlockResidual(F.embedding(self.ids.reshape(-1), w.embedding), queries)
        for number, layer in enumerate(w.layers):
            x = norms.rms_norm(stream.before_attention(number), layer.attention_norm, shape.norm_eps)
            if isinstance(layer.attention, KdaWeights):
                stream.add(self._kda(layer.attention, x))
            else:
                stream.add(self._latent(layer.attention, x))
            x = norms.rms_norm(stream.before_mlp(number), layer.mlp_norm, shape.norm_eps)
            stream.add(self._mlp(layer.mlp, x))
        return norms.rms_norm(stream.final(), w.norm, shape.norm_eps)

    def logits(self) -> Tensor:
        """fp32 [T, B, vocab]."""
        return exact.linear(self.hidden(), self.weights.head).float().view(self.tokens, self.rows, -1)

    def _kda(self, w: KdaWeights, x: Tensor) -> Tensor:
        k, tokens, rows = self.shape.kda, self.tokens, self.rows
        qkv, rank, beta, out_gate = torch.split(exact.linear(x, w.into), w.widths, dim=-1)
        decay = exact.linear(rank, w.decay_up).view(-1, k.heads, k.head_dim)
        g = kda.gate(decay, w.A_log, w.dt_bias, k.gate, k.gate_lower_bound)
        channels = qkv.reshape(tokens, -1)
        before = channels.new_zeros(k.conv_width - 1, channels.shape[1])
        mixed, _ = conv.short_conv(channels, w.conv.repeat(rows, 1), before)
        folded = (tokens, rows * k.heads, k.head_dim)
        q, key, v = (part.reshape(folded) for part in mixed.view(tokens, rows, 3, k.width).unbind(2))
        state = torch.zeros(rows * k.heads, k.head_dim, k.head_dim, device=x.device)
        o, _ = kda.chunk(q, key, v, g.view(folded), exact.sigmoid(beta.float()).view(folded[:2]), state)
        o = o.view(-1, k.heads, k.head_dim)
        gated = norms.gated_rms_norm(o, out_gate.reshape(o.shape), w.norm, self.shape.norm_eps)
        return exact.linear(gated.flatten(1), w.out)

    def _latent(self, w: GlobalWeights, x: Tensor) -> Tensor:
        m, index, eps = self.shape.mla, self.shape.index, self.shape.latent_norm_eps
        assert index is not None
        assert w.query_norm is not None
        assert w.query_up is not None
        main = sum(w.widths[:4])
        query, c, shared, gate = torch.split(exact.linear(x, w.into[:main]), w.widths[:4], dim=-1)
        query = norms.rms_norm(query, w.query_norm, eps)
        width = m.heads * m.query_dim
        q = exact.linear(query, w.query_up[:width]).view(-1, m.heads, m.query_dim)
        c = norms.rms_norm(c, w.latent_norm, eps)
        nope = exact.linear(c, w.w_uk.flatten(0, 1)).view(-1, m.heads, m.nope_dim)
        keys = torch.cat((nope, shared[:, None].expand(-1, m.heads, -1)), dim=-1)
        values = exact.linear(c, w.w_uv.transpose(1, 2).flatten(0, 1)).view(-1, m.heads, m.value_dim)
        q, keys, values = (self._by_row(part) for part in (q, keys, values))
        indexer = self._index(w, x.detach(), query.detach())
        if self.probes is not None:
            self.found.index_losses.append(self._index_loss(indexer, q.detach(), keys.detach(), self.probes))
        mask = self._chosen(indexer) if self.sparse else None
        o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None)
        flat = o.permute(2, 0, 1, 3).reshape(x.shape[0], -1)
        return exact.linear(flat * exact.sigmoid(gate), w.out)

    def _by_row(self, x: Tensor) -> Tensor:
        """[T·B, H, D] -> [B, H, T, D]."""
        return x.view(self.tokens, self.rows, *x.shape[1:]).permute(1, 2, 0, 3)

    def _index(self, w: GlobalWeights, x: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's queries [B, Hi, T, Di], head weights with both scales [B, Hi, T], and keys [B, T, Di]; fp32."""
        index, m = self.shape.index, self.shape.mla
        assert index is not None
        assert w.query_up is not None
        assert w.key_norm is not None
        assert index.rope_dim == 0, "the built-in model's indexer has no positions"
        projected = exact.linear(x, w.into[sum(w.widths[:4]) :])
        key, head_weights = torch.split(projected, w.widths[4:], dim=-1)
        key = norms.layer_norm(key, *w.key_norm, KEY_NORM_EPS).float()
        q = exact.linear(query, w.query_up[m.heads * m.query_dim :]).view(-1, index.heads, index.head_dim)
        scaled = head_weights.float() * (index.heads * index.head_dim) ** -0.5
        by_row = scaled.view(self.tokens, self.rows, -1).permute(1, 2, 0)
        return self._by_row(q.float()), by_row, key.view(self.tokens, self.rows, -1).transpose(0, 1)

    def _index_loss(self, indexer: tuple[Tensor, Tensor, Tensor], q: Tensor, keys: Tensor, probes: Tensor) -> Tensor:
        """Mean over probes of KL(mean attention of the heads | the indexer's softmax)."""
        unseen = torch.arange(self.tokens, device=q.device) > probes[..., None]
        index_q, head_weights, index_keys = indexer
        picked = _at(q, probes) * q.shape[-1] ** -0.5
        logits = (picked @ keys.transpose(2, 3)).float().masked_fill(unseen[:, None], float("-inf"))
        wanted = logits.softmax(-1).mean(1)
        total = _scores(_at(index_q, probes), head_weights.gather(2, _heads(probes, head_weights)), index_keys)
        guessed = total.masked_fill(unseen, -1e9).log_softmax(-1)
        divergence: Tensor = (wanted * ((wanted + 1e-9).log() - guessed)).sum(-1).mean()
        return divergence

    @torch.no_grad()
    def _chosen(self, indexer: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """What sparse attention may read, bool [B, 1, T, T]; row by row, to hold one row's scores at a time."""
        index = self.shape.index
        assert index is not None
        tokens = self.tokens
        unseen = torch.ones(tokens, tokens, dtype=torch.bool, device=self.ids.device).triu_(1)
        chosen = torch.zeros(self.rows, 1, tokens, tokens, dtype=torch.bool, device=self.ids.device)
        for row in range(self.rows):
            q, head_weights, keys = (part[row : row + 1] for part in indexer)
            scores = _scores(q, head_weights, keys)[0].masked_fill_(unseen, float("-inf"))
            chosen[row, 0] = _top_k_mask(scores, min(index.top_k, tokens))
        return chosen & ~unseen

    def _mlp(self, w: DenseWeights | MoeWeights, x: Tensor) -> Tensor:
        if isinstance(w, DenseWeights):
            gate, up = exact.linear(x, w.into).chunk(2, dim=-1)
            return exact.linear(moe.glu(gate, up, self.shape), w.out)
        gate, up, latent = torch.split(exact.linear(x, w.into), w.widths, dim=-1)
        assert w.norm is not None
        routed = norms.rms_norm(self._experts(w, latent, self._route(w, x)), w.norm, self.shape.norm_eps)
        return exact.linear(torch.cat((moe.glu(gate, up, self.shape), routed), dim=-1), w.out)

    def _route(self, w: MoeWeights, x: Tensor) -> Tensor:
        """Weights fp32 [T·B, E], zero where an expert is not chosen."""
        shape = self.shape.moe
        scores = exact.sigmoid(exact.linear(x.float(), w.router))
        with torch.no_grad():
            chosen = (scores + w.bias).topk(shape.per_token, dim=-1).indices
            taken = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
            self.found.counts.append(balance.count(scores.detach(), w.bias, shape.per_token))
            self.found.loads.append(taken.sum(0))
        self.found.unevenness.append(self.unevenness(scores, taken))
        weights = scores * taken
        if shape.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * shape.scaling

    def unevenness(self, scores: Tensor, taken: Tensor) -> Tensor:
        """Mean over rows of sum over experts of (load over its mean)·(mean share of the scores): 1 where each row uses
        all experts alike. The sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""
        by_row = (self.tokens, self.rows, -1)
        loads = taken.view(by_row).mean(0) * (scores.shape[1] / self.shape.moe.per_token)
        shares = (scores / scores.sum(-1, keepdim=True)).view(by_row).mean(0)
        return (loads * shares).sum(1).mean()

    def _experts(self, w: MoeWeights, z: Tensor, weights: Tensor) -> Tensor:
        """All experts as one wide MLP, each one's part weighted."""
        w1, w3, w2 = (_dense_weight(part) for part in (w.experts.w1, w.experts.w3, w.experts.w2))
        gate, up = exact.linear(z, w1.flatten(0, 1)), exact.linear(z, w3.flatten(0, 1))
        inner = moe.glu(gate, up, self.shape).view(z.shape[0], len(w1), -1) * weights[..., None].to(z.dtype)
        return exact.linear(inner.flatten(1), w2.transpose(0, 1).flatten(1))


def _top_k_mask(scores: Tensor, k: int) -> Tensor:
    """`dsa.top_k` as a mask bool [T, S] (where scores are -inf it may be set too), without a wait for the device."""
    cut = scores.topk(k, dim=-1).values[:, -1:]
    above, equal = scores > cut, scores == cut
    room = k - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1) <= room))


def _dense_weight(part: moe.Dense | moe.Packed) -> Tensor:
    assert isinstance(part, moe.Dense), "packed experts are not trained"
    return part.weight


def _at(x: Tensor, times: Tensor) -> Tensor:
    """x [B, H, T, D] at times int64 [B, n] of each row: [B, H, n, D]."""
    return x.gather(2, times[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _heads(times: Tensor, like: Tensor) -> Tensor:
    return times[:, None].expand(-1, like.shape[1], -1)


def _scores(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """`dsa.index_scores` of many rows: q [B, Hi, n, Di], scaled head weights [B, Hi, n], keys [B, T, Di]: [B, n, T]."""
    total = torch.zeros(q.shape[0], q.shape[2], keys.shape[1], device=q.device)
    for head in range(q.shape[1]):
        total = total + (q[:, head] @ keys.transpose(1, 2)).relu() * head_weights[:, head, :, None]
    return total
