"""A small GPT on one GPU with several ranks: Phalanx beside Gloo, and beside the same work in one process.

    python benchmarks/gpu_training.py [--ranks 2 4] [--steps 20] [--contenders alone px-ddp ddp-phalanx ddp-gloo ...]

Each step trains on the same texts, cut among the ranks; in a pipeline, the layers are. Shown are the median of a step,
and how far the losses are from those of one process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import traceback
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

CONTENDERS = ["alone", "px-ddp", "ddp-phalanx", "fsdp-phalanx", "px-pipeline", "pipeline-phalanx", "ddp-gloo"]
WORDS, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 8192, 256, 512, 8, 8, 16
MICROBATCHES = 4


class GPT(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Says how likely each word is to come next."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.guess = nn.Linear(WIDTH, WORDS)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.word(words) + self.place.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.guess(x)


class Stage(nn.Module):  # type: ignore[misc]
    """Some layers of a GPT, for a pipeline."""

    def __init__(self, model: GPT, index: int, stages: int) -> None:
        super().__init__()
        self.word: Any = model.word if index == 0 else None
        self.place: Any = model.place if index == 0 else None
        self.blocks = nn.ModuleList(list(model.blocks)[index * LAYERS // stages : (index + 1) * LAYERS // stages])
        self.guess = model.guess if index == stages - 1 else None
        self.register_buffer("mask", model.mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.word is not None:
            x = self.word(x) + self.place.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        # torch's pipelines want the order in memory that they found out without a GPU.
        return x.contiguous() if self.guess is None else self.guess(x)


def loss_of(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """How unlikely the model took the words to be."""
    return nn.functional.cross_entropy(output.flatten(0, 1), words.flatten())


def torch_pipeline(stage: Stage, rank: int, ranks: int) -> Any:
    """A step of torch's own pipeline; its loss on the last rank, and 0 elsewhere."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    made = PipelineStage(stage, rank, ranks, torch.device("cuda"))
    schedule = Schedule1F1B(made, n_microbatches=MICROBATCHES, loss_fn=loss_of)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        last = rank == ranks - 1
        # torch finds out what the inputs are like on no device, where views lose their gaps, and wants the same here.
        first = [inputs.contiguous()] if rank == 0 else []
        schedule.step(*first, **({"target": targets, "losses": losses} if last else {}))
        return torch.stack(losses).mean() * ranks if last else torch.zeros((), device="cuda")

    return step


def texts(step: int) -> torch.Tensor:
    """The texts of a step."""
    return torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def rank_of(rank: int, ranks: int, contenders: list[str], steps: int, folder: str) -> None:
    """One rank, which runs the contenders one after another; rank 0 shows what it found."""
    torch.cuda.set_device(0)
    reference: list[float] = []
    for contender in contenders:
        alone = contender == "alone"
        if alone and rank != 0:
            continue
        losses, seconds = trained(0 if alone else rank, 1 if alone else ranks, contender, steps, folder)
        reference = reference or losses
        apart = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        if rank == 0:
            click.echo(
                f"{contender:16} {1 if alone else ranks} ranks  {seconds * 1e3:8.1f} ms a step, "
                f"last loss {losses[-1]:.4f}, at most {apart:.4f} from {contenders[0]}"
            )


def trained(rank: int, ranks: int, contender: str, steps: int, folder: str) -> tuple[list[float], float]:
    """The losses of one contender, and the median of its steps."""
    torch.manual_seed(0)
    model: Any = GPT().cuda()
    close: Any = None
    kind, _, backend = contender.partition("-")
    run: Any = None
    """A step of a pipeline, which has a forward and a backward."""
    if contender != "alone":
        dist.init_process_group(
            "gloo" if kind == "px" or backend == "gloo" else "phalanx",
            init_method=f"file://{folder}/{contender}",
            rank=rank,
            world_size=ranks,
        )
    if kind == "px":
        import phalanx as px

        os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(ranks))
        port = [free_port() if rank == 0 else None]
        dist.broadcast_object_list(port)
        os.environ["MASTER_PORT"] = str(port[0])
        group = px.init()
        close = group.close
        if backend == "ddp":
            model = px.parallel.DDP(model, group)
        else:
            stages = [Stage(model, index, ranks) if index == rank else None for index in range(ranks)]
            model = px.parallel.Pipeline(stages, group, microbatches=MICROBATCHES)
            run = lambda inputs, targets: model.step(inputs, targets, loss_of)  # noqa: E731
    elif kind == "pipeline":
        model = Stage(model, rank, ranks)
        run = torch_pipeline(model, rank, ranks)
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses, times = [], []
    for step in range(steps):
        mine = (texts(step) if run is not None else texts(step).chunk(ranks)[rank]).cuda()
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        before = time.perf_counter()
        optimizer.zero_grad()
        if run is not None:
            loss = run(mine[:, :-1], mine[:, 1:])
        else:
            loss = loss_of(model(mine[:, :-1]), mine[:, 1:])
            loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
        shared = loss.detach().cpu() / ranks
        if dist.is_initialized():
            dist.all_reduce(shared)
        losses.append(shared.item())
    if close is not None:
        close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses, statistics.median(times[steps // 3 :])


def outspoken(rank: int, *arguments: Any) -> None:
    """`rank_of`, whose error is shown: of several ranks that fail, torch tells of one only."""
    try:
        rank_of(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        raise


def free_port() -> int:
    """A port that nobody uses now."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def main() -> None:
    """Runs the contenders one after another, in the same processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    arguments = parser.parse_args()
    count = sum(parameter.numel() for parameter in GPT().parameters())
    click.echo(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; GPT of {count / 1e6:.1f} M parameters, float32"
    )
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(outspoken, (ranks, arguments.contenders, arguments.steps, folder), nprocs=ranks)


if __name__ == "__main__":
    main()
