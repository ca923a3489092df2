"""`python -m w2v` is the command w2v."""

from w2v.api.cli import start

if __name__ == "__main__":
    start()
