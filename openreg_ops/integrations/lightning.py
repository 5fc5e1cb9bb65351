"""Import this module to train with `Trainer(accelerator="openreg")` or `Fabric(accelerator="openreg")`.

It works for `lightning`, and for `pytorch_lightning` and `lightning_fabric`, whether they are imported before or after
it. It uses Lightning's registry of accelerators. The two classes that interpret the arguments of Trainer and Fabric,
`_AcceleratorConnector` and `_Connector`, choose strategies, precision and the "auto" accelerator from lists of devices
without a way to extend them, so this module wraps three of their methods.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from openreg_ops.torch_patches.import_hooks import after_import


class _Openreg:
    """Lightning's accelerator interface, for Fabric and the Trainer."""

    def setup_device(self, device: torch.device) -> None:
        if device.type != "openreg":
            raise ValueError(f"expected an openreg device for accelerator='openreg', but the strategy has {device}")
        torch.openreg.set_device(device)

    def teardown(self) -> None:
        torch.openreg.empty_cache()

    def get_device_stats(self, device: torch.types.Device) -> dict[str, Any]:
        return torch.openreg.memory_stats(device)

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """The indices that `devices` means: a number of devices, -1 for all of them, a list, or a list as text."""
        count = torch.openreg.device_count()
        wanted = devices
        if isinstance(wanted, str):
            numbers = [int(number) for number in wanted.split(",") if number.strip()]
            wanted = numbers if "," in wanted else numbers[0]
        if isinstance(wanted, int):
            wanted = range(count if wanted == -1 else wanted)
        wanted = list(wanted)
        if not wanted or len(set(wanted)) != len(wanted) or not set(wanted) <= set(range(count)):
            raise ValueError(
                f"expected devices to name distinct openreg devices, of which there are {count}, but got {devices!r}; "
                "OPENREG_DEVICE_COUNT sets how many there are"
            )
        return wanted

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("openreg", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """One, because the devices share the host's processors: a second device makes no program faster."""
        return 1

    @staticmethod
    def is_available() -> bool:
        return torch.openreg.is_available()

    @staticmethod
    def name() -> str:
        return "openreg"


def _subclass(base: type, mixins: tuple[type, ...] = (), **members: Any) -> type:
    """A subclass that pickle finds in this module, as Lightning's strategies that spawn processes need."""
    name = "_".join(["", *base.__module__.split(".")[:2], base.__name__])
    globals()[name] = type(name, (*mixins, base), {**members, "__module__": __name__})
    return globals()[name]


def _adapt(
    connector: Any, registered: Any, base: type, strategies: Any, known: dict[str, Any], mixed: type, wraps: str
) -> None:
    """Register the device, and let `connector` choose what it needs.

    Args:
        connector: the class that reads the arguments of Trainer or Fabric.
        registered: Lightning's registry of accelerators.
        base: Lightning's Accelerator.
        strategies: Lightning's module of strategies.
        known: Lightning's registry of them.
        mixed: Lightning's MixedPrecision.
        wraps: the method of DDPStrategy that wraps a model.
    """
    methods = ("_choose_auto_accelerator", "_init_strategy", "_check_and_init_precision")
    missing = [name for name in methods if not hasattr(connector, name)]
    if missing:
        raise ImportError(
            f"openreg_ops.integrations.lightning expected {connector.__module__}.{connector.__name__} to have "
            f"{', '.join(missing)}, as in Lightning 2.6; install that version"
        )
    choose_auto, init_strategy, init_precision = (getattr(connector, name) for name in methods)
    single, ddp = strategies.SingleDeviceStrategy, strategies.DDPStrategy

    # Lightning wraps the model inside a CUDA stream wherever the device is not the CPU.
    def wrap(self: Any, model: torch.nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=[self.root_device.index], **self._ddp_kwargs)

    our_ddp = _subclass(ddp, **{wraps: wrap})
    accelerator = _subclass(base, mixins=(_Openreg,))

    def _choose_auto_accelerator() -> str:
        chosen = choose_auto()
        return "openreg" if chosen == "cpu" and accelerator.is_available() else chosen

    def _init_strategy(self: Any) -> None:
        if isinstance(self.accelerator, accelerator):
            flag = self._strategy_flag
            if flag == "single_device" or (type(flag) is single and flag.root_device.type == "cpu"):
                self._strategy_flag = single(device=self._parallel_devices[0])
            elif isinstance(flag, str) and known[flag]["strategy"] is ddp:
                self._strategy_flag = our_ddp(**known[flag]["init_params"])
        init_strategy(self)

    def _check_and_init_precision(self: Any) -> Any:
        flags = vars(self)  # the Trainer's names, and Fabric's
        plugin = flags.get("_precision_plugin_flag", flags.get("_precision_instance"))
        precision = flags.get("_precision_flag", flags.get("_precision_input"))
        ours = isinstance(self.accelerator, accelerator) and isinstance(self.strategy, (single, ddp))
        if ours and plugin is None and precision in ("16-mixed", "bf16-mixed"):
            return mixed(precision, device="openreg")
        return init_precision(self)

    registered.register("openreg", accelerator, description="The simulated accelerator of openreg_ops")
    connector._choose_auto_accelerator = staticmethod(_choose_auto_accelerator)
    connector._init_strategy = _init_strategy
    connector._check_and_init_precision = _check_and_init_precision


def _adapt_fabric(name: str) -> None:
    accelerators, strategies, connector = _modules(name, "connector")
    _adapt(
        connector._Connector,
        accelerators.ACCELERATOR_REGISTRY,
        accelerators.Accelerator,
        strategies,
        strategies.STRATEGY_REGISTRY,
        connector.MixedPrecision,
        "setup_module",
    )


def _adapt_trainer(name: str) -> None:
    accelerators, strategies, connector = _modules(name, _TRAINER_CONNECTOR)
    _adapt(
        connector._AcceleratorConnector,
        accelerators.AcceleratorRegistry,
        accelerators.Accelerator,
        strategies,
        strategies.StrategyRegistry,
        connector.MixedPrecision,
        "_setup_model",
    )


_TRAINER_CONNECTOR = "trainer.connectors.accelerator_connector"


def _modules(name: str, connector: str) -> list[Any]:
    return [importlib.import_module(f"{name}.{module}") for module in ("accelerators", "strategies", connector)]


def _register() -> None:
    fabrics = {"lightning": "lightning.fabric", "lightning_fabric": "lightning_fabric"}
    trainers = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
    found = [name for name in {**fabrics, **trainers} if importlib.util.find_spec(name)]
    if not found:
        raise ModuleNotFoundError(
            "openreg_ops.integrations.lightning needs Lightning; run `pip install lightning` (or pytorch-lightning, or "
            "lightning-fabric)"
        )
    for package in found:
        if name := fabrics.get(package):
            after_import(f"{name}.connector", functools.partial(_adapt_fabric, name))
        if name := trainers.get(package):
            after_import(f"{name}.{_TRAINER_CONNECTOR}", functools.partial(_adapt_trainer, name))


_register()
