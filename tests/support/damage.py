"""Damage to files."""

import os

DAMAGES = int(os.environ.get("W2V_DAMAGES", "20"))  # `make test-faults`: 500


def damage(path, rng):
    """Change a bit, some bytes, the end or all of a file, or remove it."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    kind = rng.choice(["flip", "overwrite", "cut", "append", "replace", "remove"])
    if kind == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "overwrite":
        content[at : at + 8] = rng.randbytes(len(content[at : at + 8]))
    elif kind == "cut":
        del content[at:]
    elif kind == "append":
        content += rng.randbytes(8)
    else:
        content = rng.randbytes(rng.randrange(64))
    path.unlink() if kind == "remove" else path.write_bytes(content)
