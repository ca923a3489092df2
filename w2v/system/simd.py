"""Vector operations on rows of matrices, for loops that numba compiles.

numba leaves vectors to LLVM, which keeps no sums of several rows in registers and checks again for
each row whether arrays overlap. These operations are written in LLVM's own language: with loops in
plain numba, `w2v train` took 28 s of CPU time in place of 17 (SGD, 100 MB, one epoch), and with
Adam 56 in place of 36. Matrices are float32, and contiguous along their rows. "Padded" matrices
have rows of whole vectors.

Shapes: C contexts, T targets, P padded dimensions, N = C * T numbers of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # float32 numbers of the widest vectors, and of a cache line
# Targets whose rows and gradients fit into the registers together.
AT_ONCE = 8 if binding.get_host_cpu_features().get("avx512f") else 3
# Vectors need sums in any order and fused products. NaN and infinity stay what they are.
FAST = ("reassoc", "contract", "nsz", "arcp")
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

    def columns(self, numbers: Any, part: Callable[..., None]) -> None:
        """Write `part` for whole vectors of a row, and with a mask for its rest."""
        builder = self.builder
        count, rest = (divide(numbers, INT64(LANES)) for divide in (builder.udiv, builder.urem))
        with cgutils.for_range(builder, count, intp=INT64) as loop:
            part(builder.mul(loop.index, INT64(LANES)))
        with cgutils.if_unlikely(builder, builder.icmp_unsigned("!=", rest, INT64(0))):
            part(builder.sub(numbers, rest), mask=self.mask(rest))

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
        return self.call(name, ir.FloatType(), [ir.FloatType()(-0.0), vector], fastmath=FAST)

    def mask(self, numbers: Any) -> Any:
        """Return which lanes are below a number."""
        lanes = ir.Constant(ir.VectorType(INT64, LANES), list(range(LANES)))
        return self.builder.icmp_unsigned("<", lanes, self.splat(numbers))

    def call(
        self, name: str, kind: Any, arguments: Sequence[Any], fastmath: Sequence[str] = ()
    ) -> Any:
        """Call a function of LLVM's, which returns this kind."""
        kind = ir.FunctionType(kind, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments, fastmath=fastmath)


class Matrix:
    """An array argument: vectors of it are loaded and stored."""

    def __init__(self, code: Code, context: Any, kind: types.Array, value: Any):
        self._code, self._context, self._kind = code, context, kind
        self._array = context.make_array(kind)(context, code.builder, value)

    def address(self, place: Sequence[Any]) -> Any:
        """Return a pointer to a number."""
        builder = self._code.builder
        return cgutils.get_item_pointer(self._context, builder, self._kind, self._array, place)

    def number(self, *place: Any) -> Any:
        """Return one number."""
        return self._code.builder.load(self.address(place))

    def load(self, *place: Any, mask: Any = None) -> Any:
        """Return a vector; where the mask is not set it is zero."""
        pointer = self._pointer(place)
        if mask is None:
            return self._code.builder.load(pointer, align=4)
        rest = pointer, ir.IntType(32)(4), mask, ZEROS
        return self._code.call(f"llvm.masked.load.v{LANES}f32.p0", VECTOR, rest)

    def store(self, vector: Any, *place: Any, mask: Any = None) -> None:
        """Store a vector, or the lanes whose mask is set."""
        pointer = self._pointer(place)
        if mask is None:
            self._code.builder.store(vector, pointer, align=4)
            return
        rest = vector, pointer, ir.IntType(32)(4), mask
        self._code.call(f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), rest)

    def _pointer(self, place: tuple[Any, ...]) -> Any:
        return self._code.builder.bitcast(self.address(place), VECTOR.as_pointer())


@intrinsic(prefer_literal=True)
def prefetch(typing, matrix, row, column, writes):
    """Fetch the cache line of matrix[row, column].

    If the literal `writes` is 1 it is taken from other cores, which lose it.
    """
    write = writes.literal_value

    def generate(context, builder, signature, arguments):
        code = Code(context, builder, signature, arguments)
        matrix, row, column, _ = code.arguments
        address = builder.bitcast(matrix.address((row, column)), ir.IntType(8).as_pointer())
        # Not to the first cache: rows of later centers would evict those of the present one.
        how = [ir.IntType(32)(value) for value in (write, 2, 1)]
        code.call("llvm.prefetch.p0", ir.VoidType(), [address, *how])
        return context.get_dummy_value()

    return types.void(matrix, types.intp, types.intp, writes), generate


@intrinsic
def fetch_add(typing, matrix, row, column, number):
    """Add to an integer that threads share; return what it was before."""

    def generate(context, builder, signature, arguments):
        matrix, *place, number = Code(context, builder, signature, arguments).arguments
        return builder.atomic_rmw("add", matrix.address(place), number, "monotonic")

    return types.int64(matrix, types.intp, types.intp, types.int64), generate


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

        code.columns(dim, part)
        return context.get_dummy_value()

    keep = keep if is_set else types.float32
    signature = types.void(keep, rows, types.int64, types.float32, others, types.int64, types.int64)
    return signature, generate


def _groups(code: Code, targets: Any, most: Any) -> Iterator[list[Any]]:
    """Write loops over all targets: in groups of `most`, then of 4, 2 and 1.

    Gives the numbers of each group, whose rows or sums stay in registers while contexts pass.
    """
    builder, begin, most = code.builder, INT64(0), most.literal_value
    for size in (most, *(1 << power for power in reversed(range((most - 1).bit_length())))):
        groups = builder.udiv(builder.sub(targets, begin), INT64(size))
        with cgutils.for_range(builder, groups, intp=INT64) as loop:
            first = builder.add(begin, builder.mul(loop.index, INT64(size)))
            yield [builder.add(first, INT64(t)) for t in range(size)]
        begin = builder.add(begin, builder.mul(groups, INT64(size)))


@intrinsic(prefer_literal=True)
def dots(typing, context_CP, contexts, rows_VR, ids_T, targets, most, dim, logits_N):
    """Set the logits of all pairs: products of contexts and rows[ids].

    logits_N: Those of a context after another; most: A literal, of targets that are taken at once.
    """

    def generate(context, builder, signature, arguments):
        code = Code(context, builder, signature, arguments)
        context_CP, contexts, rows_VR, ids_T, targets, _, dim, logits_N = code.arguments
        # A part of the context is loaded once for as many targets as registers have sums for.
        for numbers in _groups(code, targets, most):
            rows = [ids_T.number(t) for t in numbers]
            with cgutils.for_range(builder, contexts, intp=INT64) as loop:
                c, sums = loop.index, code.zeros(len(rows))

                def part(column, mask=None, c=c, rows=rows, sums=sums):
                    x = context_CP.load(c, column)
                    for row, total in zip(rows, sums, strict=True):
                        code.add_product(total, x, rows_VR.load(row, column, mask=mask))

                code.columns(dim, part)
                for t, total in zip(numbers, sums, strict=True):
                    place = builder.add(builder.mul(c, targets), t)
                    builder.store(code.sum(builder.load(total)), logits_N.address([place]))
        return context.get_dummy_value()

    shape = types.int64, most, types.int64
    kinds = context_CP, types.int64, rows_VR, ids_T, *shape, logits_N
    return types.void(*kinds), generate


@intrinsic(prefer_literal=True)
def pair_gradients(
    typing,
    error_N,
    context_CP,
    contexts,
    rows_VR,
    ids_T,
    targets,
    most,
    dim,
    grad_CP,
    grad_UP,
    at_T,
):
    """Sum the gradients of both rows of all pairs: rows times errors.

    grad_CP[c] is set to the sum of errors times rows[ids[t]] over t. The sum of errors times
    context_CP[c] over c is added to grad_UP[at[t]], or, if grad_UP is None, subtracted from the
    row. The rows must all differ.
    """
    subtracts = isinstance(grad_UP, types.NoneType)

    def generate(context, builder, signature, arguments):
        code = Code(context, builder, signature, arguments)
        error_N, context_CP, contexts, rows_VR, ids_T, targets, _, dim, *grads = code.arguments
        grad_CP, grad_UP, at_T = grads
        # Rows and gradients of a group of targets are in registers while contexts pass by.
        for numbers in _groups(code, targets, most):
            rows, at = ([array.number(t) for t in numbers] for array in (ids_T, at_T))
            is_first = builder.icmp_unsigned("==", numbers[0], INT64(0))

            def part(column, mask=None, numbers=numbers, rows=rows, at=at, is_first=is_first):
                vectors = [rows_VR.load(row, column, mask=mask) for row in rows]
                sums = code.zeros(len(rows))
                with cgutils.for_range(builder, contexts, intp=INT64) as loop:
                    c, errors = loop.index, builder.mul(loop.index, targets)
                    x = context_CP.load(c, column)
                    grad = builder.select(is_first, ZEROS, grad_CP.load(c, column))
                    for t, vector, total in zip(numbers, vectors, sums, strict=True):
                        error = code.splat(error_N.number(builder.add(errors, t)))
                        grad = code.fma(error, vector, grad)
                        code.add_product(total, error, x)
                    grad_CP.store(grad, c, column)
                for row, to, vector, total in zip(rows, at, vectors, sums, strict=True):
                    grad = builder.load(total)
                    if subtracts:
                        updated = builder.fsub(vector, grad, flags=FAST)
                        rows_VR.store(updated, row, column, mask=mask)
                    else:
                        updated = builder.fadd(grad_UP.load(to, column), grad, flags=FAST)
                        grad_UP.store(updated, to, column)

            code.columns(dim, part)
        return context.get_dummy_value()

    shape = types.int64, most, types.int64
    kinds = error_N, context_CP, types.int64, rows_VR, ids_T, *shape, grad_CP
    return types.void(*kinds, grad_UP, at_T), generate
