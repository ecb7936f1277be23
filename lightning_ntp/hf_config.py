"""A Hugging Face ``config.json`` from a file, a folder or the hub, without importing transformers."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from lightning_ntp.errors import ConfigError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z")


def load_hf_config(source: str, timeout_seconds: float = 20.0) -> dict[str, Any]:
    """The config of a local ``config.json``, of a folder that holds one, or of a hub id such as ``Qwen/Qwen3-8B``.

    The hub is asked without a token, at ``HF_ENDPOINT`` if that is set; for a gated model download its config and give the path.

    Raises:
        ConfigError: nothing there, no answer, or no JSON object.
    """
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return _parsed(path.read_text(), str(path))
    if not _HUB_ID.match(source):
        raise ConfigError(f"{source!r} is no config.json, no folder with one, and no hub id of the form owner/name")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    url = f"{endpoint}/{source}/resolve/main/config.json"
    if not url.startswith(("https://", "http://")):
        raise ConfigError(f"HF_ENDPOINT must be an http(s) address, got {endpoint!r}")
    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:
            return _parsed(answer.read().decode(), url)
    except (urllib.error.URLError, TimeoutError) as error:
        raise ConfigError(f"no config at {url} ({error}); is it gated or are you offline? Give a local config.json") from error


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{where} holds a {type(config).__name__}, a config is an object")
    return config
