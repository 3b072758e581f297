"""The published runs (`data/README.md`) as the estimator's own values: what was trained, how, by which system."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from jaxpar.estimate.constants import Constants
from jaxpar.estimate.devices import Device, Link, device
from jaxpar.estimate.layout import ALL_ROLES, FULL, KEEP_ALL, SELECTIVE, Layout, Remat
from jaxpar.estimate.system import System
from jaxpar.estimate.time import StepTime, estimate
from jaxpar.estimate.work import Work, transformer

TABLE = Path(__file__).parent / "data" / "published_runs.csv"

# What follows of each system is from its papers, docs and code as commonly known; the table does not say it.
#
# Megatron-LM of 2021 and its DeepSpeed fork: before fused attention, nothing overlapped; gradients in 16 bits.
MEGATRON_2021 = System(
    "Megatron-LM 2021", attention="unfused", fused=False, overlap_gradients=False, overlap_pipe=False, reduce_bytes=2,
    accumulate_bytes=6,
)  # fmt: skip
# With bfloat16 its gradients are summed in float32.
DEEPSPEED_BF16 = replace(MEGATRON_2021, name="Megatron-DeepSpeed, bf16", reduce_bytes=4, accumulate_bytes=10)
# Megatron Core under NeMo and Megatron-Bridge: cuDNN's attention, TransformerEngine's fused kernels and its
# overlap of tensor parallelism with matrix products, overlapped distributed optimizer and messages; the product that
# makes a gradient reads the sum so far and adds to it.
MEGATRON_CORE = System("Megatron Core", overlap_tensor=True, reduce_bytes=2, accumulate_bytes=2)
# PyTorch's FSDP in llm-foundry: FlashAttention, no compiler, gradients summed in the 16 bits of the compute.
LLM_FOUNDRY = System("llm-foundry", attention="flash", fused=False, reduce_bytes=2)
# FSDP2: PyTorch's scaled_dot_product_attention, which is FlashAttention-2; float32 sums.
TORCHTITAN = System("torchtitan", attention="flash", fused=False, overlap_ring=False)
MAXTEXT = System("MaxText", reduce_bytes=2)
AUTOMODEL = System("NeMo AutoModel", fused=False)

# What the sources say of the network between nodes, bytes/s for each device; others are as the device's table has it.
_BETWEEN = {
    "RoCE 1600Gb/s per node": 25e9,
    "NVLink 4 links in node; 4x OmniPath 100Gb/s per node": 6.25e9,
}
_KINDS = {
    "a100-40gb": "a100-40",
    "a100-80gb": "a100",
    "h100-80gb": "h100",
    "gb200": "gb200",
    "gb300": "gb300",
    "b200": "b200",
    "h200": "h200",
    "mi300x": "mi300x",
    "tpu-v6e": "v6e",
    "tpu-v5e": "v5e",
    "tpu-v5p": "v5p",
}
# torchtitan's H100: 500 W in place of 700 (power falls with the cube of the clock, while voltage follows it) and HBM2e.
_POWER = (500 / 700) ** (1 / 3)


@dataclass(frozen=True)
class Run:
    """One published run. `seconds`: its measured step. `family`: the model's, without its size."""

    row: dict[str, str]
    work: Work
    layout: Layout
    device: Device
    system: System

    @property
    def seconds(self) -> float:
        return float(self.row["step_time_s"])

    @property
    def source(self) -> str:
        return self.row["source_id"]

    @property
    def split(self) -> str:
        return self.row["split"]

    @property
    def model(self) -> str:
        return self.row["model"]

    @property
    def family(self) -> str:
        name = self.model.lower().split("-")[0]
        return "gpt" if name.startswith("gpt") else name.rstrip("0123456789") if name.startswith("llama") else name

    def estimate(self, constants: Constants) -> StepTime:
        return estimate(self.work, self.layout, self.device, self.system, constants)


def read(path: Path = TABLE) -> list[Run]:
    """All rows of the table."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    cut = {_pipeline(row): row["vpp"] for row in rows if row["vpp"]}
    return [run_of({**row, "vpp": row["vpp"] or cut.get(_pipeline(row), "1")}) for row in rows]


def _pipeline(row: dict[str, str]) -> tuple[str, ...]:
    """Where virtual stages are not printed, they are those of the same source's other runs of these."""
    return row["source_id"], row["model"], row["pp"]


def run_of(row: dict[str, str]) -> Run:
    return Run(row, _work(row), _layout(row), _device(row), _system(row))


def _number(row: dict[str, str], name: str, default: int = 1) -> int:
    return int(float(row[name])) if row.get(name) else default


def _work(row: dict[str, str]) -> Work:
    experts = _number(row, "experts", 0)
    learned = "learned positional" in row["notes"]
    return transformer(
        layers=_number(row, "layers"),
        hidden=_number(row, "hidden"),
        heads=_number(row, "heads"),
        kv_heads=_number(row, "kv_heads"),
        head_dim=_number(row, "head_dim"),
        mlp=_number(row, "ffn"),
        gated=row["gated_mlp"] == "y",
        vocab=_number(row, "vocab"),
        tied=row["tied_emb"] == "y",
        positions=_number(row, "seq_len") if learned else 0,
        experts=experts,
        active=_number(row, "topk") if experts else 0,
        expert_mlp=_number(row, "moe_ffn", _number(row, "ffn")) if experts else 0,
    )


def _layout(row: dict[str, str]) -> Layout:
    pipe, chunks, layers = _number(row, "pp"), _number(row, "vpp"), _number(row, "layers")
    data, seq = _number(row, "dp"), _number(row, "cp")
    places = pipe * chunks
    sharding = row["zero_fsdp"]
    zero = 0 if sharding == "none" else 1 if sharding.startswith("zero1") else 3
    return Layout(
        data=data,
        pipe=pipe,
        tensor=_number(row, "tp"),
        seq=seq,
        expert=_number(row, "ep"),
        expert_tensor=_number(row, "etp"),
        chunks=chunks,
        ends_are_layers=bool(layers % places) and not (layers + 2) % places,
        zero=zero,
        shard=min(data, _number(row, "fsdp_group", data)),
        microbatches=_number(row, "grad_accum"),
        rows=_number(row, "micro_batch"),
        length=_number(row, "seq_len"),
        precision="fp8" if "fp8" in row["dtype"] else "bfloat16",
        remat=_remat(row["recompute"]),
        split_norms=row["tp_sequence_parallel"] == "y",
    )


def _remat(text: str) -> Remat:
    if text.startswith("full,"):
        some, every = (int(word) for word in text.removeprefix("full,").split("(")[0].split() if word.isdigit())
        return replace(FULL, layers=some / every)
    if text == "selective(op)":
        # torchtitan: attention and every other matrix product are saved, with collectives.
        return Remat(ALL_ROLES, share=0.5, elementwise=True)
    if text.startswith("custom"):
        # MaxText: the projections around attention are saved, and what only feeds the residual is not needed again.
        return Remat(frozenset({"up"}), attention=True, elementwise=True)
    return FULL if text == "full" else SELECTIVE if text.startswith("selective") else KEEP_ALL


def _device(row: dict[str, str]) -> Device:
    kind = row["device"]
    if kind == "h100-96gb-hbm2e-500w":
        full = device("h100")
        found = replace(
            full, memory_bandwidth=2.4e12, matmul_fraction=full.matmul_fraction * _POWER,
            fp8_fraction=full.fp8_fraction * _POWER,
        )  # fmt: skip
    else:
        found = device(_KINDS[kind])
    if row["gpus_per_node"]:
        found = replace(found, node=_number(row, "gpus_per_node"))
    network = row["interconnect"]
    if network in _BETWEEN:
        found = replace(found, slow=Link(_BETWEEN[network], found.slow.latency))
    if "before NUMA/PCIe fix" in row["notes"]:
        # Processes on the wrong socket: what goes to the network crosses the link between sockets, there and back.
        found = replace(found, slow=Link(found.slow.bandwidth / 2, found.slow.latency))
    if "NVLink 4 links" in network:
        found = replace(found, fast=Link(4 * 25e9, found.fast.latency))
    return found


def _system(row: dict[str, str]) -> System:
    source, reference, notes = row["source_id"], row["source_ref"], row["notes"]
    if "maxtext" in reference.lower() or "maxtext" in source:
        return MAXTEXT
    if source.startswith("megatron-2") or source.startswith("megatron-sc21"):
        return MEGATRON_2021
    if source.startswith("bigscience"):
        return DEEPSPEED_BF16 if row["dtype"] == "bf16" else MEGATRON_2021
    if source == "llm-foundry":
        return replace(LLM_FOUNDRY, regather="SHARD_GRAD_OP" not in row["zero_fsdp"])
    if source == "torchtitan":
        float8 = "float8" in notes
        return replace(
            TORCHTITAN, fused=float8 or "compile" in notes, overlap_tensor="async TP" in notes,
            gather_bytes=1 if float8 else 2,
        )  # fmt: skip
    return AUTOMODEL if source == "nemo-automodel" else MEGATRON_CORE


def splits(runs: Iterable[Run], name: str) -> list[Run]:
    return [run for run in runs if run.split == name]
