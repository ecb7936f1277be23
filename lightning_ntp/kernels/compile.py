"""Compiled versions of the reference kernels, and the reference where nothing compiles."""

from __future__ import annotations

import functools
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def compiler_missing(device_type: str) -> str | None:
    """Why nothing can be compiled for a device type, or None. Found out once."""
    if device_type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "triton is not installed"
        return None
    compiler = (sysconfig.get_config_var("CXX") or "g++").split()[0]
    if not any(shutil.which(name) for name in (compiler, "g++", "c++", "clang++")):
        return f"no C++ compiler ({compiler}) on PATH"
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"{reason}: kernels run as plain torch, slower but equal", stacklevel=3)


class Kernel(Generic[P, R]):
    """A kernel in its two forms: `reference` defines it, `fused` is compiled. A call takes the one that pays on its device."""

    def __init__(self, reference: Callable[P, R], fused: Callable[P, R]) -> None:
        self.reference, self.fused = reference, fused
        functools.update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        on_gpu = any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
        if on_gpu and not torch.compiler.is_compiling():
            return self.fused(*args, **kwargs)
        return self.reference(*args, **kwargs)


def compiled(reference: Callable[P, R], generated: Callable[P, R] | None = None) -> Kernel[P, R]:
    """`reference` fused by torch.compile on GPUs; on CPUs the reference itself.

    `generated` is what runs compiled where that is written differently from the reference.

    On CPUs compiling costs tens of seconds at start and gains little on these memory-bound kernels; ``kernel.fused`` compiles
    there too (tests and benchmarks use it). Empty tensors go to the reference: generated code for zero columns is not worth a
    recompilation.
    """
    run_generated = generated or torch.compile(reference, dynamic=True, fullgraph=True)

    def fused(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if any(tensor.numel() == 0 for tensor in tensors):
            return reference(*args, **kwargs)
        reason = compiler_missing(tensors[0].device.type)
        if reason is not None:
            _warn_once(reason)
            return reference(*args, **kwargs)
        return run_generated(*args, **kwargs)

    return Kernel(reference, fused)
