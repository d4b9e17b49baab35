"""Results as JSON files."""

import json
from pathlib import Path
from typing import Any

from pagedjax.errors import ConfigError


def check_writable(path: str | None) -> None:
    """Raise a ConfigError now rather than after the measurement if `path` cannot be written."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: {Path(path).absolute().parent} is no directory; make it")


def write_json(path: str | None, result: Any) -> None:
    """Write `result` to `path`, if there is one."""
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
