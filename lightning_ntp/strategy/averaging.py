"""Lightning's WeightAveraging (EMA) on a cut model: the average is kept in cells, and moved and saved like optimizer state.

The callback copies the module before it is cut. Once it is, the copy's parameters are exchanged for cells that belong to an
optimizer that never steps: a loss, a newcomer and a checkpoint then treat them as they treat Adam's moments.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from lightning_ntp.errors import ConfigError
from lightning_ntp.strategy._lightning_private import AverageOf, averages_of
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.newcomers import Newcomers

KEY, COUNT = "average", "num_averaged"


class AverageCells(torch.optim.Optimizer):
    """Cells of an average over the steps, one per parameter: in the form of an optimizer's state, so that they are moved, saved and
    loaded like it. It never steps, the callback writes the cells; `step` raises, as torch's base class does.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {COUNT: 0})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {KEY: parameter.detach().clone()}


class Averaging(Newcomers):
    """Stands before the strategy's own setup and validation where a WeightAveraging callback is used."""

    _averages: tuple[tuple[AverageOf, AverageCells], ...] = ()

    @property
    def state_holders(self) -> list[torch.optim.Optimizer]:
        """Optimizers and averages."""
        return [*super().state_holders, *(cells for _, cells in self._averages)]

    def setup_environment(self) -> None:
        """See the strategy. Collective over all processes."""
        super().setup_environment()
        module = self.lightning_module
        if self.is_cut(module) and averages_of(module.trainer):
            raise ConfigError(
                "WeightAveraging copies the module when fit begins, and an earlier fit, validate or test of this module has cut it; "
                "leave the callback out, or make the module anew"
            )

    def setup(self, trainer: Any) -> None:
        """See the strategy. Collective over all processes."""
        self._averages = ()
        super().setup(trainer)  # in which a newcomer is parked, and gets its averages with its cells
        if trainer.state.fn != "fit":
            return
        if not self._averages:
            self._make_averages(trainer)
        self._take_over()

    def park(self, groups: Groups) -> None:
        """See `Newcomers`. Local."""
        super().park(groups)
        self._make_averages(self.lightning_module.trainer)

    def _make_averages(self, trainer: Any) -> None:
        parameters = [parameter for _, parameter in self.sharded.parameters()]
        self._averages = tuple((average, AverageCells(parameters)) for average in averages_of(trainer))

    def _take_over(self) -> None:
        for average, cells in self._averages:
            average.take_over(partial(self._present, average, cells), partial(_count, average, cells))
            self._present(average, cells)  # which lets go of the whole copy

    def _present(self, average: AverageOf, cells: AverageCells) -> None:
        """Before the callback looks at module and average: both show their cells, wherever these have come from."""
        state = cells.state
        average.show(
            {spec.fqn: state[parameter][KEY] for spec, parameter in self.sharded.parameters()}, cells.param_groups[0][COUNT]
        )


def _count(average: AverageOf, cells: AverageCells) -> None:
    cells.param_groups[0][COUNT] = average.num_averaged
