"""Pipeline schedules as values: built by name, checked, drawn and timed without a device."""

from jaxpar.pipeline.build import SCHEDULES, build, check, legal_microbatches
from jaxpar.pipeline.forward import forward
from jaxpar.pipeline.from_table import from_table
from jaxpar.pipeline.schedule import Costs, Kind, Schedule, Slot, Task

__all__ = [
    "SCHEDULES",
    "Costs",
    "Kind",
    "Schedule",
    "Slot",
    "Task",
    "build",
    "check",
    "forward",
    "from_table",
    "legal_microbatches",
]
