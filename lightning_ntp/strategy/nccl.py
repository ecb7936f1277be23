"""What NCCL must be told before the first group is made, so that losing a peer does not end this process too.

Reasoned from torch's source and NCCL's release notes; no GPU was at hand to run it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from lightning_ntp.errors import ConfigError

KNOWN_BAD = ((2, 28, 3), (2, 28, 8))
"""First and last NCCL release that cannot make new communicators in a process that has aborted some."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable that recovery needs: the value we set, other values that will do, and why."""

    name: str
    value: str
    also: tuple[str, ...]
    why: str


REQUIRED = (
    Setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", ("2",), "else torch's watchdog ends every process that lost a peer"),
    Setting("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", (), "else torch's watchdog ends the process of an aborted kernel"),
    Setting("TORCH_NCCL_ENABLE_MONITORING", "0", (), "else torch's monitor ends processes whose groups are being aborted"),
    Setting("TORCH_NCCL_PROPAGATE_ERROR", "0", (), "else one rank's error ends the others"),
    Setting("TORCH_NCCL_BLOCKING_WAIT", "0", (), "else a wait ends by itself, beside the recovery"),
)

RECORDED_COLLECTIVES = "2000"


def prepare_environ(environ: MutableMapping[str, str], log_folder: Path | None) -> None:
    """Sets what is needed, and the flight recorder if the user has not. Before the first NCCL group.

    Raises:
        ConfigError: the user has set a variable to a value with which a loss cannot be survived.
    """
    for setting in REQUIRED:
        value = environ.setdefault(setting.name, setting.value)
        if value not in (setting.value, *setting.also):
            wanted = " or ".join((setting.value, *setting.also))
            raise ConfigError(
                f"{setting.name}={value}: recovery needs {wanted}, {setting.why}. Unset it, or set NTP_RECOVERY=off"
            )
    environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)
    environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", environ["TORCH_FR_BUFFER_SIZE"])  # its name before torch 2.9
    if log_folder is not None:
        environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(log_folder / "nccl_trace_rank_"))
        environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", environ["TORCH_FR_DUMP_TEMP_FILE"])


def check_version(version: tuple[int, ...]) -> None:
    """`ConfigError` for a release that is known not to survive. `version` is that of the library that runs."""
    first, last = KNOWN_BAD
    if first <= version[:3] <= last:
        shown = ".".join(map(str, version))
        raise ConfigError(
            f"NCCL {shown} cannot make new communicators after an abort ({_dots(first)} to {_dots(last)} cannot): install "
            f"another nvidia-nccl-cu* package, or set NTP_RECOVERY=off"
        )


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
