"""The one decoder behind every family: Qwen3-like, with the attention layout left open.

Rows are flat (`[rows, hidden]`) everywhere but inside attention, so that every linear layer is a plain
matrix product with weights stored [out, in] (`Gemm transB=1`, no transposed copy).

A mixture of experts is the same three matrices, all experts side by side: every expert is computed for every row, and
its activations are multiplied by the weight that the router gave it, mostly zero. So a row can never depend on where
the others were routed, no operator is needed that a backend lacks, and quantisation sees ordinary layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class MoeSpec:
    """Shape and routing of the mixtures of experts.

    Attributes:
        experts, per_token: how many a layer has, and how many of them each token takes.
        intermediate: width of an expert.
        shared_intermediate: width of the expert that every token takes besides; 0 where there is none.
        dense_layers: indices of layers that have an ordinary feed-forward part.
        scoring: `softmax` over all experts, or `sigmoid` of each.
        expert_bias: a stored number per expert is added to its score before the choice; it is no part of the weight.
        groups, groups_kept: only experts of the best groups can be chosen; a group counts as its two best experts.
        normalised: the weights of the chosen are divided by their sum.
        scale: factor of the weights.
    """

    experts: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    dense_layers: frozenset[int] = frozenset()
    scoring: str = "softmax"
    expert_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    normalised: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        checks = {
            f"per_token={self.per_token} is not within 1..experts={self.experts}": 1 <= self.per_token <= self.experts,
            f"intermediate={self.intermediate}": self.intermediate >= 1,
            f"shared_intermediate={self.shared_intermediate}": self.shared_intermediate >= 0,
            f"scoring={self.scoring!r} is none of {SCORINGS}": self.scoring in SCORINGS,
            f"groups={self.groups}, groups_kept={self.groups_kept} do not fit {self.experts} experts": 1
            <= self.groups_kept
            <= self.groups
            and self.experts % self.groups == 0
            and self.per_token <= self.groups_kept * (self.experts // self.groups)
            and (self.groups == 1 or self.experts // self.groups >= 2),
        }
        bad = [text for text, right in checks.items() if not right]
        if bad:
            raise ValueError("invalid mixture of experts: " + ", ".join(bad))


@dataclass(frozen=True)
class DecoderSpec:
    """Shape of a decoder. Sizes in elements; `head_dim` is never derived from hidden / heads.

    Attributes:
        rotary_dim: how many of the first elements of a head are rotated; None: all.
        qkv_bias: queries, keys and values have biases.
        moe: mixtures of experts in the place of the feed-forward parts; None: there are none.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    tied_head: bool
    rotary_dim: int | None = None
    qkv_bias: bool = False
    moe: MoeSpec | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate")
        odd = [f"{name}={getattr(self, name)!r}" for name in sizes if type(getattr(self, name)) is not int]
        if odd:
            raise ValueError("no whole numbers: " + ", ".join(odd))
        bad = [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            bad.append(f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            bad.append(f"head_dim={self.head_dim} is odd")
        if self.rotated % 2 or not 1 < self.rotated <= max(2, self.head_dim):
            bad.append(f"rotary_dim={self.rotated} is odd or not within 2..{self.head_dim}")
        if bad:
            raise ValueError("invalid decoder shape: " + ", ".join(bad))

    @property
    def rotated(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def moe_at(self, layer: int) -> MoeSpec | None:
        """The mixture of experts of a layer, if it has one."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe


class Attend(Protocol):
    """An attention layout: queries, keys, values of one layer to the context of each query."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32, weight applied after the cast back (as Qwen3 does)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h.to(x.dtype) * self.weight


def rotary(positions: Tensor, spec: DecoderSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [rows, 1, rotary_dim] for flat absolute positions [rows], in float32 until the end."""
    half = torch.arange(0, spec.rotated, 2, dtype=torch.float32, device=positions.device)
    inverse = 1.0 / (spec.rope_theta ** (half / spec.rotated))
    angle = positions.float()[:, None] * inverse
    angle = torch.cat((angle, angle), -1)[:, None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half rotary embedding of the first elements of x [rows, heads, head_dim]."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def routing(logits: Tensor, bias: Tensor | None, moe: MoeSpec) -> Tensor:
    """The weight of every expert for every row, float32 [rows, experts]: zero but for the chosen.

    Sources: Qwen3-MoE (softmax); LLaDA2.0 (sigmoid, groups, bias; inclusionAI's modeling file).
    """
    scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if moe.groups > 1:
        grouped = choice.view(-1, moe.groups, moe.experts // moe.groups)
        best = grouped.topk(2, -1)[0].sum(-1).topk(moe.groups_kept, -1)[1]
        kept = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0)
        kept = kept[..., None].expand(-1, -1, moe.experts // moe.groups).reshape(-1, moe.experts)
        choice = torch.where(kept > 0, choice, -math.inf)
    chosen = torch.zeros_like(scores).scatter(1, choice.topk(moe.per_token, -1)[1], 1.0)
    weights = scores * chosen
    if moe.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scale


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU, or experts of it."""

    def __init__(self, spec: DecoderSpec, index: int):
        super().__init__()
        self.spec = spec
        self.moe = spec.moe_at(index)
        h, d = spec.hidden, spec.head_dim
        self.input_norm = RMSNorm(h, spec.norm_eps)
        self.post_norm = RMSNorm(h, spec.norm_eps)
        self.q = nn.Linear(h, spec.heads * d, bias=spec.qkv_bias)
        self.k = nn.Linear(h, spec.kv_heads * d, bias=spec.qkv_bias)
        self.v = nn.Linear(h, spec.kv_heads * d, bias=spec.qkv_bias)
        self.o = nn.Linear(spec.heads * d, h, bias=False)
        if spec.qk_norm:
            self.q_norm = RMSNorm(d, spec.norm_eps)
            self.k_norm = RMSNorm(d, spec.norm_eps)
        inner = spec.intermediate
        self.expert_bias: nn.Parameter | None = None
        if self.moe is not None:
            inner = self.moe.experts * self.moe.intermediate
            self.router = nn.Linear(h, self.moe.experts, bias=False)
            if self.moe.expert_bias:
                self.expert_bias = nn.Parameter(torch.zeros(self.moe.experts))
            if shared := self.moe.shared_intermediate:
                self.shared_gate = nn.Linear(h, shared, bias=False)
                self.shared_up = nn.Linear(h, shared, bias=False)
                self.shared_down = nn.Linear(shared, h, bias=False)
        self.gate = nn.Linear(h, inner, bias=False)
        self.up = nn.Linear(h, inner, bias=False)
        self.down = nn.Linear(inner, h, bias=False)

    def feed_forward(self, h: Tensor) -> Tensor:
        """Of normed rows [rows, hidden]."""
        inner = F.silu(self.gate(h)) * self.up(h)
        if self.moe is None:
            return self.down(inner)
        logits = self.router(h.float())  # in float32, as the published routers are
        weights = routing(logits, self.expert_bias, self.moe).to(h.dtype)
        scaled = inner.view(-1, self.moe.experts, self.moe.intermediate) * weights[..., None]
        out = self.down(scaled.reshape(inner.shape[0], -1))
        if self.moe.shared_intermediate:
            out = out + self.shared_down(F.silu(self.shared_gate(h)) * self.shared_up(h))
        return out

    def forward(
        self, index: int, x: Tensor, cos: Tensor, sin: Tensor, segments: int, attend: Attend
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [segments * Q, hidden] to (x, keys, values), the latter [segments, kv_heads, Q, head_dim]."""
        spec = self.spec
        h = self.input_norm(x)
        q = self.q(h).view(-1, spec.heads, spec.head_dim)
        k = self.k(h).view(-1, spec.kv_heads, spec.head_dim)
        v = self.v(h).view(-1, spec.kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.reshape(segments, -1, t.shape[1], spec.head_dim).transpose(1, 2) for t in (q, k, v))
        context = attend(index, q, k, v).transpose(1, 2).reshape(x.shape[0], -1)
        x = x + self.o(context)
        return x + self.feed_forward(self.post_norm(x)), k, v


class Decoder(nn.Module):
    """Embedding, layers, final norm and vocabulary head."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.hidden)
        self.layers = nn.ModuleList(Layer(spec, index) for index in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.tied_head:
            self.head.weight = self.embed.weight

    @staticmethod
    def shapes(spec: DecoderSpec) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all parameters, without allocating them; a tied head is not listed."""
        with torch.device("meta"):
            return [(name, tuple(p.shape)) for name, p in Decoder(spec).named_parameters()]

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run the layers.

        Args:
            ids: int64 [segments, Q].
            positions: absolute positions, int64 [segments, Q].
            attend: the attention layout.

        Returns:
            Hidden states before the final norm [segments * Q, hidden], and keys and values of every
            layer [segments, kv_heads, Q, head_dim] (keys after the rotation).
        """
        return self.through(self.embed(ids.reshape(-1)), positions, attend)

    def through(self, x: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """`forward` from embeddings [segments * Q, hidden] on."""
        cos, sin = rotary(positions.reshape(-1), self.spec, x.dtype)
        kept = []
        for index, layer in enumerate(self.layers):
            x, k, v = layer(index, x, cos, sin, positions.shape[0], attend)
            kept.append((k, v))
        return x, kept

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of hidden states [rows, hidden].

        The product itself is in the network's dtype, as the published models have it: in float32 the largest matrix
        would be read at twice the bytes, by kernels several times slower, which Turing GPUs lack altogether.
        """
        return self.head(self.norm(hidden)).float()


def load_decoder(spec: DecoderSpec, tensors: Mapping[str, Tensor]) -> Decoder:
    """A decoder that holds these tensors, without a copy; a tied head is not among them."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    decoder.load_state_dict(tensors, strict=not spec.tied_head, assign=True)
    if spec.tied_head:
        decoder.head.weight = decoder.embed.weight
    return decoder.requires_grad_(False)


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What a parameter is held in where the network is in `dtype`: experts are chosen in float32 always."""
    return torch.float32 if name.endswith(("router.weight", "expert_bias")) else dtype


def in_dtype(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    """The decoder in another dtype, in place."""
    for name, parameter in decoder.named_parameters():
        parameter.data = parameter.data.to(parameter_dtype(name, dtype))
    return decoder


def masked_attend(mask: Tensor, past: list[tuple[Tensor, Tensor]] | None = None, *, grouped: bool = False) -> Attend:
    """One sequence per row under an explicit additive mask (the `packed` layout, and training).

    Args:
        mask: additive [1 or R, 1, N, P + N].
        past: keys and values of the prefix per layer [R, kv_heads, P, head_dim], or None for P = 0.
        grouped: leave it to the attention operator that several query heads share a key/value head.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if past is not None:
            k, v = torch.cat((past[layer][0], k), 2), torch.cat((past[layer][1], v), 2)
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and not grouped:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scale, shared = 1 / math.sqrt(q.shape[-1]), groups > 1 and grouped
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)

    return attend
