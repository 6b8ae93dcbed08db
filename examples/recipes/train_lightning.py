"""PyTorch Lightning on Phalanx: the strategy has its name.

phalanx run -n 2 examples/recipes/train_lightning.py
python examples/recipes/train_lightning.py              (Lightning starts the other rank itself)
"""

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy

RANKS, CLASSES = 2, 4


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch, _):
        points, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(points), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)  # the mean over all ranks
        return loss

    def validation_step(self, batch, _):
        points, labels = batch
        self.accuracy(self.net(points), labels)
        self.log("accuracy", self.accuracy)  # torchmetrics adds up what all ranks have seen

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data(count):
    points = torch.randn(count, 16)
    return torch.utils.data.TensorDataset(points, points[:, :CLASSES].argmax(dim=1))


if __name__ == "__main__":
    lightning.seed_everything(0)
    training, validation = (torch.utils.data.DataLoader(data(count), batch_size=32) for count in (2048, 512))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend="phalanx"),  # the only line that knows of Phalanx
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), training, validation)
    if trainer.is_global_zero:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        print(f"{trainer.world_size} ranks on {type(dist.group.WORLD).__name__}")
        print(f"loss {found['loss']:.7f}, accuracy {found['accuracy']:.4f}", flush=True)
