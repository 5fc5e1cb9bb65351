"""Optimizers on the operators of openreg_ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

from openreg_ops.meta import op
from openreg_ops.meta.adamw_step_ import adamw_step_


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with one kernel launch a step: `openreg_ops.adamw_step_` updates all tensors of a device.

    Arguments, state and state_dict are the same as torch's, and each loads what the other saves. Schedulers, hooks,
    GradScaler and torch.compile work as with torch's. These arguments differ:

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as for `torch.optim.AdamW`.
        foreach, fused: None, or the value that they have here, False and True; any other value is an error.
        capturable: has no effect, because steps are always counted on the device.
        differentiable: True is an error, because the step has no derivative.
        state_dtype: `torch.float32` keeps the moments of half-type parameters in float32. Default: the parameter's.

    Example:
        >>> model = torch.nn.Linear(3, 1, device="openreg")
        >>> optimizer = openreg_ops.AdamW(model.parameters(), lr=0.1)
        >>> before = model.weight.detach().clone()
        >>> model(torch.ones(2, 3, device="openreg")).sum().backward()
        >>> optimizer.step()
        >>> torch.equal(model.weight, before)
        False
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if foreach:
            raise ValueError("AdamW: expected foreach of None or False, but got True; use torch.optim.AdamW for that")
        if fused is False:
            raise ValueError("AdamW: expected fused of None or True, but got False; use torch.optim.AdamW for that")
        if differentiable:
            raise ValueError("AdamW: expected differentiable of False, but got True; use torch.optim.AdamW for that")
        if state_dtype not in (None, torch.float32):
            raise ValueError(f"AdamW: expected state_dtype of None or torch.float32, but got {state_dtype}")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=None,
            capturable=capturable,
            fused=True,
        )
        self.defaults["state_dtype"] = state_dtype
        for group in self.param_groups:
            group.setdefault("state_dtype", state_dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return the closure's result, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[], [], [], [], [], []]
            self._init_group(group, *lists)
            params = lists[0]
            for device in dict.fromkeys(p.device for p in params):
                here = [[x for x, p in zip(tensors, params, strict=False) if p.device == device] for tensors in lists]

                def scalar(x: Any, device: torch.device = device) -> Any:
                    return x.to(device).reshape(()) if isinstance(x, Tensor) else x

                adamw_step_(
                    *here,
                    lr=scalar(group["lr"]),
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=group["amsgrad"],
                    maximize=group["maximize"],
                    grad_scale=scalar(getattr(self, "grad_scale", None)),
                    found_inf=scalar(getattr(self, "found_inf", None)),
                )
        return loss

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        if group["state_dtype"] is not None:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self.state[p] = _initial_state(p, group["amsgrad"])
        return super()._init_group(group, *lists)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what this optimizer or `torch.optim.AdamW` saved; steps move to the parameters' device."""
        # A hook that runs after all others sees the dict as they left it.
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: setattr(self, "_loaded", loaded))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            vars(self).pop("_loaded", None)

    def _restore_moments(self, loaded: StateDict) -> None:
        """Restore from the dict the states that are wider than their parameters: torch has cast them to the parameters'
        dtype."""
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            if group["state_dtype"] is None:
                continue
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name, value in loaded["state"].get(key, {}).items():
                    if name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                        self.state[p][name] = value.to(device=p.device, dtype=op.acc_dtype(p.dtype))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(fused=True, foreach=None, differentiable=False)
            group.setdefault("state_dtype", self.defaults.get("state_dtype"))
            for p in group["params"]:
                if "step" in self.state.get(p, ()):  # which torch.optim.AdamW keeps on the CPU
                    self.state[p]["step"] = self.state[p]["step"].to(device=p.device, dtype=torch.float32)
        if "_loaded" in vars(self):  # before torch runs the post-load hooks
            self._restore_moments(vars(self).pop("_loaded"))


def _initial_state(p: Tensor, amsgrad: bool) -> dict[str, Tensor]:
    names, dtype = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])], op.acc_dtype(p.dtype)
    moments = {name: torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format) for name in names}
    return {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}
