"""A module that a plan names, what may be said about it, and the checks that it is what the plan takes it for."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_ntp.errors import UnsupportedModelError
from lightning_ntp.strategy.adapters import BASE, adapted_layer, why_not


class PlanStyle(enum.StrEnum):
    """What a plan can say about a module; the values are what users write in their own plans."""

    COLUMN = "column"
    ROW = "row"
    VOCAB_EMBEDDING = "vocab_embedding"
    VOCAB_HEAD = "vocab_head"
    REPLICATE = "replicate"
    PARTIAL = "partial"


FSDP_ONLY = "tensor_parallel_size=1 trains it with FSDP alone"
"""The way out of every refusal here."""

GATHERED = "colwise_gather_output"
"""Hugging Face's word for a column layer whose whole output is needed: a head, packed projections, norms across heads."""

_HARMLESS_PATCHES = ("liger_kernel.transformers.swiglu", "liger_kernel.transformers.geglu")
"""Replaced forwards that still call the linear layers they own."""

_CLASSES: dict[PlanStyle, tuple[type[nn.Module], ...]] = {
    PlanStyle.COLUMN: (nn.Linear, Conv1D),
    PlanStyle.ROW: (nn.Linear, Conv1D),
    PlanStyle.VOCAB_EMBEDDING: (nn.Embedding,),
    PlanStyle.VOCAB_HEAD: (nn.Linear,),
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A module, the style it gets, and `word`: the plan's own term for that, which error messages repeat.

    Args:
        fqn: where it stands.
        module: the layer that is cut.
        wrapper: the LoRA layer around it, if there is one; it then stands at `fqn` itself.
    """

    fqn: str
    module: nn.Module
    style: PlanStyle
    word: str
    wrapper: nn.Module | None = None

    @classmethod
    def of(cls, fqn: str, module: nn.Module, style: PlanStyle, word: str) -> Planned:
        """What stands at `fqn`; a LoRA layer there is looked through.

        Raises:
            UnsupportedModelError: a LoRA layer of a kind that cannot be cut.
        """
        base = adapted_layer(module)
        if base is None:
            return cls(fqn, module, style, word)
        if style not in (PlanStyle.REPLICATE, PlanStyle.PARTIAL) and (why := why_not(module)) is not None:
            raise refusal(fqn, module, word, why)
        return cls(fqn, base, style, word, module)

    @property
    def layer(self) -> str:
        """Name of `module`."""
        return self.fqn if self.wrapper is None else f"{self.fqn}.{BASE}"

    @property
    def parent(self) -> str:
        """Name of the module that contains it."""
        return self.fqn.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Its name in the parent."""
        return self.fqn.rpartition(".")[2]

    @property
    def in_features(self) -> int:
        """Input features of a column or row layer; rows of an embedding."""
        return int(self.module.get_parameter("weight").shape[0 if isinstance(self.module, Conv1D) else 1])

    @property
    def out_features(self) -> int:
        """Output features of a column or row layer; vocabulary of a head."""
        return int(self.module.get_parameter("weight").shape[1 if isinstance(self.module, Conv1D) else 0])

    def refused(self, why: str, todo: str = "") -> UnsupportedModelError:
        """See `refusal`."""
        return refusal(self.fqn, self.module, self.word, why, todo)


def refusal(fqn: str, module: nn.Module, word: str, why: str, todo: str = "") -> UnsupportedModelError:
    """The error for a module that cannot be cut: where, which class, which style, why, and what to do."""
    advice = f"{todo}, or: {FSDP_ONLY}" if todo else f"What works: {FSDP_ONLY}"
    return UnsupportedModelError(f"{fqn or 'the model'} ({type(module).__name__}), style '{word}': {why}. {advice}.")


def require_stock_class(one: Planned) -> None:
    """Refuses layers whose forward we would replace without knowing what it does.

    A subclass (LoRA, quantised, scaled, fused) may do more than the class it comes from, so exact classes only.
    """
    classes = _CLASSES.get(one.style)
    if classes is None:
        return
    cls = type(one.module)
    if cls not in classes:
        wanted = " or ".join(known.__name__ for known in classes)
        raise one.refused(
            f"{cls.__module__}.{cls.__qualname__} is no layer that we can cut; only {wanted} itself is supported, "
            "not patched, quantised or extended",
            "Load the model without the patch",
        )
    require_own_forward(one.fqn, one.module, one.word)
    if one.module.get_parameter("weight").ndim != 2 or nn.utils.parametrize.is_parametrized(one.module):
        raise one.refused("its weight is parametrised or not a matrix")


def require_own_forward(fqn: str, module: nn.Module, word: str) -> None:
    """Refuses a module whose ``forward`` was replaced, on the instance or its class, by code that may read weights."""
    patched = vars(module).get("forward")
    forward = inspect.unwrap(patched if patched is not None else type(module).forward)
    source = str(getattr(forward, "__module__", forward))
    if source in _HARMLESS_PATCHES or (patched is None and source in {cls.__module__ for cls in type(module).__mro__}):
        return
    raise refusal(
        fqn,
        module,
        word,
        f"its forward was replaced by {source}.{getattr(forward, '__qualname__', 'a callable')}, which may read "
        "weights that are cut over roles",
        "Load the model without that patch (for Liger: only rms_norm, rope and swiglu; for accelerate: no device_map)",
    )


def own_parameters(fqn: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, str, tuple[int, ...]]]:
    """(module name, module, parameter name, shape) of everything below `fqn`."""
    for name, child in module.named_modules():
        for parameter_name, parameter in child.named_parameters(recurse=False):
            yield join(fqn, name), child, parameter_name, tuple(parameter.shape)


def join(*names: str) -> str:
    """Dotted name of the parts that are not empty."""
    return ".".join(name for name in names if name)
