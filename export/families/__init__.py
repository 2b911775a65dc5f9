"""Checkpoint families: from a published config and tensor names to the one decoder. No remote code is ever loaded."""

from __future__ import annotations

from spot_deploy.engines.errors import SpotDeployError
from spot_deploy.export.families.a2d import A2D
from spot_deploy.export.families.dream import DREAM
from spot_deploy.export.families.family import Config, Family, Fields, Source, native_weights
from spot_deploy.export.families.fast_dllm import FAST_DLLM
from spot_deploy.export.families.llada import LLADA
from spot_deploy.export.families.llada2 import LLADA2
from spot_deploy.export.families.llada_moe import LLADA_MOE
from spot_deploy.export.families.sdar import SDAR
from spot_deploy.export.families.sdar_moe import SDAR_MOE
from spot_deploy.export.families.stable_diffcoder import STABLE_DIFFCODER

__all__ = ["FAMILIES", "Config", "Family", "Fields", "Source", "find_family", "native_weights"]

FAMILIES = (
    SDAR,
    SDAR_MOE,
    LLADA2,
    LLADA,
    LLADA_MOE,
    DREAM,
    FAST_DLLM,
    STABLE_DIFFCODER,
    *A2D,
)
REFUSED = {
    "DiffusionGemmaForBlockDiffusion": "DiffusionGemma has no mask token: it draws tokens anew until they settle, so "
    "there is no order of commits to predict",
}


def find_family(config: Config, name: str) -> Family:
    """The family of a config.json, by `architectures[0]` or a class that `auto_map` names, then by `model_type`.

    Args:
        name: of the checkpoint, for what some configs leave out.

    Raises:
        SpotDeployError: none that export knows, or one that SPOT cannot decode.
    """
    stated = config.get("architectures") or [None]
    architecture = stated if isinstance(stated, str) else stated[0]
    model_type = config.get("model_type")
    mapped = {str(value).rsplit(".", 1)[-1] for value in (config.get("auto_map") or {}).values()}
    reason = next((REFUSED[name] for name in (architecture, *mapped) if name in REFUSED), None)
    fitting = [family for family in FAMILIES if architecture in family.architectures]
    if not fitting:
        fitting = [family for family in FAMILIES if mapped & set(family.architectures)]
    if architecture is None and not fitting:
        fitting = [family for family in FAMILIES if model_type in family.model_types]
    fitting = [family for family in fitting if family.fits(name)]
    if fitting and reason is None:
        reason = fitting[0].refused(config, name)
        if reason is None:
            return fitting[0]
    if reason is not None:
        raise SpotDeployError(
            "checkpoint-refused", "SPOT cannot decode this checkpoint", seen=name, wanted=reason, fix="use another one"
        )
    raise SpotDeployError(
        "checkpoint-family",
        "export does not know this architecture",
        seen=f"architectures {config.get('architectures')!r}, model_type {model_type!r}",
        wanted=", ".join(sorted({name for family in FAMILIES for name in family.architectures})),
        fix="use a checkpoint of one of these families",
    )
