"""Graphs grown from a shallow trace are those that tracing every layer gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from tiny_checkpoint import write_tiny_checkpoint

from spot_deploy.engines import ort
from spot_deploy.export import parity, trace
from spot_deploy.export.checkpoint import open_checkpoint
from spot_deploy.export.decoder import Decoder, DecoderSpec, MoeSpec
from spot_deploy.export.layers import layers_to_trace
from spot_deploy.export.trace import save_graph, trace_target
from spot_deploy.export.weights import save_weights
from spot_deploy.runtime.target import BlockCausalTarget

DEEP = DecoderSpec(
    vocab=320,
    hidden=32,
    layers=5,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=48,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    qk_norm=True,
    tied_head=False,
)
MOE = MoeSpec(experts=4, per_token=2, intermediate=16, dense_layers=frozenset({0}), expert_bias=True, scoring="sigmoid")


@pytest.mark.parametrize(
    ("layers", "dense", "traced"),
    [(1, None, 1), (2, None, 2), (36, None, 2), (20, {0}, 2), (20, {0, 1, 2}, 4), (6, {1, 3, 5}, 6), (4, {3}, 4)],
)
def test_layers_are_traced_until_all_that_follow_are_alike(layers, dense, traced):
    moe = None if dense is None else replace(MOE, dense_layers=frozenset(dense))
    assert layers_to_trace(replace(DEEP, layers=layers, moe=moe)) == traced


@pytest.mark.parametrize(("layout", "moe"), [("packed", None), ("split", MOE)], ids=["dense", "experts"])
def test_a_grown_graph_is_the_whole_graph(moe, layout, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path / "tiny"))
    spec, shape = replace(DEEP, moe=moe), replace(checkpoint.decoding.shape, layers=5, kv_heads=2, head_dim=16)
    decoding = replace(checkpoint.decoding, shape=shape)
    torch.manual_seed(0)
    tensors = {name: p.detach() for name, p in Decoder(spec).named_parameters()}
    offsets = save_weights(tensors, tmp_path / "weights.safetensors")
    usable = np.flatnonzero(~checkpoint.banned.numpy())
    prefix, states = parity.random_states(decoding, usable, 9, 3)
    kinds, seen = [], []
    for name in ("grown", "whole"):
        if name == "whole":
            monkeypatch.setattr(trace, "layers_to_trace", lambda spec: spec.layers)
        model = trace_target(spec, checkpoint.banned, layout, shape, decoding.block_width)
        save_graph(model, tmp_path / f"{name}.onnx", external=offsets, prefix="decoder.")
        onnx.checker.check_model(str(tmp_path / f"{name}.onnx"), full_check=True)
        kinds.append(Counter(node.op_type for node in model.graph))
        target = BlockCausalTarget(ort.Target(tmp_path / f"{name}.onnx", shape.signature(), 1), decoding, 1.0)
        target.prefill(prefix)
        rows = [head.row(i) for head in target.verify(states, 0) for i in range(len(head.positions))]
        seen.append([np.stack(rows), *target.cache.past])
    for grown, whole in zip(*seen, strict=True):
        np.testing.assert_array_equal(grown, whole)
    assert np.ptp(seen[0][0][:, usable]) > 0
    grown, whole = kinds
    assert {kind: grown[kind] for kind in ("Gemm", "MatMul", "Softmax")} == {
        kind: whole[kind] for kind in ("Gemm", "MatMul", "Softmax")
    }
    assert grown.total() <= whole.total()
