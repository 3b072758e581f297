"""The numbers of a run on a tracking service: Weights & Biases, or trackio, which took over its calls."""

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxpar.errors import ConfigError
from jaxpar.training.callbacks import Callback, Loop, Record

Service = Literal["wandb", "trackio"]


class Tracking(Callback):
    """Logs every record under its step. On one process alone.

    The run's name there is that of its folder and a few letters that are kept in the folder, so that a resumed run
    goes on there, and one started afresh is another. Raises `ConfigError` when the package is missing.
    """

    def __init__(self, service: Service, directory: Path, project: str, config: Mapping[str, Any]):
        self._service = service
        try:
            self._module: Any = importlib.import_module(service)
        except ModuleNotFoundError as error:
            if error.name != service:
                raise
            raise ConfigError(
                f"track={service} needs the package {service!r}, which is not installed: pip install {service}, or "
                f"the extra of both services, pip install 'jaxpar[tracking]'"
            ) from None
        self._directory, self._project, self._config = directory, project, dict(config)
        self._started = False

    def on_start(self, loop: Loop) -> None:
        name = f"{self._directory.name}-{_letters(self._directory / f'{self._service}.id')}"
        # trackio knows a run by its name, W&B by its id.
        by_id = {"id": name} if self._service == "wandb" else {}
        self._module.init(project=self._project, name=name, config=self._config, resume="allow", **by_id)
        self._started = True

    def on_record(self, loop: Loop, step: int, record: Record) -> None:
        self._module.log(dict(record), step=step)

    def close(self) -> None:
        if self._started:
            self._module.finish()


def _letters(path: Path) -> str:
    if not path.exists():
        path.write_text(secrets.token_hex(3) + "\n")
    return path.read_text().strip()
