r"""A small language model of bytes with hashed tables of n-grams.

    python docs/examples/ngram_lm.py text8 --compare
    python docs/examples/ngram_lm.py text8 --compare --rows 100000000 --orders 2 3 5 7 \
        --layers 12 --dim 768 --heads 12 --block 1024 --batch 12 --accumulate 4 --checkpoint
    torchrun --nproc-per-node 2 docs/examples/ngram_lm.py text8 --table paged

A GPT reads, beside the embedding of each byte, vectors of the n-grams that end with it: rows of one
large table, chosen by hashes (as in Engram, arXiv 2601.07372). `--table` leaves the table out, or
puts it on the computing device, or in CPU memory with a cache on the device. A step has one page:
its rows are fetched once for all micro-batches and for the second forward pass of activation
checkpointing, and their gradients are summed before the rows are stepped.
A line is a document: n-grams do not reach over its start.
"""

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import w2v
from w2v.rows.table import normal

BYTES = 256
NEWLINE = 10
TABLES = ["none", "device", "paged"]
EVALUATED = 10  # batches of held-out text
ODD = 0x2545F4914F6CDD1D  # factor of a hash


class Input(nn.Module):
    """Embeddings of bytes and positions, and the vectors of n-grams."""

    def __init__(self, options, ngram_dim):
        super().__init__()
        self.bytes = nn.Embedding(BYTES, options.dim)
        self.positions = nn.Embedding(options.block, options.dim)
        self.project = nn.Linear(ngram_dim, options.dim, bias=False) if ngram_dim else None
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens, vectors):
        """Return the input of the first block: [B, T, C]."""
        hidden = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        return hidden if vectors is None else hidden + self.project(vectors.flatten(2))


class Block(nn.Module):
    """Causal attention and a network of two layers, each after a norm."""

    def __init__(self, options):
        super().__init__()
        dim, self.heads = options.dim, options.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attended = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, hidden):
        """Return the input of the next block: [B, T, C]."""
        qkv = self.qkv(self.before_attention(hidden)).unflatten(2, (3, self.heads, -1))
        query, key, value = qkv.transpose(1, 3).unbind(2)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attended(found.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.before_mlp(hidden))


class GPT(nn.Module):
    """Blocks behind the input; the output layer has the weights of bytes."""

    def __init__(self, options, table):
        super().__init__()
        self.ngrams = None
        if table != "none":
            on_gpu = torch.cuda.is_available()
            storage = {"device": "cuda", "paged": "pinned"}[table] if on_gpu else "cpu"
            self.ngrams = w2v.PagedEmbedding(
                options.rows,
                options.ngram_dim,
                padding_idx=0,
                init=normal(options.ngram_dim, 0.02, seed=0),
                storage=storage,
                gpu_bytes=options.gpu_bytes if table == "paged" else 0,
                process_group=dist.group.WORLD,  # None without init_process_group
            )
        ngram_dim = options.ngram_dim * len(options.orders) * options.hashes
        self.input = Input(options, ngram_dim if self.ngrams else 0)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.dim)
        self.output = nn.Linear(options.dim, BYTES, bias=False)
        self.output.weight = self.input.bytes.weight
        self.checkpoint = options.checkpoint

    def forward(self, tokens, targets, vectors=None):
        """Return the mean loss of tokens [B, T].

        `vectors` [B, T, H, D] are those of n-grams.
        """
        hidden = self.run(self.input, tokens, vectors)
        for block in self.blocks:
            hidden = self.run(block, hidden)
        logits = self.output(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def run(self, part, *inputs):
        """Run a part, with `checkpoint` again in the backward pass."""
        if self.checkpoint and self.training:
            return checkpoint(part, *inputs, use_reentrant=False)
        return part(*inputs)


def ngram_ids(window, options):
    """Return rows of the n-grams that end at each byte: [..., T, H].

    The window has R + T bytes, of which the first R are read for the n-grams alone. An n-gram has a
    row for each hash; row 0 has those with bytes of an earlier document.
    """
    reach = max(options.orders) - 1
    code = torch.zeros_like(window[..., reach:])
    is_whole = torch.ones_like(code, dtype=torch.bool)
    ids = []
    for back in range(reach + 1):
        byte = window[..., reach - back : window.shape[-1] - back]
        if back:
            is_whole = is_whole & (byte != NEWLINE)
        code = code * (BYTES + 1) + byte + 1
        if back + 1 in options.orders:
            for number in range(1, options.hashes + 1):
                mixed = (code ^ (code >> 31)) * (ODD + 2 * number)
                row = (mixed ^ (mixed >> 32)) % (options.rows - 1) + 1
                ids.append(row * is_whole)
    return torch.stack(ids, dim=-1)


def batches(text, count, options, seed):
    """Yield tokens, targets [A, B, T] and ids of n-grams [A, B, T, H]."""
    generator = torch.Generator(text.device).manual_seed(seed)
    reach = max(options.orders) - 1
    span = torch.arange(-reach, options.block + 1, device=text.device)
    shape = options.accumulate, options.batch, 1
    last = len(text) - options.block
    for _ in range(count):
        starts = torch.randint(reach, last, shape, generator=generator, device=text.device)
        window = text[starts + span].long()
        ids = ngram_ids(window[..., :-1], options)
        yield window[..., reach:-1], window[..., reach + 1 :], ids


def add_gradients(predict, ngrams, batch, options):
    """Add the gradients of a step; return the mean of its losses."""
    tokens, targets, ids = batch
    leaves = [None] * options.accumulate
    if ngrams:
        vectors = ngrams(ids)
        leaves = [part.detach().requires_grad_() for part in vectors]  # of each micro-batch
    step_loss = torch.zeros((), device=tokens.device)
    for part in range(options.accumulate):
        is_last = part == options.accumulate - 1
        is_parallel = isinstance(predict, DistributedDataParallel)
        with predict.no_sync() if is_parallel and not is_last else contextlib.nullcontext():
            with autocast(tokens.device, options):
                loss = predict(tokens[part], targets[part], leaves[part]) / options.accumulate
            loss.backward()
        step_loss += loss.detach()
    if ngrams:
        vectors.backward(torch.stack([leaf.grad for leaf in leaves]))
    return step_loss


def autocast(device, options):
    """Return a context that computes in bfloat16 if the options say so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=options.bfloat16)


def train(text, options, table, rank, ranks):
    """Train a model; return the loss of held-out text and milliseconds a step."""
    device = text.device
    trained_bytes = len(text) * 9 // 10
    torch.manual_seed(0)
    model = GPT(options, table).to(device)
    predict = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = w2v.optimizer(
        model,
        options.optimizer,
        lr=options.table_lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
        dense={"lr": options.lr},
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)
    loader = batches(text[:trained_bytes], options.steps, options, seed=rank)
    if model.ngrams:  # rows of the next steps come to the GPU while this one computes
        loader = optimizer.pages(loader, key=lambda batch: batch[2])
    warm_steps = min(10, options.steps // 2)
    for step, batch in enumerate(loader):
        if step == warm_steps:
            began = seconds(device)
        loss = add_gradients(predict, model.ngrams, batch, options)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % max(1, options.steps // 10) == 0 and rank == 0:
            print(f"{table}, step {step:,}: loss {loss:.3f}")  # waits for the GPU
    step_ms = (seconds(device) - began) * 1000 / (options.steps - warm_steps)
    return held_out_loss(model.eval(), text[trained_bytes:], options), step_ms


@torch.no_grad()
def held_out_loss(model, text, options):
    """Return the mean loss of some batches."""
    losses = []
    for tokens, targets, ids in batches(text, EVALUATED, options, seed=0):
        vectors = model.ngrams(ids).flatten(0, 1) if model.ngrams else None
        with autocast(text.device, options):
            losses.append(model(tokens.flatten(0, 1), targets.flatten(0, 1), vectors))
    return float(torch.stack(losses).mean())


def seconds(device):
    """Return the time once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def parse(arguments):
    """Return the options of the program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="file whose bytes are read; a line is a document")
    parser.add_argument("--table", default="paged", choices=TABLES)
    parser.add_argument("--compare", action="store_true", help="train with each kind of table")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the table")
    parser.add_argument("--ngram-dim", type=int, default=32, help="dimensions of a row")
    parser.add_argument("--orders", type=int, nargs="+", default=[2, 3], help="bytes of n-grams")
    parser.add_argument("--hashes", type=int, default=2, help="rows of an n-gram")
    parser.add_argument("--gpu-bytes", default="10%", help="cache of a paged table")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--block", type=int, default=64, help="bytes of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--optimizer", default="AdamW", choices=["Adam", "AdamW"])
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--table-lr", type=float, default=0.05)
    parser.add_argument("--checkpoint", action="store_true", help="compute activations twice")
    parser.add_argument(
        "--bfloat16",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="torch.autocast; by default on a GPU",
    )
    options = parser.parse_args(arguments)
    options.size = os.path.getsize(options.text) if os.path.isfile(options.text) else 0
    least = 10 * (options.block + max(options.orders) + 1)
    if options.size < least:
        parser.error(f"{options.text} has {options.size:,} bytes; give a text of {least:,} or more")
    return options


def main(arguments=None):
    """Train; return the held-out loss and milliseconds a step, by table."""
    options = parse(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    text = torch.from_file(options.text, size=options.size, dtype=torch.uint8).to(device)
    tables = TABLES if options.compare else [options.table]
    found = {table: train(text, options, table, rank, ranks) for table in tables}
    if rank == 0:
        print(f"\n{'table':8}{'loss':>8}{'ms a step':>12}   ({options.rows:,} rows)")
        for table, (loss, step_ms) in found.items():
            print(f"{table:8}{loss:8.3f}{step_ms:12.1f}")
    if ranks > 1:
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
