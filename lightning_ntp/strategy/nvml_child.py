"""Listens to the driver, in a process of its own because the driver may never answer. Prints one JSON object per line.

    python -P nvml_child.py UUID...      {"kind": "ready"}, {"kind": "beat"}, {"kind": "xid", "gpu": UUID, "code": 79}, ...
                                         {"kind": "link", "gpu": UUID or InfiniBand port, "code": new errors, "detail": which}

Run by path: standard library and pynvml only, so that it costs milliseconds and little memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

WAIT_MILLISECONDS = 1000
LINK_ROUNDS = 10
"""Links are asked for every so many waits: eight GPUs have hundreds of counters."""

NVLINK_COUNTERS = {"REPLAY": ("NVML_NVLINK_ERROR_DL_REPLAY", 1000), "RECOVERY": ("NVML_NVLINK_ERROR_DL_RECOVERY", 1),
                   "CRC_FLIT": ("NVML_NVLINK_ERROR_DL_CRC_FLIT", 1000), "CRC_DATA": ("NVML_NVLINK_ERROR_DL_CRC_DATA", 100)}  # fmt: skip
"""Counter -> (NVML's name, new errors since they were last told that are worth telling): single replays are how links work."""

INFINIBAND = Path("/sys/class/infiniband")
PORT_COUNTERS = {"link_downed": 1, "link_error_recovery": 1, "symbol_error": 100, "port_rcv_errors": 100}
"""The same for ports of network cards, which NVML does not know: the kernel has them."""


def watch(
    nvml: Any, uuids: Sequence[str], emit: Callable[..., None], rounds: int | None = None, infiniband: Path = INFINIBAND
) -> None:
    """Reports Xid errors, new uncorrected ECC errors, lost GPUs and failing links, until `rounds` waits have passed (None: for ever).

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
    told = {key: count for key, count, _ in _link_counters(nvml, handles, infiniband)}
    emit(kind="ready")
    number = 0
    while rounds is None or number < rounds:
        number += 1
        _wait(nvml, events, emit)
        for uuid in [uuid for uuid in handles if _is_lost(nvml, handles[uuid])]:
            emit(kind="gone", gpu=uuid)
            del handles[uuid]
        for uuid, handle in handles.items():
            before, now = errors[uuid], _uncorrected(nvml, handle)
            if before is not None and now is not None and now > before:
                emit(kind="ecc", gpu=uuid, code=now - before)
            errors[uuid] = now
        if number % LINK_ROUNDS == 0:
            for (place, detail), count, limit in _link_counters(nvml, handles, infiniband):
                before = told.setdefault((place, detail), count)
                if count - before >= limit:
                    emit(kind="link", gpu=place, code=count - before, detail=detail)
                if count - before >= limit or count < before:  # somebody has set them to 0
                    told[place, detail] = count
        emit(kind="beat")


def _link_counters(nvml: Any, handles: dict[str, Any], infiniband: Path) -> Iterator[tuple[tuple[str, str], int, int]]:
    """((GPU or port, which counter), its value, new errors worth telling) of all links that say anything."""
    for uuid, handle in handles.items():
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
            try:
                active = nvml.nvmlDeviceGetNvLinkState(handle, link)
            except nvml.NVMLError:
                break  # no NVLink here, or no more of them
            yield (uuid, f"NVLink {link} down"), int(not active), 1
            for name, (number, limit) in NVLINK_COUNTERS.items() if active else ():
                try:
                    count = nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, getattr(nvml, number))
                except (nvml.NVMLError, AttributeError):
                    continue  # newer GPUs do not count this
                yield (uuid, f"NVLink {link} {name}"), int(count), limit
    for port in sorted(infiniband.glob("*/ports/*")):
        for name, limit in PORT_COUNTERS.items():
            try:
                yield (f"{port.parts[-3]} port {port.name}", name), int((port / "counters" / name).read_text()), limit
            except (OSError, ValueError):
                continue


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
