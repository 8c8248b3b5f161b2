"""The same Trainer without Hydra and without the command line, as in a notebook: python notebook_style.py"""

import tempfile
from pathlib import Path

from my_task import Digits

config = {
    "task": {"_target_": "my_task.Digits", "hidden": 32},
    "optimizer": {"_target_": "torch.optim.AdamW", "weight_decay": 0.01},
    "lr_scheduler": {"_target_": "trainer.lr_scheduler.Cosine", "warmup_updates": 20},
    "dataset": {"batch_size": 64},
    "optimization": {"lr": 3e-3, "max_update": 120},
    "common": {"cpu": True, "num_threads": 1},
}


def train(trainer, batches, num_updates):
    """The losses of `num_updates` updates, each over a list of micro-batches."""
    losses = []
    while len(losses) < num_updates:
        for samples in batches.next_epoch_itr():  # the rest of the epoch, or the next one
            losses.append(trainer.train_step(samples)["loss"])
            if len(losses) == num_updates:
                break
    return losses


def main():
    file = str(Path(tempfile.mkdtemp()) / "model.pt")

    one = Digits(config)
    batches = one.get_train_iterator(epoch=1)
    train(one, batches, 60)
    one.save_checkpoint(file, {"note": "half-way"})
    losses = train(one, batches, 60)

    other = Digits(config)
    extra_state = other.load_checkpoint(file)
    batches = other.get_train_iterator(epoch=1)
    batches.load_state_dict(extra_state["train_iterator"])
    again = train(other, batches, 60)

    print("loaded:", extra_state["note"], "at update", other.get_num_updates() - 60)
    print("accuracy on held-out images:", round(other.validate("valid")["accuracy"], 3))
    print("the 60 losses after the load are equal bit by bit:", again == losses)


if __name__ == "__main__":
    main()
