"""Structs of cu/ as ctypes lays them out."""

import ctypes
import re

from w2v.rows import launch

TYPES = {
    "bool": ctypes.c_bool,
    "int": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "long long": ctypes.c_int64,
    "unsigned long long": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


def as_structure(members):
    """Return the type of a struct."""
    types = [ctypes.c_void_p if member.dtype else TYPES[member.ctype] for member in members]
    names = [member.name for member in members]
    return type("Struct", (ctypes.Structure,), {"_fields_": list(zip(names, types, strict=True))})


def layout_assertions(source):
    """Return C++ that compiles if structs are laid out as by ctypes."""
    signatures = re.findall(rf"{launch.GLOBAL}\w+\(([^)]*)\)", launch.source_text(source))
    names = re.findall(r"\b([A-Z]\w+) \w+ *(?:,|$)", ",".join(signatures), re.MULTILINE)
    facts = []
    for name in sorted(set(names)):
        struct = as_structure(launch.struct_members(source, name))
        facts.append(f"sizeof({name}) == {ctypes.sizeof(struct)}")
        for field, _ in struct._fields_:
            facts.append(f"__builtin_offsetof({name}, {field}) == {getattr(struct, field).offset}")
    return "".join(f'static_assert({fact}, "{fact}");\n' for fact in facts)
