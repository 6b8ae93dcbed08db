"""transformers on Phalanx: `Trainer` asks for Gloo, and a variable says what Gloo is.

phalanx run -n 2 --as-gloo examples/recipes/train_transformers.py
PHALANX_AS_GLOO=1 torchrun --nproc-per-node 2 examples/recipes/train_transformers.py
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH, WORDS = 16, 32


class Counting(torch.utils.data.Dataset):
    """Texts that count upwards, each from a start of its own."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        words = (torch.arange(LENGTH) + index) % WORDS
        return {"input_ids": words, "labels": words}


if __name__ == "__main__":
    set_seed(0)
    shape = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=GPT2LMHeadModel(shape),
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                ddp_backend="gloo",  # "phalanx" is refused: start this program with --as-gloo
                ddp_find_unused_parameters=False,
                per_device_train_batch_size=16,
                num_train_epochs=2,
                learning_rate=5e-3,
                logging_steps=8,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Counting(),
        )
        trainer.train()
        if trainer.is_world_process_zero():
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            print(f"{trainer.args.world_size} ranks on {type(dist.group.WORLD).__name__}")
            print("losses", losses, flush=True)
    dist.destroy_process_group()
