"""`export`: checkpoint and order model to a bundle, in one atomic step."""

from __future__ import annotations

import datetime
import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError

from spot_deploy.engines import ort
from spot_deploy.engines.contracts import FEATURES, LAYOUTS, WEIGHT_PRECISIONS, order_signature, target_role
from spot_deploy.engines.errors import VERIFICATION, SpotDeployError, usage_error
from spot_deploy.engines.files import sha256, staged_folder, write_json, write_text
from spot_deploy.export import parity, quantize
from spot_deploy.export.checkpoint import Checkpoint, open_checkpoint
from spot_deploy.export.decoder import Decoder, in_dtype, load_decoder
from spot_deploy.export.order_model import load_order_model
from spot_deploy.export.target_graph import TargetGraph
from spot_deploy.export.trace import (
    HALF_DTYPES,
    OPSET,
    float32_nodes,
    opset,
    save_graph,
    trace_order_model,
    trace_target,
)
from spot_deploy.export.weights import WEIGHTS, stream_weights
from spot_deploy.runtime.bundle import bundle_id
from spot_deploy.runtime.manifest import MANIFEST, Decoding, FileEntry, Manifest, Speculation, is_bundle, to_document
from spot_deploy.runtime.text import GOLDEN, GOLDEN_PASS, TEMPLATE, THINKING, TOKENIZER, Text

GOLDEN_TEXTS = (
    "Once upon a time there was a little boy",
    "  two  spaces\n\nand\tlines ",
    "naïve café, 東京, Привет, 🙂👍🏽",
    "3 + 4 * 12 = 51; x_1 != 'y'",
    "",
)
GOLDEN_CHATS = (
    [{"role": "user", "content": "How much is 3 * 14?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi 🙂"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Go on with this story: One day a bird sang."},
    ],
    [{"role": "system", "content": ""}, {"role": "user", "content": "\n  東京は? \n"}],
)
MARK = "\U000f0000"  # stands for a message's content while the template around it is encoded
PRECISIONS = (*HALF_DTYPES, *WEIGHT_PRECISIONS)  # of target graphs besides the float32 ones
CARRIED = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "README.md")


@dataclass(frozen=True)
class ExportOptions:
    """How to export; `None` takes what the checkpoint says.

    Attributes:
        parity: `full`, `layers` or `none`.
        precisions: target graphs to write besides the float32 ones, some of PRECISIONS.
        budgets: numbers of drafted states that engines are made for; `budget` is the default one.
        gamma: default mass floor.
    """

    block_width: int | None = None
    mask_id: int | None = None
    stop_ids: tuple[int, ...] | None = None
    max_positions: int | None = None
    parity: str = "full"
    precisions: tuple[str, ...] = ()
    budgets: tuple[int, ...] = (0, 1, 2, 3, 6, 8, 12, 20)
    budget: int = 8
    gamma: float = 0.0

    def __post_init__(self) -> None:
        if self.parity not in parity.MODES:
            raise usage_error("options", f"parity is {self.parity!r}", wanted=", ".join(parity.MODES), fix="choose one")
        if len(set(self.precisions)) < len(self.precisions) or not set(self.precisions) <= set(PRECISIONS):
            raise usage_error(
                "options",
                "these precisions cannot be written",
                seen=",".join(self.precisions),
                wanted=f"some of {', '.join(PRECISIONS)}, each once (f32 is always written)",
                fix=f"--precisions {','.join(PRECISIONS)}",
            )
        try:
            self.speculation(order_model=True)
        except ValueError as error:
            raise usage_error(
                "options", str(error), fix="such as --budgets 0,3,8,20 --budget 8 --gamma 0.05"
            ) from error

    @property
    def halves(self) -> tuple[str, ...]:
        """The 16-bit ones among `precisions`."""
        return tuple(precision for precision in self.precisions if precision in HALF_DTYPES)

    def speculation(self, *, order_model: bool) -> Speculation:
        """The manifest's section."""
        return Speculation(order_model, self.budgets, self.budget, self.gamma, 1.0, 0.6, "normalised")


def export_bundle(
    checkpoint_folder: Path,
    output: Path,
    *,
    order_model: Path | None,
    options: ExportOptions,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write a bundle.

    Args:
        order_model: folder of a trained order model; None makes a bundle that decodes draft-free only.
        force: replace a bundle that is already there.
        say: told what is being done.

    Raises:
        SpotDeployError: bad input, or a parity gate failed (exit code 3). Nothing is left behind then.
    """
    checkpoint = open_checkpoint(
        checkpoint_folder,
        block_width=options.block_width,
        mask_id=options.mask_id,
        stop_ids=options.stop_ids,
        max_positions=options.max_positions,
    )
    decoding = checkpoint.decoding
    # The longest golden prompt and what is traced after it.
    least = decoding.positions(2 * decoding.block_width + decoding.block_width // 3, parity.TRACE_TOKENS)
    least = max(4 * decoding.block_width, -(-least // decoding.block_width) * decoding.block_width)
    if decoding.max_positions < least:
        raise usage_error(
            "capacity",
            "the target's capacity is too small to check what is exported",
            seen=f"{decoding.max_positions} positions",
            wanted=f"{least} or more",
            fix=f"--max-positions {least}",
        )
    width_from = f"block width {decoding.block_width} ({checkpoint.width_from})"
    say(f"a {checkpoint.family.name} target: {width_from}, mask {decoding.mask_id}")
    order = load_order_model(order_model) if order_model is not None else None
    if order is not None:
        widths = order[1].get("block_widths")
        trained = ", ".join(map(str, widths)) if isinstance(widths, list) and widths else "unknown"
        say(f"an order model trained at block width {trained}; eval-drafter shows what it gains on this target")
    with staged_folder(output, force=force, ours=is_bundle) as stage:
        golden, named_tokens = _write_texts(checkpoint, stage)
        say("writing the weights")
        checkpoint.check_tied_head()
        shapes = dict(Decoder.shapes(checkpoint.spec))
        places = stream_weights(shapes, checkpoint.dtypes, checkpoint.tensor, stage / WEIGHTS)
        if checkpoint.spec.tied_head:
            places["head.weight"] = places["embed.weight"]
        shape, width = checkpoint.decoding.shape, checkpoint.decoding.block_width
        graphs: dict[str, Any] = {}
        for precision in ("f32", *options.halves):
            for layout in LAYOUTS:
                role = target_role(layout, precision)
                say(f"tracing {role}")
                model = trace_target(checkpoint.spec, checkpoint.banned, layout, shape, width, precision)
                save_graph(model, stage / f"{role}.onnx", external=places, prefix="decoder.")
                described = shape.signature(precision).as_dict()
                graphs[role] = {"file": f"{role}.onnx", "opset": opset(precision), "signature": described}
                if precision != "f32":
                    graphs[role]["float32_nodes"] = float32_nodes(model)
        if order is not None:
            say("tracing the order model")
            signature = order_signature(width)
            save_graph(trace_order_model(order[0], signature), stage / "order.onnx")
            graphs["order"] = {"file": "order.onnx", "opset": OPSET, "signature": signature.as_dict()}
        say(f"parity gates: {options.parity}")
        quantised = [precision for precision in options.precisions if precision in WEIGHT_PRECISIONS]
        # The whole network in memory, in float32: for a full comparison, and to quantise.
        tensors = checkpoint.tensors() if options.parity == "full" or quantised else {}
        measured, traces, golden_pass = _run_parity(checkpoint, tensors, stage, options, golden)
        np.savez(stage / GOLDEN_PASS, **vars(golden_pass))
        if order is not None and options.parity != "none":
            measured["measured"] |= _order_parity(order[0], stage / "order.onnx", width)
        if quantised:
            say("calibrating")
            usable = np.flatnonzero(~checkpoint.banned.numpy())
            decoder = load_decoder(checkpoint.spec, tensors)
            graph = TargetGraph(decoder, checkpoint.banned, "split", shape.raw_confidence)
            seen = quantize.calibrate(graph, checkpoint.decoding, usable, _golden_prompts(golden, width))
            for precision in quantised:
                say(f"quantising to {precision}")
                graphs |= _quantised_graphs(precision, stage, tensors, seen, checkpoint.decoding)
                measured["measured"] |= parity.against_f32(precision, stage, checkpoint.decoding, usable, traces)
        for precision in options.halves if options.parity == "full" else ():
            say(f"parity gates: {precision}")
            decoder = load_decoder(checkpoint.spec, tensors)
            half = in_dtype(load_decoder(checkpoint.spec, tensors), HALF_DTYPES[precision])
            modules = {x: TargetGraph(half, checkpoint.banned, x, shape.raw_confidence) for x in LAYOUTS}
            files = {layout: stage / f"{target_role(layout, precision)}.onnx" for layout in LAYOUTS}
            measured["measured"] |= parity.half_parity(checkpoint, decoder, precision, modules, files, traces)
        traced_by = "native" if options.parity == "full" else "our decoder"
        write_json(stage / GOLDEN, golden | {"traced_by": traced_by, "traces": [asdict(trace) for trace in traces]})
        manifest = _manifest(checkpoint, order, options, graphs, measured, named_tokens, stage)
        write_json(stage / MANIFEST, to_document(manifest))
    return manifest


def _quantised_graphs(
    precision: str,
    stage: Path,
    tensors: dict[str, torch.Tensor],
    seen: Mapping[str, quantize.Seen],
    decoding: Decoding,
) -> dict[str, Any]:
    """Write the graphs of a quantised precision; their entries of the manifest."""
    files = quantize.write_graphs(precision, stage, {x: f"target-{x}.onnx" for x in LAYOUTS}, tensors, seen)
    signature = decoding.shape.signature(precision).as_dict()
    return {
        target_role(layout, precision): {"file": file, "opset": quantize.OPSET, "signature": signature}
        for layout, file in files.items()
    }


def _order_parity(model: torch.nn.Module, path: Path, width: int) -> dict[str, Any]:
    """The traced order model against the one in torch, elementwise."""
    rng = np.random.default_rng(2)
    features = rng.standard_normal((5, width, FEATURES)).astype(np.float32)
    state_id = rng.integers(0, 4, (5, width))
    state_id[:, :2] = 0
    depth = np.arange(1, 6)
    masked = state_id == 0
    seen = ort.OrderModel(path, order_signature(width), 1).run(features, state_id, depth, masked)
    with torch.no_grad():
        wanted = model(*(torch.from_numpy(x) for x in (features, state_id, depth, masked))).numpy()
    gate = parity.Gate()
    gate.close("order.log_q", seen, wanted)
    return gate.measured


def _write_texts(checkpoint: Checkpoint, stage: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Copy tokenizer and template; encode the golden texts with the checkpoint's own tokenizer class.

    Returns:
        The golden encodings, and the named tokens that a template may use.
    """
    from transformers import PreTrainedTokenizerFast

    source = checkpoint.folder
    shutil.copyfile(checkpoint.text_folder / TOKENIZER, stage / TOKENIZER)
    try:
        native = PreTrainedTokenizerFast.from_pretrained(checkpoint.text_folder)
        template: Any = native.chat_template
    except Exception as error:  # whatever a damaged file makes transformers raise
        raise SpotDeployError(
            "checkpoint-tokenizer",
            "transformers cannot read the checkpoint's tokenizer files",
            seen=f"{type(error).__name__}: {error}".splitlines()[0][:200],
            wanted="tokenizer.json, tokenizer_config.json, special_tokens_map.json and added_tokens.json as published",
            fix="download them again, or leave out those that are optional",
        ) from error
    if isinstance(template, dict):
        if "default" not in template:
            raise SpotDeployError(
                "checkpoint-template",
                "the checkpoint has several chat templates, and none is the default",
                seen=", ".join(template),
                wanted="one named default",
                fix="name one of them default in tokenizer_config.json",
            )
        template = template["default"]
    if template is not None:
        write_text(stage / TEMPLATE, template)
    for name in CARRIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, stage / f"{Path(name).stem}.model{Path(name).suffix}")
    chats = []
    switches = (None, True, False) if template is not None and THINKING in template else (None,)
    for messages, thinking in itertools.product(GOLDEN_CHATS if template is not None else (), switches):
        more = {} if thinking is None else {THINKING: thinking}
        try:
            text = native.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
        except Exception as error:
            # A template may refuse, say, the system role (TemplateError itself); all else is a fault of its own.
            if messages == GOLDEN_CHATS[0] and type(error) is not TemplateError:
                raise _broken_template(error) from error
            continue
        ids = native.encode(text, add_special_tokens=False)
        chats.append({"messages": messages, "thinking": thinking, "ids": ids})

    def as_text(text: str) -> list[int]:
        ids: list[int] = native.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    # A user who spells out every special token: they stay text, and the template's own stay special.
    special = [token.content for token in native.added_tokens_decoder.values() if token.special]
    spelled = f"a{' '.join(special)}\nb"
    asked = [{"role": "user", "content": MARK}]
    around = native.apply_chat_template(asked, tokenize=False, add_generation_prompt=True) if chats else ""
    if around.count(MARK) == 1:
        before, after = (native.encode(part, add_special_tokens=False) for part in around.split(MARK))
        asked = [{"role": "user", "content": spelled}]
        chats.append({"messages": asked, "thinking": None, "ids": before + as_text(spelled) + after})
    encodings = [{"text": text, "ids": as_text(text)} for text in (*GOLDEN_TEXTS, spelled)]
    named = {name: token for name, token in native.special_tokens_map.items() if isinstance(token, str)}
    golden = {"encodings": encodings, "chats": chats}
    write_json(stage / GOLDEN, golden)
    try:
        Text(stage, checkpoint.decoding.reserved, named).check_golden(stage)
    except SpotDeployError as error:
        error.exit_code = VERIFICATION
        raise
    return golden, named


def _broken_template(error: Exception) -> SpotDeployError:
    return SpotDeployError(
        "checkpoint-template",
        "the checkpoint's chat template does not render a user's question",
        seen=f"{type(error).__name__}: {error}"[:200],
        fix="mend chat_template.jinja (or chat_template in tokenizer_config.json), or delete it to do without chat",
    )


def _golden_prompts(golden: dict[str, Any], width: int) -> list[list[int]]:
    """One prompt shorter than a block, one that fills blocks and ends inside one."""
    short = golden["encodings"][0]["ids"][: max(1, width // 2)]
    long = (golden["chats"][0]["ids"] if golden["chats"] else short * 9) * 9
    return [short, long[: 2 * width + width // 3]]


def _run_parity(
    checkpoint: Checkpoint,
    tensors: dict[str, torch.Tensor],
    stage: Path,
    options: ExportOptions,
    golden: dict[str, Any],
) -> tuple[dict[str, Any], Sequence[parity.Trace], parity.GoldenPass]:
    measured: dict[str, Any] = {}
    mode = options.parity
    prompts = _golden_prompts(golden, checkpoint.decoding.block_width)
    if mode == "full":
        graphs = {layout: stage / f"target-{layout}.onnx" for layout in LAYOUTS}
        measured, traces, golden_pass = parity.full_parity(checkpoint, tensors, graphs, prompts)
    else:
        measured = parity.layer_parity(checkpoint, options.halves) if mode == "layers" else {}
        golden_pass = parity.streamed_golden(checkpoint)
        traces = [parity.untraced(checkpoint.decoding, prompt) for prompt in prompts]
    return {"mode": mode, "against": checkpoint.family.name, "measured": measured}, traces, golden_pass


def _manifest(
    checkpoint: Checkpoint,
    order: tuple[Any, dict[str, object]] | None,
    options: ExportOptions,
    graphs: dict[str, Any],
    measured: dict[str, Any],
    named_tokens: dict[str, str],
    stage: Path,
) -> Manifest:
    from spot_deploy import __version__

    files = tuple(
        FileEntry(path.relative_to(stage).as_posix(), path.stat().st_size, sha256(path))
        for path in sorted(stage.rglob("*"))
        if path.is_file()
    )
    manifest = Manifest(
        bundle_id="",
        created_by=f"spot-deploy {__version__}",
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source={
            "family": checkpoint.family.name,
            "architecture": (checkpoint.config.get("architectures") or [None])[0],
            "checkpoint": checkpoint.name,
            "config_sha256": sha256(checkpoint.folder / "config.json"),
            "order_model": order[1] if order is not None else None,
            "versions": _versions(),
        },
        precision="fp32",
        decoding=checkpoint.decoding,
        named_tokens=named_tokens,
        speculation=options.speculation(order_model=order is not None),
        graphs=graphs,
        parity=measured,
        files=files,
    )
    return replace(manifest, bundle_id=bundle_id(to_document(manifest)))


def _versions() -> dict[str, str]:
    import importlib.metadata

    names = ("torch", "transformers", "onnxruntime", "onnxscript", "tokenizers", "jinja2", "numpy")
    return {name: importlib.metadata.version(name) for name in names}
