"""What every cut module is made of: its state, the class swap, and how a parameter is opened to its local tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_ntp.dtensor.randomness import RoleRandomness
from lightning_ntp.layout import ShardLayout


@torch.compiler.allow_in_graph
class _OpenLocal(torch.autograd.Function):
    """[Note: allow_in_graph] the backward builds a DTensor, which dynamo cannot trace: every weight would break the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> DTensor:
        return DTensor(gradients[0].contiguous(), ctx.spec, requires_grad=False)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter's local storage; its gradient comes back with the parameter's own placement. Local."""
    return _OpenLocal.apply(tensor) if isinstance(tensor, DTensor) else tensor


@dataclass
class CutState:
    """What a cut module remembers; kept in ``module.cut``.

    Args:
        mesh: the tp axis.
        role: that this worker plays.
        original: attributes before the swap, to go back or to another degree.
        expansion: for each local query head its local KV head, where KV heads must be repeated.
        query_features: local query features that precede the KV heads in a packed output.
        head_dim: features per head.
        randomness: of the attention region that this module begins or ends.
        lookup: vocabulary row -> local row or -1, see `vocab.lookup_table`.
        layout: of the vocabulary.
        has_labels: whether the surrounding model's current forward was given labels.
        handles: of hooks to remove when the swap is undone.
    """

    mesh: DeviceMesh
    role: int
    original: dict[str, Any] = field(default_factory=dict)
    expansion: torch.Tensor | None = None
    query_features: int = 0
    head_dim: int = 1
    randomness: RoleRandomness | None = None
    lookup: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    layout: ShardLayout = field(default_factory=lambda: ShardLayout.balanced(1, 1))
    has_labels: bool = False
    handles: list[RemovableHandle] = field(default_factory=list)

    @property
    def group(self) -> ProcessGroup:
        """Process group of the tp axis."""
        return self.mesh.get_group()


class CutModule(nn.Module):
    """Base of all swapped classes."""

    cut: CutState
    original_class: ClassVar[type[nn.Module]]


_swapped: dict[tuple[type, type], type[nn.Module]] = {}


def swapped_class(behaviour: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """`original` with the forward of `behaviour`; still an instance of `original` for everybody who asks."""
    key = (behaviour, original)
    if key not in _swapped:
        name = f"{behaviour.__name__}{original.__name__}"
        _swapped[key] = type(name, (behaviour, original), {"original_class": original})
    return _swapped[key]


def become(module: nn.Module, behaviour: type[nn.Module], mesh: DeviceMesh, role: int) -> CutState:
    """Swap the class in place (again, if it was swapped before) and start a fresh `CutState`. Local."""
    restore_module(module)
    module.__class__ = swapped_class(behaviour, type(module))
    state = CutState(mesh, role)
    object.__setattr__(module, "cut", state)
    return state


def restore_module(module: nn.Module) -> None:
    """Undo a swap: class and attributes are what they were. Local."""
    swapped = module if isinstance(module, CutModule) else None
    if swapped is None:
        return
    for name, value in swapped.cut.original.items():
        setattr(module, name, value)
    for handle in swapped.cut.handles:
        handle.remove()
    object.__delattr__(module, "cut")
    module.__class__ = _without_swap(type(swapped))


def _without_swap(cls: type[CutModule]) -> type[nn.Module]:
    """The original class; below the class that FSDP has put in front, if it has (a cut module that is an FSDP unit itself)."""
    if cls in _swapped.values():
        return cls.original_class
    front, swapped = cls.__bases__
    own = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (front, _without_swap(swapped)), own)


def set_local(module: nn.Module, state: CutState, name: str, value: Any) -> None:
    """Change an attribute and remember what it was."""
    state.original.setdefault(name, getattr(module, name))
    setattr(module, name, value)
