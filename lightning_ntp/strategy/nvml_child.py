"""Listens to the driver, in a process of its own because the driver may never answer. Prints one JSON object per line.

    python -P nvml_child.py UUID...      {"kind": "ready"}, {"kind": "beat"}, {"kind": "xid", "gpu": UUID, "code": 79}, ...

Run by path: standard library and pynvml only, so that it costs milliseconds and little memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

WAIT_MILLISECONDS = 1000


def watch(nvml: Any, uuids: Sequence[str], emit: Callable[..., None], rounds: int | None = None) -> None:
    """Reports Xid errors, new uncorrected ECC errors and lost GPUs, until `rounds` waits have passed (None: for ever).

    Raises:
        Exception: of `nvml`, where there is no driver to listen to.
    """
    nvml.nvmlInit()
    events = nvml.nvmlEventSetCreate()
    handles: dict[str, Any] = {}
    errors: dict[str, int | None] = {}
    for uuid in uuids:
        handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        try:
            nvml.nvmlDeviceRegisterEvents(handles[uuid], wanted, events)
        except nvml.NVMLError as error:  # a virtual GPU: what can be asked for is still asked for
            emit(kind="deaf", gpu=uuid, why=str(error))
        errors[uuid] = _uncorrected(nvml, handles[uuid])
    emit(kind="ready")
    while rounds is None or rounds > 0:
        rounds = None if rounds is None else rounds - 1
        _wait(nvml, events, emit)
        for uuid in [uuid for uuid in handles if _is_lost(nvml, handles[uuid])]:
            emit(kind="gone", gpu=uuid)
            del handles[uuid]
        for uuid, handle in handles.items():
            before, now = errors[uuid], _uncorrected(nvml, handle)
            if before is not None and now is not None and now > before:
                emit(kind="ecc", gpu=uuid, code=now - before)
            errors[uuid] = now
        emit(kind="beat")


def _wait(nvml: Any, events: Any, emit: Callable[..., None]) -> None:
    try:
        event = nvml.nvmlEventSetWait_v2(events, WAIT_MILLISECONDS)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            return  # `_is_lost` finds out which
        if error.value != nvml.NVML_ERROR_TIMEOUT:
            raise
        return
    kind = "xid" if event.eventType & nvml.nvmlEventTypeXidCriticalError else "ecc"
    emit(kind=kind, gpu=_text(nvml.nvmlDeviceGetUUID(event.device)), code=int(event.eventData))


def _is_lost(nvml: Any, handle: Any) -> bool:
    try:
        nvml.nvmlDeviceGetUUID(handle)
        nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    except nvml.NVMLError as error:
        return bool(error.value == nvml.NVML_ERROR_GPU_IS_LOST)
    return False


def _uncorrected(nvml: Any, handle: Any) -> int | None:
    """Uncorrected memory errors since the driver was loaded; None where ECC is off or unknown."""
    try:
        return int(
            nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        )
    except nvml.NVMLError:
        return None


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid


def _emit(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    import pynvml

    watch(pynvml, sys.argv[1:], _emit)
