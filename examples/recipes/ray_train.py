"""Ray Train on Phalanx: `TorchConfig` has its name.

python examples/recipes/ray_train.py
"""

import tempfile

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model

RANKS, CLASSES, EPOCHS = 2, 4, 3


def train_on_a_worker(settings):
    torch.manual_seed(0)
    points = torch.randn(2048, 16)
    data = torch.utils.data.TensorDataset(points, points[:, :CLASSES].argmax(dim=1))
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))
    model = prepare_model(net)
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=32))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["rate"], momentum=0.9)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        mean = float(total) / len(loader) / dist.get_world_size()
        found = {"epoch": epoch, "loss": mean, "group": type(dist.group.WORLD).__name__}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(net.state_dict(), f"{folder}/model.pt")
            first = train.get_context().get_world_rank() == 0
            train.report(found, checkpoint=train.Checkpoint.from_directory(folder) if first else None)


if __name__ == "__main__":
    ray.init(num_cpus=RANKS + 1)
    trainer = TorchTrainer(
        train_on_a_worker,
        train_loop_config={"rate": 0.1},
        torch_config=TorchConfig(backend="phalanx"),  # the only line that knows of Phalanx
        scaling_config=train.ScalingConfig(num_workers=RANKS, use_gpu=False),
    )
    found = trainer.fit().metrics
    print(f"{RANKS} ranks on {found['group']}")
    print(f"epoch {found['epoch']}: loss {found['loss']:.7f}", flush=True)
    ray.shutdown()
