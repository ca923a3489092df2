"""Score, query, draw and compare vectors: the same program as `w2v`."""

from w2v.api.cli import main, start

__all__ = ["main"]

if __name__ == "__main__":
    start()
