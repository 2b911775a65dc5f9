"""A published config.json: its fields say their names where they are missing, null, or of a kind that cannot be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spot_deploy.engines.errors import SpotDeployError

# Whole numbers: least and largest that any network has.
_WHOLE = {
    **dict.fromkeys(("vocab_size", "embedding_size"), (1, 1 << 24)),
    **dict.fromkeys(("hidden_size", "d_model", "head_dim"), (1, 1 << 20)),
    **dict.fromkeys(("num_hidden_layers", "n_layers"), (1, 1 << 12)),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_key_value_heads", "n_kv_heads"), (1, 1 << 16)),
    **dict.fromkeys(("intermediate_size", "mlp_hidden_size", "moe_intermediate_size"), (1, 1 << 24)),
    **dict.fromkeys(("expert_intermediate_size", "dense_intermediate_size"), (1, 1 << 24)),
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "n_group", "topk_group"), (1, 1 << 14)),
    **dict.fromkeys(("num_shared_experts", "first_k_dense_replace"), (0, 1 << 14)),
    "decoder_sparse_step": (1, 1 << 12),
    **dict.fromkeys(("max_position_embeddings", "max_sequence_length"), (1, 1 << 31)),
    **dict.fromkeys(("block_size", "block_length", "bd_size"), (1, 1 << 31)),
    **dict.fromkeys(("mask_token_id", "bos_token_id"), (0, 1 << 31)),
}
_POSITIVE = ("rms_norm_eps", "rope_theta", "routed_scaling_factor")
_SWITCHES = (
    "tie_word_embeddings", "weight_tying", "norm_topk_prob", "attention_bias", "mlp_bias", "use_sliding_window",
)  # fmt: skip
_OBJECTS = ("auto_map", "rope_parameters", "rope_scaling")


class Fields(dict[str, Any]):
    """A config.json whose fields say their names where they are missing or null."""

    def __getitem__(self, key: str) -> Any:
        if self.get(key) is None:
            raise ValueError(f"{key} is {'null' if key in self else 'missing'}")
        return super().__getitem__(key)


def check_fields(document: Mapping[str, Any], file: str) -> None:
    """Check the kind and range of every field that export reads; those that are missing or null are passed over.

    Raises:
        SpotDeployError: with the name of every field that is wrong.
    """
    wrong = [
        f"{key} is {value!r:.60}, not {wanted}"
        for key, value in document.items()
        if value is not None and (wanted := _fault(key, value))
    ]
    rope = document.get("rope_parameters")
    if isinstance(rope, Mapping):
        wrong += [f"rope_parameters.{key} is {v!r:.60}, not {w}" for key, v in rope.items() if (w := _fault(key, v))]
    if wrong:
        raise SpotDeployError(
            "checkpoint-config",
            f"{file} has fields that no network can have",
            seen="; ".join(wrong[:5]),
            fix="compare it with the published one",
        )


def _fault(key: str, value: object) -> str | None:
    """What a field should be, if it is not."""
    if key in _WHOLE:
        least, most = _WHOLE[key]
        right = type(value) is int and least <= value <= most
        return None if right else f"a whole number from {least} to {most}"
    if key in _POSITIVE:
        right = type(value) in (int, float) and math.isfinite(value) and value > 0  # type: ignore[arg-type,operator]
        return None if right else "a number above 0"
    if key in _SWITCHES:
        return None if isinstance(value, bool) else "true or false"
    if key in _OBJECTS:
        return None if isinstance(value, Mapping) else "an object"
    if key == "architectures":
        names = [value] if isinstance(value, str) else value
        right = isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names)
        return None if right else "a list of class names"
    if key == "eos_token_id":
        ids = value if isinstance(value, list) else [value]
        return None if all(type(n) is int and 0 <= n < 1 << 31 for n in ids) else "a token id or a list of them"
    if key == "moe_layer_freq":
        right = isinstance(value, list) and all(n in (0, 1) for n in value)
        return None if right else "a list of 0 and 1, one a layer"
    if key == "mlp_only_layers":
        right = isinstance(value, list) and all(type(n) is int for n in value)
        return None if right else "a list of layer numbers"
    if key == "layer_types":
        right = isinstance(value, list) and all(kind == "full_attention" for kind in value)
        return None if right else "full_attention in every layer, which is all that export knows"
    return None
