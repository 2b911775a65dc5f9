"""The one decoder behind every dense family: Qwen3-like, with the attention layout left open.

Rows are flat (`[rows, hidden]`) everywhere but inside attention, so that every linear layer is a plain
matrix product with weights stored [out, in] (`Gemm transB=1`, no transposed copy).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderSpec:
    """Shape of a dense decoder. Sizes in elements; `head_dim` is never derived from hidden / heads."""

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

    def __post_init__(self) -> None:
        sizes = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate")
        bad = [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            bad.append(f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            bad.append(f"head_dim={self.head_dim} is odd")
        if bad:
            raise ValueError("invalid decoder shape: " + ", ".join(bad))


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
    """Cosine and sine [rows, 1, head_dim] for flat absolute positions [rows], in float32 until the end."""
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device=positions.device)
    inverse = 1.0 / (spec.rope_theta ** (half / spec.head_dim))
    angle = positions.float()[:, None] * inverse
    angle = torch.cat((angle, angle), -1)[:, None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half rotary embedding of x [rows, heads, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec = spec
        h, d = spec.hidden, spec.head_dim
        self.input_norm = RMSNorm(h, spec.norm_eps)
        self.post_norm = RMSNorm(h, spec.norm_eps)
        self.q = nn.Linear(h, spec.heads * d, bias=False)
        self.k = nn.Linear(h, spec.kv_heads * d, bias=False)
        self.v = nn.Linear(h, spec.kv_heads * d, bias=False)
        self.o = nn.Linear(spec.heads * d, h, bias=False)
        if spec.qk_norm:
            self.q_norm = RMSNorm(d, spec.norm_eps)
            self.k_norm = RMSNorm(d, spec.norm_eps)
        self.gate = nn.Linear(h, spec.intermediate, bias=False)
        self.up = nn.Linear(h, spec.intermediate, bias=False)
        self.down = nn.Linear(spec.intermediate, h, bias=False)

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
        h = self.post_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), k, v


class Decoder(nn.Module):
    """Embedding, layers, final norm and vocabulary head."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.hidden)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
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
        x = self.embed(ids.reshape(-1))
        cos, sin = rotary(positions.reshape(-1), self.spec, x.dtype)
        kept = []
        for index, layer in enumerate(self.layers):
            x, k, v = layer(index, x, cos, sin, ids.shape[0], attend)
            kept.append((k, v))
        return x, kept

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of hidden states [rows, hidden].

        The product itself is in the network's dtype, as the published models have it: in float32 the largest matrix
        would be read at twice the bytes, by kernels several times slower, which Turing GPUs lack altogether.
        """
        return self.head(self.norm(hidden)).float()


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
