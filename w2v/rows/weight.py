"""Weights of paged tables, as parameters and as views of these.

They have no memory: operations of torch read and write the rows where they are.

Shapes: V rows, D dimensions, U unique rows.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef

from w2v.rows.group import outside_inference
from w2v.rows.lookup import RowPage
from w2v.rows.paged_table import PagedTable

OWN_GRAD: Any = Tensor.grad
INDEXING = (  # which copy the rows that they read
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_select.default,
    torch.ops.aten.embedding.default,
)
MEMORY = torch.ops.aten.as_strided, torch.ops.aten.set_  # which take memory as it is
SHAPING = (  # which give views in another order or shape
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.view.default,
)
# What takes a gradient of rows. The leaf and the caller of torch.autograd.grad get one of all rows.
Receiver = Literal["table", "leaf", "caller"]


class _OfTable(Tensor):
    """Tensor without memory: operations of torch read and write the rows."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    table: PagedTable

    def stored(self) -> Tensor:
        """Return a view of what it stands for, where that is stored."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """Return a copy of what it stands for, on the compute device."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Call an operation of torch with the weights themselves."""
        kwargs = kwargs or {}
        schema, aten = func._schema, torch.ops.aten
        if func.namespace != "aten":  # such as c10d's, whose schemas do not say what they write
            raise TypeError(f"{func} does not take the weight of a paged table; give weight.data")
        if func.overloadpacket in MEMORY:  # records are in memory of another layout
            remedy = "give a clone(), or call w2v.unpage(model) first"
            raise TypeError(f"{func} does not take the weight of a paged table; {remedy}")
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
        given |= kwargs
        changed = [
            tensor
            for argument in schema.arguments
            if argument.alias_info and argument.alias_info.is_write
            for tensor in tree_leaves(given.get(argument.name))
        ]
        written = {each: None for each in changed if isinstance(each, _OfTable)}
        aliases = [result.alias_info for result in schema.returns if result.alias_info]
        is_view = any(not alias.is_write for alias in aliases)
        # Without a gradient a view of the weight is one of the table. With one it may be a factor
        # of a product, as is the transposed weight.
        is_stored = is_view and (func is aten.detach.default or not torch.is_grad_enabled())
        is_stored &= isinstance(args[0], PagedWeight) and func not in SHAPING
        is_stored |= func in (aten.copy_.default, aten.fill_.Scalar, aten.zero_.default)
        if is_view and not is_stored:
            return _views(func, *args, **kwargs)
        if func in INDEXING and isinstance(args[0], PagedWeight):
            return args[0].table.index(partial(func, **kwargs), *args[1:])
        used: dict[_OfTable, Tensor] = {}
        for weight in tree_leaves((args, kwargs)):
            if isinstance(weight, _OfTable) and weight not in used:
                in_place = is_stored and (weight in written or isinstance(weight, PagedWeight))
                used[weight] = weight.stored() if in_place else weight.whole()
        given_args, given_kwargs = tree_map_only(_OfTable, used.get, (args, kwargs))
        result = func(*given_args, **given_kwargs)
        for weight in used if is_view else written:
            if not is_stored:
                weight.stored().copy_(used[weight])
            weight.table.store.version += 1  # rows that were read before are out of date
        if func.__name__.startswith("_foreach"):  # autograd has not counted these as changed
            torch.autograd.graph.increment_version(
                each for each in changed if not each.is_inference()
            )
        return next(iter(written)) if written and result is not None else result

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return the weights as an array, which is a view where torch's is."""
        if self.requires_grad and not force:
            remedy = "use weight.detach().numpy()"
            raise RuntimeError(f"numpy() is not called of what requires a gradient; {remedy}")
        return self.stored().numpy(force=force)

    def tolist(self) -> list[Any]:
        """Return the weights as lists."""
        return self.whole().tolist()

    def data_ptr(self) -> int:
        """Return the address of the first row."""
        return self.stored().data_ptr()

    def __dlpack__(self, **settings: Any) -> Any:
        return self.stored().requires_grad_(self.requires_grad).__dlpack__(**settings)

    def __dlpack_device__(self) -> Any:
        return self.stored().__dlpack_device__()

    def share_memory_(self) -> Tensor:
        raise ValueError("processes cannot share a table by share_memory(); use process_group")

    def __format__(self, spec: str) -> str:
        return self.whole().__format__(spec)


class WeightView(_OfTable):
    """View of a weight that was taken with a gradient.

    Once it is read it has a copy on the compute device, until the table changes. What is written to
    it is written to the table, as by a view of torch.

    Attributes:
        source: What it is a view of.
        view_of: Returns the view of values of the source.
        copied: The copy, of the table at version `copied_version`.
    """

    source: _OfTable
    view_of: Callable[[Tensor], Tensor]
    copied: Tensor
    copied_version = -1, 0

    def __new__(
        cls, source: _OfTable, view_of: Callable[[Tensor], Tensor], like: Tensor
    ) -> WeightView:
        """Return a view with the shape and strides of `like`."""
        strides = like.stride()
        own: WeightView = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=strides, dtype=like.dtype, device=source.device
        )
        own.table, own.source, own.view_of = source.table, source, view_of
        return own

    def stored(self) -> Tensor:
        try:
            return self.view_of(self.source.stored())
        except RuntimeError:
            remedy = "write to rows of it, and read a clone()"
            raise RuntimeError(f"a paged weight is not stored in this shape; {remedy}") from None

    def whole(self) -> Tensor:
        if self.copied_version != (version := self.table.version):
            if isinstance(self.source, PagedWeight) and self.numel() < self.source.numel():
                layout = self.shape, self.stride()
                copied = torch.empty_strided(*layout, dtype=self.dtype, device=self.device)
                self.copied = copied.copy_(self.stored())  # all rows may be too many
            else:
                self.copied = self.view_of(self.source.whole())
            self.copied_version = version
        return self.copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.whole())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone().__deepcopy__(memo)


def _views(func: Any, source: _OfTable, *args: Any, **kwargs: Any) -> Any:
    """Return the view, or the list of views, that an operation of torch gives."""

    def view_of(values: Tensor, place: int | None = None) -> Any:
        views = func(values, *args, **kwargs)
        return views if place is None else views[place]

    layout = source.shape, source.stride()
    like = view_of(torch.empty_strided(*layout, dtype=source.dtype, device="meta"))
    if isinstance(like, Tensor):
        return WeightView(source, view_of, like)
    return [WeightView(source, partial(view_of, place=n), part) for n, part in enumerate(like)]


class PagedWeight(_OfTable, nn.Parameter):
    """Weights [V, D] of a table, as the parameter of its module.

    It has no memory of its own: operations of torch read and write the rows where they are. The
    gradient of an operation is one of all rows, which waits for the step beside those of ids. Those
    of ids pass by the weight, unless a hook or torch.autograd.grad takes them.

    Attributes:
        table: Of several ranks, a weight has this rank's rows, and gets no gradient.
        grad: Without an optimizer of this library that of torch. With a `PagedOptimizer` None, so
            that one of dense modules passes it over; with `w2v.optimizer` the gradients of the rows
            that have some, [U, D]. One that is set is of all rows, [V, D].
    """

    @outside_inference  # it is trained later
    def __new__(cls, table: PagedTable, attributes: dict[str, Any] | None = None) -> PagedWeight:
        weight = cls._of_shape(table)
        vars(weight).update(attributes or {}, table=table)
        table.weight = TensorWeakRef(weight)
        weight.register_post_accumulate_grad_hook(_on_gradient)
        return weight.requires_grad_(table.trainable)

    @classmethod
    def _of_shape(cls, table: PagedTable) -> PagedWeight:
        shape = table.ranks.shard_rows(table.num_embeddings), table.embedding_dim
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=table.vector_dtype, device=table.device, requires_grad=True
        )

    @outside_inference
    def update_shape(self) -> None:
        """Take the number of rows and the device that the table has now."""
        Tensor.data.__set__(self, self._of_shape(self.table))  # type: ignore[attr-defined]

    @property
    def version(self) -> tuple[int, int]:
        """Return how often the rows, and the weight with its views, changed."""
        return self.table.store.version, self._version

    def stored(self) -> Tensor:
        return self.table.stored()

    def whole(self) -> Tensor:
        return self.table.whole()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values is self:  # as a tied module is moved to where it is
            return
        table, shape = self.table, tuple(values.shape)
        if table.ranks.size == 1 and shape[1:] == self.shape[1:] and shape[0] > len(self):
            table.grow(shape[0], lambda rows_n: values[rows_n.to(values.device)])
            self.update_shape()
        if shape != tuple(self.shape):
            expected = f"weight.data has shape {list(shape)}, but the table is {list(self.shape)}"
            raise ValueError(f"{expected}; a table can only grow")
        with torch.no_grad():
            self.copy_(values)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that users have set."""
        return {name: value for name, value in vars(self).items() if name != "table"}

    def pass_gradient(self) -> None:
        """Give a gradient of all rows to the table, which has got an optimizer."""
        grad_VD = OWN_GRAD.__get__(self)
        if grad_VD is None:
            return
        OWN_GRAD.__set__(self, None)
        self.table.add_whole_grad(grad_VD.detach())

    @property
    def leaf(self) -> Tensor:
        """The leaf of autograd whose gradient is that of the rows."""
        return self if self.table.ranks.size == 1 else self.table.parameter

    def receiver(self, node: Any) -> Receiver | None:
        """Return where the gradient of rows goes in the present backward pass.

        `node` is that of `leaf`. None: the pass is for other tensors, or the weight is frozen now.
        """
        table = self.table
        try:
            if not torch._C._will_engine_execute_node(node):
                return None
        except RuntimeError:  # as torch.autograd.grad gets the gradient of the leaf
            return "caller"
        # The first hook after a gradient is `_on_gradient`.
        if self._backward_hooks or len(self._post_accumulate_grad_hooks) > 1:  # type: ignore
            return "leaf"
        if table.stepped_by is None and table.ranks.size == 1:
            return "leaf"
        return "table" if table.trainable else None

    def gradient(self, page: RowPage, grad_UD: Tensor, receiver: Receiver) -> Tensor:
        """Return the gradient of a page as one of all rows [V, D].

        It is sparse as the module's are, and where the table steps only rows that have one.
        """
        table, rows_U = self.table, page.rows() - page.store.first_row
        if table.sparse or (receiver == "leaf" and table.stepped_by):
            return torch.sparse_coo_tensor(
                rows_U[None], grad_UD, self.shape, is_coalesced=True, check_invariants=False
            )
        return grad_UD.new_zeros(self.shape).index_copy(0, rows_U, grad_UD)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call a function with gradients [V, D], sparse if the module is."""
        return super().register_hook(partial(_call_hook, self.table, hook))  # type: ignore

    def whole_grad(self) -> Tensor | None:
        """Return the gradients that wait as one of all rows [V, D]."""
        if (waiting := self.table.waiting()) is None:
            return OWN_GRAD.__get__(self)
        return self.gradient(*waiting, "caller")

    @property
    def grad(self) -> Tensor | None:
        table = self.table
        if table.shows_grad:
            return table.parameter.grad_UD
        return None if table.stepped_by else OWN_GRAD.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        table = self.table
        if table.stepped_by is None:
            OWN_GRAD.__set__(self, value)
        elif value is None:
            table.zero_grad()
        elif value is not table.parameter.grad_UD:
            if not isinstance(value, Tensor):
                raise TypeError(f"weight.grad is a {type(value).__name__}; give a tensor or None")
            if value.shape != self.shape:
                expected = f"give one of {list(self.shape)}, of all rows"
                raise ValueError(f"weight.grad has shape {list(value.shape)}; {expected}")
            table.zero_grad()
            table.add_whole_grad(value.detach().clone())  # as a fused step makes it 0

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    requires_grad: Any = property(
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        lambda weight, value: weight.requires_grad_(value),
    )

    def requires_grad_(self, requires_grad: bool = True) -> PagedWeight:
        """Train or freeze the table."""
        self.table.trainable = requires_grad
        super().requires_grad_(requires_grad and self.table.ranks.size == 1)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self.detach()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedWeight:
        if id(self) not in memo:
            memo[id(self)] = PagedWeight(copy.deepcopy(self.table, memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return PagedWeight, (self.table, self.attributes())


def hand_over(old: Any, new: Any) -> None:
    """Give what a weight has to its paged or plain successor.

    That is attributes, hooks and gradients. The hooks stay in their dictionaries, as their handles
    remove them from there.
    """
    hooks, later = old._backward_hooks, old._post_accumulate_grad_hooks
    if isinstance(new, PagedWeight):
        grad, attributes = old.grad, vars(old)
        for key, hook in (hooks or {}).items():
            hooks[key] = partial(_call_hook, new.table, hook)
        if later:
            for key, hook in new._post_accumulate_grad_hooks.items():
                later[key] = hook
                later.move_to_end(key, last=False)
    else:
        grad, attributes = old.whole_grad(), old.attributes()
        for key, hook in (hooks or {}).items():
            _, hooks[key] = hook.args
        for key in [key for key, hook in later.items() if hook is _on_gradient]:
            del later[key]
    vars(new).update(attributes)
    if hooks:
        new._backward_hooks = hooks
    if later:
        new._post_accumulate_grad_hooks = later
    if grad is not None:
        new.grad = grad.to(new.device, new.dtype)


def _call_hook(
    table: PagedTable, hook: Callable[[Tensor], Tensor | None], grad_VD: Tensor
) -> Tensor | None:
    """Call a hook with all rows' gradient; return that of rows with some."""
    if table.sparse or not grad_VD.is_sparse:
        return hook(grad_VD)
    has_grad_V = torch.zeros(len(grad_VD), dtype=torch.bool, device=grad_VD.device)
    has_grad_V[grad_VD._indices()[0]] = True
    dense_VD = grad_VD.to_dense()
    changed_VD = hook(dense_VD)
    if changed_VD is None:
        changed_VD = dense_VD  # the hook may have written to it
    elif not isinstance(changed_VD, Tensor):
        return changed_VD  # which torch refuses
    rows_U = torch.nonzero(has_grad_V | changed_VD.ne(0).any(1))[:, 0]
    values_UD = changed_VD[rows_U]
    return torch.sparse_coo_tensor(
        rows_U[None], values_UD, grad_VD.shape, is_coalesced=True, check_invariants=False
    )


def _on_gradient(weight: PagedWeight) -> None:
    """Take the gradient of a backward pass."""
    if OWN_GRAD.__get__(weight) is None:  # it went to the table
        return
    if weight.table.stepped_by:
        weight.table.check_gradient()
        weight.pass_gradient()
    else:
        unused = "no PagedOptimizer steps this PagedEmbedding, so that weight.grad has all rows"
        warnings.warn(f"{unused}; w2v.optimizer is faster", stacklevel=2)
