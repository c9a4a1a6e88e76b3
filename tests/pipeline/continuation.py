"""A program: trains a small decoder under fairscale's FullyShardedDataParallel, from checkpoints and to them.

Run as `python -m tests.pipeline.continuation JOBS.json`, with {"workers": W, "jobs": [Job, ...]}; it starts W processes
(gloo, loopback) that do the jobs one after another. Checkpoints are what metaseq's trainer writes. The global batch of
a step depends on the step alone, so that runs of every W see the same data.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel
from torch import Tensor, nn

VOCAB, POSITIONS, LAYERS = 24, 11, 2
GLOBAL_BATCH = 6
LENGTH = 9


@dataclass(frozen=True)
class Job:
    """One stretch of training: steps from the first up to the one where it stops."""

    first_step: int
    stop_step: int
    result: str
    "file for the losses, and for the whole model and optimizer state at the end"
    load: str = ""
    "prefix of the files, up to `-model_part-0`; empty: a new model"
    load_form: str = "sharded"
    "'sharded', 'whole' (one unflat file) or 'weights' (sharded, without the optimizer's state)"
    save: str = ""
    "prefix of the sharded checkpoint saved at the end; empty: none"
    save_unsharded_state: str = ""
    "prefix of one more: flat shards of the weights, the optimizer's state whole in rank 0's file"
    heads: int = 2
    dim: int = 14
    ffn: int = 20
    fused: bool = True
    layer_units: bool = True
    "an FSDP unit for each layer, besides the root's"
    integer_steps: bool = False
    "save steps as integers, as torch before 1.12 did"


class Attention(nn.Module):
    """Causal self-attention; a fused projection gives K, V, Q, in this order, as metaseq's does."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.heads = job.heads
        self.names = ("qkv_proj",) if job.fused else ("k_proj", "v_proj", "q_proj")
        for name in self.names:
            setattr(self, name, nn.Linear(job.dim, 3 * job.dim if job.fused else job.dim))
        self.out_proj = nn.Linear(job.dim, job.dim)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([getattr(self, name)(x) for name in self.names], dim=-1)
        k, v, q = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in joined.chunk(3, dim=-1))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """A decoder layer; modules stand in metaseq's order, which is the order of the flat parameters."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.self_attn = Attention(job)
        self.self_attn_layer_norm = nn.LayerNorm(job.dim)
        self.fc1 = nn.Linear(job.dim, job.ffn)
        self.fc2 = nn.Linear(job.ffn, job.dim)
        self.final_layer_norm = nn.LayerNorm(job.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(torch.relu(self.fc1(self.final_layer_norm(x))))


class Decoder(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, job.dim)
        self.embed_positions = nn.Embedding(POSITIONS, job.dim)
        layers = [Layer(job) for _ in range(LAYERS)]
        self.layers = nn.ModuleList([shard(layer) for layer in layers] if job.layer_units else layers)
        self.layer_norm = nn.LayerNorm(job.dim)
        self.output_projection = nn.Linear(job.dim, VOCAB, bias=False)
        self.output_projection.weight = self.embed_tokens.weight
        self.register_buffer("version", torch.tensor([3.0]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens) + self.embed_positions(torch.arange(tokens.shape[1]) + 2)
        for layer in self.layers:
            x = layer(x)
        return self.output_projection(self.layer_norm(x))


class Model(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.decoder = Decoder(job)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens)


def shard(module: nn.Module) -> Any:
    return FullyShardedDataParallel(module, flatten_parameters=True, compute_device=torch.device("cpu"))


class NoStream:
    """Stands for a CUDA stream: on a CPU all work is done when the call returns."""

    def wait_stream(self, stream: object) -> None:
        pass


def stand_in_for_cuda() -> None:
    """Let fairscale run on a CPU: it uses CUDA streams without asking whether there are any."""
    stream = NoStream()
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    # From a GPU this copies, and fairscale gathers all moments of a parameter into one buffer, one after another.
    torch.Tensor.cpu = torch.Tensor.clone  # type: ignore[method-assign]
    set_up = FullyShardedDataParallel._setup_streams

    def setup_streams(self: Any) -> None:
        # Where there is no CUDA, fairscale makes no streams here, but looks them up later.
        set_up(self)
        self._streams.update(dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), stream))

    def reduce_scatter(output: Tensor, stacked: Tensor, group: Any) -> None:
        # fairscale gives a row for each rank; gloo wants them one after another.
        dist.reduce_scatter_tensor(output, stacked.flatten(), group=group)

    FullyShardedDataParallel._setup_streams = setup_streams
    dist._reduce_scatter_base = reduce_scatter


def new_optimizer(model: nn.Module) -> torch.optim.Adam:
    # Keys' biases have a gradient of zero but for rounding (softmax takes no notice of them), which Adam divides by its
    # own size; an epsilon far above it, and below true gradients, keeps that noise out of the weights.
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-5, weight_decay=0.01)


def batch(step: int) -> Tensor:
    """Return the global batch of a step: sequences that can be learnt, and differ from step to step."""
    starts = torch.arange(GLOBAL_BATCH).unsqueeze(1) * 5 + step * 3
    places = torch.arange(LENGTH + 1).unsqueeze(0)
    return (starts + places * (1 + (starts + step) % 4) + places**2) % VOCAB


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train one step; return the mean loss over the global batch."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    own = GLOBAL_BATCH // workers
    tokens = batch(step)[rank * own : (rank + 1) * own]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # FSDP averages gradients over the ranks, which have equally many sequences
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total / workers)


def plain(item: Any) -> Any:
    """Copy a tree as metaseq's `move_to_cpu` does: containers become plain ones, tensors get storages of their own."""
    if isinstance(item, Tensor):
        return item.detach().clone()
    if isinstance(item, dict):
        return {key: plain(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        values = [plain(value) for value in item]
        return values if isinstance(item, list) else tuple(values)
    return item


def checkpoint(job: Job, model: Any, state: object, *, sharded: bool) -> dict[str, Any]:
    """Make the dict that metaseq's trainer saves on one rank."""
    arch = argparse.Namespace(
        _name="transformer_lm_megatron",
        decoder_layers=LAYERS,
        decoder_embed_dim=job.dim,
        decoder_ffn_embed_dim=job.ffn,
        decoder_attention_heads=job.heads,
        model_parallel_size=1,
        share_decoder_input_output_embed=True,
        checkpoint_activations=False,
        min_params_to_wrap=0 if job.layer_units else 10**8,  # metaseq's default: layers smaller than that are no units
    )
    cfg = {
        "model": arch,
        "common": {"model_parallel_size": 1},
        "distributed_training": {"distributed_world_size": dist.get_world_size(), "use_sharded_state": sharded},
    }
    saved = {
        "cfg": cfg,
        "model": model.local_state_dict(),
        "criterion": None,
        "optimizer_history": [{"optimizer_name": "Adam", "lr_scheduler_state": {}, "num_updates": 0}],
        "extra_state": {"previous_training_time": 1.5},
        "last_optimizer_state": state,
        "shard_metadata": model.local_metadata_dict(),
    }
    return plain(saved)


def gather(model: Any, state: dict[str, Any]) -> dict[str, Any] | None:
    """Return fairscale's whole state on rank 0. It changes the steps of what it is given, which gets a copy here."""
    if dist.get_world_size() == 1:
        return None  # fairscale 0.4.13 cannot gather from one process
    copied = copy.deepcopy(state)
    return model.gather_full_optim_state_dict(SimpleNamespace(state_dict=lambda: copied))


def save(job: Job, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Save what the job asks for; return fairscale's whole optimizer state on rank 0."""
    state = {**plain(optimizer.state_dict()), "loss_scale": 4.0}
    if job.integer_steps:
        for entry in state["state"].values():
            entry["step"] = int(entry["step"])
    rank = dist.get_rank()
    if job.save:
        torch.save(checkpoint(job, model, state, sharded=True), f"{job.save}-model_part-0-shard{rank}.pt")
    whole = gather(model, state)
    if job.save_unsharded_state:
        held = checkpoint(job, model, whole if rank == 0 else -1, sharded=False)
        torch.save(held, f"{job.save_unsharded_state}-model_part-0-shard{rank}.pt")
    return whole


def load(job: Job, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Load by fairscale and torch, strictly."""
    is_whole = job.load_form == "whole"
    name = f"{job.load}.pt" if is_whole else f"{job.load}-model_part-0-shard{dist.get_rank()}.pt"
    held = torch.load(name, weights_only=False)
    if is_whole:
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(model.get_shard_from_optim_state_dict(held["last_optimizer_state"]))
        return
    for unit in (module for module in model.modules() if isinstance(module, FullyShardedDataParallel)):
        unit._lazy_init()  # as the first forward pass does; fairscale 0.4.13 fails to load nested units before it
    model.load_local_state_dict(held["model"])
    if job.load_form == "sharded":
        optimizer.load_state_dict(held["last_optimizer_state"])


def run(job: Job) -> None:
    torch.manual_seed(1)  # every rank builds the whole model, and keeps its shard
    model = shard(Model(job))
    optimizer = new_optimizer(model)
    if job.load:
        load(job, model, optimizer)
    losses = [train_step(model, optimizer, step) for step in range(job.first_step, job.stop_step)]
    whole = save(job, model, optimizer)
    weights = plain(model.state_dict())
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "model": weights, "optimizer": whole}, job.result)


def work(rank: int, workers: int, rendezvous: str, jobs: list[Job]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=workers)
    for job in jobs:
        run(job)
        dist.barrier()
    dist.destroy_process_group()


def write_jobs(path: Path, workers: int, jobs: list[Job]) -> None:
    path.write_text(json.dumps({"workers": workers, "jobs": [asdict(job) for job in jobs]}))


def main(path: str) -> None:
    told = json.loads(Path(path).read_text())
    jobs = [Job(**job) for job in told["jobs"]]
    stand_in_for_cuda()
    # Forked processes have torch at once; none of its threads has started yet.
    arguments = (told["workers"], f"{path}.rendezvous", jobs)
    torch.multiprocessing.start_processes(work, arguments, nprocs=told["workers"], start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1])
