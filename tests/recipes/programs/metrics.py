"""torchmetrics on two ranks: sums, a curve, and a list of which every rank has another length."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torchmetrics


def main(backend: str) -> None:
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    metrics = {
        "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=3),
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
        "roc": torchmetrics.AUROC(task="multiclass", num_classes=3),
        "mean": torchmetrics.MeanMetric(),
        "cat": torchmetrics.CatMetric(),
    }
    for batch in range(2 + rank):
        scores, labels = torch.rand(8, 3).softmax(dim=1), torch.randint(3, (8,))
        for name in ("accuracy", "f1", "roc"):
            metrics[name].update(scores, labels)
        for name in ("mean", "cat"):
            metrics[name].update(scores[:, 0] * (batch + 1))
    found = {name: metric.compute().tolist() for name, metric in metrics.items()}
    assert len(found["cat"]) == 8 * 5
    if rank == 0:
        print("ranks on", type(dist.group.WORLD).__name__)
        print(found, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
