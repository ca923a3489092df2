"""Decode pickles of gensim's KeyedVectors without calling anything they name.

A pickle is a program for a stack machine that may import and call any function. Only what gensim
and NumPy write, in protocols 2 to 4, is decoded here: numbers, text, lists and dictionaries become
plain values, and each object becomes a `Made`, which records what the pickle would have called.
"""

from __future__ import annotations

import math
import pickle
import struct
from typing import Any, Literal

import numpy as np

KEYED_VECTORS = "gensim.models.keyedvectors.KeyedVectors"
NAMES = {  # all names in a pickle of KeyedVectors
    KEYED_VECTORS,
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "_codecs.encode",
    "__builtin__.frozenset",
    "builtins.frozenset",
}
KINDS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}  # of arrays

# Opcodes; those with an operand in the order of its size.
GET = pickle.BINGET + pickle.LONG_BINGET
PUT = pickle.BINPUT + pickle.LONG_BINPUT
INT = pickle.BININT1 + pickle.BININT2 + pickle.BININT
MEMOIZE = pickle.MEMOIZE[0]
TEXT = pickle.SHORT_BINUNICODE + pickle.BINUNICODE + pickle.BINUNICODE8
COUNTED = TEXT + pickle.LONG1 + pickle.SHORT_BINBYTES + pickle.BINBYTES + pickle.BINBYTES8
TUPLES = pickle.EMPTY_TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3  # of 0 to 3 items
CONSTANTS = {pickle.NONE: None, pickle.NEWTRUE: True, pickle.NEWFALSE: False}
OPERAND_BYTES = [0] * 256  # by opcode; the operand of COUNTED is the length of what follows
for _bytes, _codes in {
    1: GET[:1] + PUT[:1] + INT[:1] + TEXT[:1] + pickle.SHORT_BINBYTES + pickle.LONG1 + pickle.PROTO,
    2: INT[1:2],
    4: GET[1:] + PUT[1:] + INT[2:] + TEXT[1:2] + pickle.BINBYTES,
    8: TEXT[2:] + pickle.BINBYTES8 + pickle.BINFLOAT + pickle.FRAME,
}.items():
    for _code in _codes:
        OPERAND_BYTES[_code] = _bytes


class Made:
    """An object that a pickle would make: what it would call, and the state."""

    def __init__(self, name: str, arguments: Any = ()):
        self.name = name
        self.arguments = arguments
        self.state: Any = None


class _Machine:
    """Stack of a pickle, and the opcodes that only work on it."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []  # for each mark, the stack below it

    def do(self, opcode: bytes) -> None:
        """Do the operation of an opcode without an operand."""
        stack = self.stack
        if opcode == pickle.MARK:
            self._outer.append(stack)
            self.stack = []
        elif opcode in (pickle.TUPLE, pickle.FROZENSET):  # as a tuple: nothing is hashed
            self._pop_mark().append(tuple(stack))
        elif opcode == pickle.APPENDS:
            _extend(self._pop_mark()[-1], stack)
        elif opcode == pickle.SETITEMS:
            _update(self._pop_mark()[-1], stack)
        elif opcode in CONSTANTS:
            stack.append(CONSTANTS[opcode])
        elif opcode == pickle.EMPTY_LIST:
            stack.append([])
        elif opcode == pickle.EMPTY_DICT:
            stack.append({})
        elif opcode in TUPLES:
            first = len(stack) - TUPLES.index(opcode)
            stack[first:] = [tuple(stack[first:])]
        else:
            self._combine(opcode)

    def _combine(self, opcode: bytes) -> None:
        """Do the operation of an opcode that takes its operands from the stack."""
        stack = self.stack
        last = stack.pop()
        if opcode == pickle.APPEND:
            _extend(stack[-1], [last])
        elif opcode == pickle.SETITEM:
            key = stack.pop()
            _update(stack[-1], [key, last])
        elif opcode == pickle.STACK_GLOBAL:
            stack.append(named(stack.pop(), last))
        elif opcode in (pickle.NEWOBJ, pickle.REDUCE):
            stack.append(Made(stack.pop().name, last))
        elif opcode == pickle.BUILD and type(stack[-1]) is Made:
            stack[-1].state = last
        else:
            raise ValueError(f"gensim writes no opcode {opcode!r} here")

    def _pop_mark(self) -> list[Any]:
        """Return to the stack below the last mark."""
        self.stack = self._outer.pop()
        return self.stack


def decode(pickled: bytes) -> Any:
    """Return the value of a pickle, with each object as a `Made`.

    Raises `ValueError` for names that are not in NAMES and for other opcodes, and exceptions of any
    kind for damage.
    """
    machine = _Machine()
    stack = machine.stack
    memo: dict[int, Any] = {}
    place = 0
    while True:
        code = pickled[place]
        first = place + 1
        place = first + OPERAND_BYTES[code]
        number = int.from_bytes(pickled[first:place], "little")
        # The most frequent ones are first: there are millions of words and of their numbers.
        if code in GET:
            stack.append(memo[number])
        elif code in INT:
            stack.append(number - (number >> 31 << 32))  # four bytes have a sign
        elif code == MEMOIZE:
            memo[len(memo)] = stack[-1]
        elif code in PUT:
            memo[number] = stack[-1]
        elif code in COUNTED:
            content = pickled[place : place + number]
            place += number
            if code in TEXT:
                stack.append(content.decode())
            elif code == pickle.LONG1[0]:
                stack.append(int.from_bytes(content, "little", signed=True))
            else:
                stack.append(content)
        elif code == pickle.BINFLOAT[0]:
            stack += struct.unpack(">d", pickled[first:place])
        elif code == pickle.GLOBAL[0]:
            module, name, _ = pickled[place : place + 200].split(b"\n", 2)
            place += len(module) + len(name) + 2
            stack.append(named(module.decode(), name.decode()))
        elif code == pickle.STOP[0]:
            return stack[-1]
        elif code not in (pickle.PROTO[0], pickle.FRAME[0]):
            machine.do(bytes([code]))
            stack = machine.stack


def named(module: str, name: str) -> Made:
    """Return what stands for a class or function, if gensim's files name it."""
    full = f"{module}.{name}"
    if full not in NAMES:  # a whole model is a common mistake
        remedy = "save the .wv of a gensim model"
        raise ValueError(f"it names {full}, which could run any code; {remedy}")
    return Made(full)


def array(made: Made) -> np.ndarray:
    """Return the array that NumPy has pickled: of numbers, or of arrays of numbers."""
    _, shape, dtype, _, content = made.state
    if dtype.arguments[0] != "O8":
        return _numbers(made)
    column = np.empty(len(content), object)
    for place, value in enumerate(content):
        # One level only: of arrays in arrays in arrays, a small file could hold billions.
        column[place] = value
        if isinstance(value, Made):
            column[place] = _numbers(value)
    return column.reshape(shape)


def _numbers(made: Made) -> np.ndarray:
    """Return an array of numbers; raise `ValueError` unless all of its parts match."""
    _, shape, dtype, in_columns, content = made.state
    kind = dtype.arguments[0]
    if kind not in KINDS or any(type(length) is not int for length in shape):
        raise ValueError("an array does not hold numbers")
    if isinstance(content, Made):  # bytes in protocol 2
        content = content.arguments[0].encode("latin1")
    found = np.dtype(kind).newbyteorder(dtype.state[1])
    if min(shape, default=0) < 0 or len(content) != math.prod(shape) * found.itemsize:
        raise ValueError(f"an array of {len(content):,} bytes does not have its size")
    order: Literal["C", "F"] = "C"
    if in_columns is True:
        order = "F"
    # The copy, in this machine's byte order, can be written.
    return np.ndarray(shape, found, content, order=order).astype(kind)


def _extend(to: Any, items: list[Any]) -> None:
    if type(to) is not list:
        raise ValueError("items are appended to something else than a list")
    to.extend(items)


def _update(to: Any, items: list[Any]) -> None:
    keys = items[::2]
    # A tuple of a million tuples in each other, as a key, would exhaust the stack of C.
    if type(to) is not dict or set(map(type, keys)) - {str}:
        raise ValueError("the keys of a dictionary are not words")
    to.update(zip(keys, items[1::2], strict=True))
