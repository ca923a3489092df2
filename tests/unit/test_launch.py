"""Launches by name, from every call site, to a driver that reads them."""

import ctypes
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from tests.support.processes import run_python
from tests.support.steps import make_table, problem, with_tree
from tests.support.structs import TYPES, as_structure
from w2v.config import OptimizerConfig
from w2v.distributed.ranks import Ranks
from w2v.rows import launch, ops
from w2v.rows.cache import RowCache
from w2v.rows.group import RowGroup
from w2v.rows.link import MappedLink
from w2v.rows.moves import GpuPlanner, WantedRows
from w2v.rows.ops import Bags, Span, Spans, View
from w2v.rows.optim import Hyper, RowOptimizer
from w2v.word2vec import cuda
from w2v.word2vec.batch import BatchSeed, Grads, Pool, RowGrads, StepShape, StepState, Update
from w2v.word2vec.cuda import CudaKernels, TorchStepKernels
from w2v.word2vec.exchange import BatchRows
from w2v.word2vec.peers import PeerExchange
from w2v.word2vec.subwords import Subwords
from w2v.word2vec.subwords_cuda import CudaSubwordKernels

CPU = torch.device("cpu")
VECTORS, DIM = 40, 4
ROWS = 2 * VECTORS
KERNELS = {
    (path.name, name)
    for folder in launch.SOURCES
    for path in folder.glob("*.cu")
    for name in re.findall(rf"{launch.GLOBAL}(\w+)\(", launch.source_text(path.name))
}
# `cupy.cuda` needs what CuPy sets before it imports it. As compiled modules do, it does not wait.
CUPY = "import time; time.sleep(0.3); version = 13; import cupy.cuda"
NVRTC = 'def getVersion(): raise RuntimeError("No such file:\\n\\n libnvrtc.so.13")'
CUDA = "import sys, types; runtime = types.SimpleNamespace(**vars(sys.modules['cupy']))"
THREADS = """
import importlib, threading, time
from w2v.rows.launch import cuda_runtime, has_cupy
other = threading.Thread(target=importlib.import_module, args=["cupy"])
other.start()
time.sleep(0.1)
print(cuda_runtime().version)
try:
    has_cupy()
except ValueError as error:
    print(error)
"""


def test_cupy_that_a_thread_imports_is_waited_for_and_must_compile(tmp_path):
    (tmp_path / "cupy/cuda").mkdir(parents=True)
    (tmp_path / "cupy_backends/cuda/libs").mkdir(parents=True)
    (tmp_path / "cupy_backends/cuda/libs/nvrtc.py").write_text(NVRTC)
    (tmp_path / "cupy/__init__.py").write_text(CUPY)
    (tmp_path / "cupy/cuda/__init__.py").write_text(CUDA)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{THREADS}"
    done = run_python(code)
    version, refusal = done.stdout.splitlines()
    assert (version, done.stderr) == ("13", "")
    broken = "CuPy cannot compile (RuntimeError: No such file: libnvrtc.so.13);"
    assert refusal.startswith(f"{broken} {launch.INSTALL_CUPY}, ")


# The driver.


class Launch(NamedTuple):
    source: str
    kernel: str
    blocks: int
    args: dict  # as the kernel sees them


def read(members, address):
    structure = as_structure(members).from_address(address)
    return {member.name: getattr(structure, member.name) for member in members}


def as_seen(parameter, value):
    """Return what a kernel sees of an argument."""
    if isinstance(value, launch.StructBuffer):
        value = value.value
    values = value if parameter.fields else [value]
    seen = {}
    for member, part in zip(parameter.members, values, strict=True):
        if member.dtype:
            seen[member.name] = (part.data_ptr() or None) if part is not None else None
        else:
            seen[member.name] = TYPES[member.ctype](part).value
    return seen


def seen_in(parameters, addresses):
    """Return what a kernel sees at the addresses of its parameters."""
    args = {}
    for (members, _), address in zip(parameters.values(), addresses, strict=True):
        args |= read(members, address)
    return args


@pytest.fixture
def launches(monkeypatch):
    """Launches on a GPU that shares the CPU's memory; no kernel is compiled."""
    found = []
    given = []

    def compiled(device, source, kernel, **macros):
        signature = launch.signature(source, kernel, macros.get("ELEMENT", 0))

        def driver(function, blocks, *others):
            shared = macros.get("SHARED", 0)
            assert others[:7] == (1, 1, launch.THREADS, 1, 1, shared, 0) and others[8] == 0
            addresses = (ctypes.c_void_p * len(signature)).from_address(others[7])
            args = seen_in(signature, addresses)
            for name, parameter in signature.items():
                expected = as_seen(parameter, given[-1][name])
                assert expected == {key: args[key] for key in expected}
            found.append(Launch(source, kernel, blocks, args))

        return 7, driver

    def called(kernel, *blocks, **args):
        given.append({**kernel._fixed, **args})
        call(kernel, *blocks, **args)

    call = launch.Kernel.__call__
    monkeypatch.setattr(launch.Kernel, "__call__", called)
    monkeypatch.setattr(launch, "_compiled", compiled)
    monkeypatch.setattr(launch, "_processors", lambda: 1)
    monkeypatch.setattr(cuda, "shared_bytes", lambda blocks: 96 << 10)
    monkeypatch.setattr(launch._thread, "device", -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    launch._bound_to.cache_clear()
    # Pinned memory is memory.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("zeros", "empty"):
        make = getattr(torch, name)

        def unpinned(*size, _make=make, pin_memory=False, **how):
            return _make(*size, **how)

        monkeypatch.setattr(torch, name, unpinned)
    yield found
    launch._bound_to.cache_clear()


# Call sites.


def make_step(dtype=torch.float32, name="Adam", make=CudaKernels, ranks=1, **config):
    """Return kernels, an update, a view and a state."""
    optimizer = RowOptimizer(OptimizerConfig(name=name, lr=0.1, **config))
    table = make_table(optimizer, VECTORS, DIM, dtype=dtype)
    shape = StepShape(VECTORS, DIM, dtype, CPU, bool(optimizer.occurrence_cap), ranks)
    view = View(table.records_VR, torch.zeros(ROWS, dtype=torch.int32))
    return make(shape), Update(optimizer, table, 0.1), view, StepState(CPU)


def random_batch(objective="skipgram"):
    batch, weights_TVD = problem(0, 8, 2, 3, VECTORS)
    if "tree" in objective:
        batch, _ = with_tree(batch, weights_TVD, alone=objective.startswith("tree"))
    cbow, weighted = "cbow" in objective, 3 if "weighted" in objective else 0
    changed = batch.objective._replace(cbow=cbow, weighted=weighted)
    return batch._replace(objective=changed)


def draw_text():
    cdf_V = torch.linspace(0.1, 1, VECTORS, dtype=torch.float64)
    seeds = [BatchSeed(5, 2**64 - 1, 3), BatchSeed(6, 2)]
    assert len(list(cuda.draw(seeds, (1, 5), 3, Pool(7, 4, True, 1, 2), cdf_V))) == 2
    words_N, keep_V = torch.zeros(3000, dtype=torch.int32), torch.ones(VECTORS)
    for trained_S in (np.ones(2, bool), np.array([True, False])):
        edges_S = np.array([0, 1000, 3000])
        cuda.subsample(2**64 - 1, words_N, edges_S, keep_V, trained_S, 16, 100)


def train(kernels, update, view, state, batch):
    kernels.mark(batch, torch.zeros(ROWS, dtype=torch.bool))
    grads = kernels.gradients(batch, view, kernels.unique_rows(batch), update.lr)
    kernels.optimizer_step(update, view, grads, state)
    return grads


def with_subwords(shape):
    words = [f"word{number}" for number in range(VECTORS)]
    return CudaSubwordKernels(CudaKernels(shape), Subwords.of(words, (3, 6, 9), VECTORS), shape)


def exchange_rows():
    kernels, update, view, state = make_step(ranks=2, occurrence_cap=5)
    kernels.list_rows(random_batch())
    ranks = Ranks()
    ranks.size = 2
    requested = BatchRows(torch.arange(5), RowGroup(update.table, CPU), kernels.shape)
    requested.receive(ranks, torch.arange(9), [4, 5])
    requested.own.narrow_N, requested.own.row_count = torch.arange(9).int(), torch.tensor([9])
    rows = kernels.sum_by_row(requested, torch.zeros(9, DIM), torch.zeros(9).int())
    loss, pairs = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    kernels.optimizer_step(update, view, Grads(rows, loss, pairs), state)


class OnePeer:
    """Memory of two ranks, which are this one."""

    rank = 1

    def addresses(self, tensors):
        return [[0 if each is None else each.data_ptr() for each in tensors]] * 2


def read_peers(pages):
    kernels, update, view, state = make_step(ranks=2, occurrence_cap=5)
    if not pages:
        view = view._replace(slot_of_A=None)
    exchange = PeerExchange(kernels, 2, state, OnePeer(), view, ROWS)
    (planned,) = exchange.plan([random_batch()])
    exchange.mark([planned], torch.zeros(ROWS // 2, dtype=torch.bool))
    grads, view = exchange.borrow(planned, view)
    grads = kernels.gradients(planned.batch, view, grads, update.lr)
    kernels.optimizer_step(update, view, exchange.reduce(grads), state)
    assert exchange.bytes_sent == 0


def cache_rows():
    optimizer = RowOptimizer(OptimizerConfig(name="Adam", lr=0.1))
    table = make_table(optimizer, VECTORS, DIM)
    marked = RowCache(table, 20, CPU, GpuPlanner)
    marked.prefetch(WantedRows(*torch.zeros(2, ROWS, dtype=torch.bool)))
    marked.wait()
    listed = RowCache(table, 20, CPU, GpuPlanner)
    rows_U = torch.arange(5)
    listed.prefetch(WantedRows(None, None, [rows_U], [rows_U]))
    listed.wait()
    listed.flush()


def look_up():
    spans = Spans.of([Span(ROWS, 3, (0, 40)), Span(9, None, (20, 60))], [], CPU)
    readback = torch.zeros(ops.numbers_of(4), dtype=torch.int64)
    ids_N = torch.arange(6)
    ops.find_rows(ids_N.split(3), spans, 3, readback)
    ops.find_rows([ids_N.int()], spans, 3, readback, has_gaps=True)
    ops.find_rows([ids_N], Spans.of([Span(ROWS, 3, (0,))], [6], CPU), 0, readback, are_rows=True)


def use_bags(dtype):
    optimizer = RowOptimizer(OptimizerConfig(name="Adam", lr=0.1))
    records_SR, places_N = torch.zeros(ROWS, 32, dtype=dtype), torch.arange(6)
    rows_U = torch.zeros(ROWS, dtype=torch.int32)
    view = View(records_SR, None)
    bags = Bags(2, torch.tensor([0, 3]), is_mean=True)
    for given in ((None, places_N), (rows_U, places_N), (rows_U, places_N, DIM, bags, 1)):
        weight_ND = ops.gather_vectors(view, *given[:2], DIM, *given[3:])
    sums_UD = torch.zeros(6, DIM)
    ops.add_gradients([weight_ND], places_N, sums_UD, bags, 1)
    ops.add_gradients([torch.zeros(6, DIM)], places_N, sums_UD, None, 1)
    of_two = [torch.zeros(2, DIM)] * 2
    ops.add_gradients(of_two, places_N, sums_UD, Bags(2, None, 1, False, 2))
    for count in (None, torch.tensor(3)):
        for rows in (None, rows_U):
            args = rows, count, sums_UD, torch.tensor(0.1)  # as torch's optimizers may have it
            ops.step_rows(optimizer, (1.0, -1), 2**64 - 1, View(records_SR, rows_U), *args)


def test_every_kernel_gets_what_its_parameters_are(launches):
    draw_text()
    for objective in ("skipgram", "weighted", "cbow", "tree", "tree cbow", "both: tree"):
        train(*make_step(), random_batch(objective))
    train(*make_step(make=with_subwords), random_batch())
    for dtype in (torch.bfloat16, torch.float16):
        train(*make_step(dtype, "AdamW", occurrence_cap=3), random_batch())
        use_bags(dtype)
    kernels, *_ = make_step(name="NAdam", make=TorchStepKernels)
    assert kernels.unique_rows(random_batch()).rows.rows_U.shape == (0,)
    exchange_rows()
    read_peers(pages=True)
    read_peers(pages=False)
    cache_rows()
    look_up()
    use_bags(torch.float32)
    table = make_table(RowOptimizer(OptimizerConfig(name="Adam", lr=0.1)), VECTORS, DIM)
    for slots_U in (None, torch.arange(3)):
        for move in (MappedLink(table.records_VR).read, MappedLink(table.records_VR).write):
            move(torch.arange(3), torch.zeros(3, table.width), slots_U)
    assert {(source, kernel) for source, kernel, *_ in launches} == KERNELS


def test_bound_kernels_get_the_buffers_at_hand(launches):
    kernels, update, first, state = make_step()
    second = View(first.records_SR.clone(), None)
    small, large = (problem(0, centers, 2, 300, VECTORS)[0] for centers in (4, 30))
    used, bound = [], []
    for batch, view, lr in (
        (small, first, 0.5),
        (small._replace(), first, 0.25),
        (small._replace(), second, 0.25),
        (large, second, 0.25),
    ):
        state.step += 1
        launches.clear()
        grads = train(kernels, update._replace(lr=lr), view, state, batch)
        _, unique, skipgram, step = (launched.args for launched in launches)
        words, records = batch.words_n.data_ptr(), view.records_SR.data_ptr()
        index, loss = grads.rows.index_A.data_ptr(), grads.loss.data_ptr()
        assert (unique["chunk.words"], unique["rows.index_A"]) == (words, index)
        assert (skipgram["chunk.words"], skipgram["rows.index_A"]) == (words, index)
        assert skipgram["view.records_SR"] == step["view.records_SR"] == records
        assert skipgram["loss"] == step["loss"] == loss and step["rows.index_A"] == index
        assert (step["lr"], step["table_step"]) == (lr, state.step)
        used.append(index)
        bound.append(kernels._launch_gradients)
    assert used[0] == used[1] == used[2] != used[3], "the larger batch needs larger buffers"
    assert bound[0] is bound[1] is bound[2] is not bound[3]


# Names, types and places.


@pytest.fixture
def mark_rows(launches):
    return launch.kernel("cache.cu", "mark_rows")


def mark_rows_args(**changes):
    args = {"rows": torch.arange(4), "count": 4, "words": torch.zeros(1, dtype=torch.int32)}
    return args | changes


@each_case(
    "changes, message",
    [
        ({"row": torch.arange(4)}, "mark_rows of cache.cu has no parameter row"),
        ({"rows": torch.arange(4).int()}, "rows is long long[*], not a tensor of torch.int32"),
        ({"rows": torch.arange(8)[::2]}, r"rows .* strides \(2,\)"),
        ({"rows": None}, "rows is long long[*], not None"),
        ({"rows": 2**40}, "rows is long long[*], not 1099511627776"),
        ({"count": torch.tensor(4)}, "count is long long, not 4"),
        ({"count": None}, "count is long long, not None"),
    ],
)
def test_arguments_of_other_names_types_and_places_are_refused(mark_rows, changes, message):
    mark_rows(1, **mark_rows_args())
    with pytest.raises(TypeError, match=message):
        mark_rows(1, **mark_rows_args(**changes))
    with pytest.raises(TypeError, match=message):
        mark_rows.bind(**changes)


@each_case("count", [2**63, 0.5, "4"])
def test_numbers_that_a_parameter_cannot_hold_are_refused(mark_rows, count):
    with pytest.raises(ValueError, match="mark_rows of cache.cu: count is long long, not"):
        mark_rows(1, **mark_rows_args(count=count))


def test_missing_and_doubled_arguments_are_refused(mark_rows):
    args = mark_rows_args()
    bound = mark_rows.bind(count=args.pop("count"))
    bound(1, **args)
    with pytest.raises(TypeError, match="mark_rows of cache.cu got count twice"):
        bound(1, **args, count=4)
    with pytest.raises(TypeError, match="mark_rows of cache.cu lacks count"):
        mark_rows(1, **args)


def test_structs_are_named_tuples_with_the_fields_in_order(launches):
    names = ["index_A", "rows_U", "grad_UD", "pairs_U", "row_count"]
    kernel = launch.kernel("unique.cu", "unique_rows", WINDOW=1, TARGETS=1, PATHS=0)
    other = NamedTuple("Other", [(name, object) for name in reversed(names)])
    for wrong in (other(*[None] * 5), (None,) * 5, None):
        with pytest.raises(TypeError, match="unique_rows of unique.cu: a struct has the fields"):
            kernel.bind(rows=wrong)
    assert kernel.bind(rows=RowGrads(*[None] * 5))
    buffer = launch.StructBuffer("unique.cuh", "Places")
    for name in ("rows", "places"):
        with pytest.raises(TypeError, match=f"unique_rows of unique.cu has no {name} of"):
            kernel.bind(**{name: buffer})
    with pytest.raises(TypeError, match="Places of unique.cuh: a struct has the fields"):
        buffer.set(RowGrads(*[None] * 5))
    with pytest.raises(TypeError, match="Places of unique.cuh: room is long long, not None"):
        buffer.set(launch.c_struct("unique.cuh", "Places")(None, None, None))


def test_arguments_of_a_launch_may_be_in_any_order(launches, mark_rows):
    args = mark_rows_args(count=3)
    for names in (list(args), sorted(args), list(args)):
        mark_rows(5, **{name: args[name] for name in names})
    assert launches[0] == launches[1] == launches[2] and launches[0].args["count"] == 3


def test_kernels_in_turn_have_the_same_parameters(launches):
    with pytest.raises(TypeError, match="survey and list of cache.cu differ in their parameters"):
        launch.kernel("cache.cu", "survey", "list")(1, 1)


def test_elements_are_those_of_the_macro(launches):
    for dtype, element in launch.ELEMENTS.items():
        kernel = launch.kernel("rows.cu", "gather_bags", ELEMENT=element, WIDE=1)
        kernel.bind(view=View(torch.zeros(1, dtype=dtype), None))
        with pytest.raises(TypeError, match=r"records_SR is Element\*"):
            kernel.bind(view=View(torch.zeros(1, dtype=torch.float64), None))


def test_memory_of_the_cpu_is_refused_but_where_a_kernel_takes_it(launches, monkeypatch):
    on_cpu = torch.arange(4)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    launch.kernel("rows.cu", "move_records").bind(table=on_cpu)
    with pytest.raises(TypeError, match="rows is .* on cpu"):
        launch.kernel("rows.cu", "move_records").bind(rows=on_cpu)


def test_a_kernel_is_launched_on_the_gpu_of_its_arguments(mark_rows, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    with pytest.raises(RuntimeError, match="mark_rows is bound to GPU -1, not 1"):
        mark_rows(1, **mark_rows_args())


def test_hyperparameters_are_in_the_order_of_the_struct():
    members = launch.struct_members("optim.cu", "Hyper")
    assert tuple(member.name for member in members) == Hyper._fields
