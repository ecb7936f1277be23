"""Private torch names that the placement needs, each with its reason. Tried on torch 2.13.0 (read for 2.11 to 2.14).

DTensor has no public way to give a new placement its rules. What we hook, once, when `lightning_ntp.dtensor` is imported:

| name | reason |
|---|---|
| `DTensorSpec`, `TensorMeta`, `OpSchema`, `OutputSharding` | the values in which DTensor asks for and takes a sharding rule |
| `ShardingPropagator.propagate_op_sharding(_non_cached)` | where a rule is looked up. Successful answers are cached (here, and in a C++ cache keyed by the operator, the specs and the static arguments), errors never are |
| `redistribute_local_tensor` | what `DTensor.redistribute`, `full_tensor`, their backward and implicit cuts of operands call; it would relabel an `UnevenShard` without moving anything |
| `_api.compute_global_tensor_info` | `from_local` and the backward of `to_local` ask it for the logical shape and stride; it raises for a placement it does not know |
| `_utils._compute_local_shape_and_global_offset` | would answer with the whole shape, from which DCP writes wrong chunks |
| `_c10d_functional` | the collectives that eager code and compiled graphs share |
| `_custom_op_handlers` | operators that communicate or need the worker's own elements (norms, sums, cross-entropy) are answered here, before sharding rules; `loss_parallel` removes handlers of the same operators, so we come back after it |
| `unwrap_to_op_info` ... `wrap` | torch's own path for such an operator on tensors that are not ours |
| `debug._clear_sharding_prop_cache`, `clear_redistribute_planner_cache` | meshes compare by ranks and shape, so the caches hand a mesh whose groups are gone to its equal of the next generation |
| `_collective_utils.MeshTopoInfo.build_from_mesh`, `ShardingPropagator._propagate_tensor_meta_cached` | two more caches that keep meshes of generations gone by, and with them their groups, sockets and threads |
| `RuntimeSchemaInfo`, `op_to_schema_info` | which plain arguments belong to that key: an operator unknown to DTensor has none, and its rule would be reused for other arguments |
| `checkpoint.filesystem._StorageInfo` | where in which file a tensor is: the leader writes the metadata for all workers without asking them |
| `checkpoint._fsspec_filesystem.FileSystem` | what `FsspecReader` reads with; the reader itself would unpickle metadata that can run code |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.tensor._api
import torch.distributed.tensor._collective_utils
import torch.distributed.tensor._dispatch
import torch.distributed.tensor._redistribute
import torch.distributed.tensor._utils
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel.loss
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFiles
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._sharding_prop import LocalLRUCache

__all__ = [
    "DTensorSpec",
    "FsspecFiles",
    "OpOverload",
    "OpSchema",
    "OutputSharding",
    "Propagate",
    "Redistribute",
    "StorageInfo",
    "TensorMeta",
    "functional",
    "hook_global_info",
    "hook_handlers",
    "hook_local_shape",
    "hook_propagation",
    "hook_redistribute",
    "make_dtensor",
    "output_meta",
    "spec_of",
    "static_arguments",
]  # fmt: skip

OpOverload = torch._ops.OpOverload
"""Type of one operator overload, for annotations; public nowhere."""

Propagate = Callable[[OpSchema], OutputSharding]

Redistribute = Callable[..., torch.Tensor]
GlobalInfo = Callable[[torch.Tensor, DeviceMesh, Sequence[Any]], tuple[Sequence[int], Sequence[int]]]

functional = torch.ops._c10d_functional

_propagator = DTensor._op_dispatcher.sharding_propagator


def hook_propagation(rule: Callable[[OpSchema, Propagate], OutputSharding]) -> None:
    """From now on DTensor asks ``rule(schema, stock)``; what it does not know it passes on to `stock`."""
    name = "propagate_op_sharding_non_cached"
    stock = _existing(_propagator, name)

    def hooked(schema: OpSchema) -> OutputSharding:
        return rule(schema, stock)

    setattr(_propagator, name, hooked)
    _propagator.propagate_op_sharding = LocalLRUCache(hooked)


def output_meta(schema: OpSchema) -> Any:
    """`TensorMeta` (or a list of them, or None) of the operator's result on the logical tensors."""
    return _propagator._propagate_tensor_meta_non_cached(schema)


def static_arguments(operators: dict[OpOverload, int]) -> None:
    """Put the plain arguments from the given position on into the cache key of operators that DTensor has no entry for."""
    single = getattr(_propagator, "op_to_schema_info_for_single_dim_strategy", {})
    for operator, first in operators.items():
        if operator not in single:
            _propagator.op_to_schema_info.setdefault(operator, RuntimeSchemaInfo(first))


def hook_redistribute(
    move: Callable[[Redistribute, torch.Tensor, DTensorSpec, DTensorSpec, dict[str, Any]], torch.Tensor],
) -> None:
    """From now on DTensor moves local tensors by ``move(stock, local, source, target, options)``."""
    home, name = torch.distributed.tensor._redistribute, "redistribute_local_tensor"
    stock = _existing(home, name)

    def hooked(
        local: torch.Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
    ) -> torch.Tensor:
        return move(stock, local, current_spec, target_spec, options)

    for module in (home, torch.distributed.tensor._dispatch, torch.distributed.tensor._api):
        _existing(module, name)
        setattr(module, name, hooked)


def hook_global_info(info: Callable[[GlobalInfo, torch.Tensor, DeviceMesh, Sequence[Any]], Any]) -> None:
    """From now on DTensor infers logical shapes and strides by ``info(stock, local, mesh, placements)``."""
    home = torch.distributed.tensor._api
    stock = _existing(home, "compute_global_tensor_info")

    def hooked(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
        return info(stock, tensor, mesh, placements)

    home.compute_global_tensor_info = hooked


def hook_local_shape(check: Callable[[Sequence[Any]], None]) -> None:
    """From now on ``check(placements)`` runs before DTensor computes a chunk's shape and offset."""
    home = torch.distributed.tensor._utils
    stock = _existing(home, "_compute_local_shape_and_global_offset")

    def hooked(
        global_shape: Any, mesh_shape: Any, my_coordinate: Any, placements: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        check(placements)
        return stock(global_shape, mesh_shape, my_coordinate, placements, *args, **kwargs)

    home._compute_local_shape_and_global_offset = hooked


def hook_handlers(handlers: dict[OpOverload, Callable[..., Any]], ours: Callable[[Sequence[Any]], bool]) -> None:
    """From now on these operators are answered by ``handler(operator, *args, **kwargs)`` where ``ours(args)``, else by torch."""
    table = DTensor._op_dispatcher._custom_op_handlers
    wrapped = {operator: _with_stock(handler, ours, table.get(operator)) for operator, handler in handlers.items()}
    table.update(wrapped)
    loss = torch.distributed.tensor.parallel.loss
    leave_loss_parallel = _existing(loss, "_disable_custom_loss_ops")

    def leave_and_come_back() -> None:
        leave_loss_parallel()
        table.update(wrapped)

    loss._disable_custom_loss_ops = leave_and_come_back


def _with_stock(
    handler: Callable[..., Any], ours: Callable[[Sequence[Any]], bool], earlier: Callable[..., Any] | None
) -> Any:
    def handle(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if ours(args):
            return handler(operator, *args, **kwargs)
        return (earlier or _stock_call)(operator, args, kwargs)

    return handle


def _stock_call(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    _propagator.propagate(info)
    local = dispatcher._dispatch_get_local_results_slow_path(operator, args, info)
    return dispatcher.wrap(local, None if info.output_sharding is None else info.output_sharding.output_spec)


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements, logical shape and dtype of a DTensor."""
    return tensor._spec


def local_of(tensor: DTensor) -> torch.Tensor:
    """Its local tensor, below autograd."""
    return tensor._local_tensor


def make_dtensor(local: torch.Tensor, like: DTensorSpec, shape: Sequence[int], placements: tuple[Any, ...]) -> DTensor:
    """A DTensor below autograd: the result of a handler. Its stride is dense."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(like.mesh, placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def clear_caches() -> None:
    """Empty every cache of DTensor that holds a mesh: the Python and the C++ one of sharding rules, and the plans of moves."""
    _existing(torch.distributed.tensor.debug, "_clear_sharding_prop_cache")()
    planner = torch.distributed.tensor._redistribute
    clear = getattr(planner, "clear_redistribute_planner_cache", None)  # absent before 2.12
    if clear is not None:
        clear()
    planner._gen_transform_infos.cache_clear()
    torch.distributed.tensor._collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    metas = getattr(type(_propagator), "_propagate_tensor_meta_cached", None)
    if metas is not None:
        metas.cache_clear()


def _existing(home: Any, name: str) -> Any:
    if not hasattr(home, name):
        owner = getattr(home, "__name__", type(home).__name__)
        raise ImportError(
            f"torch {torch.__version__} has no {owner}.{name}, which UnevenShard hooks; use torch 2.13"
        )
    return getattr(home, name)
