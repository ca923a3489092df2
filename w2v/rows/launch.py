"""Compile the kernels in cu/ by CuPy, and launch them by name.

The parameters of a kernel are read from its signature in the source. A launch gives each by its
name; a NamedTuple with the fields of a C struct is passed as that struct.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

from w2v.system.files import kernel_folder, refused

# CuPy reads this when it is imported: its kernels belong into a folder of the user alone.
os.environ["CUPY_CACHE_DIR"] = str(kernel_folder("CUPY_CACHE_DIR"))

SOURCES = [Path(__file__).parent / "cu"]  # folders; word2vec adds its own
THREADS = 256  # of a block
# The command that installs the CuPy for torch's CUDA version, with the compiler of kernels.
INSTALL_CUPY = f"pip install 'cupy-cuda{(torch.version.cuda or '13').split('.')[0]}x[ctk]'"
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # ELEMENT of element.cuh
MARKS = {"OPTIONAL", "STRIDED", "HOST"}  # of pointers, see common.cuh
# By C type: the format in `struct`, and the dtype of tensors that a pointer takes. Unsigned
# integers are in signed tensors, as torch has few operations on unsigned ones.
TYPES: dict[str, tuple[str, torch.dtype | str]] = {
    "bool": ("?", torch.bool),
    "int": ("i", torch.int32),
    "unsigned": ("I", torch.int32),
    "long long": ("q", torch.int64),
    "unsigned long long": ("Q", torch.int64),
    "float": ("f", torch.float32),
    "double": ("d", torch.float64),
    "unsigned char": ("B", torch.uint8),
    "float4": ("", "any"),
    "void": ("", "any"),
}
RESERVED = 1 << 10  # bytes of shared memory that CUDA itself takes for each block
NO_NUMBERS = {Tensor, type(None)}  # types that `struct` would convert, or refuse in other words
GLOBAL = r"__global__ void (?:__launch_bounds__\([^)]*\) )?"

# A tuple: a NamedTuple. Only bound arguments are a StructBuffer.
Argument = Union[Tensor, float, tuple[Any, ...], None, "StructBuffer"]


class CMember(NamedTuple):
    """A number or pointer that a kernel takes, alone or in a struct."""

    name: str
    ctype: str
    code: str  # format in `struct`; "" for a struct
    dtype: torch.dtype | str | None  # of a pointer's tensor, or "any"; None: a number
    marks: set[str]


class Parameter(NamedTuple):
    """A parameter of a kernel: a struct, or one member."""

    members: list[CMember]
    fields: tuple[str, ...] | None = None  # names of a struct's members


def path_of(source: str) -> Path:
    """Return the path of a file of SOURCES."""
    return next(path for folder in SOURCES if (path := folder / source).exists())


@functools.cache
def source_text(source: str) -> str:
    """Return a file of cu/ with its headers, without comments."""
    text = re.sub("//.*", "", path_of(source).read_text())
    return re.sub('#include "(.*)"', lambda match: source_text(match[1]), text)


@functools.cache
def signature(source: str, kernel: str, element: int = 0) -> dict[str, Parameter]:
    """Return the parameters of a kernel by name; element: its macro ELEMENT."""
    (declarations,) = re.findall(rf"{GLOBAL}{kernel}\(([^)]*)\)", source_text(source))
    parameters = {}
    for declaration in declarations.split(","):
        (member,) = _declared(declaration, element)
        parameters[member.name] = Parameter([member])
        if not member.code:
            members = struct_members(source, member.ctype, element)
            named = [field._replace(name=f"{member.name}.{field.name}") for field in members]
            fields = tuple(field.name for field in members)
            parameters[member.name] = Parameter(named, fields)
    return parameters


def struct_members(source: str, name: str, element: int = 0) -> list[CMember]:
    """Return the data members of a struct, which come before its functions."""
    pattern = rf"struct {name} {{(.*?)(?:__device__|}};)"
    (body,) = set(re.findall(pattern, source_text(source), re.DOTALL))
    *declarations, _ = body.split(";")
    return [member for text in declarations for member in _declared(text, element)]


@functools.cache
def c_struct(source: str, name: str) -> Any:
    """Return the type of NamedTuples that are passed as a struct."""
    make: Any = collections.namedtuple  # the fields are known only here
    return make(name, [member.name for member in struct_members(source, name)])


def _declared(declaration: str, element: int) -> Iterator[CMember]:
    """Yield the members of a C declaration."""
    words = re.findall(r"\w+|\*", declaration.partition(",")[0])
    ctype = " ".join(word for word in words[:-1] if word not in {"const", "*"} | MARKS)
    # Structs in memory consist of 8-byte numbers.
    code, pointed = TYPES.get(ctype, ("", torch.int64))
    if ctype == "Element":
        pointed = list(ELEMENTS)[element]
    of_stars = {"": (code, None), "*": ("P", pointed), "**": ("P", torch.int64)}  # **: addresses
    for declarator in declaration.split(","):
        stars = "*" * declarator.count("*")
        code, dtype = of_stars[stars]
        name = re.findall(r"\w+", declarator)[-1]
        yield CMember(name, ctype + stars, code, dtype, MARKS.intersection(words))


class Arguments:
    """Checks arguments of a kernel, and packs them as C lays them out."""

    def __init__(self, kernel: str, device: int, parameters: Mapping[str, Parameter]):
        self._kernel = kernel
        self._device = device
        self._members = [member for one in parameters.values() for member in one.members]
        self._pointers = [(n, member) for n, member in enumerate(self._members) if member.dtype]
        self._structs = [(n, one.fields) for n, one in enumerate(parameters.values()) if one.fields]
        self._structs.reverse()  # `pack` replaces each by its fields
        self._begins: dict[str, int] = {}  # in bytes
        layout = "@0q"  # 0q: to a multiple of 8 bytes
        for name, one in parameters.items():
            self._begins[name] = struct.calcsize(layout)
            layout += "".join(member.code for member in one.members) + "0q"
        self._layout = struct.Struct(layout)

    def allocate(self) -> tuple[Any, dict[str, int]]:
        """Return memory for all parameters, and the address of each."""
        memory = ctypes.create_string_buffer(self._layout.size)
        start = ctypes.addressof(memory)
        return memory, {name: start + begin for name, begin in self._begins.items()}

    def pack(self, memory: Any, values: Iterable[Argument]) -> None:
        """Check the values of all parameters, in order, and write them.

        Every launch does, so there are few operations for each value.
        """
        flat: list[Any] = list(values)
        for n, fields in self._structs:
            if getattr(flat[n], "_fields", None) != fields:
                raise TypeError(f"{self._kernel}: a struct has the fields {fields}, not {flat[n]}")
            flat[n : n + 1] = flat[n]
        device = self._device
        for n, member in self._pointers:
            value = flat[n]
            if value is None and "OPTIONAL" in member.marks:
                flat[n] = 0
                continue
            is_usual = type(value) is Tensor and member.dtype in (value.dtype, "any")
            if not (is_usual and value.is_contiguous() and value.get_device() == device):
                self._check(n, value)
            flat[n] = value.data_ptr()
        if not NO_NUMBERS.isdisjoint(map(type, flat)):
            self._refuse_number(flat)
        try:
            self._layout.pack_into(memory, 0, *flat)
        except (struct.error, OverflowError):
            self._refuse_number(flat)
            raise

    def _check(self, n: int, value: Any) -> None:
        """Raise `TypeError` unless the n-th pointer takes the value."""
        member = self._members[n]
        if type(value) is Tensor:
            on_host = value.is_cpu and "HOST" in member.marks
            is_there = on_host or value.get_device() == self._device
            is_contiguous = value.is_contiguous() or "STRIDED" in member.marks
            if member.dtype in (value.dtype, "any") and is_there and is_contiguous:
                return
            strides = f"strides {value.stride()}"
            value = f"a tensor of {value.dtype} on {value.device}, {strides}"
        raise TypeError(self._refusal(n, value))

    def _refuse_number(self, values: list[Any]) -> None:
        """Raise an error that names the number that C's type cannot hold."""
        for n, member in enumerate(self._members):
            if type(values[n]) in NO_NUMBERS:
                raise TypeError(self._refusal(n, values[n]))
            try:
                struct.pack(member.code, values[n])
            except (struct.error, OverflowError) as error:
                raise ValueError(self._refusal(n, values[n])) from error

    def _refusal(self, n: int, value: Any) -> str:
        return f"{self._kernel}: {self._members[n].name} is {self._members[n].ctype}, not {value}"


class StructBuffer:
    """Memory of a struct argument, which bound kernels read at each launch.

    It is packed once for all of them. One thread sets it and launches.
    """

    def __init__(self, source: str, name: str, element: int = 0):
        members = struct_members(source, name, element)
        self.fields = tuple(member.name for member in members)
        self.value: Any = None
        parameters = {name: Parameter(members, self.fields)}
        device = torch._C._cuda_getDevice()
        self._arguments = Arguments(f"{name} of {source}", device, parameters)
        self._memory, addresses = self._arguments.allocate()
        self.address = addresses[name]

    def set(self, value: Any) -> None:
        """Set the value, a NamedTuple; pack it unless it is the same object."""
        if value is not self.value:
            self._arguments.pack(self._memory, [value])
            self.value = value


@functools.cache
def _arguments(
    device: int, source: str, kernel: str, element: int, names: tuple[str, ...]
) -> Arguments:
    """Return what packs arguments of these names, in this order."""
    parameters = signature(source, kernel, element)
    if unknown := ", ".join(set(names) - parameters.keys()):
        raise TypeError(f"{kernel} of {source} has no parameter {unknown}")
    return Arguments(f"{kernel} of {source}", device, {name: parameters[name] for name in names})


class Kernel:
    """Launches a kernel on one GPU, or several in turn; `kernel` returns it.

    CuPy's own launch takes about a microsecond an argument and looks the kernel up each time. So
    memory is laid out once for launches that name their arguments in the same order.

    Args:
        device: Index of the GPU.
        source: Name of a file in cu/.
        names: Names of the kernels, which have the same parameters.
        macros: Values of the file's macros. SHARED: bytes of a block's dynamic shared memory.
        fixed: Arguments of all launches.
    """

    def __init__(
        self,
        device: int,
        source: str,
        names: Sequence[str],
        macros: Mapping[str, int | str],
        fixed: Mapping[str, Argument],
    ):
        self._device, self._source, self._kernels = device, source, names
        self._macros = macros
        self._fixed = fixed  # keeps the tensors
        self._shared = int(macros.get("SHARED", 0))
        element = int(macros.get("ELEMENT", 0))
        self._arguments = functools.partial(_arguments, device, source, names[0], element)
        buffers = {name: one for name, one in fixed.items() if isinstance(one, StructBuffer)}
        parameters = signature(source, names[0])
        for name, buffer in buffers.items():
            if name not in parameters or parameters[name].fields != buffer.fields:
                raise TypeError(f"{names[0]} of {source} has no {name} of {buffer.fields}")
        packed = {name: value for name, value in fixed.items() if name not in buffers}
        arguments = self._arguments(tuple(packed))
        self._fixed_memory, self._addresses = arguments.allocate()
        arguments.pack(self._fixed_memory, packed.values())
        self._addresses |= {name: buffer.address for name, buffer in buffers.items()}
        self._names: tuple[str, ...] | None = None  # of the other arguments
        self._lock = threading.Lock()

    def bind(self, **fixed: Argument) -> Kernel:
        """Return the kernel with arguments that all its launches share."""
        return Kernel(self._device, self._source, self._kernels, self._macros, fixed)

    def __call__(self, *blocks: int, **args: Argument) -> None:
        """Launch each with so many blocks of THREADS threads.

        They run in turn, on torch's current stream.
        """
        # torch's public functions for device and stream take longer than the launch itself.
        device = torch._C._cuda_getDevice()
        if device != self._device:
            raise RuntimeError(f"{self._kernels[0]} is bound to GPU {self._device}, not {device}")
        if getattr(_thread, "device", None) != device:
            # Gives this thread the device's context, without which the driver launches nothing.
            torch.cuda.current_stream().query()
            _thread.device = device
        stream = torch._C._cuda_getCurrentRawStream(device)
        with self._lock:  # until the driver has copied the arguments
            if tuple(args) != self._names:
                self._lay_out(args)
            if args:
                self._others.pack(self._memory, args.values())
            shared, pointers = self._shared, self._pointers
            for (function, launch), number in zip(self._functions, blocks, strict=True):
                launch(function, number, 1, 1, THREADS, 1, 1, shared, stream, pointers, 0)

    def _lay_out(self, args: Mapping[str, Argument]) -> None:
        """Allocate memory for all arguments, and compile the kernel."""
        parameters, *more = (signature(self._source, name) for name in self._kernels)
        of_source = f"of {self._source}"
        if any(list(each.items()) != list(parameters.items()) for each in more):
            both = " and ".join(self._kernels)
            raise TypeError(f"{both} {of_source} differ in their parameters")
        if twice := ", ".join(self._fixed.keys() & args.keys()):
            raise TypeError(f"{self._kernels[0]} {of_source} got {twice} twice")
        if missing := ", ".join(parameters.keys() - self._fixed.keys() - args.keys()):
            raise TypeError(f"{self._kernels[0]} {of_source} lacks {missing}")
        self._others = self._arguments(tuple(args))
        self._memory, addresses = self._others.allocate()
        addresses |= self._addresses
        self._parameters = (ctypes.c_void_p * len(parameters))()
        self._parameters[:] = [addresses[name] for name in parameters]
        self._pointers = ctypes.addressof(self._parameters)
        self._functions = [
            _compiled(self._device, self._source, name, **self._macros) for name in self._kernels
        ]
        self._names = tuple(args)


@functools.cache
def _bound_to(device: int, source: str, *names: str, **macros: int | str) -> Kernel:
    return Kernel(device, source, names, macros, {})


def kernel(source: str, *names: str, **macros: int | str) -> Kernel:
    """Return kernels of a source file for the current GPU."""
    return _bound_to(torch._C._cuda_getDevice(), source, *names, **macros)


_thread = threading.local()  # of each thread, the device whose context it has


def cuda_runtime() -> Any:
    """Return CuPy's module of CUDA's runtime.

    Raises:
        ImportError: CuPy is not installed.
    """
    # `from cupy.cuda import runtime` would not wait for a thread that is importing CuPy, and fail,
    # as it needs what that thread has not imported yet.
    import cupy

    return cupy.cuda.runtime


@functools.cache
def has_cupy() -> bool:
    """Return whether there is CuPy; raise `ValueError` if it is broken."""
    try:
        cuda_runtime()
    except ImportError:
        return False
    with refused(ValueError, "CuPy cannot compile", f"{INSTALL_CUPY}, or uninstall CuPy"):
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    return True


def blocks_for(threads: int, per_processor: int = 8) -> int:
    """Return the blocks for that many threads, at most so many a processor."""
    return max(1, min(-(-threads // THREADS), per_processor * _processors()))


@functools.cache
def _processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


@functools.cache
def shared_bytes(blocks: int) -> int:
    """Return the bytes of shared memory for each of a processor's blocks."""
    of_processor = torch.cuda.get_device_properties().shared_memory_per_multiprocessor
    return of_processor // blocks - RESERVED


@functools.cache
def _compiled(
    device: int, source: str, kernel: str, **macros: int | str
) -> tuple[int, Callable[..., None]]:
    """Return the handle of a kernel, and the driver's cuLaunchKernel.

    Its module stays loaded.
    """
    compiled = _module(device, source, **macros).get_function(kernel)
    if macros.get("SHARED"):
        compiled.max_dynamic_shared_size_bytes = macros["SHARED"]
    function = compiled.kernel
    from cupy_backends.cuda.api import driver  # after CuPy itself, which finds CUDA's libraries

    return function.ptr, driver.launchKernel


@functools.cache
def _module(device: int, source: str, **macros: int | str) -> Any:
    import cupy

    # Not as options: CuPy compiles an empty file for each new set of these, which takes 20 ms. It
    # does not look at headers: a hash of their content is part of the code.
    content = hashlib.blake2b(source_text(source).encode(), digest_size=8).hexdigest()
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    code = f'// {content}\n{defines}#line 1 "{source}"\n{path_of(source).read_text()}'
    options = ("-std=c++17", *(f"-I{folder}" for folder in SOURCES))
    return cupy.RawModule(code=code, options=options)
