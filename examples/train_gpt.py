"""A small GPT learns Shakespeare's sonnets, letter by letter, on several ranks: DDP or FSDP, torch's or Phalanx's own,
by one line (look for "the one line" below).

phalanx run -n 2 examples/train_gpt.py                    (torch's DDP on Phalanx)
phalanx run -n 2 examples/train_gpt.py --wrap fsdp2
phalanx run -n 2 examples/train_gpt.py --wrap phalanx
torchrun --nproc-per-node 2 examples/train_gpt.py --backend gloo
python examples/train_gpt.py                              (a world of one)
"""

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import phalanx as px

TEXT = (Path(__file__).parent / "data" / "sonnets.txt").read_text(encoding="utf-8")
LETTERS = sorted(set(TEXT))
# layers, heads, width, letters that it looks back, texts per step and rank
SIZES = {"tiny": (2, 2, 32, 32, 8), "small": (4, 4, 128, 64, 16)}


class Block(nn.Module):
    """Every letter looks at those before it, then thinks for itself."""

    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.before_looking, self.before_thinking = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look, self.seen = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.look(self.before_looking(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.seen(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(self.before_thinking(x))


class GPT(nn.Module):
    """Says how likely each letter is to come next, after every letter of a text."""

    def __init__(self, layers, heads, width, context):
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm, self.guess = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))

    def forward(self, letters):
        x = self.letter(letters) + self.place(torch.arange(letters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.guess(self.norm(x).flatten(0, 1))


def with_torch_ddp(model):
    return DistributedDataParallel(model)


def with_fsdp2(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # without one, torch takes a GPU if there is one
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def with_phalanx(model):
    return px.parallel.DDP(model, px.init())


def with_phalanx_fsdp(model):
    return px.parallel.FSDP(model, px.init())


WRAPS = {
    "torch-ddp": with_torch_ddp,
    "fsdp2": with_fsdp2,
    "phalanx": with_phalanx,
    "phalanx-fsdp": with_phalanx_fsdp,
}


def batches(text, context, count, seed):
    """Random pieces of the text, and the same pieces one letter later."""
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (count, 1), generator=random)
        pieces = text[starts + torch.arange(context + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


def mean_over_ranks(value):
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def write(model, context, count):
    """Lets the model go on from an empty line. All ranks take part: under FSDP each has a piece of the model only."""
    random = torch.Generator().manual_seed(0)
    letters = torch.tensor([[LETTERS.index("\n")]])
    for _ in range(count):
        likely = model(letters[:, -context:])[-1:].softmax(-1)
        letters = torch.cat([letters, torch.multinomial(likely, 1, generator=random)], 1)
    return "".join(LETTERS[letter] for letter in letters[0]).strip()


def check_replicas(model, wrap):
    """Data parallel keeps the same parameters on all ranks, bit for bit."""
    if wrap == "phalanx":
        model.verify_replicas()
    mine = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine.hexdigest())
    return "replicas identical: " + ("yes" if len(set(everyone)) == 1 else f"NO: {everyone}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrap", choices=WRAPS, default="torch-ddp")
    parser.add_argument("--backend", choices=["phalanx", "gloo"], default="phalanx", help="of torch.distributed")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--write", type=int, default=0, metavar="N", help="let the model write N letters at the end")
    args = parser.parse_args()

    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(args.backend, **alone)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    layers, heads, width, context, count = SIZES[args.size]
    torch.manual_seed(0)  # all ranks begin with the same model
    model = GPT(layers, heads, width, context)
    parameters = sum(parameter.numel() for parameter in model.parameters())

    model = WRAPS[args.wrap](model)  # <- the one line: DistributedDataParallel, fully_shard, px.parallel.DDP or FSDP

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    data = batches(text, context, count, seed=rank)  # each rank learns from pieces of its own
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        letters, following = next(data)
        optimizer.zero_grad()
        loss = cross_entropy(model(letters), following.flatten())
        loss.backward()  # gradients are averaged over all ranks while it runs
        optimizer.step()
        if step == 1 or step % max(1, args.steps // 5) == 0:
            shown = mean_over_ranks(loss)
            if rank == 0:
                print(f"\rstep {step}: loss {shown:.6f}", flush=True)
        elif rank == 0 and sys.stdout.isatty():
            print(f"\rstep {step} of {args.steps}", end="", flush=True)
    seconds = time.perf_counter() - began

    words = [f"{ranks} ranks, {args.wrap} on {args.backend}, {parameters:,} parameters"]
    words.append(f"{1000 * seconds / max(args.steps, 1):.1f} ms per step")
    if "fsdp" not in args.wrap:  # there each rank has a piece of every parameter
        words.append(check_replicas(model, args.wrap))
    if args.write:
        words.append(write(model, context, args.write))
    if rank == 0:
        print(*words, sep="\n", flush=True)
    dist.destroy_process_group()


main()
