"""The optimiser of matrices inside networks."""

from __future__ import annotations

import torch


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are orthogonalised, for matrices (Jordan et al. 2024; scale: Liu et al. 2025).

    torch.optim.Muon iterates in bfloat16, which takes 13 s a step on a CPU that lacks it (float32: 0.4 s).
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(average, group["momentum"])
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(x.T if tall else x, alpha=-0.2 * group["lr"] * max(p.shape) ** 0.5)
