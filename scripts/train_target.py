"""Train a small block-diffusion target (SDAR, or full attention as LLaDA) and write it as a Hugging Face folder.

Method: masked diffusion with two streams. The noisy copy of a block attends to the clean copies of the blocks before it
and to itself (block diffusion, Arriola et al. 2025; SDAR). Per block a masking rate t ~ U(.03, 1), stratified over the
batch; cross-entropy on masked positions divided by t (by .15 at least). Only the answer is ever masked. Sequences are
padded with the end-of-text token to the next block edge and one block more, so that the model learns to fill a block
after its end.

Batches depend on (seed, step, worker) alone, so a run that was interrupted goes on exactly as if it had not been; and
since the learning rate is constant until its final fall, a run may be prolonged with more `--steps` before that.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import demo_data
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spot_deploy.engines.contracts import MASKED
from spot_deploy.engines.files import atomic_path, write_json, write_text
from spot_deploy.export.decoder import Decoder, DecoderSpec, masked_attend
from spot_deploy.export.families.llada import LLADA
from spot_deploy.export.families.sdar import SDAR
from spot_deploy.training.checkpoints import load_state, save_state
from spot_deploy.training.muon import Muon
from spot_deploy.training.schedule import set_learning_rate

LEAST_RATE = 0.15  # bounds the weights 1 / t and with them the noise of the gradient
END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with single digits, whose special tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, TURN_START, TURN_END, MASK]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(special)
    return tokenizer


@dataclass(frozen=True)
class Corpus:
    """Tokenised examples, padded to whole blocks: `ids[i]` with the answer from `start[i]` to `stop[i]`."""

    ids: list[np.ndarray]
    start: np.ndarray
    stop: np.ndarray
    buckets: list[np.ndarray]  # indices of examples with equal (blocks, first answer block)


def tokenise(items: list[dict[str, str]], tokenizer: Tokenizer, width: int, limit: int) -> Corpus:
    """Chat-format the examples; drop those over `limit` tokens."""
    prompts = tokenizer.encode_batch(
        [f"{TURN_START}user\n{i['prompt']}{TURN_END}\n{TURN_START}assistant\n" for i in items]
    )
    answers = tokenizer.encode_batch([i["answer"] + TURN_END for i in items])
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids, start, stop = [], [], []
    groups: dict[tuple[int, int], list[int]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        length = len(prompt.ids) + len(answer.ids)
        blocks = math.ceil(length / width) + 1
        if length > limit:
            continue
        row = np.full(blocks * width, end, np.int64)
        row[: len(prompt.ids)] = prompt.ids
        row[len(prompt.ids) : length] = answer.ids
        groups.setdefault((blocks, len(prompt.ids) // width), []).append(len(ids))
        ids.append(row)
        start.append(len(prompt.ids))
        stop.append(len(row))
    return Corpus(ids, np.array(start), np.array(stop), [np.array(g) for g in groups.values()])


@dataclass(frozen=True)
class Batch:
    clean: torch.Tensor  # [B, N]
    noisy: torch.Tensor  # [B, M]: the last M positions, some masked
    target: torch.Tensor  # [masked]
    weight: torch.Tensor  # [masked], 1 / max(t, LEAST_RATE)
    rows: torch.Tensor  # [masked], flat indices into [B, M]


def make_batch(corpus: Corpus, rng: np.random.Generator, tokens: int, width: int, mask_id: int) -> Batch:
    """A batch of about `tokens` clean tokens from one bucket; the noisy stream starts at the first answer block."""
    sizes = np.array([len(g) * len(corpus.ids[g[0]]) for g in corpus.buckets], float)
    group = corpus.buckets[rng.choice(len(sizes), p=sizes / sizes.sum())]
    length = len(corpus.ids[group[0]])
    picked = rng.choice(group, max(1, tokens // length))
    clean = np.stack([corpus.ids[i] for i in picked])
    first = corpus.start[picked[0]] // width * width
    noisy = clean[:, first:].copy()
    blocks = noisy.shape[1] // width
    position = np.arange(first, length)
    count = len(picked) * blocks
    rate = (rng.permutation(count) + rng.random(count)) / count * 0.97 + 0.03  # stratified
    rate = np.repeat(rate.reshape(len(picked), blocks), width, axis=1)
    masked = (rng.random(noisy.shape) < rate) & (position >= corpus.start[picked][:, None])
    target = noisy[masked]
    noisy[masked] = mask_id
    return Batch(
        torch.from_numpy(clean),
        torch.from_numpy(noisy),
        torch.from_numpy(target),
        torch.from_numpy((1 / np.maximum(rate[masked], LEAST_RATE)).astype(np.float32)),
        torch.from_numpy(np.flatnonzero(masked)),
    )


def two_stream_mask(length: int, noisy: int, width: int) -> torch.Tensor:
    """Additive [1, 1, N + M, N + M] for N clean positions followed by noisy copies of the last M."""
    position = torch.cat((torch.arange(length), torch.arange(length - noisy, length)))
    block = position // width
    is_noisy = torch.arange(length + noisy) >= length
    q_block, k_block = block[:, None], block[None]
    q_noisy, k_noisy = is_noisy[:, None], is_noisy[None]
    clean_sees = ~q_noisy & ~k_noisy & (k_block <= q_block)
    noisy_sees = q_noisy & ((~k_noisy & (k_block < q_block)) | (k_noisy & (k_block == q_block)))
    return torch.where(clean_sees | noisy_sees, 0.0, MASKED)[None, None]


def batch_loss(model: Decoder, batch: Batch, width: int, full_attention: bool) -> torch.Tensor:
    """Mean over the noisy positions of weighted cross-entropy."""
    length, noisy = batch.clean.shape[1], batch.noisy.shape[1]
    if full_attention:
        ids = torch.cat((batch.clean[:, : length - noisy], batch.noisy), 1)
        positions = torch.arange(length)
        mask = torch.zeros(1, 1, length, length)
    else:
        ids = torch.cat((batch.clean, batch.noisy), 1)
        positions = torch.cat((torch.arange(length), torch.arange(length - noisy, length)))
        mask = two_stream_mask(length, noisy, width)
    hidden, _ = model(ids, positions.expand(len(ids), -1), masked_attend(mask))
    hidden = hidden.view(len(ids), ids.shape[1], -1)[:, -noisy:].reshape(-1, hidden.shape[-1])
    losses = F.cross_entropy(model.logits(hidden[batch.rows]), batch.target, reduction="none")
    return (losses * batch.weight).sum() / (batch.noisy.numel())


def write_checkpoint(folder: Path, model: Decoder, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Write config, weights (bfloat16) and tokenizer as an ordinary Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    spec, full = model.spec, args.attention == "full"
    ids = {name: tokenizer.token_to_id(t) for name, t in {"end": END_OF_TEXT, "turn": TURN_END, "mask": MASK}.items()}
    common = {
        "vocab_size": spec.vocab,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "bos_token_id": ids["end"],
        "eos_token_id": ids["end"],
        "mask_token_id": ids["mask"],
        "torch_dtype": "bfloat16",
    }
    if full:
        sources = LLADA.sources(spec)
        config = {
            "architectures": ["LLaDAModelLM"],
            "model_type": "llada",
            "d_model": spec.hidden,
            "n_layers": spec.layers,
            "n_heads": spec.heads,
            "n_kv_heads": spec.kv_heads,
            "mlp_hidden_size": spec.intermediate,
            "embedding_size": spec.vocab,
            "weight_tying": spec.tied_head,
            "max_sequence_length": args.max_positions,
        }
    else:
        sources = SDAR.sources(spec)
        config = {
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "hidden_size": spec.hidden,
            "intermediate_size": spec.intermediate,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": spec.tied_head,
            "max_position_embeddings": args.max_positions,
            "block_size": args.width,
        }
    own = dict(model.named_parameters())
    with atomic_path(folder / "model.safetensors") as path:
        weights = {sources[n].names[0]: p.detach().to(torch.bfloat16).contiguous() for n, p in own.items()}
        save_file(weights, path, metadata={"format": "pt"})
    with atomic_path(folder / "tokenizer.json") as path:
        tokenizer.save(str(path))
    documents = {
        "config.json": config | common,
        "generation_config.json": {"eos_token_id": [ids["turn"], ids["end"]], "bos_token_id": ids["end"]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "mask_token": MASK,
            "model_max_length": args.max_positions,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, document in documents.items():
        write_json(folder / name, document)
    write_text(folder / "chat_template.jinja", CHAT_TEMPLATE)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path, help="Hugging Face folder to write")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and the log")
    parser.add_argument("--data", type=Path, help="folder with tinystories/ and e2e/ (see demo_data.py)")
    parser.add_argument("--examples", type=int, default=120_000)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--tokens", type=int, default=2_048, help="clean tokens a batch of one worker")
    parser.add_argument("--limit", type=int, default=256, help="longest example, tokens")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=32, help="block width")
    parser.add_argument("--attention", choices=("block", "full"), default="block")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use in place of a newly trained one")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--max-positions", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a batch of its own at every step")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast (pays with AMX or AVX512-BF16)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the loss")
    parser.add_argument("--save-every", type=int, default=100)
    return parser.parse_args()


def decoder_spec(args: argparse.Namespace, vocab: int) -> DecoderSpec:
    full = args.attention == "full"
    return DecoderSpec(
        vocab=vocab,
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.heads if full else args.kv_heads,
        head_dim=args.head_dim,
        intermediate=args.intermediate,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        qk_norm=not full,
        tied_head=True,
    )


def mean_over_workers(model: Decoder, workers: int) -> None:
    """Average the gradients over all workers, in one message."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient) / workers)


def train(worker: int, args: argparse.Namespace, corpus: Corpus, tokenizer_json: str) -> None:
    """Train on one of `args.workers` processes; worker 0 logs and saves."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.workers > 1:
        meeting = f"file://{(args.work / 'workers').absolute()}"
        dist.init_process_group("gloo", init_method=meeting, rank=worker, world_size=args.workers)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    full = args.attention == "full"
    model = Decoder(decoder_spec(args, tokenizer.get_vocab_size()))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    matrices = [p for p in model.layers.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1] + [model.embed.weight]
    optimizers = [
        Muon(matrices, lr=args.learning_rate),
        torch.optim.AdamW(others, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    forward = torch.compile(batch_loss, dynamic=True) if args.compile else batch_loss
    state = args.work / "state.safetensors"
    run = f"data {len(corpus.ids)} {corpus.start.sum()} seed {args.seed} tokens {args.tokens} workers {args.workers}"
    step = load_state(state, model, optimizers, run)
    mask_id = tokenizer.token_to_id(MASK)
    if worker == 0:
        log = (args.work / "log.jsonl").open("a", encoding="utf-8")
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{parameters} parameters, {len(corpus.ids)} examples, from step {step}", flush=True)
    began, recent = time.monotonic(), []
    while step < args.steps:
        rng = np.random.default_rng([args.seed, step, worker])
        batch = make_batch(corpus, rng, args.tokens, args.width, mask_id)
        for optimizer in optimizers:
            share = set_learning_rate(optimizer, step, steps=args.steps, warmup=args.warmup)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = forward(model, batch, args.width, full)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if args.workers > 1:
            mean_over_workers(model, args.workers)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        recent.append(loss.item())
        if worker == 0 and step % 25 == 0:
            line = {
                "step": step,
                "loss": round(float(np.mean(recent)), 4),
                "rate": round(share * args.learning_rate, 6),
                "seconds_per_step": round((time.monotonic() - began) / len(recent), 3),
            }
            print(json.dumps(line), file=log, flush=True)
            print(line, flush=True)
            began, recent = time.monotonic(), []
        if worker == 0 and (step % args.save_every == 0 or step == args.steps):
            save_state(state, model, optimizers, step, run)
            write_checkpoint(args.output, model, tokenizer, args)
    if args.workers > 1:
        dist.destroy_process_group()


def main() -> None:
    args = parse_arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    items = demo_data.examples(args.examples, args.seed, args.data, held_out=False)
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
        tokenizer.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END, MASK])
    else:
        texts = [text for i in items[:20_000] for text in (i["prompt"], i["answer"])]
        tokenizer = train_tokenizer(texts, args.vocab)
    corpus = tokenise(items, tokenizer, args.width, args.limit)
    (args.work / "workers").unlink(missing_ok=True)
    if args.workers > 1:
        mp.spawn(train, (args, corpus, tokenizer.to_str()), args.workers)
    else:
        train(0, args, corpus, tokenizer.to_str())


if __name__ == "__main__":
    main()
