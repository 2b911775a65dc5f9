"""Order models from elsewhere: a network of torch's own encoder layers, under names that are not ours."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from torch import nn

from spot_deploy import SpotDeployError
from spot_deploy.cli.main import main
from spot_deploy.export.order_model import load_order_model
from spot_deploy.export.released_order_model import import_order_model


class Published(nn.Module):
    """The same network as others would write it."""

    def __init__(self):
        super().__init__()
        self.input_proj = nn.Linear(40, 128)
        self.pos_emb, self.state_emb, self.depth_emb = (
            nn.Embedding(64, 128),
            nn.Embedding(4, 128),
            nn.Embedding(33, 128),
        )
        layer = nn.TransformerEncoderLayer(128, 8, 512, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(128), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, features, state_id, depth, masked):
        x = self.input_proj(features) + self.state_emb(state_id) + self.depth_emb(depth)[:, None]
        x = x + self.pos_emb.weight[: features.shape[1]]
        return self.head(self.encoder(x))[..., 0].masked_fill(~masked, -torch.inf).log_softmax(-1)


@pytest.fixture(scope="module")
def published():
    torch.manual_seed(0)
    model = Published().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2)
    return model


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    state_id = torch.randint(0, 4, (3, 8), generator=generator)
    state_id[:, 0] = 0
    return torch.randn(3, 8, 40, generator=generator), state_id, torch.tensor([1, 2, 3]), state_id == 0


@pytest.mark.parametrize("container", ["bare", "nested", "compiled"])
def test_it_computes_what_the_published_network_does(published, inputs, container, tmp_path):
    state = published.state_dict()
    content = {
        "bare": state,
        "nested": {"step": 3000, "config": {"d": 128, "heads": 8}, "model": state},
        "compiled": {f"_orig_mod.{name}": t for name, t in state.items()},
    }[container]
    torch.save(content, tmp_path / "sdar8b_b32.pt")
    model, taken = import_order_model(tmp_path / "sdar8b_b32.pt")
    assert len(taken) == len(set(taken.values())) == len(state)
    with torch.no_grad():
        seen, wanted = model(*inputs), published(*inputs)
    finite = torch.isfinite(wanted)
    assert torch.equal(finite, torch.isfinite(seen))
    assert torch.allclose(seen[finite], wanted[finite], atol=1e-5)


def test_the_verb_writes_a_folder_that_is_read_again(published, inputs, tmp_path, capsys):
    torch.save(published.state_dict(), tmp_path / "x.pt")
    with pytest.raises(SystemExit) as caught:
        main(["drafter", "import", str(tmp_path / "x.pt"), "-o", str(tmp_path / "order")])
    assert caught.value.code == 0
    assert "eval-drafter" in capsys.readouterr().err
    model, card = load_order_model(tmp_path / "order")
    assert card["imported_from"] == "x.pt"
    assert re.fullmatch(r"[0-9a-f]{64}", str(card["sha256"]))
    with torch.no_grad():
        finite = torch.isfinite(published(*inputs))
        assert torch.allclose(model(*inputs)[finite], published(*inputs)[finite], atol=1e-5)


class Trap:
    def __reduce__(self):
        return (exec, ("raise SystemExit('this ran')",))


@pytest.mark.parametrize("damage", ["missing", "pickle", "text", "two", "no-tensors", "wider", "ambiguous", "extra"])
def test_what_does_not_fit_is_refused_with_a_list(published, damage, tmp_path):
    path, state = tmp_path / "x.pt", dict(published.state_dict())
    expected = {
        "missing": ("drafter-missing", "x.pt"),
        "pickle": ("drafter-unreadable", "tensors"),
        "text": ("drafter-unreadable", "tensors"),
        "two": ("drafter-content", "ema"),
        "no-tensors": ("drafter-content", "dict"),
        "wider": ("drafter-shapes", "input_proj.weight [128, 44]"),
        "ambiguous": ("drafter-shapes", "pe [64, 128]"),
        "extra": ("drafter-shapes", "gate.weight [7, 7]"),
    }
    if damage == "pickle":
        torch.save({"model": state, "trap": Trap()}, path)
    elif damage == "text":
        path.write_text("hello")
    elif damage == "two":
        torch.save({"model": state, "ema": state}, path)
    elif damage == "no-tensors":
        torch.save({"lr": 0.1}, path)
    elif damage == "wider":
        torch.save(state | {"input_proj.weight": torch.zeros(128, 44)}, path)
    elif damage == "ambiguous":
        renamed = {"pos_emb.weight": "pe", "head.0.weight": "pos_head.0.weight"}
        torch.save({renamed.get(name, name): t for name, t in state.items()}, path)
    elif damage == "extra":
        torch.save(state | {"gate.weight": torch.zeros(7, 7)}, path)
    with pytest.raises(SpotDeployError) as caught:
        import_order_model(path)
    code, text = expected[damage]
    assert caught.value.code == code
    assert text in f"{caught.value} {caught.value.seen} {caught.value.wanted}"


def test_a_bare_pickle_never_runs(tmp_path):
    (tmp_path / "x.pt").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(SpotDeployError, match="tensors alone"):
        import_order_model(tmp_path / "x.pt")
