"""The order model: which position commits next? (SPOT, section 3.1; sizes from the authors' model card.)

It reads per position the stale top-32 probabilities and a few numbers derived from them, never token ids, so one model
drives every target. 3 pre-norm encoder layers, d 128, 8 heads, feed-forward 512: 621,569 parameters.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spot_deploy.engines.contracts import FEATURES, Array
from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.runtime.features import FEATURES_VERSION

WIDTH, LAYERS, HEADS, FEED_FORWARD = 128, 3, 8, 512
MAX_POSITIONS, MAX_DEPTH, STATES = 64, 32, 4
FORMAT = "spot-deploy-order-model"


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and GELU feed-forward, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, FEED_FORWARD), nn.Linear(FEED_FORWARD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        states, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(states, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(context.transpose(1, 2).reshape(states, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class OrderModel(nn.Module):
    """Features and states to log-probabilities of the next position (contract: engines.contracts)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(FEATURES, WIDTH)
        self.position = nn.Embedding(MAX_POSITIONS, WIDTH)
        self.state = nn.Embedding(STATES, WIDTH)
        self.depth = nn.Embedding(MAX_DEPTH + 1, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.score1, self.score2 = nn.Linear(WIDTH, 64), nn.Linear(64, 1)

    def forward(self, features: Tensor, state_id: Tensor, depth: Tensor, masked: Tensor) -> Tensor:
        """features [N, L, 40], state_id [N, L], depth [N], masked [N, L] to log q [N, L]."""
        x = self.features(features) + self.state(state_id) + self.depth(depth)[:, None]
        x = x + self.position.weight[: features.shape[1]]
        for layer in self.layers:
            x = layer(x)
        scores = self.score2(F.gelu(self.score1(self.norm(x))))[..., 0]
        return torch.log_softmax(scores.masked_fill(~masked, -torch.inf), -1)


class TorchOrderModel:
    """An order model in torch as a session (engines.contracts.OrderSession), for one that is in no bundle."""

    def __init__(self, model: OrderModel):
        self._model = model.eval()

    def run(self, features: Array, state_id: Array, depth: Array, masked: Array) -> Array:
        with torch.inference_mode():
            log_q: Tensor = self._model(*(torch.from_numpy(x) for x in (features, state_id, depth, masked)))
        return log_q.numpy()


def save_order_model(model: OrderModel, folder: Path, card: dict[str, object]) -> None:
    """Write `order_model.json` (the card) and `order_model.safetensors`, the latter first."""
    from safetensors.torch import save_file

    from spot_deploy.engines.files import atomic_path, write_json

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    with atomic_path(folder / "order_model.safetensors") as path:
        save_file(tensors, path)
    write_json(folder / "order_model.json", {"format": FORMAT, "features_version": FEATURES_VERSION, **card})


def load_order_model(folder: Path) -> tuple[OrderModel, dict[str, object]]:
    """Read what `save_order_model` wrote.

    Raises:
        SpotDeployError: the folder or a file is missing, or tensors do not fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from spot_deploy.engines.files import read_json

    fix = "give the folder that train-drafter wrote"
    if not (folder / "order_model.json").is_file():
        raise SpotDeployError(
            "order-model", f"{folder} is no order model", wanted="a folder with order_model.json", fix=fix
        )
    card = read_json(folder / "order_model.json", code="order-model", fix=fix)
    if not isinstance(card, dict) or card.get("format") != FORMAT or card.get("features_version") != FEATURES_VERSION:
        seen = f"features {card.get('features_version')!r}" if isinstance(card, dict) else ""
        raise SpotDeployError(
            "order-model",
            f"{folder} is no order model of this version",
            seen=seen,
            wanted=f"features {FEATURES_VERSION}",
            fix="train it again: train-drafter",
        )
    model = OrderModel()
    try:
        model.load_state_dict(load_file(folder / "order_model.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise SpotDeployError(
            "order-model", f"cannot read the weights in {folder}", seen=str(error).splitlines()[0], fix=fix
        ) from error
    return model.eval(), card
