"""The target in NumPy, float64, every state alone: the reference of rung 1, written apart from the decoder."""

from __future__ import annotations

import json

import numpy as np
from safetensors import safe_open

from spot_deploy.engines.contracts import TargetOutputs
from spot_deploy.engines.prefix import HostSession
from spot_deploy.runtime.head import summarise


class ReferenceTarget(HostSession):
    """An SDAR checkpoint folder as a target session."""

    def __init__(self, folder, known_ids):
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {}
        with safe_open(folder / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                self.w[name] = file.get_tensor(name).double().numpy()
        self.w.setdefault("lm_head.weight", self.w["model.embed_tokens.weight"])
        self.banned = np.ones(self.config["vocab_size"], bool)
        self.banned[known_ids] = False
        self.banned[self.config["mask_token_id"]] = True

    def norm(self, x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.w[name]

    def forward(self, ids, positions, past, own_mask):
        """Hidden states [Q, hidden] and new (k, v) per layer [heads, Q, d]; past as the same pairs."""
        c, d = self.config, self.config["head_dim"]
        x = self.w["model.embed_tokens.weight"][ids]
        angle = positions[:, None] / c["rope_theta"] ** (np.arange(0, d, 2) / d)
        angle = np.concatenate((angle, angle), 1)
        kept = []
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = self.norm(x, p + "input_layernorm.weight")

            def project(kind, heads, h=h, p=p):
                y = (h @ self.w[f"{p}self_attn.{kind}_proj.weight"].T).reshape(len(ids), heads, d)
                if kind == "v":
                    return y.transpose(1, 0, 2)
                y = self.norm(y, f"{p}self_attn.{kind}_norm.weight").transpose(1, 0, 2)
                turned = np.concatenate((-y[..., d // 2 :], y[..., : d // 2]), -1)
                return y * np.cos(angle) + turned * np.sin(angle)

            groups = c["num_attention_heads"] // c["num_key_value_heads"]
            q = project("q", c["num_attention_heads"])
            k, v = project("k", c["num_key_value_heads"]), project("v", c["num_key_value_heads"])
            kept.append((k, v))
            keys = np.repeat(np.concatenate((past[i][0], k), 1), groups, 0)
            values = np.repeat(np.concatenate((past[i][1], v), 1), groups, 0)
            mask = np.concatenate((np.zeros((len(ids), past[i][0].shape[1])), own_mask), 1)
            scores = q @ keys.transpose(0, 2, 1) / np.sqrt(d) + mask
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            context = (weights / weights.sum(-1, keepdims=True)) @ values
            x = x + context.transpose(1, 0, 2).reshape(len(ids), -1) @ self.w[p + "self_attn.o_proj.weight"].T
            h = self.norm(x, p + "post_attention_layernorm.weight")
            gate = h @ self.w[p + "mlp.gate_proj.weight"].T
            up = h @ self.w[p + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.w[p + "mlp.down_proj.weight"].T
        return self.norm(x, "model.norm.weight"), kept

    def run(self, inputs, *, keep):
        filled = int(inputs.past_len[0])
        layers = self.config["num_hidden_layers"]
        stored = [
            tuple(inputs.past[2 * i + j][0, :, :filled].astype(np.float64) for j in (0, 1)) for i in range(layers)
        ]
        ids = inputs.input_ids[0]
        length = ids.shape[1]
        hidden, kept = [], []
        for s, tokens in enumerate(ids):
            past = stored
            parent = int(inputs.parent[0, s])
            if parent >= 0:
                past = []
                for (past_k, past_v), (k, v) in zip(stored, kept[parent], strict=True):
                    past.append((np.concatenate((past_k, k), 1), np.concatenate((past_v, v), 1)))
            positions = int(inputs.position_base[0, s]) + np.arange(length)
            h, pairs = self.forward(tokens, positions, past, inputs.own_mask)
            hidden.append(h)
            kept.append(pairs)
        logits = (np.concatenate(hidden)[inputs.rows] @ self.w["lm_head.weight"].T).astype(np.float32)
        logits[:, self.banned] = -np.inf
        top, top_ids, rest, _ = summarise(logits, float(inputs.inv_temperature[0]))
        out = []
        if keep:
            out = [
                np.stack([kept[int(s)][i][j] for s in inputs.keep[0]])[None].astype(np.float32)
                for i in range(layers)
                for j in (0, 1)
            ]
        return TargetOutputs(top, top_ids, rest, None, lambda m: logits[m], out)
