"""``trainer.fit(torch.compile(module))``: what the user's steps call is compiled, the steps themselves run as written.

Lightning compiles the whole training_step, and refuses that for strategies that it does not know. Ours would be one graph break
after another there (micro-batches, logging, collectives), while the model inside is where the time goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_ntp.strategy import checks
from lightning_ntp.strategy._lightning_private import take_compiler
from lightning_ntp.strategy._torch_private import compile_in_place
from lightning_ntp.strategy.base import StrategyBase


class Compiling(StrategyBase):
    """Takes the compiler off a compiled module and applies it to the parts that are cut."""

    _user_module: Any = None
    _compiler: Callable[[Any], Any] | None = None

    @property
    def _lightning_module(self) -> Any:
        """Lightning sets it before it looks whether the strategy supports a compiled module."""
        return self._user_module

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        self._user_module = module
        self._compiler = take_compiler(module) or self._compiler

    def setup(self, trainer: Any) -> None:
        """See the strategy. Collective over all processes."""
        super().setup(trainer)
        if self._compiler is None:
            return
        for name in checks.forward_roots(self.lightning_module):
            compile_in_place(self.lightning_module.get_submodule(name), self._compiler)
        self._compiler = None
