"""Training of generated words on several GPUs.

    python tests/bench/ranks.py [--room .1]
    torchrun --nproc-per-node 4 tests/bench/ranks.py --room .4                   (strong scaling)
    torchrun --nproc-per-node 4 tests/bench/ranks.py --batch 524288 --room .4    (weak scaling)

The words are those of zipf.py. The batch, a pool of half as many negatives, and the cache are
shared out among the GPUs. No rank looks ahead at the text, so that one GPU does as several do.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import zipf


def main(arguments: list[str] | None = None) -> None:
    parser = zipf.options(__doc__, 1_000_000_000)
    parser.add_argument("--batch", type=int, default=131_072, help="of all ranks together")
    parser.add_argument("--room", type=float, default=0.1, help="share of the rows to cache")
    args = parser.parse_args(arguments)
    settings = [f"train.batch_size={args.batch}", f"model.negative_pool={args.batch // 2}"]
    settings += [f"transfer.gpu_bytes={100 * args.room:g}%", "transfer.lookahead=false"]
    zipf.measure("ranks", settings, args)


if __name__ == "__main__":
    main()
