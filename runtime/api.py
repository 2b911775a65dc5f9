"""The public API: load a bundle, generate, stream.

    with Runtime.load("demo.spot") as runtime:
        print(runtime.generate("Once upon a time", budget=8).text)

A `Runtime` may be shared by threads: it is read-only after loading, and every call has its own cache and state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from spot_deploy.engines import backends
from spot_deploy.engines.contracts import WEIGHT_PRECISIONS, Array, OrderSession, TargetSession
from spot_deploy.engines.defaults import Defaults, read_defaults
from spot_deploy.engines.errors import usage_error
from spot_deploy.engines.record import EngineRecord, open_record
from spot_deploy.runtime.bundle import Bundle, open_bundle
from spot_deploy.runtime.decode import CommitEvent, DecodeOptions, Figures, Observer, decode
from spot_deploy.runtime.drafters import Drafter, SpotDrafter
from spot_deploy.runtime.manifest import Decoding
from spot_deploy.runtime.rejection import SampledChain
from spot_deploy.runtime.target import RequestTarget, request_target
from spot_deploy.runtime.text import Detokenizer, Message, Text


@dataclass(frozen=True)
class TextEvent:
    """A piece of text that is settled: everything before it is known and none of it will change."""

    text: str


@dataclass(frozen=True)
class Result:
    """Text and figures of one run. Counts are explained at `decode.Figures`.

    Attributes:
        text: what `token_ids` decode to.
        token_ids: generated ids, cut at max_new_tokens and before the first stop id.
        finish_reason: `stop` (a stop id) or `length`.
        fetched: bytes of the engine's output that were read: heads, and single rows of logits.
        seconds: wall time from the first pass to the end; in a stream it includes what the reader does between events.
        exact: whether the law of the output is proven to be the target's own, in this engine.
        lossless: whether it is proven to be that of draft-free decoding in the same mode; `exact` says less only where
            attention is full and the cache frozen.
        exactness: both in words, with the reason where something is not proven.
        precision: what the engine's graph is in; `exact` speaks of this graph (int8 and int4 are other networks).
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    nfe: int
    prefill_forwards: int
    store_forwards: int
    refresh_forwards: int
    given: int
    commits: int
    accepted: int
    rounds: int
    drafted: int
    accepted_per_round: list[int]
    rejections: dict[str, int]
    fetched: int
    seconds: float
    phases: dict[str, float]
    prompt_tokens: int
    budget: int
    gamma: float
    temperature: float
    seed: int
    verifier: str
    backend: str
    exact: bool
    lossless: bool
    exactness: str
    precision: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Finished:
    """The last event of a stream."""

    result: Result


Event = CommitEvent | TextEvent | Finished


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and all(isinstance(item.get(key), str) for key in ("role", "content"))


class Runtime:
    """A loaded bundle on one backend. Make it with `Runtime.load`; a context manager."""

    def __init__(
        self,
        *,
        decoding: Decoding,
        defaults: DecodeOptions,
        text: Text,
        target: TargetSession,
        order_model: OrderSession | None,
        backend: str,
        exact_budget: int,
        precision: str = "f32",
        why_unproven: str = "",
        most_budget: int | None = None,
        bundle_id: str = "",
    ):
        self.decoding = decoding
        self.text = text
        self.order_model = order_model
        self.backend = backend
        self.exact_budget, self._most_budget = exact_budget, most_budget
        self.precision, self._why_unproven = precision, why_unproven
        self.bundle_id = bundle_id
        self._defaults = defaults
        self._target: TargetSession | None = target

    @classmethod
    def load(cls, path: str | Path, *, backend: str = "onnxruntime", threads: int | None = None) -> Runtime:
        """Check a bundle and open its engine.

        Args:
            path: the bundle folder.
            backend: which engine; it must have been built by `spot-deploy build-engine`.
            threads: in place of the engine record's; results are then called exact only without drafts, since the
                probe was made with the record's.

        Raises:
            SpotDeployError: the bundle is damaged, the engine is missing or was built elsewhere, or the backend cannot
                run here.
        """
        backends.require(backend)
        bundle = open_bundle(Path(path))
        record = open_record(bundle.path, backend, bundle.manifest.bundle_id)
        return cls.from_bundle(bundle, record, threads=threads)

    @classmethod
    def from_bundle(
        cls,
        bundle: Bundle,
        record: EngineRecord,
        *,
        threads: int | None = None,
        target: TargetSession | None = None,
        engines: Path | None = None,
    ) -> Runtime:
        """Open the engine that `record` describes on a checked bundle; or take a target session that is open.

        Args:
            engines: folder of compiled engines, in place of the bundle's own.
        """
        manifest, inputs = bundle.manifest, record.inputs
        if target is None:
            target = bundle.open_target(record, threads=threads, engines=engines)
        order = None
        if manifest.speculation.order_model:
            order = bundle.open_order_model(record, threads=threads, engines=engines)
        text = Text(bundle.path, manifest.decoding.reserved, manifest.named_tokens)
        text.check_golden(bundle.path)
        spec = manifest.speculation
        own = read_defaults(bundle.path, inputs.backend) if engines is None else None
        own = own or Defaults(min(spec.budget, inputs.budgets[-1]), spec.gamma, spec.tau, spec.hedge_gate)
        return cls(
            decoding=manifest.decoding,
            defaults=DecodeOptions(
                budget=own.budget if order is not None else 0,
                gamma=own.gamma,
                tau=own.tau,
                hedge_gate=own.hedge_gate,
                hedge_weights=spec.hedge_weights,
            ),
            text=text,
            target=target,
            order_model=order,
            backend=inputs.backend,
            most_budget=inputs.budgets[-1] if backends.compiles(inputs.backend) else None,
            exact_budget=record.exact_budget(threads or inputs.threads),
            precision=inputs.precision,
            why_unproven=record.why_unproven(threads or inputs.threads),
            bundle_id=manifest.bundle_id,
        )

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the engine go. Calls after it raise; calls that still run finish."""
        self._target = None
        self.order_model = None

    def prompt_ids(self, prompt: str | Sequence[int] | Sequence[Message], thinking: bool | None = None) -> Array:
        """Token ids of a prompt: plain text, token ids, or chat messages.

        Args:
            thinking: for messages, the chat template's switch; None leaves it at the template's default.

        Raises:
            SpotDeployError: empty where the target has no bos id, or an id outside the vocabulary; see Text.render.
        """
        for text in [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if _is_message(m)]:  # type: ignore[index]
            if any("\ud800" <= c <= "\udfff" for c in text):
                raise usage_error(
                    "prompt-encoding", "the prompt is not Unicode text", seen=ascii(text)[:80], fix="mend it"
                )
        if isinstance(prompt, str):
            ids = self.text.encode(prompt)
        elif all(isinstance(i, int | np.integer) for i in prompt):
            ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        elif all(_is_message(m) for m in prompt):
            ids = self.text.encode_chat(prompt, thinking)  # type: ignore[arg-type]
        else:
            raise usage_error(
                "prompt-type",
                "the prompt is neither text, token ids, nor messages",
                seen=repr(prompt)[:200],
                wanted='"text", [1, 2, 3], or [{"role": "user", "content": "text"}]',
                fix="give one of these",
            )
        bad = [i for i in ids if not 0 <= i < self.decoding.shape.vocab or i == self.decoding.mask_id]
        if bad:
            raise usage_error(
                "prompt-ids",
                "the prompt holds ids that are no text of this target",
                seen=str(bad[:8]),
                wanted=f"0..{self.decoding.shape.vocab - 1}, and not the mask {self.decoding.mask_id}",
                fix="tokenize with the bundle's tokenizer",
            )
        if not ids:
            if self.decoding.bos_id is None:
                raise usage_error(
                    "prompt-empty", "this target has no bos token, so the prompt may not be empty", fix="give a prompt"
                )
            ids = [self.decoding.bos_id]
        return np.array(ids, np.int64)

    def resolve(self, options: DecodeOptions) -> DecodeOptions:
        """Options with the bundle's defaults filled in."""
        names = ("budget", "gamma", "tau", "hedge_gate", "hedge_weights")
        filled = {name: getattr(self._defaults, name) for name in names if getattr(options, name) is None}
        return replace(options, **filled)

    def spot_drafter(self, options: DecodeOptions) -> SpotDrafter:
        """SPOT with resolved options.

        Raises:
            SpotDeployError: the bundle has no order model.
        """
        if self.order_model is None:
            raise usage_error(
                "no-order-model",
                "this bundle has no order model, so nothing can be drafted",
                seen=f"budget {options.budget}",
                fix="use budget 0, or export again with --order-model",
            )
        return SpotDrafter.of(self.order_model, options)

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        options: DecodeOptions | None = None,
        *,
        thinking: bool | None = None,
        drafter: Drafter | None = None,
        observe: Observer | None = None,
        **changes: Any,
    ) -> Result:
        """Decode one prompt to the end.

        Args:
            prompt: text, token ids, or chat messages (dicts with role and content).
            options: how to decode; `changes` are fields of DecodeOptions set on top.
            thinking: see `prompt_ids`.
            drafter: in place of SPOT (oracles, experiments).
            observe: see `decode.decode`.

        Raises:
            SpotDeployError: see `prompt_ids`, `spot_drafter`; or prompt and generation exceed the capacity.
        """
        for event in self.stream(prompt, options, thinking=thinking, drafter=drafter, observe=observe, **changes):
            if isinstance(event, Finished):
                return event.result
        raise AssertionError("a stream ends with Finished")

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        options: DecodeOptions | None = None,
        *,
        thinking: bool | None = None,
        drafter: Drafter | None = None,
        observe: Observer | None = None,
        **changes: Any,
    ) -> Iterator[Event]:
        """Decode one prompt, yielding a CommitEvent per commit, TextEvents as text settles, and Finished at the end.

        Arguments and errors as `generate`; errors in the arguments are raised here, before the first event.
        """
        if self._target is None:
            raise RuntimeError("this Runtime was closed")
        options = self.resolve(replace(options or DecodeOptions(), **changes))
        ids = self.prompt_ids(prompt, thinking)
        decoding = self.decoding
        if options.whole and decoding.exact_cache:
            raise usage_error(
                "whole",
                "whole sequences are for targets with full attention",
                seen="a block-causal target, which is decoded exactly as it is",
                fix="leave out --whole (whole=True)",
            )
        if not options.fuse and (decoding.given_start or not decoding.exact_cache):
            raise usage_error(
                "fuse",
                "this target never opens a block in the pass that stores the one before",
                seen="its blocks' first tokens are given" if decoding.given_start else "full attention",
                fix="leave out --no-fuse",
            )
        wanted = decoding.positions(len(ids), options.max_new_tokens)
        if wanted > decoding.max_positions:
            room = decoding.max_positions - len(ids)
            if not decoding.exact_cache:  # blocks begin at the prompt's end
                room = room // decoding.block_width * decoding.block_width
            raise usage_error(
                "capacity",
                "prompt and generation do not fit the target",
                seen=f"{len(ids)} prompt tokens + {options.max_new_tokens} new, rounded up to {wanted} positions",
                wanted=f"at most {decoding.max_positions}",
                fix=f"--max-new-tokens {room} or less" if room > 0 else "shorten the prompt",
            )
        if self._most_budget is not None and (options.budget or 0) > self._most_budget:
            raise usage_error(
                "budget",
                "the engine was not compiled for so many drafts in a pass",
                seen=f"budget {options.budget}",
                wanted=f"at most {self._most_budget}",
                fix=f"--budget {self._most_budget} or less, or build-engine --budgets with a larger one",
            )
        if drafter is None and options.budget:
            drafter = self.spot_drafter(options)
            if options.verifier == "rejection":
                drafter = SampledChain(drafter.order_model, drafter.tau)
        target = request_target(
            self._target,
            decoding,
            options.temperature,
            padded=options.padded,
            fuse=options.fuse,
            whole=options.whole,
        )
        return self._events(target, ids, options, drafter, observe)

    def _exactness(self, options: DecodeOptions, exact: bool, lossless: bool, refreshes: int) -> str:
        """`exact` and `lossless` in words."""
        if exact:
            if self.precision in WEIGHT_PRECISIONS:
                return f"yes, of the {self.precision} graph (another network than the float32 one)"
            return "yes" if options.verifier != "rejection" else "yes, in law: not the draft-free text of this seed"
        frozen = f"no (frozen cache, refreshed by {refreshes} of the passes; --whole is exact)" if refreshes else ""
        if lossless:
            return frozen + "; equal to draft-free decoding over such a cache: yes"
        if not options.exact:
            return "no (the greedy verifier is not, above temperature 0)"
        why = self._why_unproven
        if not why:
            why = f"the engine was probed up to budget {self.exact_budget}: use that, or build with a larger one"
        return (f"{frozen}; equal to draft-free decoding: " if frozen else "") + f"not proven ({why})"

    def _events(
        self,
        target: RequestTarget,
        ids: Array,
        options: DecodeOptions,
        drafter: Drafter | None,
        observe: Observer | None,
    ) -> Iterator[Event]:
        began = time.perf_counter()
        decoding, figures = self.decoding, Figures()
        length = decoding.positions(len(ids), options.max_new_tokens)
        sequence = np.full(length, decoding.mask_id, np.int64)
        sequence[: len(ids)] = ids
        limit = len(ids) + options.max_new_tokens
        settled = len(ids)
        stopped = False
        detokenizer, text = Detokenizer(self.text), ""
        for event in decode(target, decoding, ids, options, drafter, figures, observe):
            yield event
            sequence[event.position] = event.token
            before = settled
            while not stopped and settled < limit and sequence[settled] != decoding.mask_id:
                stopped = not options.ignore_eos and int(sequence[settled]) in decoding.stop_ids
                settled += not stopped
            if settled > before:
                piece = detokenizer.update(sequence[len(ids) : settled].tolist())
                text += piece
                if piece:
                    yield TextEvent(piece)
        token_ids = sequence[len(ids) : settled].tolist()
        piece = detokenizer.update(token_ids, final=True)
        text += piece
        if piece:
            yield TextEvent(piece)
        seconds, phases = time.perf_counter() - began, figures.phases
        phases["target"] = target.seconds - phases["prefill"]
        phases["host"] = seconds - target.seconds - phases["draft"]
        exact_here = options.sequential or (options.budget or 0) <= self.exact_budget
        exact = options.exact and (decoding.exact_cache or options.whole) and exact_here
        lossless = options.exact and exact_here and options.verifier != "rejection"
        yield Finished(
            Result(
                text=text,
                token_ids=token_ids,
                finish_reason="stop" if stopped else "length",
                nfe=figures.nfe,
                prefill_forwards=target.prefill_forwards,
                store_forwards=target.store_forwards,
                refresh_forwards=target.refresh_forwards,
                given=figures.given,
                commits=figures.commits,
                accepted=figures.accepted,
                rounds=figures.rounds,
                drafted=figures.drafted,
                accepted_per_round=figures.accepted_per_round,
                rejections=figures.rejections,
                fetched=target.fetched,
                seconds=seconds,
                phases=phases,
                prompt_tokens=len(ids),
                budget=options.budget or 0,
                gamma=options.gamma or 0.0,
                temperature=options.temperature,
                seed=options.seed,
                verifier=options.verifier,
                backend=self.backend,
                exact=exact,
                lossless=lossless,
                exactness=self._exactness(options, exact, lossless, target.refresh_forwards),
                precision=self.precision,
            )
        )
