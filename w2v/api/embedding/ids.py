"""Copy ids to the GPU, and small results back, without synchronizing.

Shape: N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from w2v.transfer.streams import current_stream

Ids = Tensor | np.ndarray | Sequence[int]  # int32 or int64, of any shape, on any device

_pinned: set[int] = set()  # addresses of memory that was found to be pinned


class Identity:
    """Recognizes a tensor by its memory, without reading it.

    It keeps the tensor, so that no other one is given its memory. Arrays and lists are read.
    """

    def __init__(self, ids: Any):
        self._ids = ids
        self._key: tuple[Any, ...] = ()
        if isinstance(ids, Tensor):
            changes = 0 if ids.is_inference() else ids._version
            self._key = ids.data_ptr(), changes, ids.shape, ids.stride(), ids.dtype, ids.device
        elif ids is not None:  # it does not count its changes
            values = np.asarray(ids)
            self._key = values.tobytes(), values.shape, values.dtype

    def matches(self, ids: Any) -> bool:
        """Return whether these are the same ids, which were not changed since."""
        return Identity(ids)._key == self._key


def as_tensor(values: Any) -> Tensor:
    """Return a tensor as it is, and other values as one in CPU memory.

    torch.as_tensor would copy them to the device of torch.set_default_device.
    """
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray):
        values = np.asarray(values, order="C")  # torch takes no negative strides
    return torch.as_tensor(values, device="cpu")


def joined(ids: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return all ids on the GPU: int64 [N]."""
    flat = [values.flatten() for values in ids]
    values = stacked(flat)
    if values is not None and values.is_contiguous():
        return to_device(values, device).long().flatten()
    if all(values.is_cuda for values in flat):
        return torch.cat(flat).long()
    # The others are most likely as the first: the query is slow, and a wrong guess only waits.
    if not any(values.is_cuda for values in flat) and not _is_pinned(flat[0]):
        # One copy in place of many.
        return torch.cat(flat).long().pin_memory().to(device, non_blocking=True)
    ids_N = torch.empty(sum(map(len, flat)), dtype=torch.int64, device=device)
    torch._foreach_copy_(ids_N.split([*map(len, flat)]), flat, non_blocking=True)
    return ids_N


def stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return equally spaced views of one storage as one view [T, ...].

    None if they are anything else.
    """
    first, last = tensors[0], tensors[-1]
    step = 0
    if len(tensors) > 1:
        step = tensors[1].data_ptr() - first.data_ptr()
    if step % first.element_size() or (step <= 0 and len(tensors) > 1):
        return None
    address = first.data_ptr()
    for tensor in tensors:
        is_next = tensor.data_ptr() == address and tensor.shape == first.shape
        if not is_next or tensor.stride() != first.stride() or tensor.dtype is not first.dtype:
            return None
        address += step
    # Tensors may be equally spaced by chance.
    if last.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
        return None
    strides = step // first.element_size(), *first.stride()
    return first.as_strided((len(tensors), *first.shape), strides)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; unpinned memory alone would wait for it."""
    is_sent = device.type == "cuda" and values.device.type == "cpu"
    if is_sent and not _is_pinned(values):
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _is_pinned(values: Tensor) -> bool:
    """Return whether CPU memory is pinned, or was when first seen."""
    address = values.data_ptr()
    if address in _pinned:  # `is_pinned` takes 30 us
        return True
    if len(_pinned) > 4096:
        _pinned.clear()
    if is_pinned := values.is_pinned():
        _pinned.add(address)
    return is_pinned


class Readback:
    """Small results that a kernel writes to pinned memory for the CPU.

    Memory and events are reused: allocating them takes as long as launching a kernel.
    """

    _free: ClassVar[dict[int, list[tuple[Tensor, torch.cuda.Event]]]] = {}

    def __init__(self, count: int):
        self._pool = self._free.setdefault(count, [])
        try:
            self.numbers, self._event = self._pool.pop()
            self._event.synchronize()  # the last kernel may still write to the memory
        except IndexError:
            self.numbers = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)
            self._event = torch.cuda.Event()

    def __del__(self) -> None:
        self._pool.append((self.numbers, self._event))

    def launched(self) -> None:
        """Note that the kernel was launched on the current stream."""
        current_stream().record_event(self._event)

    @property
    def is_known(self) -> bool:
        return self._event.query()

    def read(self) -> list[int]:
        self._event.synchronize()
        return self.numbers.tolist()
