"""accelerate on Phalanx: a program that asks for Gloo, and a variable that says what Gloo is.

phalanx run -n 2 --as-gloo examples/recipes/train_accelerate.py
PHALANX_AS_GLOO=1 torchrun --nproc-per-node 2 examples/recipes/train_accelerate.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed

CLASSES, EPOCHS = 4, 3


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    points = torch.randn(2048, 16)
    data = torch.utils.data.TensorDataset(points, points[:, :CLASSES].argmax(dim=1))
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(EPOCHS):
        total, right = 0.0, 0
        for batch, labels in loader:
            scores = model(batch)
            loss = torch.nn.functional.cross_entropy(scores, labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            guesses, truth = accelerator.gather_for_metrics((scores.argmax(dim=1), labels))
            right += int((guesses == truth).sum())
            total += float(accelerator.reduce(loss.detach(), reduction="mean"))
        accelerator.print(f"epoch {epoch}: loss {total / len(loader):.7f}, right {right} of {len(data)}", flush=True)
    accelerator.print(f"{accelerator.num_processes} ranks on {type(dist.group.WORLD).__name__}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
