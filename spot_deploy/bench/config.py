"""What `bench` shall measure: one TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from spot_deploy.engines.backends import BACKENDS
from spot_deploy.engines.errors import SpotDeployError, usage_error
from spot_deploy.runtime.manifest import HEDGE_WEIGHTS, MAX_BUDGET

SPOT = "SPOT"
METHODS = (SPOT, "SPOT chain", "free chain", "confidence tree", "draft graph", "position")
ORACLES = re.compile(r"(token|joint) t=([1-9]\d*)")
EXACT = ("coupled", "uncoupled")  # verifiers whose passes follow from a draft-free trajectory
CONFIGS, SETS = "configs", "sets"


@dataclass(frozen=True)
class Variant:
    """SPOT with other settings, for ablations and for order models of other targets; None keeps the bundle's."""

    name: str
    tau: float | None = None
    hedge_gate: float | None = None
    hedge_weights: str | None = None
    merge: bool = True
    chain: bool = False
    order_model: Path | None = None


@dataclass(frozen=True)
class Timing:
    """Decoding for real, drafted and draft-free in turns.

    Attributes:
        prompts: of every kind; 0: nothing is timed.
        methods, budgets: to time; none of the oracles, which need to have seen the end.
        repeats: of every decode.
    """

    prompts: int = 0
    methods: tuple[str, ...] = (SPOT,)
    budgets: tuple[int, ...] = (8,)
    repeats: int = 3


@dataclass(frozen=True)
class Graph:
    """Where the draft graph's formulas are counted: prompts that are not measured."""

    prompts: Path
    limit: int = 50


@dataclass(frozen=True)
class BenchConfig:
    """A grid of measurements on one bundle.

    Attributes:
        bundle: to measure.
        prompts: a prompt file, or the name of a set that the package brings.
        kinds: of prompts, all if empty; `per_kind` of each at most.
        chat: put prompts into the chat template.
        methods: see METHODS and ORACLES.
        budgets, gammas, temperatures, lengths, seeds: the grid. The longest length is decoded past the end of text;
            what shorter ones and stopping there would take is part of that. Mass floors are for SPOT and its chain.
        verifiers: `uncoupled`, `rejection` and `greedy` are for SPOT alone, above temperature 0.
        variants: of SPOT.
        graph: needed where the draft graph is among the methods.
        timing: what to time besides.
        run_code: let graders run the code that the target wrote, in a process of its own.
    """

    bundle: Path
    prompts: str
    kinds: tuple[str, ...] = ()
    per_kind: int = 100
    chat: bool = True
    backend: str = BACKENDS[0]
    methods: tuple[str, ...] = (*METHODS[:4], "position", "joint t=1", "joint t=2", "joint t=32")
    budgets: tuple[int, ...] = (3, 8, 20)
    gammas: tuple[float, ...] = (0.0,)
    temperatures: tuple[float, ...] = (0.0,)
    lengths: tuple[int, ...] = (128,)
    seeds: tuple[int, ...] = (0,)
    verifiers: tuple[str, ...] = ("coupled",)
    variants: tuple[Variant, ...] = ()
    graph: Graph | None = None
    timing: Timing = field(default_factory=Timing)
    run_code: bool = False

    def __post_init__(self) -> None:
        def rising(values: tuple[Any, ...], low: float, high: float, kind: Any) -> bool:
            numbers = all(isinstance(v, kind) and not isinstance(v, bool) and low <= v <= high for v in values)
            return bool(values) and numbers and sorted(set(values)) == list(values)

        real = (int, float)
        names = [v.name for v in self.variants]
        checks = {
            f"backend {self.backend!r}; there are {', '.join(BACKENDS)}": self.backend in BACKENDS,
            f"methods {self.methods!r}; there are {', '.join(METHODS)}, token t=N, joint t=N": bool(self.methods)
            and all(m in METHODS or ORACLES.fullmatch(m) for m in self.methods),
            f"budgets {self.budgets!r}; wanted: rising, within 1..{MAX_BUDGET}": rising(
                self.budgets, 1, MAX_BUDGET, int
            ),
            f"gammas {self.gammas!r}; wanted: rising, from 0": rising(self.gammas, 0, 1e9, real),
            f"temperatures {self.temperatures!r}; wanted: rising, 0 or within 0.01..100": rising(
                self.temperatures, 0, 100, real
            )
            and all(t == 0 or t >= 0.01 for t in self.temperatures),
            f"lengths {self.lengths!r}; wanted: rising, from 1": rising(self.lengths, 1, 2**31, int),
            f"seeds {self.seeds!r}; wanted: rising, from 0": rising(self.seeds, 0, 2**63, int),
            f"per_kind {self.per_kind!r}; wanted: 1 or more": type(self.per_kind) is int and self.per_kind >= 1,
            f"verifiers {self.verifiers!r}; there are coupled, uncoupled, rejection, greedy": bool(self.verifiers)
            and set(self.verifiers) <= {*EXACT, "rejection", "greedy"},
            "the draft graph is among the methods; wanted: [graph] with prompts that are not measured": self.graph
            is not None
            or "draft graph" not in self.methods,
            f"variants {names}; wanted: names of their own": len({*names, *METHODS}) == len(names) + len(METHODS),
            f"hedge_weights of a variant; there are {', '.join(HEDGE_WEIGHTS)}": all(
                v.hedge_weights in (None, *HEDGE_WEIGHTS) for v in self.variants
            ),
            f"timing of {self.timing.methods!r}; wanted: methods that need not know the end": all(
                m in METHODS[:5] or m in names for m in self.timing.methods
            ),
        }
        bad = [text for text, right in checks.items() if not right]
        if bad:
            raise ValueError("; ".join(bad))


def read_config(path: Path) -> BenchConfig:
    """Read a configuration; paths in it are taken from where the file lies.

    Args:
        path: a file, or the name of a configuration that the package brings (`demo`, `paper`), whose paths are taken
            from the working directory.

    Raises:
        SpotDeployError: it cannot be read, or names what there is not (exit code 2).
    """
    text = show_config(path)
    try:
        return _from_document(tomllib.loads(text), Path() if _brought(path) else path.parent)
    except (ValueError, TypeError, KeyError) as error:
        raise _bad_config(path, error) from error


def show_config(path: Path) -> str:
    """The text of a configuration; arguments and errors as `read_config`."""
    try:
        if _brought(path):
            return resources.files(__package__).joinpath(CONFIGS, f"{path}.toml").read_text(encoding="utf-8")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_config(path, error) from error


def _brought(path: Path) -> bool:
    return not path.suffix and not path.is_file()


def _bad_config(path: Path, error: object) -> SpotDeployError:
    names = sorted(p.name.removesuffix(".toml") for p in resources.files(__package__).joinpath(CONFIGS).iterdir())
    return usage_error(
        "bench-config",
        f"cannot use the configuration {path}",
        seen=str(error)[:300],
        wanted=f"a TOML file, or one of {', '.join(names)}",
        fix="mend it; spot-deploy bench NAME --show prints one that the package brings",
    )


def _from_document(document: Mapping[str, Any], folder: Path) -> BenchConfig:
    values = _values(BenchConfig, document)
    values["bundle"] = folder / document["bundle"]
    if "." in str(document["prompts"]):
        values["prompts"] = str(folder / document["prompts"])
    variants = []
    for entry in document.get("variants", []):
        chosen = _values(Variant, entry)
        if "order_model" in entry:
            chosen["order_model"] = folder / entry["order_model"]
        variants.append(Variant(**chosen))
    values["variants"] = tuple(variants)
    if "graph" in document:
        graph = _values(Graph, document["graph"])
        values["graph"] = Graph(**graph | {"prompts": folder / graph["prompts"]})
    if "timing" in document:
        values["timing"] = Timing(**_values(Timing, document["timing"]))
    return BenchConfig(**values)


def _values(kind: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by name, lists as tuples; raises ValueError for names that are none."""
    known = {f.name for f in fields(kind)}
    if unknown := sorted(set(document) - known):
        raise ValueError(f"unknown: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
