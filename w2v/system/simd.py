"""Vector operations on rows of matrices, for loops that numba compiles.

numba leaves vectors to LLVM, which keeps no sums of several rows in registers and checks again for
each row whether arrays overlap. These operations are written in LLVM's own language. Matrices are
float32, and contiguous along their rows. "Padded" matrices have rows of whole vectors.

Shapes: C contexts, T targets, P padded dimensions, N = C * T numbers of pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # float32 numbers of the widest vectors, and of a cache line
# Targets whose rows and gradients fit into the registers together.
AT_ONCE = 8 if binding.get_host_cpu_features().get("avx512f") else 3
FAST = ("reassoc", "contract", "nsz", "arcp")  # as cpu_loops.py has it
VECTOR = ir.VectorType(ir.FloatType(), LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)
INT64 = ir.IntType(64)


class Code:
    """Writes the code of one intrinsic; array arguments become matrices."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any):
        self.builder = builder
        self.arguments = [
            Matrix(self, context, kind, value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        ]

    @contextmanager
    def blocks(self, numbers: Any) -> Iterator[Any]:
        """Loop over whole vectors; gives the first column of each."""
        count = self.builder.udiv(numbers, INT64(LANES))
        with cgutils.for_range(self.builder, count, intp=INT64) as loop:
            yield self.builder.mul(loop.index, INT64(LANES))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """Return x * y + z."""
        return self.builder.fadd(self.builder.fmul(x, y, flags=FAST), z, flags=FAST)

    def splat(self, number: Any) -> Any:
        """Return a vector of equal numbers."""
        undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
        one = self.builder.insert_element(undefined, number, INT64(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self.builder.shuffle_vector(one, undefined, zeros)

    def zeros(self, count: int) -> list[Any]:
        """Return variables of vectors, set to zero."""
        variables = [cgutils.alloca_once(self.builder, VECTOR) for _ in range(count)]
        for variable in variables:
            self.builder.store(ZEROS, variable)
        return variables

    def add_product(self, variable: Any, x: Any, y: Any) -> None:
        """Add x * y to a variable."""
        self.builder.store(self.fma(x, y, self.builder.load(variable)), variable)

    def sum(self, vector: Any) -> Any:
        """Return the sum of a vector's numbers."""
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        return self.call(name, ir.FloatType(), ir.FloatType()(-0.0), vector, fastmath=FAST)

    def mask(self, numbers: Any) -> Any:
        """Return which lanes are below a number."""
        lanes = ir.Constant(ir.VectorType(INT64, LANES), list(range(LANES)))
        return self.builder.icmp_unsigned("<", lanes, self.splat(numbers))

    def call(self, name: str, kind: Any, *arguments: Any, **options: Any) -> Any:
        """Call a function of LLVM's, which returns this kind."""
        kind = ir.FunctionType(kind, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments, **options)


class Matrix:
    """An array argument: vectors of it are loaded and stored."""

    def __init__(self, code: Code, context: Any, kind: types.Array, value: Any):
        self._code, self._context, self._kind = code, context, kind
        self._array = context.make_array(kind)(context, code.builder, value)

    @property
    def columns(self) -> Any:
        """The length of a row."""
        return cgutils.unpack_tuple(self._code.builder, self._array.shape)[-1]

    def address(self, *place: Any) -> Any:
        """Return a pointer to a number."""
        builder = self._code.builder
        return cgutils.get_item_pointer(self._context, builder, self._kind, self._array, place)

    def number(self, *place: Any) -> Any:
        """Return one number."""
        return self._code.builder.load(self.address(*place))

    def load(self, *place: Any, mask: Any = None) -> Any:
        """Return a vector; where the mask is not set it is zero."""
        pointer = self._pointer(place)
        if mask is None:
            return self._code.builder.load(pointer, align=4)
        rest = pointer, ir.IntType(32)(4), mask, ZEROS
        return self._code.call(f"llvm.masked.load.v{LANES}f32.p0", VECTOR, *rest)

    def store(self, vector: Any, *place: Any, mask: Any = None) -> None:
        """Store a vector, or the lanes whose mask is set."""
        pointer = self._pointer(place)
        if mask is None:
            self._code.builder.store(vector, pointer, align=4)
            return
        rest = vector, pointer, ir.IntType(32)(4), mask
        self._code.call(f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), *rest)

    def _pointer(self, place: tuple[Any, ...]) -> Any:
        return self._code.builder.bitcast(self.address(*place), VECTOR.as_pointer())


@intrinsic
def prefetch(typing, matrix, row, column):
    """Fetch the cache line of matrix[row, column], to be written."""

    def generate(context, builder, signature, arguments):
        code = Code(context, builder, signature, arguments)
        matrix, row, column = code.arguments
        address = builder.bitcast(matrix.address(row, column), ir.IntType(8).as_pointer())
        write, all_caches, data = (ir.IntType(32)(value) for value in (1, 3, 1))
        code.call("llvm.prefetch.p0", ir.VoidType(), address, write, all_caches, data)
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp), generate


@intrinsic
def fetch_add(typing, numbers_N, place, number):
    """Add to an integer that threads share; return what it was before."""

    def generate(context, builder, signature, arguments):
        numbers, place, number = Code(context, builder, signature, arguments).arguments
        return builder.atomic_rmw("add", numbers.address(place), number, "monotonic")

    return types.int64(numbers_N, types.intp, types.int64), generate


@intrinsic(prefer_literal=True)
def blend(typing, keep, rows, row, scale, others, other, dim):
    """Set a row to keep * row + scale * other, in its first `dim` columns.

    The rows are rows[row] and others[other]. Where `keep` is the literal 0, the row is not read
    and its padding becomes zero too.
    """
    is_set = isinstance(keep, types.IntegerLiteral) and keep.literal_value == 0

    def generate(context, builder, signature, arguments):
        code = Code(context, builder, signature, arguments)
        keep, rows, row, scale, others, other, dim = code.arguments
        scale = code.splat(scale)
        keep = None if is_set else code.splat(keep)

        def part(column: Any, mask: Any = None) -> None:
            value = builder.fmul(scale, others.load(other, column, mask=mask), flags=FAST)
            if keep is not None:
                value = code.fma(keep, rows.load(row, column, mask=mask), value)
            # A load after a store of fewer lanes would wait until that has reached the cache.
            rows.store(value, row, column, mask=None if is_set else mask)

        with code.blocks(dim) as column:
            part(column)
        rest = builder.urem(dim, INT64(LANES))
        with cgutils.if_unlikely(builder, builder.icmp_unsigned("!=", rest, INT64(0))):
            part(builder.sub(dim, rest), code.mask(rest))
        return context.get_dummy_value()

    keep = keep if is_set else types.float32
    signature = types.void(keep, rows, types.int64, types.float32, others, types.int64, types.int64)
    return signature, generate


@intrinsic(prefer_literal=True)
def dots(typing, context_CP, place, target_TP, targets, product_N, n):
    """Set product_N[n:] to the dot products of a context with all targets.

    targets: Their number, a literal.
    """
    count = targets.literal_value

    def generate(context, builder, signature, arguments):
        code = Code(context, builder, signature, arguments)
        contexts, place, targets, _, products, n = code.arguments
        # A part of the context is loaded once for as many targets as the registers have sums for.
        for first in range(0, count, AT_ONCE):
            group = range(first, min(first + AT_ONCE, count))
            sums = code.zeros(len(group))
            with code.blocks(targets.columns) as column:
                x = contexts.load(place, column)
                for t, total in zip(group, sums, strict=True):
                    code.add_product(total, x, targets.load(INT64(t), column))
            for t, total in zip(group, sums, strict=True):
                number = builder.add(n, INT64(t))
                builder.store(code.sum(builder.load(total)), products.address(number))
        return context.get_dummy_value()

    signature = types.void(context_CP, types.int64, target_TP, targets, product_N, types.int64)
    return signature, generate


@intrinsic(prefer_literal=True)
def pair_gradients(typing, error_N, contexts, targets, context_CP, grad_CP, target_TP, grad_TP):
    """Set the gradients of both rows of all pairs, sums of rows times errors.

    grad_CP[c] is the sum of error_N[c * T + t] * target_TP[t] over t, and grad_TP[t] that of
    error_N[c * T + t] * context_CP[c] over c. T is `targets`, a literal.
    """
    count = targets.literal_value

    def generate(context, builder, signature, arguments):
        code = Code(context, builder, signature, arguments)
        errors, contexts, _, context_rows, grads, target_rows, target_grads = code.arguments
        # Rows and gradients of a group of targets are in registers while contexts pass by.
        for first in range(0, count, AT_ONCE):
            group = range(first, min(first + AT_ONCE, count))
            with code.blocks(target_rows.columns) as column:
                targets = [target_rows.load(INT64(t), column) for t in group]
                sums = code.zeros(len(group))
                with cgutils.for_range(builder, contexts, intp=INT64) as loop:
                    c = loop.index
                    x = context_rows.load(c, column)
                    # A context's gradient adds up over the groups.
                    grad = grads.load(c, column) if first else ZEROS
                    for t, target, total in zip(group, targets, sums, strict=True):
                        place = builder.add(builder.mul(c, INT64(count)), INT64(t))
                        error = code.splat(errors.number(place))
                        grad = code.fma(error, target, grad)
                        code.add_product(total, error, x)
                    grads.store(grad, c, column)
                for t, total in zip(group, sums, strict=True):
                    target_grads.store(builder.load(total), INT64(t), column)
        return context.get_dummy_value()

    signature = types.void(error_N, types.int64, targets, context_CP, grad_CP, target_TP, grad_TP)
    return signature, generate
