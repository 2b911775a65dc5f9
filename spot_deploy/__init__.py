"""spot-deploy: run diffusion language models fast and losslessly.

The public API; everything is imported on first use, so that `import spot_deploy` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spot_deploy.building import build_engine
    from spot_deploy.engines.errors import SpotDeployError
    from spot_deploy.runtime.api import Finished, Result, Runtime, TextEvent
    from spot_deploy.runtime.decode import CommitEvent, DecodeOptions

__version__ = "0.1.0"

_HOME = {
    "Runtime": "spot_deploy.runtime.api",
    "Result": "spot_deploy.runtime.api",
    "TextEvent": "spot_deploy.runtime.api",
    "Finished": "spot_deploy.runtime.api",
    "CommitEvent": "spot_deploy.runtime.decode",
    "DecodeOptions": "spot_deploy.runtime.decode",
    "SpotDeployError": "spot_deploy.engines.errors",
    "build_engine": "spot_deploy.building",
}
__all__ = [
    "CommitEvent",
    "DecodeOptions",
    "Finished",
    "Result",
    "Runtime",
    "SpotDeployError",
    "TextEvent",
    "build_engine",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
