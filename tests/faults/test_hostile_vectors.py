"""Vectors of others run nothing and crash nothing.

A process of its own reads hostile and damaged files, as a crash would end the tests. By default
300 files, and `make test-faults` reads 7,500.
"""

import contextlib
import os
import pickle
import random
import struct
import sys
from pathlib import Path

import numpy as np

from tests.support.damage import DAMAGES, damage
from tests.support.planted import kv_of
from tests.support.processes import run_python
from w2v.text.vocab import Vocab
from w2v.vectors import export, load
from w2v.vectors.manifest import SUMS, VectorsError
from w2v.vectors.runs import RunError

ROOT = Path(__file__).parents[2]
COUNT = 15 * DAMAGES
WORDS = ["the", "of", "Zürich"]
RUNS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class"}
OTHERS = ["os system", "builtins eval", "builtins getattr", "numpy load", "copyreg _reconstructor"]
OTHERS += ["numpy._core.multiarray scalar", "gensim.utils unpickle", "w2v.vectors.load Words"]


def text(value):
    content = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(content)) + content


def plain(value):
    """Return the opcodes of a value."""
    return pickle.dumps(value, 3)[2:-1]


def a_name(rng):
    """Push a class or function, in one of the ways that there are."""
    names = [tuple(name.split()) for name in sorted(load.PICKLED)]
    names += [tuple(name.split()) for name in OTHERS]
    module, name = rng.choice(names[: rng.choice([len(load.PICKLED), len(names)])])
    if rng.random() < 0.5:
        return pickle.GLOBAL + f"{module}\n{name}\n".encode()
    return text(module) + text(name) + pickle.STACK_GLOBAL


def a_value(rng, depth=2):
    """Push a plain value, such as NumPy's states have, or one that is made."""
    values = [
        None,
        True,
        -1,
        0,
        2**40,
        "",
        "O8",
        "O",
        "f4",
        "V8",
        "S5000",
        "<",
        "|",
        b"b",
        b"\1" * 8,
    ]
    values += [(), (0,), (-1,), (2, 2), (2**62, 2), [], ["the"], {}, {"a": 1}, 1e300, "touch ran"]
    values += [("O8", False, True), (3, "<", None, None, None, -1, -1, 0), "__class__"]
    values += [(3, "|", None, None, None, 8, 8, 0), (3, "|", None, ("a",), {"a": 1}, 8, 8, 63)]
    values += [(None, {"__setstate__": 1}), ({}, {"name": "x", "__class__": 2}), 1 << 2000]
    if depth and rng.random() < 0.4:
        return a_call(rng, depth - 1)
    return plain(rng.choice(values))


def a_call(rng, depth=2):
    """Push what a name makes, and change it by some opcodes."""
    arguments = b"".join(a_value(rng, depth) for _ in range(rng.randrange(4)))
    tuple_of = pickle.MARK + arguments + pickle.TUPLE
    made = rng.choice(
        [
            a_name(rng) + tuple_of + pickle.REDUCE,
            a_name(rng) + tuple_of + pickle.NEWOBJ,
            a_name(rng) + tuple_of + plain({"a": 1}) + pickle.NEWOBJ_EX,
            pickle.MARK + a_name(rng) + arguments + pickle.OBJ,
            pickle.MARK + arguments + pickle.INST + b"numpy\ndtype\n",
            a_name(rng),
            text("x") + pickle.BINPERSID,
            pickle.EXT1 + b"\1",
            pickle.BYTEARRAY8 + struct.pack("<Q", rng.choice([4, 1 << 60])) + b"abcd",
            pickle.NEXT_BUFFER,
            pickle.LONG_BINPUT + struct.pack("<I", 1 << 31),
            pickle.BINBYTES8 + struct.pack("<Q", 1 << 60),
        ]
    )
    for _ in range(rng.randrange(3)):
        value = a_value(rng, depth)
        made += rng.choice(
            [
                value + pickle.BUILD,
                value + a_value(rng, depth) + pickle.SETITEM,
                pickle.MARK + value + value + pickle.SETITEMS,
                value + pickle.APPEND,
                pickle.MARK + value + pickle.APPENDS,
                pickle.EMPTY_TUPLE + 1000 * pickle.TUPLE1 + value + pickle.SETITEM,
                pickle.DUP + pickle.POP,
            ]
        )
    return made


def an_array(rng):
    """Push an array as NumPy does, with some parts replaced."""

    def part(value):
        return a_value(rng, 1) if rng.random() < 0.15 else plain(value)

    shape = rng.choice([(3, 2), (3,), (2**40, 2**40), (-3, -2), (3, 2, 0), (True, 6)])
    dtype = pickle.GLOBAL + b"numpy\ndtype\n"
    dtype += part((rng.choice(["f4", "f8", "i8", "O8", "U3", "M8"]), False, True)) + pickle.REDUCE
    dtype += part((3, rng.choice("<>|?"), None, None, None, -1, -1, rng.choice([0, 63])))
    dtype += pickle.BUILD
    made = pickle.GLOBAL + b"numpy.core.multiarray\n_reconstruct\n"
    made += part(("ndarray", (0,), b"b")) + pickle.REDUCE
    content = rng.choice([bytes(24), bytes(48), b"", [1, 2, 3], ["a"] * 6])
    state = part(1) + part(shape) + dtype + part(rng.random() < 0.3) + part(content)
    return made + pickle.MARK + state + pickle.TUPLE + pickle.BUILD


def an_address(rng):
    """Push an array whose bytes NumPy would take for objects."""
    dtype = pickle.GLOBAL + b"numpy\ndtype\n"
    objects = dtype + plain(("O8", False, True)) + pickle.REDUCE
    if rng.random() < 0.5:
        state = plain(3) + plain("|") + 3 * plain(None) + plain(8) + plain(8) + plain(0)
        made = objects
    else:
        fields = pickle.EMPTY_DICT + text("a") + objects + plain(0) + pickle.TUPLE2 + pickle.SETITEM
        state = plain(3) + plain("|") + plain(None) + plain(("a",)) + fields
        state += plain(8) + plain(8) + plain(0)
        made = dtype + plain(("V8", False, True)) + pickle.REDUCE
    made += pickle.MARK + state + pickle.TUPLE + pickle.BUILD
    array = pickle.GLOBAL + b"numpy\nndarray\n" + plain((3,)) + made + plain(b"A" * 24)
    return array + pickle.TUPLE3 + pickle.REDUCE


def hostile(rng):
    """Return a .kv whose parts are replaced by what may be dangerous."""
    if rng.random() < 0.2:
        return b"\x80\x04" + a_call(rng) + pickle.STOP
    attributes = {
        "vector_size": plain(2),
        "index_to_key": plain(WORDS),
        "key_to_index": plain({word: row for row, word in enumerate(WORDS)}),
        "vectors": plain(np.ones((3, 2), np.float32)),
        "expandos": plain({"count": np.arange(3)}),
        "__numpys": plain([]),
        "__scipys": plain([]),
        "norms": plain(None),
    }
    for name in rng.sample(sorted(attributes), rng.randrange(1, 3)):
        attributes[name] = rng.choice([a_value, a_call, an_array, an_address])(rng)
    if rng.random() < 0.3:
        attributes["vectors"] = an_array(rng)
    if rng.random() < 0.3:
        names = [["vectors"], ["/../fifo"], ["vectors/../../fifo"], "vectors", [["vectors"]]]
        attributes["__numpys"] = plain(rng.choice(names))
    state = b"".join(text(name) + attributes[name] for name in attributes)
    made = pickle.GLOBAL + b"gensim.models.keyedvectors\nKeyedVectors\n"
    made += pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT
    return b"\x80\x03" + made + pickle.MARK + state + pickle.SETITEMS + pickle.BUILD + pickle.STOP


def nested(opcodes):
    """Return a .kv with these opcodes in the place of a word."""
    made = pickle.GLOBAL + b"gensim.models.keyedvectors\nKeyedVectors\n" + pickle.EMPTY_TUPLE
    made += pickle.NEWOBJ + pickle.EMPTY_DICT + text("index_to_key") + pickle.EMPTY_LIST
    made += pickle.EMPTY_TUPLE + opcodes + pickle.APPEND + pickle.SETITEM
    return b"\x80\x03" + made + pickle.BUILD + pickle.STOP


def real_files(folder, rng):
    """Write files as gensim and w2v do; return those to damage."""
    vectors = np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)
    kv = kv_of(WORDS, vectors)
    kv.save(str(folder / "inline.kv"))
    kv.save(str(folder / "apart.kv"), separately=["vectors"])
    kv.save(str(folder / "old.kv"), pickle_protocol=2)
    run = folder / "run"
    run.mkdir()
    vocab = Vocab(WORDS, np.array([3, 2, 1]), 6, 3)
    export.save_run(vocab, 2, iter([vectors]), run, ["kv", "bin"], 7)
    os.mkfifo(folder / "fifo")
    return vectors


def read(path, vectors=None):
    """Load a file; what is loaded must be whole."""
    with contextlib.suppress(VectorsError, RunError):
        words = load.load_words(path)
        assert len(words.vectors) == len(set(words.index_to_key)) == len(words.key_to_index)
        assert words.vectors.dtype.kind == "f" and words.vectors.ndim == 2
        assert all(type(word) is str for word in words.index_to_key)
        words.vectors.sum()
        for column in words.expandos.values():
            assert len(column.tolist()) == len(words.index_to_key)
        load.load(path)
        if vectors is not None:  # checksums find all damage
            assert np.array_equal(words.vectors, vectors) and words.index_to_key == WORDS


def main(count, folder):
    """Read hostile and damaged files; each one's number is printed before."""
    folder = Path(folder, "files")
    folder.mkdir()
    rng = random.Random(count)
    vectors = real_files(folder, rng)
    load.load(folder / "inline.kv")
    sys.addaudithook(lambda event, arguments: event in RUNS and os.abort())
    for number in range(count):
        print(number, flush=True)
        path = folder / "hostile.kv"
        if number % 3 == 0:
            names = ["inline.kv", "apart.kv", "apart.kv.vectors.npy", "old.kv"]
            path = folder / rng.choice(names)
            before = path.read_bytes()
            damage(path, rng)
            read(folder / path.name.removesuffix(".vectors.npy"))
            path.write_bytes(before)
        elif number % 9 == 1:
            run = folder / "run"
            path = run / rng.choice(["vectors.kv", "vectors.bin", load.ARRAY, "vocab.tsv", SUMS])
            before = path.read_bytes()
            damage(path, rng)
            sums = path.name != SUMS
            for file in ("vectors.kv", "vectors.bin"):
                read(run / file, vectors if sums else None)
            if path.name == SUMS:
                path.write_text(f"{'0' * 64}  {rng.choice(['vectors.kv./../../fifo', '/'])}\n")
                read(run / "vectors.kv")
            path.write_bytes(before)
        else:
            path.write_bytes(hostile(rng))
            read(path)
    in_key = pickle.EMPTY_DICT + pickle.EMPTY_TUPLE + 1_000_000 * pickle.TUPLE1 + pickle.NONE
    in_key += pickle.SETITEM
    for opcodes in (1_000_000 * pickle.TUPLE1, 1_000_000 * pickle.MARK, in_key):
        (folder / "hostile.kv").write_bytes(nested(opcodes))
        read(folder / "hostile.kv")
    print("done")


def test_hostile_and_damaged_vectors_run_nothing(tmp_path):
    code = f"from tests.faults.test_hostile_vectors import main; main({COUNT}, {str(tmp_path)!r})"
    done = run_python(code, seconds=600)
    assert done.returncode == 0, (done.stdout[-20:], done.stderr[-2000:])
    assert done.stdout.endswith("done\n") and not (ROOT / "ran").exists()
