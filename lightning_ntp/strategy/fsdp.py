"""Cuts a whole model into this worker's cells: uneven tp placement, layer swap, stock FSDP2, one bucket sync per unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_ntp.dtensor.collectives import broadcast_in_place
from lightning_ntp.dtensor.cut import restore_module
from lightning_ntp.dtensor.dispatch import forget_meshes
from lightning_ntp.dtensor.grad_sync import BucketSync, WindowState
from lightning_ntp.dtensor.parallel import swap_module
from lightning_ntp.dtensor.placement import UnevenShard, wrap_local
from lightning_ntp.dtensor.vocab import VocabHead, connect_head
from lightning_ntp.errors import ConfigError
from lightning_ntp.model_spec import Cell, Coordinates, ModelPlan, ParamSpec, Style
from lightning_ntp.strategy._torch_private import (
    WatchedUnit,
    adopt_parameters,
    bucket_parameters,
    forget_compiled,
    time_waits,
    undo_fully_shard,
)
from lightning_ntp.strategy.backward_watch import BackwardWatch
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.row_trail import RowTrail
from lightning_ntp.sync_plan import plan_sync

if TYPE_CHECKING:
    from lightning_ntp.strategy.held import HeldState


def take_cell(whole: torch.Tensor, spec: ParamSpec, cell: Cell) -> torch.Tensor:
    """A copy of one cell of a whole parameter (or of anything of its shape), as (rows, columns). Local."""
    matrix = whole.detach().reshape(spec.matrix_shape)
    rows = [matrix[span.start : span.stop] for span in cell.rows] or [matrix[:0]]
    picked = torch.cat(rows)
    columns = [picked[:, span.start : span.stop] for span in cell.columns] or [picked[:, :0]]
    return torch.cat(columns, dim=1).contiguous()


def local_shape(spec: ParamSpec, cell: Cell) -> tuple[int, ...]:
    """The tensor shape of a cell: its rows and columns with the parameter's inner dims put back."""
    rows, columns = cell.shape
    if len(spec.shape) <= 1:
        return (rows,) if spec.shape else ()
    return (rows, columns) if len(spec.shape) == 2 else (rows, *spec.shape[1:])


@dataclass
class ShardedModel:
    """A model of which this worker holds its cells; what the strategy talks to during a step.

    Args:
        module: the user's module, changed in place.
        plan: how it was cut.
        groups: process groups of the current generation.
        buckets: one per FSDP unit with trainable parameters, in the global order.
        window: state shared by the buckets.
        units: the FSDP units, in bucket order.
        watch: what keeps the buckets' exchanges in step.
        mp_policy: FSDP2's mixed precision.
        roots: names of the submodules whose forward the user calls.
        held: the state while it is outside of the module, between two cuts (`state.rebuild`).

    A parked worker has neither units nor buckets, and parameters without storage.
    """

    module: nn.Module
    plan: ModelPlan
    groups: Groups
    buckets: tuple[BucketSync, ...] = ()
    window: WindowState = field(default_factory=WindowState)
    units: tuple[FSDPModule, ...] = ()
    watch: BackwardWatch = field(default_factory=lambda: BackwardWatch((), (), WindowState(), RowTrail()))
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    roots: Sequence[str] = ("",)
    held: HeldState | None = None

    @property
    def coordinates(self) -> Coordinates:
        """Where this worker stands in its replica."""
        return self.groups.topology.coordinates(self.groups.worker)

    def parameters(self) -> Iterator[tuple[ParamSpec, nn.Parameter]]:
        """Each distinct parameter with its spec, in plan order; not between a forward and its backward."""
        for unit in self.units:
            unit.reshard()  # a forward without backward (validation) leaves the root's whole parameters in the modules
        named = dict(self.module.named_parameters())
        for spec in self.plan.params:
            yield spec, named[spec.fqn]

    def begin_window(self) -> None:
        """Call once before the first micro-batch of an optimizer step."""
        self.watch.begin_micro_batch()
        self.watch.trail.clear()
        self.window.begin()
        for bucket in self.buckets:
            bucket.forget()

    def begin_backward(self) -> None:
        """Call before one of several backward passes of a step that exchanges at each (manual optimization)."""
        self.window.begin()
        self.watch.begin_backward()
        for bucket in self.buckets:
            bucket.forget()

    def set_last_micro_batch(self, is_last: bool, counts: bool = True) -> None:
        """Say before each forward whether its backward ends the window: only then are gradients exchanged.

        Args:
            counts: False for a ghost, which does not make a parameter a used one.
        """
        self.window.is_last_micro_batch = is_last
        self.watch.begin_micro_batch(counts)
        self.watch.trail.begin_micro_batch()

    def finish_backward(self) -> None:
        """Call after the window's last backward: buffers held for other streams are given back."""
        self.window.release()

    def gradients(self, of: Collection[torch.Tensor] | None = None) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Local gradients that there are, of these parameters or of all of them. Local."""
        wanted = None if of is None else {id(parameter) for parameter in of}
        for spec, parameter in self.parameters():
            if parameter.grad is not None and (wanted is None or id(parameter) in wanted):
                yield spec, local_of(parameter.grad)

    def window_marks(self) -> list[int]:
        """What workers tell each other about a window. Local.

        Returns:
            1 or 0: for each parameter, in plan order, whether it has had a gradient; then for each bucket, whether autograd reports it.
        """
        used = [int(spec.fqn in self.window.used) for spec in self.plan.params]
        return used + [int(reported) for reported in self.watch.reported]

    def settle_window(self, marks: Sequence[int]) -> dict[str, bool]:
        """Whether any worker used each parameter, by name; settles the order of the next window's buckets. Local.

        Args:
            marks: `window_marks` of all workers, combined by maximum.
        """
        self.watch.settle_order([bool(mark) for mark in marks[len(self.plan.params) :]])
        self.watch.trail.clear()
        return {spec.fqn: bool(mark) for spec, mark in zip(self.plan.params, marks, strict=False)}

    @torch.no_grad()
    def scale_gradients(self, factor: torch.Tensor | float, of: Collection[torch.Tensor] | None = None) -> None:
        """Multiply local gradients in place. Local."""
        for _, gradient in self.gradients(of):
            gradient.mul_(factor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's storage of a parameter, gradient or state tensor, outside autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def shard_model(
    module: nn.Module,
    plan: ModelPlan,
    groups: Groups,
    mp_policy: MixedPrecisionPolicy | None = None,
    roots: Sequence[str] = ("",),
    equal: bool = False,
) -> ShardedModel:
    """Cut `module` in place.

    Args:
        module: with whole parameters on this worker's device; the leader's values win on all workers.
        plan: from `huggingface.plan_model`, made for the topology's ``num_roles`` and ``loss_order``.
        groups: of the current generation; this worker must hold a role.
        mp_policy: FSDP2's mixed precision; None computes in the parameters' dtype.
        roots: names of the submodules whose forward the user calls; each becomes an FSDP root.
        equal: `start_equal` has been called; then cutting is local.

    Raises:
        ConfigError: the plan was made for other roles, or a parameter lies outside every root.

    Collective over all workers with a role.
    """
    _check_plan(plan, groups)
    if not equal:
        start_equal(module, groups)
    sharded = ShardedModel(module, plan, groups, mp_policy=mp_policy or MixedPrecisionPolicy(), roots=tuple(roots))
    _cut(sharded, take_cell)
    return sharded


def park_model(
    module: nn.Module,
    plan: ModelPlan,
    groups: Groups,
    mp_policy: MixedPrecisionPolicy | None = None,
    roots: Sequence[str] = ("",),
) -> ShardedModel:
    """What a worker that joins a running job makes of its module: parameters without storage, until `state.rebuild` fills them.

    Arguments as for `shard_model`; the worker need not have a role. Local.
    """
    sharded = ShardedModel(module, plan, groups, mp_policy=mp_policy or MixedPrecisionPolicy(), roots=tuple(roots))
    uncut(sharded)
    return sharded


def uncut(sharded: ShardedModel) -> None:
    """Undo `shard_model`: classes, attributes and hooks are what they were, parameters are whole and without storage. Local.

    Whoever needs the cells takes them before. The module object and the user's hooks on it stay; hooks on parameters do not.
    """
    module, plan = sharded.module, sharded.plan
    undo_fully_shard(module)
    for part in module.modules():
        restore_module(part)
    named, places = dict(module.named_parameters()), _owners(module)
    for spec in plan.params:
        old = named[spec.fqn]
        _replace(places[old], torch.empty(spec.shape, dtype=old.dtype, device="meta"), old.requires_grad)
    sharded.units, sharded.buckets = (), ()
    sharded.watch = BackwardWatch((), (), sharded.window, RowTrail())
    sharded.window.begin()
    forget_meshes()
    forget_compiled(module)


def cut_again(sharded: ShardedModel, plan: ModelPlan, groups: Groups) -> None:
    """Cut an `uncut` module for another generation; parameters get their placements but no storage yet, see `fill`. Local."""
    _check_plan(plan, groups)
    sharded.plan, sharded.groups = plan, groups
    _cut(sharded, lambda whole, spec, cell: torch.empty(cell.shape, dtype=whole.dtype, device="meta"))


@torch.no_grad()
def fill(sharded: ShardedModel, locals_: Mapping[str, torch.Tensor]) -> None:
    """Give the parameters of a `cut_again` module their storage: local tensors by name. Local."""
    named, places = dict(sharded.module.named_parameters()), _owners(sharded.module)
    for spec in sharded.plan.params:
        old = named[spec.fqn]
        _replace(places[old], wrap_like(old, locals_[spec.fqn]), old.requires_grad)
    for unit in sharded.units:
        adopt_parameters(unit)


def wrap_like(parameter: torch.Tensor, local: torch.Tensor) -> DTensor:
    """A tensor cut like a sharded parameter, from this worker's part of it. Local."""
    if not isinstance(parameter, DTensor):
        raise TypeError(f"expected a sharded parameter, got {type(parameter).__name__}")
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _replace(places: Sequence[tuple[nn.Module, str]], tensor: torch.Tensor, requires_grad: bool) -> None:
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    for owner, name in places:
        setattr(owner, name, parameter)


def _check_plan(plan: ModelPlan, groups: Groups) -> None:
    topology = groups.topology
    if (plan.num_roles, plan.loss_order) != (topology.num_roles, topology.loss_order):
        raise ConfigError(
            f"the plan is for {plan.num_roles} roles lost in order {plan.loss_order}, the topology has {topology.num_roles} "
            f"and {topology.loss_order}; make the plan from the topology"
        )


def _cut(sharded: ShardedModel, take: Callable[[torch.Tensor, ParamSpec, Cell], torch.Tensor]) -> None:
    module, plan, groups = sharded.module, sharded.plan, sharded.groups
    at = sharded.coordinates
    # An attention module hands its randomness to its output projection, which must have been swapped before.
    for rule in sorted(plan.rules, key=lambda rule: rule.style is Style.ATTENTION):
        swap_module(module, rule, at, groups.mesh["tp"])
    _connect_heads(module)
    _cut_parameters(module, plan, groups, at, take)
    sharded.units = _apply_fsdp(module, plan, groups, at, sharded.mp_policy, sharded.roots)
    sharded.buckets, sharded.watch = _install_hooks(module, plan, groups, sharded.units, sharded.window)


def _connect_heads(module: nn.Module) -> None:
    for model in module.modules():
        find = getattr(model, "get_output_embeddings", None)
        head = find() if find is not None else None
        if isinstance(head, VocabHead):
            connect_head(model, head)


@torch.no_grad()
def start_equal(module: nn.Module, groups: Groups) -> None:
    """All replicas start from the leader's weights and buffers, whatever seed each process had."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_meta:
            continue  # all read it from the same file, see `weight_files`
        broadcast_in_place(tensor.data, groups.global_rank(groups.leader), groups.live)


def _owners(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Every place a parameter is registered at: more than one when weights are tied."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places[parameter].append((owner, name))
    return places


def _cut_parameters(
    module: nn.Module,
    plan: ModelPlan,
    groups: Groups,
    at: Coordinates,
    take: Callable[[torch.Tensor, ParamSpec, Cell], torch.Tensor],
) -> None:
    places, named = _owners(module), dict(module.named_parameters())
    for spec in plan.params:
        whole = named.pop(spec.fqn)  # nothing may keep one once it is cut: all cells come on top of it
        owners = places.pop(whole)
        if spec.dim is None or spec.layouts is None:
            continue
        cell, layout = spec.role_cell(at.degree, at.role, at.relief), spec.layouts.at(at.degree, at.relief)
        local = take(whole, spec, cell).view(local_shape(spec, cell))
        cut = wrap_local(local, groups.mesh["tp"], UnevenShard(spec.dim, layout), torch.Size(spec.shape))
        _replace(owners, cut, whole.requires_grad)


def _apply_fsdp(
    module: nn.Module,
    plan: ModelPlan,
    groups: Groups,
    at: Coordinates,
    mp_policy: MixedPrecisionPolicy,
    roots: Sequence[str],
) -> tuple[FSDPModule, ...]:
    # Weak: FSDP makes shards of one parameter after the other, and what they were made of is to be freed meanwhile.
    spec_of = WeakTensorKeyDictionary({parameter: plan.by_fqn[name] for name, parameter in module.named_parameters()})
    inside = {id(p) for root in roots for p in module.get_submodule(root).parameters()}
    outside = [name for name, p in module.named_parameters() if id(p) not in inside]
    if outside:
        raise ConfigError(
            f"parameter {outside[0]} lies outside {list(roots)}, so nothing would sync its gradient; put it into a submodule "
            "whose forward you call"
        )
    place = _placement_function(spec_of, at.fsdp_size)
    units: list[FSDPModule] = []
    for name in (*plan.units, *roots):
        unit = module.get_submodule(name)
        if next(unit.parameters(), None) is None:
            continue
        units.append(fully_shard(unit, mesh=groups.mesh["fsdp"], shard_placement_fn=place, mp_policy=mp_policy))
    for sharded in units:
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if at.fsdp_size > 1:
            time_waits(sharded)
    return tuple(units)


def _placement_function(
    spec_of: Mapping[nn.Parameter, ParamSpec], fsdp_size: int
) -> Callable[[nn.Parameter], Shard | None]:
    def place(parameter: nn.Parameter) -> Shard | None:
        spec = spec_of.get(parameter)
        return None if spec is None else Shard(spec.fsdp_dim(fsdp_size))

    return place


def _install_hooks(
    module: nn.Module, plan: ModelPlan, groups: Groups, units: Sequence[FSDPModule], window: WindowState
) -> tuple[tuple[BucketSync, ...], BackwardWatch]:
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    buckets: list[BucketSync] = []
    watched: list[tuple[WatchedUnit, list[str]]] = []
    others: list[WatchedUnit] = []
    # One stream for all buckets: exchanges on several communicators must start in the same order on every worker.
    stream = torch.cuda.Stream() if groups.device_type == "cuda" else None
    for unit in units:
        specs = [plan.by_fqn[name_of[p]] for p in bucket_parameters(unit) if p.requires_grad]
        if not specs:
            others.append(WatchedUnit(unit))
            continue
        sync_plan = plan_sync(specs, groups.topology, groups.worker)
        bucket = BucketSync(len(buckets), sync_plan, groups.replica, groups.slots, window)
        unit.set_all_reduce_hook(bucket, stream=stream)
        buckets.append(bucket)
        watched.append((WatchedUnit(unit), [spec.fqn for spec in specs]))
    return tuple(buckets), BackwardWatch(watched, others, window, RowTrail.of(module, units, groups))
