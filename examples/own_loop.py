"""A training loop of your own, sharded by fullshard:

    torchrun --standalone --nproc-per-node 2 examples/own_loop.py

`accelerate launch` starts it as well, and `python` runs it as one rank. Stop it and start it again, on any number of
ranks: it continues from its last checkpoint. Learns a cipher: every letter has a partner.
"""

import sys

import torch
from torch import nn

import fullshard

LETTERS = 32


def main(folder: str = "runs/own_loop", steps: int = 60) -> None:
    world = fullshard.init()  # rank, size, device
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(LETTERS, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, LETTERS))

    model = fullshard.shard(model, activation_checkpointing="full")  # then the optimizer, which holds its parameters
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    saved = fullshard.load(folder, model=model, optimizer=optimizer, schedule=schedule, missing_ok=True)

    for step in range(saved.get("step", 0) + 1, steps + 1):
        torch.manual_seed(step)
        letters = torch.randint(LETTERS, (16, 12)).chunk(world.size)[world.rank].to(world.device)  # this rank's rows
        loss = nn.functional.cross_entropy(model(letters).flatten(0, 1), (letters * 5 + 3).flatten() % LETTERS)
        loss.backward()  # gradients are averaged over the ranks
        norm = fullshard.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if world.is_main and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.4f}  norm {norm.item():.3f}")
        if step % 20 == 0 or step == steps:
            fullshard.save(folder, model=model, optimizer=optimizer, schedule=schedule, step=step, keep=2)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
