"""The size of a computation as a number that no load changes: seconds belong into `benchmarks/`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")


def counted_calls(run: Callable[[], Result]) -> tuple[Result, int]:
    """What `run` returns, and how many Python and C functions it called on this thread."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(before)
    return result, count
