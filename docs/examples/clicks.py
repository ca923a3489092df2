"""A click model like DLRM, with 26 tables of features.

    python docs/examples/clicks.py --scale 1 --dim 64 --storage pinned --gpu-bytes 10%
    torchrun --nproc-per-node 2 docs/examples/clicks.py --scale 1 --dim 64 --storage pinned

Tables have the sizes of the categories in Criteo's Kaggle data, times `--scale`. Each sample has a
bag of ids for each table, which follow Zipf's law, and 13 numbers. Dot products of all pairs of
vectors go to a network (Naumov et al., 2019). Labels are drawn from a hidden logistic model.
With torchrun, rows are sharded over the processes, and each process gets a part of the batch.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from w2v import PagedEmbeddingBag, PagedOptimizer
from w2v.rows.table import normal

CRITEO = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194]
CRITEO += [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
NUMBERS = 13


class ClickModel(nn.Module):
    """Bags of embeddings and numbers, their dot products, a network."""

    def __init__(self, sizes, dim, storage, gpu_bytes=0):
        super().__init__()
        settings = {"mode": "mean", "storage": storage, "gpu_bytes": gpu_bytes}
        settings["process_group"] = dist.group.WORLD  # None without init_process_group
        self.bags = nn.ModuleList(
            PagedEmbeddingBag(rows, dim, init=normal(dim, rows**-0.25, seed), **settings)
            for seed, rows in enumerate(sizes)
        )
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, dim))
        self.top = Top(1 + len(sizes), dim)

    def forward(self, numbers, ids, offsets):
        """Return logits of a click: [B]."""
        return self.top(*self.features(numbers, ids, offsets))

    def features(self, numbers, ids, offsets):
        """Return the vector of numbers [B, D], and all vectors [B, F, D]."""
        dense = self.bottom(numbers)
        offsets = offsets.to(dense.device, non_blocking=True)  # once for all tables
        vectors = [bag(bag_ids, offsets) for bag, bag_ids in zip(self.bags, ids, strict=True)]
        return dense, torch.stack([dense, *vectors], dim=1)


class Top(nn.Module):
    """Dot products of all pairs of vectors, and layers."""

    def __init__(self, count, dim):
        super().__init__()
        inputs = dim + count * (count - 1) // 2
        self.layers = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense, features):
        """Return logits: [B]."""
        dots = (features @ features.transpose(1, 2)).flatten(1)
        # Of each pair once; dots[:, left, right] would sort its indices in the backward pass.
        count = features.shape[1]
        left, right = torch.triu_indices(count, count, offset=1, device=dots.device)
        dots = dots.index_select(1, left * count + right)
        return self.layers(torch.cat([dense, dots], dim=1)).squeeze(1)


def zipf(rows, count, skew):
    """Return ids [count]; id r is as frequent as 1 / (r + 1) ** skew."""
    power = 1 - skew
    uniform = torch.rand(count, dtype=torch.float64)
    ranks = (1 + uniform * ((rows + 1) ** power - 1)) ** (1 / power)
    return (ranks.long() - 1).clamp_(0, rows - 1)


def samples(sizes, batch, skew):
    """Return numbers [B, 13], ids [T, N] of tables, offsets [B], labels [B]."""
    numbers = torch.randn(batch, NUMBERS)
    counts = torch.randint(1, 4, (batch,))  # ids of a bag
    offsets = counts.cumsum(0) - counts
    logits = 0.5 * numbers.sum(1) / NUMBERS**0.5
    # Those of all tables in one tensor go to the GPU at once.
    ids = torch.stack([zipf(rows, int(counts.sum()), skew) for rows in sizes])
    for table in range(len(sizes)):
        # Each id has a hidden weight, which is a function of the id.
        hidden = normal(1, 1.0, seed=1000 + table)(ids[table, offsets]).squeeze(1)
        logits += 3 * hidden / len(sizes) ** 0.5
    return numbers, ids, offsets, (torch.rand(batch) < logits.sigmoid()).float()


def auc(scores, labels):
    """Return how often a click scores higher than another sample."""
    return float((scores[labels > 0][:, None] > scores[labels == 0]).float().mean())


def main(arguments=None):
    """Train, and return the AUC of new samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=26, help="number of Criteo's tables to use")
    parser.add_argument("--scale", type=float, default=1e-4, help="factor of all numbers of rows")
    parser.add_argument("--skew", type=float, default=1.05, help="exponent of Zipf's law, not 1")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--storage", default="cpu", choices=["cpu", "pinned", "cuda"])
    parser.add_argument("--gpu-bytes", default="0", help="GPU memory to cache rows, such as 10%%")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    torch.manual_seed(rank)  # for samples of its own

    sizes = [max(3, round(rows * options.scale)) for rows in CRITEO[: options.tables]]
    model = ClickModel(sizes, options.dim, options.storage, options.gpu_bytes).to(device)
    predict = DistributedDataParallel(model, gradient_as_bucket_view=True) if ranks > 1 else model
    paged = PagedOptimizer(model, "Adagrad", lr=0.1)
    dense = torch.optim.Adam(model.parameters(), lr=0.003)
    count = options.batch // ranks
    batches = (samples(sizes, count, options.skew) for _ in range(options.steps + 1))
    # Rows of the next batch come to the GPU while this one computes.
    for step, batch in enumerate(paged.pages(batches, key=lambda batch: batch[1])):
        numbers, ids, offsets, clicked = batch
        logits = predict(numbers.to(device), ids, offsets)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicked.to(device))
        if step == options.steps:  # these samples are not trained on
            score = auc(logits.detach().cpu(), clicked)
            break
        paged.zero_grad()
        dense.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        paged.step()
        dense.step()
        if step % max(1, options.steps // 10) == 0 and rank == 0:
            print(f"step {step:,}: loss {loss:.3f}")
    gib = sum(bag.store.bytes for bag in model.bags) / 2**30
    if rank == 0:
        print(f"AUC {score:.3f} of new samples; {sum(sizes):,} rows, {gib:.3f} GiB a process")
    if ranks > 1:
        dist.destroy_process_group()
    return score


if __name__ == "__main__":
    main()
