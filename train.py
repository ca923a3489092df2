"""Train word vectors: the same program as `w2v train`."""

import sys
from collections.abc import Sequence

from w2v.api import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says, and return the exit status."""
    return cli.main(["train", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    cli.start("train")
