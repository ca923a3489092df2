"""Neural collaborative filtering with Adamax, on generated clicks.

    python docs/examples/ncf.py --users 10000000 --items 2000000 --storage pinned

Users and items have two embeddings each, one for a dot product and one for a small network (He et
al., 2017). A user clicks items whose hidden taste is similar to theirs; the taste is a function of
the id, so that any number of users takes no memory.
"""

import argparse

import torch
from torch import nn

import w2v
from w2v import PagedEmbedding
from w2v.rows.table import normal

TASTE = 4  # dimensions


class NeuMF(nn.Module):
    """Dot product of user and item beside a network of both."""

    def __init__(self, users, items, dim, storage):
        super().__init__()
        sizes = {"user_dot": users, "item_dot": items, "user_mlp": users, "item_mlp": items}
        self.tables = nn.ModuleDict(
            {
                name: PagedEmbedding(rows, dim, storage=storage, init=normal(dim, 0.1, seed))
                for seed, (name, rows) in enumerate(sizes.items())
            }
        )
        self.mlp = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
        self.score = nn.Linear(2 * dim, 1)

    def forward(self, user_ids, item_ids):
        """Return logits of a click: [B]."""
        dot = self.tables["user_dot"](user_ids) * self.tables["item_dot"](item_ids)
        pair = [self.tables["user_mlp"](user_ids), self.tables["item_mlp"](item_ids)]
        hidden = self.mlp(torch.cat(pair, dim=1))
        return self.score(torch.cat([dot, hidden], dim=1)).squeeze(1)


def clicks(options):
    """Return users, items, and whether each user clicks the item: [B] each."""
    user_ids = torch.randint(options.users, (options.batch,))
    item_ids = torch.randint(options.items, (options.batch,))
    taste = normal(TASTE, 1.0, seed=100)(user_ids), normal(TASTE, 1.0, seed=200)(item_ids)
    return user_ids, item_ids, ((taste[0] * taste[1]).sum(1) > 0).float()


def main(arguments=None):
    """Train, and return the accuracy on new clicks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=2_000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--storage", default="cpu", choices=["cpu", "pinned", "cuda"])
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = NeuMF(options.users, options.items, options.dim, options.storage).to(device)
    dense = {"optimizer": "Adam", "lr": 0.005}
    optimizer = w2v.optimizer(model, "Adamax", lr=0.05, betas=(0.5, 0.99), dense=dense)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, options.steps)
    for step in range(options.steps):
        user_ids, item_ids, clicked = clicks(options)
        logits = model(user_ids, item_ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicked.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, options.steps // 10) == 0:
            print(f"step {step:,}: loss {loss:.3f}")

    user_ids, item_ids, clicked = clicks(options)
    with torch.no_grad():
        right = (model(user_ids, item_ids).cpu() > 0) == (clicked > 0)
    accuracy = float(right.float().mean())
    print(f"{accuracy:.1%} of new clicks predicted right")
    return accuracy


if __name__ == "__main__":
    main()
