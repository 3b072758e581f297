"""Orders of tasks by stage that others have published, for runtimes in which each stage goes at its own pace.

- 1F1B and interleaved: Narayanan et al. 2021 (arXiv 2104.04473), figure 4: 4 devices, 8 microbatches, 2 chunks. The
  same orders follow from Megatron-LM's rule (`get_pp_rank_microbatches`: p - 1 - s forwards before the first pair of F
  and B, interleaved 2 (p - 1 - s) + (v - 1) p), and from torch.distributed.pipelining's `Schedule1F1B` and
  `ScheduleInterleaved1F1B`. The smaller ones apply the rule to 2 stages.
- GPipe: the same paper, figure 3, with backwards in order as in torch's `ScheduleGPipe`.
- `SCHEDULE_TABLE`: the example at Megatron-LM's `get_schedule_table`: 2 stages, 2 chunks, 5 microbatches, groups
  of 3 and 2.

Here microbatches, stages and chunks count from 0, and `F1.1` is microbatch 1 on chunk 1.
"""

from jaxpar.pipeline import Kind, Task

GPIPE_4_8 = ["F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7"] * 4

ONE_F_ONE_B_4_8 = [
    "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
    "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
    "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
    "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
]

ONE_F_ONE_B_2_3 = ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]

INTERLEAVED_4_8_2 = [
    "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1 F4.1 B2.1 "
    "F5.1 B3.1 F6.1 B0 F7.1 B1 B2 B3 B4.1 B5.1 B6.1 B7.1 B4 B5 B6 B7",
    "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 B0.1 F5 B1.1 F6 B2.1 F7 B3.1 "
    "F4.1 B0 F5.1 B1 F6.1 B2 F7.1 B3 B4.1 B5.1 B6.1 B7.1 B4 B5 B6 B7",
    "F0 F1 F2 F3 F0.1 F1.1 F2.1 B0.1 F3.1 B1.1 F4 B2.1 F5 B3.1 F6 B0 "
    "F7 B1 F4.1 B2 F5.1 B3 F6.1 B4.1 F7.1 B5.1 B6.1 B7.1 B4 B5 B6 B7",
    "F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1 "
    "F6 B2 F7 B3 F4.1 B4.1 F5.1 B5.1 F6.1 B6.1 F7.1 B7.1 B4 B5 B6 B7",
]

INTERLEAVED_2_4_2 = [
    "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
    "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
]

SCHEDULE_TABLE = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]


def parsed(rows: list[str]) -> dict[int, list[Task]]:
    """By stage: its tasks in order."""
    return {stage: [_task(word) for word in row.split()] for stage, row in enumerate(rows)}


def _task(word: str) -> Task:
    microbatch, _, chunk = word[1:].partition(".")
    return Task(Kind(word[0]), int(microbatch), int(chunk or 0))
