"""Puts the goodput workspace into a W&B project; what is in it says `goodput_dashboard.py`."""

from __future__ import annotations

import json
import secrets
import string

from lightning_ntp.errors import ConfigError
from lightning_ntp.goodput_dashboard import parse_project, view_spec
from lightning_ntp.strategy._wandb_private import ask_wandb

NAME_LENGTH = 11

SAVE = """
mutation UpsertView2($entityName: String, $projectName: String, $type: String, $name: String, $displayName: String, $description: String, $spec: String) {
    upsertView(input: {entityName: $entityName, projectName: $projectName, name: $name, displayName: $displayName,
                       description: $description, type: $type, spec: $spec, createdUsing: WANDB_SDK}) {
        view { id name }
        inserted
    }
}
"""


def save_dashboard(project: str, title: str) -> str:
    """Make a saved view in ``ENTITY/PROJECT``; its address.

    Raises:
        ConfigError: not a project, no key, no network, or W&B refused.
    """
    entity, name = parse_project(project)
    short = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(NAME_LENGTH))
    variables = {
        "entityName": entity,
        "projectName": name,
        "type": "project-view",
        "name": f"nw-{short}-v",
        "displayName": title,
        "description": "",
        "spec": json.dumps(view_spec()),
    }
    try:
        answer, address = ask_wandb(SAVE, variables)
    except Exception as error:  # wandb raises its own kinds, and those of what it runs in the background
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"W&B did not take the dashboard for {project}: {said}. It needs the network, a key (`wandb login` or WANDB_API_KEY) that may "
            "write to the project, and the project itself; without them `--out FILE` writes the specification down"
        ) from error
    if not (answer.get("upsertView") or {}).get("view"):
        raise ConfigError(f"W&B made no view in {project}: it answered {answer}; is there such a project?")
    return f"{address.rstrip('/')}/{entity}/{name}?nw={short}"
