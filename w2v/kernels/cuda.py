"""The CUDA kernels, compiled by CuPy when one is first used and launched on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w2v.kernels.batch import Batch, Held
from w2v.kernels.random import signed

KERNELS = Path(__file__).parent / "cu"
THREADS = 256
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as element.cuh knows them
SUMMED = 64  # steps whose sums are made at a time
MOVING_BLOCKS = 64  # enough for the link, and no more, so that reads and writes at once get about the same share
# Enough for both ways at once, and few enough that what computes meanwhile does not wait for its own memory behind reads of the CPU's.
EXCHANGING_BLOCKS = 16


def gather_records(
    table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
) -> None:
    """records[slots[u]] = table[rows[u]], slots[u] being u where none are given; the table may lie in pinned CPU memory.

    Rows and slots are int64 on the GPU, inside their bounds; rows are unique, and best sorted. A record is a multiple of 16 bytes.
    """
    _move("gather_records", table_VR, rows_U, records_SR, slots_U)


def scatter_records(
    table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None = None
) -> None:
    """table[rows[u]] = records[slots[u]]; otherwise as `gather_records`."""
    _move("scatter_records", table_VR, rows_U, records_SR, slots_U)


def _move(
    kernel: str, table_VR: Tensor, rows_U: Tensor, records_SR: Tensor, slots_U: Tensor | None
) -> None:
    assert table_VR.shape[1] == records_SR.shape[1] and table_VR.dtype == records_SR.dtype
    assert table_VR.stride(1) == 1 and records_SR.is_contiguous()
    for ids in (rows_U, slots_U):
        assert ids is None or (
            ids.dtype == torch.int64
            and ids.is_contiguous()
            and ids.is_cuda
            and len(ids) == len(rows_U)
        )
    width, stride = (
        elements * table_VR.element_size() // 16
        for elements in (table_VR.shape[1], table_VR.stride(0))
    )
    assert width * 16 == table_VR.shape[1] * table_VR.element_size()
    if len(rows_U):
        launch(
            "rows.cu",
            kernel,
            {},
            MOVING_BLOCKS,
            table_VR,
            stride,
            rows_U,
            records_SR,
            slots_U,
            len(rows_U),
            width,
        )


def draw(
    key: int,
    centers: int,
    lowest: int,
    widest: int,
    noise: int,
    pool: int,
    pool_key: int,
    cdf_V: Tensor,
) -> tuple[Tensor, Tensor]:
    """The draws of reference.draw by one kernel."""
    windows_B = torch.empty(centers, dtype=torch.int32, device=cdf_V.device)
    negatives_BK = torch.empty(centers, noise, dtype=torch.int32, device=cdf_V.device)
    blocks, (words,) = enough_blocks(centers * (1 + noise)), cdf_V.shape
    pooled = pool, signed(pool_key)
    launch(
        "draw.cu",
        "draw",
        {},
        blocks,
        signed(key),
        centers,
        noise,
        lowest,
        widest,
        *pooled,
        cdf_V,
        words,
        windows_B,
        negatives_BK,
    )
    return windows_B, negatives_BK


class Claims:
    """The rows of a table that the batch at hand touches, `most` at most, with a gradient of each; all on the GPU.

    room: for how many rows; number_V: int32, the number of each row, or -1; rows_U: int32, the row of each number; grad_UD: float32;
    pairs_U: int32, how many pairs a gradient sums, where they are counted.
    """

    def __init__(self, rows: int, most: int, dim: int, device: torch.device):
        self.number_V = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.room = min(rows, most)
        self.rows_U = torch.empty(self.room, dtype=torch.int32, device=device)
        self.grad_UD = torch.zeros(self.room, dim, device=device)
        self.pairs_U = torch.zeros_like(self.rows_U)


class Sums(NamedTuple):
    """What a step adds up on the GPU: its loss (float64) and positive pairs, and the rows that it claims of both tables (all int64)."""

    loss: Tensor
    pairs: Tensor
    claimed: tuple[Tensor, Tensor]

    @classmethod
    def of_steps(cls, device: torch.device) -> Iterator[Sums]:
        """Zeros, for one step after another; made for many at a time, as those of one take the CPU longer than launching a kernel."""
        while True:
            loss_n, *numbers = torch.zeros(4, SUMMED, dtype=torch.int64, device=device).unbind()
            columns = loss_n.view(torch.float64), *numbers
            for loss, pairs, inputs, outputs in zip(
                *(column.unbind() for column in columns), strict=True
            ):
                yield cls(loss, pairs, (inputs, outputs))


def claim(batch: Batch, inputs: Claims, outputs: Claims, claimed: tuple[Tensor, Tensor]) -> None:
    """Claim the rows of both tables that take part in a pair of the batch, and add their numbers to those `claimed`, int64."""
    items = batch.windows_B.shape[0] * (2 * batch.window + 1 + batch.negatives_BK.shape[1])
    launch(
        "claim.cu",
        "claim",
        _shape(batch),
        enough_blocks(items),
        *_arguments(batch),
        inputs.number_V,
        inputs.rows_U,
        claimed[0],
        outputs.number_V,
        outputs.rows_U,
        claimed[1],
    )


def mark(batch: Batch, marks_TV: Tensor) -> None:
    """Set the marks, bool [2, V], of the rows of the input and the output table that take part in a pair of the batch."""
    items = batch.windows_B.shape[0] * (2 * batch.window + 1 + batch.negatives_BK.shape[1])
    launch(
        "claim.cu",
        "mark",
        _shape(batch),
        enough_blocks(items),
        *_arguments(batch),
        *marks_TV.unbind(),
    )


class Moves(NamedTuple):
    """Rows that come to slots, some of them in place of rows that leave, in lists on the GPU; rows are counted through all tables.

    coming, leaving: int32; slots: int32, of those that come; numbers: int64, how many come, and how many of them to slots that nobody
    leaves: these are first in the list, and the others take the places of those that leave, in order.
    """

    coming: Tensor
    leaving: Tensor
    slots: Tensor
    numbers: Tensor


def exchange(
    moves: Moves,
    tables: Tensor,
    rows: int,
    stride: int,
    records_SR: Tensor,
    slot_of_TV: Tensor | None = None,
    none: int = 0,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Read the records that come into their slots, and write to their tables those that leave them.

    tables: the addresses of the tables' records, int64 [T] on the GPU, of so many rows each; stride: elements from row to row; slot_of_TV:
    is kept current, if given, with `none` for a row that has left; stream: where to, if not to the current one.
    """
    width, stride = (
        elements * records_SR.element_size() // 16 for elements in (records_SR.shape[1], stride)
    )
    launch(
        "rows.cu",
        "exchange",
        {},
        EXCHANGING_BLOCKS,
        tables,
        rows,
        stride,
        records_SR,
        width,
        *moves,
        slot_of_TV,
        none,
        stream=stream,
    )


def skipgram(
    batch: Batch,
    inputs: Held,
    input_claims: Claims,
    outputs: Held,
    output_claims: Claims,
    sums: Sums,
    counted: bool = False,
) -> None:
    """Add the gradients of the batch's summed loss to the claims, and that loss and its number of positive pairs to the sums.

    counted: whether to count the pairs of each row too.
    """
    (_, row_width), dim, dtype = (
        inputs.records_SR.shape,
        input_claims.grad_UD.shape[1],
        inputs.records_SR.dtype,
    )
    assert outputs.records_SR.shape[1] == row_width and outputs.records_SR.dtype == dtype
    made_for = _shape(batch) | {"DIM": dim, "ELEMENT": ELEMENTS[dtype], "COUNTED": int(counted)}
    launch(
        "sgns.cu",
        "skipgram",
        made_for,
        enough_blocks(32 * batch.windows_B.shape[0]),
        *_arguments(batch),
        inputs.records_SR,
        inputs.slot_of_V,
        input_claims.number_V,
        input_claims.grad_UD,
        input_claims.pairs_U,
        outputs.records_SR,
        outputs.slot_of_V,
        output_claims.number_V,
        output_claims.grad_UD,
        output_claims.pairs_U,
        row_width,
        sums.loss,
        sums.pairs,
    )


class Guard(NamedTuple):
    """What keeps numbers that are not finite out of the tables; loss: float64, fault: int64, both on the GPU.

    A step whose `loss` is not finite sets `fault` to `step` + 1, and one that would write a row which is not sets it to `step` + `bit`, or
    twice that bit for the output table, unless it is set already; from then on no row is written.
    """

    loss: Tensor
    fault: Tensor
    step: int
    bit: int


def step_rows(
    formula: str,
    states: int,
    held: tuple[Held, Held],
    claims: tuple[Claims, Claims],
    claimed: tuple[Tensor, Tensor],
    stepped: Tensor,
    step: float,
    step_column: int,
    hyper: Hyper,
    cap: int,
    noise: tuple[int, int],
    guard: Guard,
) -> None:
    """One optimizer step of the claimed rows of both tables, their `step`th, which ends the claims and zeroes gradients and their pairs.

    claimed, stepped: int64, how many rows are claimed of each table, and those of all steps, to which they are added.

    A row's own count of steps is at `step_column` of its record, if that is not negative. A gradient that sums more than `cap` pairs is
    scaled by cap / pairs, if cap is not 0. `noise` are the seeds, mixed, of rounding to bfloat16, unsigned.
    """
    (inputs, slot_in), (outputs, slot_out) = held
    (of_inputs, of_outputs), (_, dim), (_, row_width) = (
        claims,
        claims[0].grad_UD.shape,
        inputs.shape,
    )
    made_for: dict[str, int | str] = {
        "STEP": formula,
        "STATES": states,
        "ELEMENT": ELEMENTS[inputs.dtype],
        "WIDE": 1 if dim % 4 else 4,
    }
    launch(
        "optim.cu",
        "step",
        made_for,
        enough_blocks(32 * (of_inputs.room + of_outputs.room)),
        inputs,
        slot_in,
        of_inputs.grad_UD,
        of_inputs.pairs_U,
        of_inputs.rows_U,
        of_inputs.number_V,
        signed(noise[0]),
        claimed[0],
        outputs,
        slot_out,
        of_outputs.grad_UD,
        of_outputs.pairs_U,
        of_outputs.rows_U,
        of_outputs.number_V,
        signed(noise[1]),
        claimed[1],
        stepped,
        row_width,
        dim,
        step_column,
        step,
        cap,
        *hyper,
        *guard,
    )


class Hyper(NamedTuple):
    """What the formulas in optim.cu take, in the order of their struct, each a float as `launch` has it; `rest` is 1 - beta."""

    lr: float
    eps: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    beta1: float = 0.0
    rest1: float = 1.0
    log_beta1: float = -math.inf
    beta2: float = 0.0
    rest2: float = 1.0
    log_beta2: float = -math.inf


def _shape(batch: Batch) -> dict[str, int | str]:
    return {"WINDOW": batch.window, "TARGETS": 1 + batch.negatives_BK.shape[1]}


def _arguments(batch: Batch) -> tuple[Tensor | int, ...]:
    words_n, sentences_n, first, windows_B, negatives_BK = batch[:5]
    return (
        words_n,
        sentences_n,
        words_n.shape[0],
        first,
        windows_B.shape[0],
        windows_B,
        negatives_BK,
    )


def enough_blocks(threads: int) -> int:
    """Blocks for so many threads, at most what fills the GPU several times over."""
    return max(1, min(-(-threads // THREADS), 8 * _processors()))


@functools.cache
def _processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def launch(
    source: str,
    kernel: str,
    defines: dict[str, int | str],
    blocks: int,
    *args: Tensor | float | None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Launch a kernel of a source file, compiled with these definitions, on a stream, torch's current one if none is given.

    A tensor is passed as the pointer to its data, None as a null pointer. Integers are for parameters of any width, floats for those of 4
    bytes.
    """
    device = (
        torch._C._cuda_getDevice()
    )  # torch's public ways to it and to its stream look up more than this
    if getattr(_thread, "device", None) != device:
        torch.cuda.current_stream().query()  # gives this thread the device's context, without which the driver launches nothing
        _thread.device = device
    # By its type, as isinstance takes twice as long to find that a number is no tensor.
    values: list[Any] = [
        arg.data_ptr() if type(arg) is Tensor else 0 if arg is None else arg for arg in args
    ]
    queue = stream.cuda_stream if stream else torch._C._cuda_getCurrentRawStream(device)
    _compiled(device, source, kernel, **defines)(blocks, values, queue)


_thread = threading.local()


class Launcher:
    """Launches one kernel: keeps memory for its arguments, 8 bytes for each, of which the driver takes as many as the parameter has.

    CuPy's own way takes about a microsecond for each argument and looks the kernel up each time, which was most of what a step cost the
    CPU. launch: the driver's, as CuPy has it.
    """

    def __init__(self, function: int, launch: Callable[..., None]):
        self._function, self._launch = function, launch
        self._layout: struct.Struct | None = None
        self._alone = threading.Lock()

    def __call__(self, blocks: int, values: Sequence[float], stream: int) -> None:
        with self._alone:  # until the driver has copied the arguments
            if self._layout is None:
                self._layout = struct.Struct(
                    "".join("f4x" if isinstance(value, float) else "q" for value in values)
                )
                self._memory = ctypes.create_string_buffer(self._layout.size)
                start = ctypes.addressof(self._memory)
                self._pointers = (ctypes.c_void_p * len(values))(
                    *range(start, start + self._layout.size, 8)
                )
                self._parameters = ctypes.addressof(self._pointers)
            self._layout.pack_into(self._memory, 0, *values)
            self._launch(
                self._function, blocks, 1, 1, THREADS, 1, 1, 0, stream, self._parameters, 0
            )


@functools.cache
def _compiled(device: int, source: str, kernel: str, **defines: int | str) -> Launcher:
    """For the current `device`; the module stays loaded with it."""
    function = _module(device, source, **defines).get_function(kernel).kernel
    from cupy_backends.cuda.api import driver  # after CuPy itself, which finds CUDA's libraries

    return Launcher(function.ptr, driver.launchKernel)


@functools.cache
def _module(device: int, source: str, **defines: int | str) -> Any:
    import cupy

    options = (
        "-std=c++17",
        f"-I{KERNELS}",
        *(f"-D{name}={value}" for name, value in defines.items()),
    )
    return cupy.RawModule(code=(KERNELS / source).read_text(), options=options)
