"""The bytes that each rank of a job takes, and whether they fit on machines that are not at hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from w2v.budget import Budget, Job
from w2v.hardware import Hardware
from w2v.questions import ASKED

MOST_RANKS = 4096
WORD_BYTES = 180  # of CPU memory, for a word of the vocabulary and what is known of it
DRAW_BYTES, CLAIM_BYTES, ASK_BYTES = 12, 8, 16  # of GPU memory for a word: to draw it, to number its rows, and to ask others for these
PLACE_BYTES = 13  # of GPU memory for a row of the shard, when rows are paged


@dataclass(frozen=True)
class Share(Job):
    """What each rank takes of a job; `words` are the rows of whole tables, `batch_size` the centers of all ranks."""

    ranks: int = 1
    gpus: int = 1  # of a host
    text_bytes: int = 0  # of ids that each GPU has

    @property
    def rows(self) -> int:
        """Of this rank, in each table."""
        return -(-self.words // self.ranks)

    @property
    def on_host(self) -> int:
        return min(self.ranks, self.gpus)

    @property
    def shard_bytes(self) -> int:
        return replace(self, words=self.rows).table_bytes

    @property
    def known_bytes(self) -> int:
        """Of GPU memory, which do not depend on how many rows have room there."""
        asked = ASK_BYTES * self.words if self.ranks > 1 else 0
        return self.text_bytes + DRAW_BYTES * self.words + CLAIM_BYTES * self.rows + asked

    def needs(self) -> dict[str, dict[str, int]]:
        """Bytes of a rank by place and purpose; of the disk, those of a host."""
        needs = Job.needs(replace(self, words=self.rows, batch_size=-(-self.batch_size // self.ranks)))
        needs["host"]["vocabulary"] = WORD_BYTES * self.words
        if self.ranks > 1:  # vectors are written block by block, and those kept that are scored
            needs["host"]["vectors"] = 4 * min(self.words, ASKED) * self.vector_size
        needs["gpu"]["text, vocabulary"] = self.known_bytes
        if self.engine != "resident":
            needs["gpu"]["places"] = 2 * PLACE_BYTES * self.rows
        on_disk = {purpose: self.on_host * count for purpose, count in needs["disk"].items()}
        needs["disk"] = on_disk | {"vectors": Job.needs(self)["disk"]["vectors"]}
        return needs

    def free(self, hardware: Hardware) -> dict[str, float]:
        """Bytes for a rank there, by place; of the disk, for a host."""
        free = {"host": hardware.host / self.on_host, "gpu": hardware.gpu}
        return free | ({"disk": hardware.disk} if hardware.disk < math.inf else {})

    def fits(self, hardware: Hardware) -> bool:
        free = self.free(hardware)
        return all(sum(needs.values()) <= free.get(place, math.inf) for place, needs in self.needs().items())


@dataclass(frozen=True)
class Shares(Budget):
    """The budget of each rank; more ranks are the first change that would make it fit."""

    job: Share
    enough: Callable[[int], bool]  # whether so many ranks are
    vocabulary: str  # what to set for a smaller one

    def changes(self) -> list[str]:
        enough = next((ranks for ranks in range(self.job.ranks + 1, MOST_RANKS) if self.enough(ranks)), None)
        others = [change.replace("vocab.max_final_vocab=", self.vocabulary) for change in super().changes()]
        return ([f"--world-size={enough}"] if enough else []) + others
