"""Export: parity gates that can fail, bundles that appear whole or not at all, checkpoints refused or taken."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import write_tiny_checkpoint

from spot_deploy import Runtime, SpotDeployError, build_engine
from spot_deploy.engines import ort
from spot_deploy.engines.contracts import TargetShape, order_signature
from spot_deploy.engines.files import STAGING
from spot_deploy.export import bundle_writer, parity
from spot_deploy.export.bundle_writer import ExportOptions, export_bundle
from spot_deploy.export.checkpoint import open_checkpoint
from spot_deploy.export.families.sdar import SDAR
from spot_deploy.export.order_model import OrderModel
from spot_deploy.runtime.drafters import OracleDrafter
from spot_deploy.runtime.manifest import read_manifest
from spot_deploy.training.replay import Trajectory


@pytest.fixture
def checkpoint_copy(tiny_checkpoint, tmp_path):
    return shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")


def edit_config(folder, **changes):
    path = folder / "config.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in document.items() if v != "delete"}))


def test_order_model_has_the_published_size():
    assert sum(p.numel() for p in OrderModel().parameters()) == 621_569


def test_manifest_records_every_gate(tiny_bundle):
    manifest = read_manifest(tiny_bundle)
    assert manifest.parity["mode"] == "full"
    measured = manifest.parity["measured"]
    for layout in ("split", "packed"):
        for gate in ("prefill.k.0", "tree.logits", "head.rest_lse", "denoise.logits", "opening.logits", "opening.v.1"):
            entry = measured[f"{layout}.{gate}"]
            assert 0 <= entry["max_abs"] <= entry["allowed"]
        assert measured[f"{layout}.tree.argmax"]["differ"] == 0
        for index in range(4):
            assert measured[f"{layout}.trace{index}"]["first_difference"] is None
            assert measured[f"{layout}.trace{index}"]["commits"] >= 48


@pytest.mark.parametrize("name", ["target-split.onnx", "target-packed.onnx", "order.onnx"])
def test_onnx_checker_takes_the_graphs(tiny_bundle, name):
    onnx.checker.check_model(str(tiny_bundle / name), full_check=True)


def test_graphs_share_one_copy_of_the_weights(tiny_bundle):
    sizes = {p.name: p.stat().st_size for p in tiny_bundle.iterdir() if p.is_file()}
    weights = load_file(tiny_bundle / "weights.safetensors")
    raw = sum(t.numel() * 4 for t in weights.values())
    assert sizes["weights.safetensors"] < raw + 10_000
    for name in ("target-split.onnx", "target-packed.onnx"):
        model = onnx.load(str(tiny_bundle / name), load_external_data=False)
        outside = {i.name.removeprefix("decoder.") for i in model.graph.initializer if i.external_data}
        assert outside == set(weights)
        inside = [i for i in model.graph.initializer if not i.external_data]
        assert sum(int(np.prod(i.dims)) for i in inside) < 2000
        # Linear layers are Gemm with weights as stored: a Transpose would cost a second copy.
        gemms = [n for n in model.graph.node if n.op_type == "Gemm"]
        assert len(gemms) == 2 * 7 + 1
        assert all({a.name: a.i for a in g.attribute}["transB"] == 1 for g in gemms)


@pytest.mark.parametrize("kind", ["weight", "tokenizer"])
def test_a_failed_gate_ends_with_exit_3_and_leaves_nothing(kind, checkpoint_copy, tmp_path, monkeypatch):
    output = tmp_path / "out.spot"
    if kind == "weight":
        real = bundle_writer.trace_target

        def broken(spec, *rest):
            return real(replace(spec, norm_eps=0.05), *rest)

        monkeypatch.setattr(bundle_writer, "trace_target", broken)
    else:
        # Our tokenizer reads another template than the checkpoint's class did.
        real_text = bundle_writer.Text

        class Other(real_text):
            def encode(self, text):
                return [*super().encode(text), 5]

        monkeypatch.setattr(bundle_writer, "Text", Other)
    with pytest.raises(SpotDeployError) as caught:
        export_bundle(checkpoint_copy, output, order_model=None, options=ExportOptions())
    assert caught.value.exit_code == 3
    assert list(tmp_path.iterdir()) == [checkpoint_copy]


@pytest.mark.parametrize("seen", [np.array([1.0, 2.1]), np.array([1.0, np.nan]), np.array([1.0, -np.inf])])
def test_elementwise_gate_can_fail(seen):
    with pytest.raises(SpotDeployError, match="parity gate"):
        parity.Gate().close("x", seen, np.array([1.0, 2.0]))


def test_argmax_gate_forgives_near_ties_only():
    gate = parity.Gate()
    gate.argmax("near", np.array([[1.0, 1.00001]]), np.array([[1.00001, 1.0]]))
    assert gate.measured["near"]["differ"] == 1
    with pytest.raises(SpotDeployError, match="parity gate"):
        gate.argmax("far", np.array([[1.0, 1.2]]), np.array([[1.2, 1.0]]))


def test_trace_gate_forgives_near_ties_only(tiny_bundle):
    decoding = read_manifest(tiny_bundle).decoding
    session = ort.Target(tiny_bundle / "target-split.onnx", decoding.shape.signature(), 1)
    golden = json.loads((tiny_bundle / "golden.json").read_text(encoding="utf-8"))["traces"]
    trace = next(parity.Trace(**t) for t in golden if t["temperature"] == 0)
    gate = parity.Gate()
    gate.trace("same", session, decoding, trace, 0.0)
    assert gate.measured["same"] == {"commits": len(trace.commits), "first_difference": None}
    changed = replace(trace, commits=[*map(list, trace.commits)])
    changed.commits[-2:] = changed.commits[:-3:-1]  # the last two in the other order
    with pytest.raises(SpotDeployError, match="parity gate other"):
        gate.trace("other", session, decoding, changed, 1e-4)
    gate.trace("tie", session, decoding, changed, 100.0)
    found = gate.measured["tie"]
    assert found["first_difference"] == len(trace.commits) - 2
    assert found["near_ties"] >= 1


def test_layer_parity_passes_and_can_fail(tiny_checkpoint, monkeypatch):
    checkpoint = open_checkpoint(tiny_checkpoint)
    measured = parity.layer_parity(checkpoint, ["f16", "bf16"])
    assert {f"layer{i}{p}.hidden" for i in range(2) for p in ("", "-f16", "-bf16")} == set(measured)
    real = parity.load_decoder

    def broken(spec, tensors):
        decoder = real(spec, tensors)
        decoder.layers[0].input_norm.eps = 0.1
        return decoder

    monkeypatch.setattr(parity, "load_decoder", broken)
    with pytest.raises(SpotDeployError, match="layer0"):
        parity.layer_parity(checkpoint, [])


def test_tied_head_shards_and_no_order_model(tmp_path):
    """A second shape of checkpoint: tied head, several weight files, norms of ones as before training, no drafter."""
    folder = write_tiny_checkpoint(tmp_path / "target-b8", tied=True, shards=True, norms=False, seed=5)
    assert len(list(folder.glob("*.safetensors"))) > 1
    edit_config(folder, block_size="delete")  # the name says it
    output = tmp_path / "out.spot"
    manifest = export_bundle(folder, output, order_model=None, options=ExportOptions(parity="layers"))
    assert manifest.decoding.block_width == 8
    assert manifest.parity["mode"] == "layers"
    build_engine(output, backend="onnxruntime", threads=1)
    with Runtime.load(output) as runtime:
        assert runtime.generate("the cat", max_new_tokens=9, ignore_eos=True).budget == 0
        with pytest.raises(SpotDeployError, match="no order model"):
            runtime.generate("the cat", budget=3, max_new_tokens=9)
        trajectory = Trajectory()
        control = runtime.generate("the cat", max_new_tokens=20, observe=trajectory)
        oracle = OracleDrafter(trajectory.lookup, 32)
        assert runtime.generate("the cat", max_new_tokens=20, budget=3, drafter=oracle).nfe < control.nfe


def test_existing_output_is_replaced_only_by_force_and_only_if_it_is_a_bundle(tiny_copy, tiny_checkpoint, tmp_path):
    before = (tiny_copy / "manifest.json").read_bytes()
    options = ExportOptions(parity="none")
    with pytest.raises(SpotDeployError, match="already there"):
        export_bundle(tiny_checkpoint, tiny_copy, order_model=None, options=options)
    assert (tiny_copy / "manifest.json").read_bytes() == before
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.jpg").write_text("x")
    (other / "manifest.json").write_text('{"name": "a browser extension"}')
    with pytest.raises(SpotDeployError, match="already there"):
        export_bundle(tiny_checkpoint, other, order_model=None, options=options, force=True)
    assert (other / "cat.jpg").exists()
    export_bundle(tiny_checkpoint, tiny_copy, order_model=None, options=options, force=True)
    assert read_manifest(tiny_copy).parity["mode"] == "none"
    assert not list(tmp_path.glob(f"{STAGING}*"))


REFUSED = {
    "family": ({"architectures": ["LlamaForCausalLM"]}, "checkpoint-family"),
    "gemma": ({"architectures": ["DiffusionGemmaForBlockDiffusion"]}, "checkpoint-refused"),
    "a2d-name": ({"architectures": ["A2DQwen3LMHeadModel"]}, "checkpoint-refused"),
    "bias": ({"attention_bias": True}, "checkpoint-unsupported"),
    "rope-scaling": ({"rope_scaling": {"type": "yarn"}}, "checkpoint-unsupported"),
    "field": ({"head_dim": "delete"}, "checkpoint-config"),
    "small-vocabulary": ({"vocab_size": 200}, "checkpoint-decoding"),
    "mask": ({"mask_token_id": 5000}, "checkpoint-decoding"),
    "width": ({"block_size": 100}, "checkpoint-decoding"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "checkpoint-quantised"),
    "rope-old-spelling": (
        {"rope_parameters": {"type": "linear", "factor": 4, "rope_theta": 1e4}},
        "checkpoint-unsupported",
    ),
    "rope-factor": ({"rope_scaling": {"factor": 4}}, "checkpoint-unsupported"),
    "widths": ({"block_length": 16}, "checkpoint-decoding"),
    "rope-parameters": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "checkpoint-unsupported"),
}


@pytest.mark.parametrize(("changes", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_config_that_cannot_be_decoded(checkpoint_copy, changes, code):
    edit_config(checkpoint_copy, **changes)
    with pytest.raises(SpotDeployError) as caught:
        open_checkpoint(checkpoint_copy)
    assert caught.value.code == code


ODD = {
    "max_position_embeddings": ("many", 256.0, 0, True),
    "block_size": (0, -8, "8", 8.0, [8], True),
    "num_hidden_layers": (10**7, -1, 2.0),
    "vocab_size": (10**13, "320"),
    "num_attention_heads": (0, None),
    "head_dim": (16.0,),
    "rms_norm_eps": (0, -1e-6, "1e-6", None),
    "rope_theta": (0, -1.0, "10000", True),
    "mask_token_id": (299.7, True, -1),
    "bos_token_id": ([1], "a"),
    "eos_token_id": (296.0, True, [[1]], ["a"]),
    "tie_word_embeddings": ("false", 1),
    "architectures": ({"a": 1}, [["x"]], 5, []),
    "auto_map": (["x"], "a.b"),
    "rope_parameters": ("yarn", {"rope_theta": 0}),
    "layer_types": (["full_attention", "sliding_attention"], "x"),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in ODD.items() for v in values])
def test_fields_of_the_wrong_kind_are_named(checkpoint_copy, field, value):
    edit_config(checkpoint_copy, **{field: value})
    with pytest.raises(SpotDeployError) as caught:
        open_checkpoint(checkpoint_copy)
    assert caught.value.code == "checkpoint-config"
    assert field in caught.value.seen
    assert caught.value.exit_code == 1


def test_fields_of_the_generation_config_too(checkpoint_copy):
    (checkpoint_copy / "generation_config.json").write_text('{"eos_token_id": 296.0}')
    with pytest.raises(SpotDeployError, match=r"generation_config\.json has fields") as caught:
        open_checkpoint(checkpoint_copy)
    assert "eos_token_id" in caught.value.seen


def test_an_architecture_that_is_no_list_and_a_rope_scaling_that_scales_nothing_are_fine(checkpoint_copy):
    edit_config(checkpoint_copy, architectures="SDARForCausalLM", rope_scaling={"rope_type": "default"})
    assert open_checkpoint(checkpoint_copy).family.name == "sdar"


@pytest.mark.parametrize("name", ["LLaDA2.1-mini", "LLaDA2_1-mini", "LLaDA21-mini", "llada-v2.1-flash", "LLaDA2.2"])
def test_later_llada2_is_refused_by_its_name(checkpoint_copy, name):
    edit_config(checkpoint_copy, architectures=["LLaDA2MoeModelLM"])
    named = checkpoint_copy.rename(checkpoint_copy.parent / name)
    with pytest.raises(SpotDeployError, match="cannot decode") as caught:
        open_checkpoint(named)
    assert caught.value.code == "checkpoint-refused"
    assert "rewrite" in str(caught.value.wanted)


@pytest.mark.parametrize(("field", "option"), [("block_size", "--block-width"), ("mask_token_id", "--mask-id")])
def test_what_neither_config_nor_name_tells_must_be_given(checkpoint_copy, field, option):
    folder = checkpoint_copy.rename(checkpoint_copy.parent / "Qwen3-bd3lm")
    edit_config(folder, architectures=["A2DQwen3LMHeadModel"], **{field: "delete"})
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(SpotDeployError) as caught:
        open_checkpoint(folder)
    assert caught.value.code == "checkpoint-decoding"
    assert option in caught.value.fix
    assert open_checkpoint(folder, block_width=8, mask_id=299).decoding.block_width == 8


def test_tokenizer_with_more_ids_than_the_model(checkpoint_copy):
    path = checkpoint_copy / "tokenizer.json"
    document = json.loads(path.read_text())
    document["added_tokens"] += [document["added_tokens"][-1] | {"id": 300 + i, "content": f"<{i}>"} for i in range(30)]
    path.write_text(json.dumps(document))
    with pytest.raises(SpotDeployError, match="more ids than the model"):
        open_checkpoint(checkpoint_copy)


def test_rope_theta_is_read_by_both_sides(checkpoint_copy):
    """The oracle takes its settings from the checkpoint's config, not from what we read out of it."""
    edit_config(checkpoint_copy, rope_theta=500.0)
    checkpoint = open_checkpoint(checkpoint_copy)
    parity.layer_parity(checkpoint, [])
    misread = replace(checkpoint, spec=replace(checkpoint.spec, rope_theta=10_000.0))
    with pytest.raises(SpotDeployError, match="layer0"):
        parity.layer_parity(misread, [])


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "dtype", "truncated", "header", "pickle", "shard"])
def test_weights_that_do_not_fit(checkpoint_copy, damage):
    path = checkpoint_copy / "model.safetensors"
    tensors = load_file(path)
    if damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "extra":
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(4)
    elif damage == "shape":
        tensors["model.norm.weight"] = torch.zeros(7)
    elif damage == "dtype":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "header":
        path.write_bytes(b"x" * 100)
    elif damage == "pickle":
        path.rename(path.with_name("pytorch_model.bin"))
    elif damage == "shard":
        path.unlink()
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (checkpoint_copy / "model.safetensors.index.json").write_text(json.dumps(index))
    named = {
        "missing": "model.norm.weight",
        "extra": "model.layers.0.self_attn.q_proj.bias",
        "shape": "model.norm.weight",
        "dtype": "model.norm.weight is F8_E4M3",
        "pickle": "pytorch_model.bin",
        "shard": "model-00001-of-00002.safetensors",
    }
    with pytest.raises(SpotDeployError) as caught:
        open_checkpoint(checkpoint_copy).tensors()
    assert caught.value.code in ("checkpoint-tensors", "checkpoint-weights", "checkpoint-dtype")
    assert named.get(damage, path.name) in str(caught.value) + str(caught.value.seen)


def test_undecodable_ids_and_the_mask_are_banned(tiny_checkpoint, tiny_runtime):
    checkpoint = open_checkpoint(tiny_checkpoint)
    assert np.flatnonzero(checkpoint.banned.numpy()).tolist() == list(range(299, 320))
    for seed in range(3):
        result = tiny_runtime.generate("the", temperature=2.5, seed=seed, max_new_tokens=60, ignore_eos=True)
        assert max(result.token_ids) < 299


@pytest.mark.parametrize(
    ("name", "config", "width"),
    [
        ("SDAR-8B-Chat-b32", {}, 32),
        ("SDAR-8B-b32_hf", {}, 32),
        ("SDAR-8B-B32.v1", {}, 32),
        ("SDAR-4B", {}, 4),
        ("SDAR-4B-base", {}, 4),
        ("x", {"block_size": 16}, 16),
        ("x-b16", {"block_size": 16}, 16),
    ],
)
def test_block_width_from_config_name_or_default(name, config, width):
    assert SDAR.width(config, name)[0] == width


@pytest.mark.parametrize(
    ("name", "config"),
    [("x-b32", {"block_size": 16}), ("SDAR-b16-b32", {}), ("x", {"block_size": 8, "block_length": 16})],
)
def test_block_widths_that_contradict_each_other_must_be_decided(name, config):
    with pytest.raises(ValueError, match="contradicting"):
        SDAR.width(config, name)


def exported(folder, tmp_path):
    return export_bundle(folder, tmp_path / "out.spot", order_model=None, options=ExportOptions(parity="none"))


def test_a_head_that_is_not_the_embedding_contradicts_a_tied_config(checkpoint_copy, tmp_path):
    """transformers believes the weights, older modeling files the config; whoever exports must say which is right."""
    edit_config(checkpoint_copy, tie_word_embeddings=True)
    with pytest.raises(SpotDeployError, match="the head is the embedding, and the weights hold another") as caught:
        exported(checkpoint_copy, tmp_path)
    assert "lm_head.weight" in caught.value.seen
    tensors = load_file(checkpoint_copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, checkpoint_copy / "model.safetensors")
    open_checkpoint(checkpoint_copy).check_tied_head()
    tensors["lm_head.weight"] = torch.zeros(3)
    save_file(tensors, checkpoint_copy / "model.safetensors")
    with pytest.raises(SpotDeployError, match="not those of its config"):
        exported(checkpoint_copy, tmp_path)
    assert not list(tmp_path.glob("out.spot"))


@pytest.mark.parametrize("damage", ["twice", "in two shards", "outside", "null"])
def test_weights_that_are_there_twice_or_elsewhere(tmp_path, damage):
    folder = write_tiny_checkpoint(tmp_path / "target-b8", shards=True)
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    shards = sorted(set(document["weight_map"].values()))
    if damage == "twice":
        save_file(load_file(folder / shards[0]), folder / "model.safetensors")
    elif damage == "in two shards":
        name = next(iter(load_file(folder / shards[0])))
        save_file(load_file(folder / shards[-1]) | {name: torch.ones(1)}, folder / shards[-1])
    else:
        document["weight_map"]["lm_head.weight"] = "../x.safetensors" if damage == "outside" else None
        index.write_text(json.dumps(document))
    with pytest.raises(SpotDeployError) as caught:
        open_checkpoint(folder).tensors()
    assert caught.value.code in ("checkpoint-weights", "checkpoint-index")
    named = {"twice": "model.safetensors", "in two shards": shards[0], "outside": "../x", "null": "None"}
    assert named[damage] in caught.value.seen


def test_weights_that_are_no_numbers_are_named(checkpoint_copy, tmp_path):
    tensors = load_file(checkpoint_copy / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 2] = torch.nan
    save_file(tensors, checkpoint_copy / "model.safetensors")
    with pytest.raises(SpotDeployError, match="no finite numbers") as caught:
        exported(checkpoint_copy, tmp_path)
    assert "layers.1.q.weight" in caught.value.seen


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("tokenizer_config.json", "{", "checkpoint-tokenizer"),
        ("tokenizer_config.json", "[]", "checkpoint-tokenizer"),
        ("special_tokens_map.json", "{", "checkpoint-tokenizer"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1", "tokenizer"),
        ("chat_template.jinja", "{% for m in messages %}", "checkpoint-template"),
        ("chat_template.jinja", "{{ 1 // 0 }}", "checkpoint-template"),
        ("chat_template.jinja", "{{ nobody.told }}", "checkpoint-template"),
        ("chat_template.jinja", "{% for i in range(10**9) %}x{% endfor %}", "checkpoint-template"),
    ],
)
def test_text_files_that_cannot_be_used_are_told_before_weights_are_written(
    checkpoint_copy, tmp_path, file, text, code
):
    (checkpoint_copy / file).write_text(text)
    said = []
    with pytest.raises(SpotDeployError) as caught:
        export_bundle(
            checkpoint_copy,
            tmp_path / "o.spot",
            order_model=None,
            options=ExportOptions(parity="none"),
            say=said.append,
        )
    assert caught.value.code == code
    assert "writing the weights" not in said
    assert "export the bundle again" not in caught.value.fix


def test_signatures_cover_the_contract():
    shape = TargetShape(layers=2, kv_heads=1, head_dim=4, vocab=20, raw_confidence=True)
    names = [t.name for t in shape.signature().outputs]
    assert names == ["top_logits", "top_ids", "rest_lse", "rest_lse_raw", "logits", "k.0", "v.0", "k.1", "v.1"]
    assert shape.head_width == 20
    assert [t.name for t in order_signature(8).inputs] == ["features", "state_id", "depth", "masked"]


@pytest.mark.parametrize(
    "bad",
    [
        {"budgets": (3, 8)},
        {"budgets": (0, 8, 3)},
        {"budget": 7},
        {"parity": "some"},
        {"gamma": float("nan")},
        {"budgets": (0, 300)},
    ],
    ids=str,
)
def test_export_options_out_of_range(bad):
    with pytest.raises(SpotDeployError) as caught:
        ExportOptions(**bad)
    assert caught.value.exit_code == 2


def test_golden_texts_hold_a_user_who_spells_out_special_tokens(tiny_bundle):
    golden = json.loads((tiny_bundle / "golden.json").read_text(encoding="utf-8"))
    document = json.loads((tiny_bundle / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"]: token["content"] for token in document["added_tokens"]}
    text, chat, plain = golden["encodings"][-1], golden["chats"][-1], golden["chats"][0]
    assert all(content in text["text"] for content in special.values())
    assert not set(special) & set(text["ids"])
    assert chat["messages"] == [{"role": "user", "content": text["text"]}]
    assert [i for i in chat["ids"] if i in special] == [i for i in plain["ids"] if i in special] != []
