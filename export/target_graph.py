"""The one target graph (engines.contracts) around the decoder, in both attention layouts, and the head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spot_deploy.engines.contracts import HEAD_WIDTH, MASKED
from spot_deploy.export.decoder import Attend, Decoder, masked_attend

Past = list[tuple[Tensor, Tensor]]


def split_attend(parent: Tensor, own_mask: Tensor, past_len: Tensor, past: Past) -> Attend:
    """Scores against prefix, parent and own segment side by side before one softmax.

    The prefix is never expanded over segments, and no row depends on its batch mates, not even in the last bit. Shapes
    as in engines.contracts. Masks and softmax are in float32 whatever the network's dtype: in float16 the mask would be
    infinite, and a row of 16-bit weights does not add up to 1.
    """
    requests, segments = parent.shape
    length = own_mask.shape[0]
    prefix = past[0][0].shape[2]
    first = (torch.arange(requests) * segments)[:, None]
    parent_row = (parent.clamp(min=0) + first).reshape(-1)
    parent_mask = torch.where(parent >= 0, 0.0, MASKED).reshape(-1, 1, 1, 1)
    past_mask = torch.where(torch.arange(prefix)[None] < past_len[:, None], 0.0, MASKED).reshape(-1, 1, 1, prefix)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past_k, past_v = past[layer]
        heads, size = q.shape[1], q.shape[3]
        kv_heads = k.shape[1]
        rows = heads // kv_heads * length  # query rows per key/value head
        q = q.reshape(requests * segments, kv_heads, rows, size) * (1 / math.sqrt(size))

        def merge(x: Tensor) -> Tensor:  # [R*S, H, rows, n] -> [R, H, S*rows, n]
            x = x.reshape(requests, segments, kv_heads, rows, x.shape[-1]).transpose(1, 2)
            return x.reshape(requests, kv_heads, segments * rows, x.shape[-1])

        def unmerge(x: Tensor) -> Tensor:
            x = x.reshape(requests, kv_heads, segments, rows, x.shape[-1]).transpose(1, 2)
            return x.reshape(requests * segments, kv_heads, rows, x.shape[-1])

        to_past = unmerge(torch.matmul(merge(q), past_k.transpose(2, 3)).float() + past_mask)
        to_parent = torch.matmul(q, k[parent_row].transpose(2, 3)).float() + parent_mask
        to_own = torch.matmul(q, k.transpose(2, 3)).float().reshape(-1, heads, length, length) + own_mask
        to_own = to_own.reshape(-1, kv_heads, rows, length)
        weights = torch.softmax(torch.cat((to_past, to_parent, to_own), -1), -1).to(q.dtype)
        on_past, on_parent, on_own = weights.split((prefix, length, length), -1)
        context = unmerge(torch.matmul(merge(on_past), past_v))
        context = context + torch.matmul(on_parent, v[parent_row]) + torch.matmul(on_own, v)
        return context.reshape(-1, heads, length, size)

    return attend


def packed_attend(parent: Tensor, own_mask: Tensor, past_len: Tensor, past: Past) -> Attend:
    """All segments as one sequence under an explicit tree mask, for fused attention kernels.

    Fused kernels take the mask in the queries' dtype, and shared key/value heads as they are.
    """
    requests, segments = parent.shape
    length = own_mask.shape[0]
    prefix = past[0][0].shape[2]
    total = segments * length
    index = torch.arange(segments)
    own = (index[:, None] == index[None])[None, :, None, :, None]
    is_parent = (parent[:, :, None] == index[None, None])[:, :, None, :, None]
    tree = torch.where(own, own_mask[None, None, :, None], torch.where(is_parent, 0.0, MASKED))
    tree = tree.expand(requests, segments, length, segments, length).reshape(requests, 1, total, total)
    past_mask = torch.where(torch.arange(prefix)[None] < past_len[:, None], 0.0, MASKED)
    past_mask = past_mask[:, None, None].expand(requests, 1, total, prefix)
    mask = torch.cat((past_mask, tree), -1)
    dtype = past[0][0].dtype
    least = torch.finfo(dtype).min / 2  # a score is added to it, and the sum must stay finite
    if least > MASKED:
        mask = mask.clamp(min=least)
    one_sequence = masked_attend(mask.to(dtype), past, grouped=dtype != torch.float32)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def pack(x: Tensor) -> Tensor:  # [R*S, H, Q, D] -> [R, H, S*Q, D]
            x = x.reshape(requests, segments, x.shape[1], length, x.shape[3]).transpose(1, 2)
            return x.reshape(requests, x.shape[1], total, x.shape[4])

        context = one_sequence(layer, pack(q), pack(k), pack(v))
        context = context.reshape(requests, q.shape[1], segments, length, q.shape[3]).transpose(1, 2)
        return context.reshape(requests * segments, q.shape[1], length, q.shape[3])

    return attend


ATTEND = {"split": split_attend, "packed": packed_attend}


class TargetGraph(nn.Module):
    """The contract of engines.contracts as a module to trace.

    Args:
        decoder: the network.
        banned: ids that may never be sampled (the mask, and what the tokenizer cannot decode), bool [vocab].
        layout: `split` or `packed`.
        raw_confidence: also return `rest_lse_raw`.
    """

    def __init__(self, decoder: Decoder, banned: Tensor, layout: str, raw_confidence: bool):
        super().__init__()
        self.decoder = decoder
        self.layout, self.raw_confidence = layout, raw_confidence
        self.ban: Tensor
        self.register_buffer("ban", torch.where(banned, -math.inf, 0.0), persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        position_base: Tensor,
        parent: Tensor,
        own_mask: Tensor,
        past_len: Tensor,
        inv_temperature: Tensor,
        keep: Tensor,
        rows: Tensor,
        past: list[Tensor],
    ) -> tuple[Tensor, ...]:
        requests, segments, length = input_ids.shape
        pairs = list(zip(past[::2], past[1::2], strict=True))
        attend = ATTEND[self.layout](parent, own_mask, past_len, pairs)
        positions = (position_base[:, :, None] + torch.arange(length)).reshape(-1, length)
        hidden, kept = self.decoder(input_ids.reshape(-1, length), positions, attend)
        logits = self.decoder.logits(hidden[rows]) + self.ban
        inverse = inv_temperature[rows // (segments * length)][:, None]
        chosen = (keep + (torch.arange(requests) * segments)[:, None]).reshape(-1)
        outputs = list(head(logits, inverse, self.raw_confidence))
        for pair in kept:
            outputs += [x[chosen].reshape(requests, -1, x.shape[1], length, x.shape[3]) for x in pair]
        return tuple(outputs)


def head(logits: Tensor, inverse: Tensor, raw: bool) -> tuple[Tensor, ...]:
    """What leaves the pass: largest logits and ids, log-sum-exp of the rest, full logits.

    The rest is summed directly: total minus head cancels in float32.
    """
    top_logits, top_ids = logits.topk(min(HEAD_WIDTH, logits.shape[-1]), -1)
    rest = logits.scatter(-1, top_ids, -math.inf)
    sums = [log_sum_exp(rest * inverse)]
    if raw:
        sums.append(log_sum_exp(rest))
    return (top_logits, top_ids, *sums, logits)


def log_sum_exp(x: Tensor) -> Tensor:
    """Over the last axis, shifted by the maximum; -inf where all are."""
    shift = x.amax(-1, keepdim=True).clamp(min=MASKED)
    total = torch.exp(x - shift).sum(-1, keepdim=True)
    # ONNX Runtime takes the log of 8 or 16 numbers at once, and of what remains one by one with other last bits: how
    # many rows there are would then decide about a row. Full vectors per row keep it out of the remainder.
    return (shift + torch.log(total.expand(-1, 16))[:, :1])[:, 0]
