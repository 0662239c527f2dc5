"""The operators against golden data: numbers from independent public implementations, each with its tolerance.

Tolerances are those of the sets' READMEs. Where a README gives what two fp32 references differ by, room for another
order of summation is left (ROOM times); the detail says so. Knobs that a README fixes (latent norms' eps 1e-6, fp32
keys) are set here and printed.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from forebay.kernels import balance, conv, dsa, exact, kda, mla, moe, mxfp4, norms
from forebay.kernels.models import K3
from forebay.kernels.shapes import Gate

ROOM = 4.0
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison: the largest absolute difference beside its tolerance. `passed` None: not run, `detail` says
    why.
    """

    name: str
    error: float | None
    tolerance: float | None
    passed: bool | None
    detail: str


def not_run(name: str, why: str) -> Case:
    return Case(name=name, error=None, tolerance=None, passed=None, detail=why)


def compare(name: str, found: Tensor, expected: Tensor, tolerance: float, detail: str = "") -> Case:
    """Shapes must be equal; infinities and NaNs must stand in the same places (their error counts as infinite else)."""
    assert found.shape == expected.shape, f"{name}: {tuple(found.shape)} against {tuple(expected.shape)}"
    a, b = found.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = float((a - b).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(same, 0.0).max())
    return Case(name=name, error=error, tolerance=tolerance, passed=error <= tolerance, detail=detail)


def run_set(folder: Path) -> list[Case]:
    """All cases of one operator set, whose folder is named like it (a key of SETS)."""
    with torch.inference_mode():
        return [*SETS[folder.name](folder)]


def _kda(folder: Path) -> Iterator[Case]:
    for path in sorted(folder.glob("*.safetensors")):
        case = _short_conv if path.stem == "short_conv" else _kda_case
        yield from case(f"kda/{path.stem}", load_file(path))


def _short_conv(name: str, t: Tensors) -> Iterator[Case]:
    weight, zero = t["weight"][:, 0], torch.zeros_like(t["prev_rows"])
    for tail, expected in ((zero, "output_zero_history"), (t["prev_rows"], "output_with_prev_rows")):
        y = torch.stack([conv.short_conv(x, weight, h)[0] for x, h in zip(t["x"], tail, strict=True)])
        yield compare(f"{name} {expected}", y, t[expected], 1e-6)
    tails, outputs = t["prev_rows"], []
    for x in t["x"].unbind(1):
        y, tails = conv.short_conv_step(x, weight, tails)
        outputs.append(y)
    yield compare(f"{name} step by step", torch.stack(outputs, 1), t["output_with_prev_rows"], 1e-6)
    yield compare(f"{name} last_rows", tails, t["last_rows"], 0.0)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of a KDA case, with the operator's inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    output: Tensor
    final: Tensor

    def chunk(self, state: Tensor, first: int = 0, end: int | None = None) -> tuple[Tensor, Tensor]:
        """Tokens first .. end-1 in the chunked form."""
        part = slice(first, end)
        return kda.chunk(self.q[part], self.k[part], self.v[part], self.g[part], self.beta[part], state)

    def steps(self, state: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """All tokens from `first` on, one by one."""
        outputs, states = [], state[None]
        for i in range(first, len(self.output)):
            one = slice(i, i + 1)
            o, states = kda.step(self.q[one], self.k[one], self.v[one], self.g[one], self.beta[one], states)
            outputs.append(o)
        return torch.cat(outputs), states[0]


def _sequences(name: str, t: Tensors) -> list[_Sequence]:
    kind: Gate = "softplus" if "softplus" in name else "bounded"
    q, k, v, z, output = (t[key].flatten(0, 1) for key in ("q", "k", "v", "g_raw", "output"))
    g = kda.gate(z, t["A_log"], t["dt_bias"], kind, -5.0)
    beta = exact.sigmoid(t["beta_logits"].flatten(0, 1))
    batch, tokens = t["q"].shape[:2]
    ends = t["cu_seqlens"].tolist() if "cu_seqlens" in t else [i * tokens for i in range(batch + 1)]
    return [
        _Sequence(q[a:b], k[a:b], v[a:b], g[a:b], beta[a:b], t["initial_state"][i], output[a:b], t["final_state"][i])
        for i, (a, b) in enumerate(pairwise(ends))
    ]


def _kda_case(name: str, t: Tensors) -> Iterator[Case]:
    sequences = _sequences(name, t)
    output, final = torch.cat([s.output for s in sequences]), torch.stack([s.final for s in sequences])
    chunks, steps = [s.chunk(s.state) for s in sequences], [s.steps(s.state) for s in sequences]
    for form, found in (("chunk", chunks), ("step", steps)):
        yield compare(f"{name} {form} output", torch.cat([o for o, _ in found]), output, 1e-6)
        yield compare(f"{name} {form} state", torch.stack([state for _, state in found]), final, 1e-5)
    for key in sorted(key for key in t if key.startswith("state_after_")):
        yield from _split(f"{name} {key}", sequences[0], int(key.rsplit("_", 1)[1]), t[key][0])


def _split(name: str, s: _Sequence, at: int, expected: Tensor) -> Iterator[Case]:
    """The state after `at` tokens, and the rest computed from there: on the grid by chunks, elsewhere step by step."""
    _, state = s.chunk(s.state, end=at)
    yield compare(name, state, expected, 1e-5)
    on_grid = at % kda.CHUNK == 0
    form = "chunks from a split" if on_grid else "steps from a split"
    rest, final = s.chunk(state, at) if on_grid else s.steps(state, at)
    yield compare(f"{name} then output", rest, s.output[at:], 1e-6, form)
    yield compare(f"{name} then state", final, s.final, 1e-5, form)


def _dsa(folder: Path) -> Iterator[Case]:
    for name, heads, dim, k, rope in (("small", 4, 32, 8, 16), ("k3like", 32, 128, 16, 64)):
        t = load_file(folder / f"indexer_{name}.safetensors")
        for form, rope_dim, observed in (("nope", 0, 1.6e-6), ("rope", rope, 1.5e-6)):
            prefix = f"dsa/indexer_{name} {form}"
            yield from _indexer(prefix, t, form, (heads, dim, k, rope_dim), ROOM * observed)
    yield from _sparse("dsa/sparse_attention", load_file(folder / "sparse_attention.safetensors"))


def _indexer(name: str, t: Tensors, form: str, sizes: tuple[int, int, int, int], tolerance: float) -> Iterator[Case]:
    heads, dim, k, rope_dim = sizes
    tokens = t["x"].shape[1] - 1
    positions = torch.arange(tokens + 1)
    q, w, keys = [], [], []
    for x, latent in zip(t["x"], t["q_latent"], strict=True):
        query = exact.linear(latent, t["indexer.wq_b.weight"]).view(-1, heads, dim)
        key = exact.linear(x, t["indexer.wk.weight"])
        key = norms.layer_norm(key, t["indexer.k_norm.weight"], t["indexer.k_norm.bias"], 1e-6)
        q.append(dsa.rope_half_split(query, positions, rope_dim, 10_000.0))
        keys.append(dsa.rope_half_split(key, positions, rope_dim, 10_000.0))
        w.append(exact.linear(x, t["indexer.weights_proj.weight"]))
    prefill = torch.stack([dsa.index_scores(a[:-1], b[:-1], c[:-1], 0) for a, b, c in zip(q, w, keys, strict=True)])
    last_q, last_w, all_keys = torch.stack(q)[:, -1], torch.stack(w)[:, -1], torch.stack(keys)
    decode = dsa.index_scores_decode(last_q, last_w, all_keys, torch.full((len(q),), tokens + 1))
    note = f"fp32 keys, {ROOM:g} × what references differ by"
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    yield compare(f"{name} keys", all_keys, t[f"{form}.index_keys"], tolerance, note)
    yield compare(
        f"{name} prefill scores", prefill[:, visible], t[f"{form}.prefill_scores"][:, visible], tolerance, note
    )
    yield compare(f"{name} decode scores", decode, t[f"{form}.decode_scores"][:, 0], tolerance, note)
    chosen = torch.stack([dsa.top_k(scores, k) for scores in prefill])
    yield compare(f"{name} prefill set", chosen, t[f"{form}.prefill_topk"], 0.0, "equal sets")
    yield compare(f"{name} decode set", dsa.top_k(decode, k), t[f"{form}.decode_topk"][:, 0], 0.0, "equal sets")


def _sparse(name: str, t: Tensors) -> Iterator[Case]:
    heads, nope, pe, value, rank, eps = 3, 16, 8, 24, 32, 1e-6
    w = {key.removeprefix("weights."): x for key, x in t.items() if key.startswith("weights.")}
    x, q_latent = t["x"][0], t["q_latent"][0]
    latent = exact.linear(x, w["kv_a_proj_with_mqa.weight"])
    rows = torch.cat((norms.rms_norm(latent[:, :rank], w["kv_a_layernorm.weight"], eps), latent[:, rank:]), dim=1)
    q = exact.linear(q_latent, w["q_b_proj.weight"]).view(-1, heads, nope + pe)
    expand = w["kv_b_proj.weight"].view(heads, nope + value, rank)
    w_uk, w_uv = expand[:, :nope].contiguous(), expand[:, nope:].transpose(1, 2).contiguous()
    gate = exact.sigmoid(exact.linear(x, w["g_proj.weight"]))
    tolerance, note = ROOM * 1.3e-6, f"latent norms' eps {eps:g}, {ROOM:g} × what references differ by"
    queries = norms.rms_norm(exact.linear(x, w["q_a_proj.weight"]), w["q_a_layernorm.weight"], eps)
    yield compare(f"{name} q_latent", queries, q_latent, tolerance, note)
    yield compare(f"{name} kv_latent", rows, t["kv_latent"][0], tolerance, note)
    scale = (nope + pe) ** -0.5
    yield compare(f"{name} q_mqa", mla.absorb(q, w_uk) / scale, t["q_mqa"][0], tolerance, note)
    index_q = exact.linear(q_latent, w["indexer.wq_b.weight"]).view(-1, 4, 32)
    key = norms.layer_norm(
        exact.linear(x, w["indexer.wk.weight"]), w["indexer.k_norm.weight"], w["indexer.k_norm.bias"], 1e-6
    )
    scores = dsa.index_scores(index_q, exact.linear(x, w["indexer.weights_proj.weight"]), key, 0)
    chosen, everything = dsa.top_k(scores, 8), dsa.top_k(scores, len(x))
    yield compare(f"{name} set", chosen, t["topk_indices"][0], 0.0, "equal sets")
    yield compare(f"{name} full set", everything, t["topk_indices_full"][0], 0.0, "equal sets")
    for form, idx in (("sparse", chosen), ("dense", everything)):
        heads_out = dsa.sparse_attend(q, rows[idx.clamp(min=0)], idx, w_uk, w_uv)
        absorbed = mla.attend_latent(mla.absorb(q, w_uk), rows[idx.clamp(min=0)], idx >= 0, rank)
        yield compare(f"{name} {form}.out_latent", absorbed, t[f"{form}.out_latent"][0], tolerance, note)
        yield from _heads_out(f"{name} {form}", heads_out, gate, w["o_proj.weight"], t, form, tolerance, note)
    unabsorbed = mla.attend_prefill(q, rows, w_uk, w_uv, 0)
    yield from _heads_out(f"{name} un-absorbed", unabsorbed, gate, w["o_proj.weight"], t, "dense", tolerance, note)
    lengths, repeated = torch.arange(1, len(x) + 1), rows.expand(len(x), -1, -1)
    decoded = mla.attend_decode(q, repeated, lengths, w_uk, w_uv)
    yield from _heads_out(f"{name} decode", decoded, gate, w["o_proj.weight"], t, "dense", tolerance, note)
    full = dsa.sparse_attend(q, rows[everything.clamp(min=0)], everything, w_uk, w_uv)
    yield compare(f"{name} top-k ≥ length against dense", full, decoded, 0.0, "bit for bit")
    yield not_run(f"{name} lse", "the operator does not return its log-sum-exp")


def _heads_out(
    name: str, found: Tensor, gate: Tensor, o_proj: Tensor, t: Tensors, form: str, tolerance: float, note: str
) -> Iterator[Case]:
    flat = found.flatten(1)
    yield compare(f"{name} out_heads", found, t[f"{form}.out_heads"][0], tolerance, note)
    yield compare(f"{name} gated", flat * gate, t[f"{form}.gated"][0], tolerance, note)
    yield compare(
        f"{name} gated_final", exact.linear(flat * gate, o_proj), t[f"{form}.gated_final"][0], tolerance, note
    )
    yield compare(f"{name} ungated_final", exact.linear(flat, o_proj), t[f"{form}.ungated_final"][0], tolerance, note)


ROUTERS = (
    ("small_e16k4", 4, 1.0),
    ("kimi_linear_e256k8", 8, 2.446),
    ("k3_e896k16", 16, 1.0),
    ("bias_dominates_e8k2", 2, 1.0),
)


def _moe(folder: Path) -> Iterator[Case]:
    note = f"{ROOM:g} × what references differ by"
    for name, k, scaling in ROUTERS:
        t = load_file(folder / f"router_{name}.safetensors")
        chosen, weights = moe.route(t["x"], t["gate_weight"], t["correction_bias"], k, scaling, True)
        yield compare(f"moe/router_{name} set", chosen, t["experts_sorted"], 0.0, "equal sets")
        yield compare(f"moe/router_{name} weights", weights, t["weights"], ROOM * 6.7e-8, note)
    yield from _latent_moe(
        "moe/latent_moe_layer", load_file(folder / "latent_moe_layer.safetensors"), ROOM * 9.5e-6, note
    )
    t = load_file(folder / "situ_table.safetensors")
    out = moe.glu(t["gate"][:, None], t["up"][None], K3)
    yield compare("moe/situ_table", out, t["out"], ROOM * 7.2e-6, note)
    bound = float(out.abs().max())
    yield Case(name="moe/situ_table bound", error=bound, tolerance=100.0, passed=bound < 100.0, detail="|out| < 100")
    yield from _balance("moe/quantile_balancing", json.loads((folder / "quantile_balancing.json").read_text()))


def _balance(name: str, case: dict[str, Any]) -> Iterator[Case]:
    """One update of the bias, exact and by histogram, and the loads that it leads to."""
    scores, k = torch.tensor(case["scores"], dtype=torch.float64), case["top_k"]
    start, wanted = torch.tensor(case["start_bias"], dtype=torch.float64), case["trace"]["qplus1"][0]
    exact_bias = balance.quantile_bias(scores, start, k)
    coarse = balance.histogram_bias(balance.count(scores, start, k), k)
    expected = torch.tensor(wanted["bias"], dtype=torch.float64)
    yield compare(f"{name} bias", exact_bias, expected, 1e-12, "reading: the (q+1)-th largest margin")
    yield compare(f"{name} bias, histogram", coarse, expected, balance.BIN, f"one of {balance.BINS} bins")
    for form, bias in (("bias", exact_bias), ("histogram", coarse)):
        chosen = (scores + bias).topk(k, dim=1).indices.flatten()
        loads = torch.bincount(chosen, minlength=case["experts"])
        yield compare(f"{name} loads, {form}", loads, torch.tensor(wanted["loads_next"]), 0.0, "one update balances")


def _latent_moe(name: str, t: Tensors, tolerance: float, note: str) -> Iterator[Case]:
    w = {key.removeprefix("weights."): x for key, x in t.items() if key.startswith("weights.")}
    w1, w3, w2 = (
        moe.Dense(torch.stack([w[f"experts.{e}.{part}.weight"] for e in range(16)])) for part in ("w1", "w3", "w2")
    )
    x = t["x"]
    latent = exact.linear(x, w["routed_expert_down_proj.weight"])
    chosen, weights = moe.route(x, w["gate.weight"], w["gate.e_score_correction_bias"], 4, 1.0, True)
    routed = moe.experts(latent, chosen, weights, moe.Experts(w1=w1, w3=w3, w2=w2), K3)
    normed = norms.rms_norm(routed, w["routed_expert_norm.weight"], 1e-5)
    gate, up = (exact.linear(x, w[f"shared_experts.{part}_proj.weight"]) for part in ("gate", "up"))
    shared = exact.linear(moe.glu(gate, up, K3), w["shared_experts.down_proj.weight"])
    output = exact.linear(normed, w["routed_expert_up_proj.weight"]) + shared
    yield compare(f"{name} set", chosen, t["experts_sorted"], 0.0, "equal sets")
    found = {"latent": latent, "weights": weights, "routed_sum": routed, "routed_normed": normed}
    for key, value in {**found, "shared_output": shared, "output": output}.items():
        yield compare(f"{name} {key}", value, t["weights" if key == "weights" else key], tolerance, note)


def _mxfp4(folder: Path) -> Iterator[Case]:
    exactly = "bit for bit"
    t = load_file(folder / "random_groups.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        found = mxfp4.unpack(t["weight_packed"], t["weight_scale"], dtype)
        yield compare(f"mxfp4/random_groups {str(dtype)[6:]}", found, t["dequantized"], 0.0, exactly)
    t = load_file(folder / "edge_scales.safetensors")
    # Above scale byte 252 some values exceed fp32: infinity is what they must become, and NaN under byte 255.
    found = mxfp4.unpack(t["weight_packed"], t["weight_scale"])
    yield compare("mxfp4/edge_scales", found, t["dequantized_f64"].float(), 0.0, "bit for bit, subnormals kept")
    t = load_file(folder / "quantize.safetensors")
    packed, scale = mxfp4.quantize(t["weight"])
    yield compare("mxfp4/quantize packed", packed, t["weight_packed"], 0.0, exactly)
    yield compare("mxfp4/quantize scale", scale, t["weight_scale"], 0.0, exactly)
    yield compare("mxfp4/quantize dequantized", mxfp4.unpack(packed, scale), t["dequantized"], 0.0, exactly)
    yield not_run(
        "mxfp4/quantize floor and ceil rules", "other libraries' scale rules; Forebay quantises by one rule only"
    )


SETS: dict[str, Callable[[Path], Iterator[Case]]] = {"kda": _kda, "dsa": _dsa, "moe": _moe, "mxfp4": _mxfp4}
