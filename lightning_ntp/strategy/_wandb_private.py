"""Private names of Lightning's WandbLogger and of wandb, each with its reason.

Tried on Lightning 2.6.6 and wandb 0.31.0; tests/test_goodput_wandb.py and test_dashboard.py are the contract.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def wandb_options(logger: Any) -> dict[str, Any]:
    """What a WandbLogger hands to ``wandb.init`` when its run is first used: id, mode and settings can only be set here."""
    options: dict[str, Any] = logger._wandb_init
    return options


def wandb_run_of(logger: Any) -> Any:
    """The run of a WandbLogger, or what stands for it; None before there is one. Asking for ``experiment`` would make one."""
    return logger._experiment


def set_wandb_run(logger: Any, run: Any) -> None:
    """Lightning opens every logger's run before any hook could say which run it is: something may stand for it till then."""
    logger._experiment = run


def open_wandb(logger: Any) -> None:
    """Make a WandbLogger's run. Whoever asks for ``experiment`` meanwhile finds what stood for it, and makes no second one."""
    twin = object.__new__(type(logger))
    twin.__dict__.update(logger.__dict__, _experiment=None)
    logger._experiment = twin.experiment


def set_wandb_id(logger: Any, run_id: str) -> None:
    """Before the run exists: its id, also for ``version``."""
    logger._id = run_id
    logger._wandb_init["id"] = run_id


def set_wandb_offline(logger: Any) -> None:
    """Before the run exists: write to disk only."""
    logger._offline = True
    logger._wandb_init["mode"] = "offline"


def ask_wandb(query: str, variables: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The answer of W&B's server to a GraphQL query, with the user's key, and the address of its pages.

    wandb makes no workspaces by itself, and offers no public way to send a query since it has no ``Api().client`` any more.
    """
    service: Any = importlib.import_module("wandb").Api()._service_api
    answer: dict[str, Any] = service.execute_graphql(query, variables=dict(variables))
    return answer, service.app_url
