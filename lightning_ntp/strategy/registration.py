"""Registers "ntp" with Lightning, now or as soon as it is imported.

Lightning takes seconds to import and there are two of it (`lightning` and `pytorch_lightning`, with separate registries), so
``import lightning_ntp`` imports neither: a finder waits for the module that holds the registry.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

FRAMEWORKS = ("lightning.pytorch", "pytorch_lightning")
NAME = "ntp"


def register() -> None:
    """Make ``Trainer(strategy="ntp")`` work in every Lightning that this process has or will import. May be called twice."""
    waiting = {}
    for framework in FRAMEWORKS:
        module = sys.modules.get(f"{framework}.strategies")
        if module is not None and hasattr(module, "StrategyRegistry"):
            _register_in(framework, module)
        else:
            waiting[f"{framework}.strategies"] = framework
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(waiting))


def _register_in(framework: str, module: Any) -> None:
    module.StrategyRegistry.register(
        NAME,
        partial(_build, framework),
        description="FSDP2 + uneven tensor parallelism over ragged replicas",
        override=True,
    )


def _build(framework: str, **options: Any) -> Any:
    from lightning_ntp.strategy.strategy import strategy_class

    return strategy_class(framework)(**options)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the real finders find the awaited modules, and registers once such a module has run."""

    def __init__(self, waiting: dict[str, str]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        framework = self._waiting.pop(fullname, None)  # popped first, so that the search below does not come back here
        if framework is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, framework)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, framework: str) -> None:
        self._loader, self._framework = loader, framework

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register_in(self._framework, module)
