"""Nonuniform tensor parallelism for PyTorch Lightning: replicas of unequal tensor-parallel degree train one model exactly.

import lightning as L, lightning_ntp        # registers strategy="ntp", also for pytorch_lightning

L.Trainer(strategy="ntp", devices=8).fit(module, data)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lightning_ntp.errors import (
    ConfigError,
    NTPError,
    PlanMismatchError,
    RankLostError,
    UnrecoverableError,
    UnsupportedModelError,
)
from lightning_ntp.goodput import Ledger
from lightning_ntp.layout import ShardLayout
from lightning_ntp.reshard import plan_reshard
from lightning_ntp.stragglers import SlowConfig
from lightning_ntp.strategy.registration import register
from lightning_ntp.topology import Topology

if TYPE_CHECKING:
    from lightning_ntp.dtensor.placement import UnevenShard
    from lightning_ntp.simulator import simulate
    from lightning_ntp.strategy.alerts import AlertConfig
    from lightning_ntp.strategy.callback import ReshardOnGPULossLogic as ReshardOnGPULoss
    from lightning_ntp.strategy.config import CheckpointConfig, RecoveryConfig
    from lightning_ntp.strategy.hub_models import from_pretrained
    from lightning_ntp.strategy.strategy import NTPStrategyLogic as NTPStrategy

_HOMES = {
    "AlertConfig": "strategy.alerts",
    "CheckpointConfig": "strategy.config",
    "RecoveryConfig": "strategy.config",
    "UnevenShard": "dtensor.placement",
    "from_pretrained": "strategy.hub_models",
    "simulate": "simulator",
}
"""Public names that need torch or NumPy, and where they live: imported when first asked for, as torch takes seconds."""

__all__ = [
    "AlertConfig",
    "CheckpointConfig",
    "ConfigError",
    "Ledger",
    "NTPError",
    "NTPStrategy",
    "PlanMismatchError",
    "RankLostError",
    "RecoveryConfig",
    "ReshardOnGPULoss",
    "ShardLayout",
    "SlowConfig",
    "Topology",
    "UnevenShard",
    "UnrecoverableError",
    "UnsupportedModelError",
    "from_pretrained",
    "plan_reshard",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in ("NTPStrategy", "ReshardOnGPULoss"):
        only_old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
        framework = "pytorch_lightning" if only_old else "lightning.pytorch"
        if name == "NTPStrategy":
            return importlib.import_module("lightning_ntp.strategy.strategy").strategy_class(framework)
        return importlib.import_module("lightning_ntp.strategy.callback").callback_class(framework)
    if name in _HOMES:
        return getattr(importlib.import_module(f"lightning_ntp.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
