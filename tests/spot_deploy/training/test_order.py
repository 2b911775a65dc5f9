"""Training the order model: shards are read as they are needed, several targets at once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.engines.files import write_json
from spot_deploy.export.order_model import OrderModel, load_order_model
from spot_deploy.runtime.head import Head
from spot_deploy.runtime.state import Commit, State
from spot_deploy.training.order import Part, TrainOptions, draw, train
from spot_deploy.training.records import FORMAT, INDEX, META, ROWS, Recorder, load_records

VOCAB = 40


def write_records(folder, width, shards, seed):
    """Blocks that commit from left to right, but for some noise; top logits fall from left to right as well."""
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    write_json(folder / META, {"format": FORMAT, "block_width": width})
    for number in range(shards):
        recorder = Recorder(width)
        for _ in range(6):
            state = State(0, np.full(width, VOCAB, np.int64), VOCAB)
            while len(state.masked):
                masked = state.masked
                logits = -np.sort(-rng.normal(size=(len(masked), 33)), axis=1).astype(np.float32)
                logits[:, 0] += 4 - masked / 4
                ids = np.stack([rng.permutation(VOCAB)[:33] for _ in masked])
                head = Head(masked, logits, ids, np.full(len(masked), -3, np.float32), None, 1.0, lambda i: None)
                pick = min(int(rng.geometric(0.8)) - 1, len(masked) - 1)
                commit = Commit(int(masked[pick]), int(ids[pick, 0]))
                recorder(state, head, commit)
                state = state.after(commit)
        save_file(recorder.tensors(), folder / f"shard-{number:05d}.safetensors")
    return folder


@pytest.fixture
def folders(tmp_path):
    return [write_records(tmp_path / "eight", 8, 7, 1), write_records(tmp_path / "twelve", 12, 7, 2)]


def test_rows_come_from_the_shard_that_holds_them(folders):
    eight, twelve = load_records(folders)
    assert (eight.width, twelve.width) == (8, 12)
    for records, folder in zip((eight, twelve), folders, strict=True):
        shards = [load_file(p) for p in sorted(folder.iterdir()) if p.suffix == ".safetensors"]
        rows = {name: np.concatenate([s[name] for s in shards]) for name in ROWS}
        assert records.blocks == 42
        assert records.passes == 42 * records.width
        at = 0
        for block in range(records.blocks):
            for n, step in enumerate(records.steps(block)):
                stale = records.stale(block, step)
                count = records.width - n
                assert len(stale.positions) == count
                np.testing.assert_array_equal(stale.log_p, rows["log_p"][at : at + count])
                np.testing.assert_array_equal(stale.ids, rows["ids"][at : at + count])
                np.testing.assert_array_equal(stale.log_odds, rows["log_odds"][at : at + count])
                at += count
        assert at == len(rows["rest"])


def test_only_the_index_is_held_in_memory(folders):
    for records in load_records(folders):
        assert set(records.index) == set(INDEX)
        assert sum(a.nbytes for a in records.index.values()) < 0.1 * sum(p.stat().st_size for p in records.shards)


@pytest.mark.parametrize("damage", ["cut", "no tensor", "rows", "empty", "meta"])
def test_damaged_records(folders, damage):
    path = folders[0] / "shard-00003.safetensors"
    tensors = load_file(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "no tensor":
        save_file({name: t for name, t in tensors.items() if name != "ids"}, path)
    elif damage == "rows":
        save_file(tensors | {name: tensors[name][:-1].copy() for name in ROWS}, path)
    elif damage == "empty":
        for shard in folders[0].glob("shard-*"):
            shard.unlink()
    else:
        write_json(folders[0] / META, {"format": FORMAT, "block_width": "8"})
    with pytest.raises(SpotDeployError) as raised:
        load_records(folders[:1])
    assert raised.value.code == "records"


def test_examples_are_of_blocks_to_train_on_and_predict_a_commit(folders):
    (records, _) = load_records(folders)
    part = Part.of(records)
    drawn = draw(records, part.blocks, np.random.default_rng(4), 400)
    held = {e.block for examples in part.held_out.values() for e in examples}
    assert not held & {e.block for e in drawn}
    for example in drawn:
        steps = records.steps(example.block)
        assert steps.start <= example.step < example.step + example.depth < steps.stop
    assert {e.depth for e in drawn} == set(range(1, 8))


def test_the_order_of_several_targets_is_learnt(folders, tmp_path):
    output = tmp_path / "order"
    options = TrainOptions(steps=60, batch=32, warmup=10, save_every=30)
    result = train(load_records(folders), output, options)
    assert result["1"]["examples"] == 3 * (7 + 11)  # every 20th of 42 blocks is held out
    assert result["1"]["model"] > 0.6  # the noise leaves 0.8
    assert result["1"]["cross_entropy"] < 1.2
    model, card = load_order_model(output)
    assert isinstance(model, OrderModel)
    assert card["block_widths"] == [8, 12]
    assert json.loads((output / "order_model.json").read_text())["training_passes"] == 42 * 20
    with pytest.raises(SpotDeployError, match="another training run"):
        train(load_records(folders), output, TrainOptions(steps=61, batch=33, warmup=10))
