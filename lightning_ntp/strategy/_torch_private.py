"""Private names of torch that `strategy` needs, each with its reason. tests/test_backward_watch.py and test_state.py are the contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_ntp.dtensor.collectives import begin_wait, end_wait
from lightning_ntp.errors import ConfigError


def bucket_parameters(unit: FSDPModule) -> Sequence[nn.Parameter]:
    """The sharded parameters of one FSDP unit in the order of its flat gradient buffer.

    The order (children before the module's own) is that of FSDP2's managed modules and is public nowhere.
    """
    state: Any = unit._get_fsdp_state()
    group = state._fsdp_param_group
    return [] if group is None else [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]


def undo_fully_shard(module: nn.Module) -> None:
    """Take FSDP2 off a module and everything in it, whatever state an exception left it in. Local; torch has no inverse.

    The sharded parameters stay in the modules as they are. Missing one of the handles keeps the groups alive: seven file
    descriptors and three threads each time (prototype, torch 2.13). The lists are emptied because they form cycles, which only
    the garbage collector would find.
    """
    for part in list(module.modules()):
        vars(part).pop("_is_fsdp_managed_module", None)
        vars(part).pop("_fsdp_use_orig_params", None)
        if not isinstance(part, FSDPModule):
            continue
        state: Any = part._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in state._fsdp_param_groups:
            _undo_param_group(group)
        state._fsdp_param_groups = []
        vars(state).pop("_root_post_backward_final_callback", None)
        state._state_ctx.all_states.clear()
        state._states_to_forward_prefetch, state._states_to_backward_prefetch = [], []
        for name in (STATE_KEY, REGISTRY_KEY):
            table: dict[Any, Any] = vars(part).get(name, {})
            for key in [key for key, value in table.items() if value is state or key == fully_shard.__name__]:
                del table[key]
        _module_state_mapping.pop(part, None)
        part.__class__ = type(part).__mro__[getattr(type(part), "_orig_cls_mro_index", 2)]


def _undo_param_group(group: Any) -> None:
    for handles in (group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle):
        for handle in handles.values():
            handle.remove()
        handles.clear()
    for fsdp_param in group.fsdp_params:
        fsdp_param._setattr_on_modules(fsdp_param.sharded_param)
        fsdp_param._post_load_hook_handle.remove()
    group.fsdp_params.clear()
    group.modules = ()
    for name in WATCHED_METHODS:
        vars(group).pop(name, None)
    vars(group.comm_ctx).get("post_forward_order", []).clear()  # absent before the first forward
    group._all_reduce_hook = None


def adopt_parameters(unit: FSDPModule) -> None:
    """Tell FSDP2 that the modules' parameters were exchanged for others of the same placement. Local.

    It would look by itself at the first forward only, and `bucket_parameters` would answer with the old ones until then.
    """
    state: Any = unit._get_fsdp_state()
    for fsdp_param in () if state._fsdp_param_group is None else state._fsdp_param_group.fsdp_params:
        fsdp_param.reset_sharded_param()


class _TimedComm:
    """One of FSDP2's collectives, timed as waiting. The one inside allocates and communicates as before."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
        began = begin_wait()
        work = self._inner(*args, group=group, **kwargs)
        end_wait(group, began)
        return work


def time_waits(unit: FSDPModule) -> None:
    """What a unit waits in FSDP2's own collectives shall not count as computing.

    The public ``set_custom_all_gather`` would need the default one, which is private too. On CUDA they run on streams of their own,
    and what the computing waits for them is not seen.
    """
    state: Any = unit._get_fsdp_state()
    for group in state._fsdp_param_groups:
        for name in ("_all_gather_comm", "_reduce_scatter_comm"):
            if (inner := vars(group).get(name)) is not None:
                setattr(group, name, _TimedComm(inner))


def forget_compiled(module: nn.Module) -> None:
    """Drop compiled code if any part of the module is compiled: graphs hold the names of groups, which the next generation reuses.

    Local; the next forward compiles again.
    """
    if any(getattr(part, "_compiled_call_impl", None) is not None for part in module.modules()):
        torch.compiler.reset()


WATCHED_METHODS = ("pre_forward", "_register_post_backward_hook", "post_backward")
"""Methods of FSDP2's parameter group that `WatchedUnit` replaces on the instance."""


class WatchedUnit:
    """One FSDP unit whose forwards and backward are reported to us. Nothing of it is public:

    | name | reason |
    |---|---|
    | ``group.pre_forward`` | whether the unit runs at all |
    | ``group._register_post_backward_hook`` | whether autograd will report that backward has left it (not without gradients) |
    | ``group.post_backward`` | the report: it reduces the unit's gradients, and may be called for a unit that has not run |
    | ``state._root_post_backward_final_callback`` | the end of backward, where FSDP2 reduces what autograd did not report |
    | ``fsdp_param.unsharded_param``, ``unsharded_accumulated_grad`` | whether a parameter has a gradient |
    | ``state._lazy_init``, ``group.finalize_backward`` | what a root that has never run, or not in this backward, lacks |
    """

    def __init__(self, unit: FSDPModule) -> None:
        self._unit, self._state = unit, cast(Any, unit._get_fsdp_state())
        self._group = self._state._fsdp_param_group
        self._post_backward: Callable[[], None] = lambda: None

    def watch(
        self,
        ran: Callable[[], None],
        will_pass: Callable[[], None],
        passed: Callable[[], None],
        end: Callable[[WatchedUnit, Callable[[], None]], None],
    ) -> None:
        """From now on: a forward begins; a backward pass will be reported; it is over and `reduce` is up to us; all is over."""
        group = self._group
        register = group._register_post_backward_hook
        self._post_backward = group.post_backward

        def report_registration(args: Any, kwargs: Any) -> Any:
            new_args, new_kwargs = register(args, kwargs)
            if new_args is not args or new_kwargs is not kwargs:
                will_pass()
            return new_args, new_kwargs

        @torch.compiler.disable
        def report_backward(*_: Any) -> None:
            passed()

        group._register_post_backward_hook, group.post_backward = report_registration, report_backward
        self.watch_forward(ran)
        self.watch_end(end)

    def watch_forward(self, ran: Callable[[], None]) -> None:
        """From now on ``ran()`` is called before each forward of the unit gathers its parameters."""
        pre_forward = self._group.pre_forward

        @torch.compiler.disable
        def report_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            ran()
            return pre_forward(module, args, kwargs)

        self._group.pre_forward = report_forward

    def watch_end(self, end: Callable[[WatchedUnit, Callable[[], None]], None]) -> None:
        """From now on ``end(self, finish)`` runs where backward through this unit's root ends, if it began at this unit."""
        finish = self._state._root_post_backward_final_callback
        self._state._root_post_backward_final_callback = lambda: end(self, finish)

    def reduce(self) -> list[bool]:
        """Reduce-scatter and exchange the unit's bucket; zeros stand in for missing gradients, so that it always has one size.

        Returns:
            Per trainable parameter, in bucket order, whether it had a gradient.
        """
        trainable = [p for p in self._group.fsdp_params if p.sharded_param.requires_grad]
        if not all(hasattr(p, "_unsharded_param") for p in trainable):  # has never run
            if self._state._is_root is None:
                self._state._lazy_init()
            self._unit.unshard()
            self._unit.reshard()
        have = [p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None for p in trainable]
        for parameter, has_gradient in zip(trainable, have, strict=True):
            if not has_gradient:
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
        self._post_backward()
        return have

    def contains(self, other: WatchedUnit) -> bool:
        """Whether the other unit is a part of this one's module."""
        return any(module is cast(nn.Module, other._unit) for module in cast(nn.Module, self._unit).modules())

    def shares_root_with(self, other: WatchedUnit) -> bool:
        """Whether one backward ends for both."""
        return bool(self._state._state_ctx is other._state._state_ctx)

    def finish_alone(self) -> None:
        """After `reduce` of a unit through whose root no backward went."""
        self._group._training_state = type(self._group._training_state).IDLE
        self._group.finalize_backward()


def new_group_in_order(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A group whose ranks follow the order of `ranks`; None where this process is not in it. Collective over the default group.

    It has the timeout of the default group; torch itself would take 30 minutes whatever that one has.

    Raises:
        ConfigError: an order that is not ascending, on a torch that always sorts (before 2.13).
    """
    timeout = _default_group_timeout()
    if list(ranks) == sorted(ranks):
        return dist.new_group(list(ranks), timeout=timeout)
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ConfigError(
            f"torch {torch.__version__} cannot make a group in the order {list(ranks)}, which this topology needs: upgrade to "
            "torch 2.13 or restart the job from a checkpoint"
        )
    return dist.new_group(list(ranks), timeout=timeout, sort_ranks=False)


def _default_group_timeout() -> timedelta | None:
    """None where the backend knows none, as the fake one."""
    group = c10d._get_default_group()
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return cast(timedelta, options._timeout)
    return None


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """``module.to(device)`` that leaves alone what is on meta, which ``to`` refuses."""
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def compile_in_place(module: nn.Module, compiler: Callable[[Any], Any]) -> None:
    """``module.compile()`` with a compiler that exists already: the one of ``torch.compile(outer_module, ...)``."""
    module._compiled_call_impl = compiler(module._call_impl)


def abort_groups() -> None:
    """Abort every process group of this process, so that a kernel that waits for a dead peer ends (NCCL; gloo has no abort).

    torch offers no public list of all groups, and aborting only the default one leaves the sub-groups' kernels waiting.
    """
    for group in list(c10d._world.pg_map):
        group.abort()


def end_groups(backend: str) -> None:
    """End the default group and all others, also when a peer is dead.

    `destroy_process_group` waits for NCCL kernels that a dead peer will never finish; only the private variant aborts them.
    """
    if backend == "nccl":
        c10d._abort_process_group()
    else:
        dist.destroy_process_group()
