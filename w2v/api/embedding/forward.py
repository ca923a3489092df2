"""Forward passes: rows of ids, their weights, and their gradients.

Shapes: N ids or bags, T tables, U unique rows, D dimensions.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from w2v.api.embedding import look_up
from w2v.api.embedding.ids import Identity, Ids, stacked
from w2v.api.embedding.look_up import ComputedVectors, RowPage, RowsOfIds
from w2v.api.embedding.sharded import RoutedLookUp, look_up_alone
from w2v.api.embedding.table import PagedTable
from w2v.kernels.cuda import Bags


class Use(NamedTuple):
    """A table's rows in a forward pass."""

    table: PagedTable
    rows: RowsOfIds
    page: RowPage


def find(table: PagedTable, ids: Ids) -> RowsOfIds:
    """Look up ids, and begin to bring their rows."""
    table.check_view()
    is_alone, dist = table.trains and table.ranks.size == 1, torch.distributed
    if is_alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"this PagedEmbedding cannot train in {dist.get_world_size()} processes: each would "
            "have a table of its own; make it with process_group=torch.distributed.group.WORLD"
        )
    found = table.announced  # whose rows are there, unless other uses have evicted them
    if found is None or not found.is_of(ids):
        if table.ranks.size > 1:
            found = look_up_alone(table, ids)
        else:
            found = look_up.look_up(table.store, ids, table.padding_idx)
        # Beside rows of other tables of the group, as only this one has been looked up.
        group, part = table.store.group, table.store.first_row
        look_up.prefetch(group, [found.look_up.own], part=part)
    return found


def fetch(table: PagedTable, ids: Ids) -> tuple[Tensor, Tensor, int | None]:
    """Fetch the rows of ids.

    Returns:
        Their weights [U, D], which send their gradient to the page; the place of each id in them;
        and the place of the padding row, None where no id is padding.
    """
    with table.opened().lock:
        found = find(table, ids)
        if isinstance(found.look_up, RoutedLookUp):
            page = found.look_up.page_of(found)
            weight_UD, places_N, padding = found.look_up.part(found.index)
        else:
            page, weight_UD = table.read(found)
            places_N, padding = found.places(), found.padding()
    if table.trains:
        weight_UD = nn.Parameter(weight_UD)
        # The graph keeps the page; without a backward pass it goes, and nothing has changed.
        collect = functools.partial(_collect, Use(table, found, page))
        weight_UD.register_post_accumulate_grad_hook(collect)
    return weight_UD, places_N.view(found.shape), padding


def _collect(use: Use, weight_UD: Any) -> None:
    """Take the gradient from the weights of a page."""
    grad_UD = weight_UD.grad.detach()
    weight_UD.grad = None
    table, rows, _ = use
    with table.store.lock:
        if isinstance(rows.look_up, RoutedLookUp):
            grad_UD = rows.look_up.add_rows(rows.index, grad_UD, _pending(table, rows))
        _add_grad(use, grad_UD)


def _pending(table: PagedTable, rows: RowsOfIds) -> Tensor | None:
    """Return gradients of these rows that wait for the step, or to be sent."""
    if not isinstance(rows.look_up, RoutedLookUp):
        return table.parameter.grad
    _, grad_UD = table.unsent.get(rows.look_up, (None, None))
    return grad_UD


def _add_grad(use: Use, grad_UD: Tensor) -> None:
    """Add a page's gradient to those that wait for the step or the exchange."""
    if torch.is_grad_enabled():
        remedy = "leave it out, or take torch.autograd.grad of the other parameters"
        raise RuntimeError(f"create_graph=True is not supported for paged rows; {remedy}")
    if not use.table.has_optimizer:
        unused = "gradients of a PagedEmbedding have no effect until a PagedOptimizer steps it"
        warnings.warn(unused, stacklevel=2)
    if isinstance(use.rows.look_up, RoutedLookUp):
        use.table.unsent[use.rows.look_up] = use.page, grad_UD
    else:
        use.table.add_grad(use.page, grad_UD)


def fused_vectors(table: PagedTable, ids: Ids, offsets: Tensor | None = None) -> Tensor:
    """Return vectors of ids or bags by kernels, which sum their gradients.

    The first table of an announced batch computes those of all tables; the others take theirs.
    """
    with table.opened().lock:
        found = find(table, ids)
        if table.trains and (kept := found.take_vectors(offsets)) is not None:
            return kept
        bags = _bags(table, found.shape, offsets)
        if not table.trains:
            found.look_up.page_of(found)
            return found.in_shape(found.look_up.vectors(found.index, bags), bags)
        users = _tables_to_compute(table, found, bags)
        bags = bags and bags._replace(tables=len(users))
        uses = [Use(user, rows, rows.look_up.page_of(rows)) for user, rows in users]
        computed = _KernelVectors.apply(table.parameter, uses, bags)
        seen = Identity(offsets)
        for use, vectors_ND in zip(uses, computed, strict=True):
            vectors = use.rows.in_shape(vectors_ND, bags)
            if use.rows is found:
                own = vectors
            else:
                version, of_all = use.table.store.version, found.look_up.computed
                of_all[use.rows.index] = ComputedVectors(vectors, version, seen)
        return own


def _launch_key(table: PagedTable, rows: RowsOfIds) -> Any:
    """Return a key; tables with equal keys share one kernel launch."""
    is_bag = table.mode is not None
    # Kernels leave out one padding row at a time: bags of such tables are by themselves.
    if not table.uses_kernels or (is_bag and table.padding_idx is not None) or table.mode == "max":
        return table
    return is_bag and (table.mode, table.include_last_offset, rows.shape)


def _tables_to_compute(
    table: PagedTable, found: RowsOfIds, bags: Bags | None
) -> list[tuple[PagedTable, RowsOfIds]]:
    """Return this table, or at the first use of an announced batch all.

    Bags are summed together until offsets of tables are found to differ.
    """
    look_up = found.look_up
    bags_differ = bags and table.store.group.bags_differ
    if found is table.announced and not look_up.is_computed and not bags_differ:
        look_up.is_computed = True
        users = [(each, each.announced) for each in look_up.tables if each.trains]
        keys = {_launch_key(each, rows) for each, rows in users}
        if len(users) == len(look_up.tables) and len(keys) == 1:
            return users
    return [(table, found)]


def _bags(table: PagedTable, shape: torch.Size, offsets: Tensor | None) -> Bags | None:
    """Return how ids are divided; raise `ValueError` where torch does."""
    if table.mode is None:
        return None
    is_mean = table.mode == "mean"
    if len(shape) == 2 and offsets is None:
        return Bags(shape[0], None, shape[1], is_mean)
    if len(shape) == 1 and offsets is not None and offsets.dim() == 1:
        begins = offsets.to(table.device, torch.int64).contiguous()
        return Bags(len(begins) - table.include_last_offset, begins, 0, is_mean)
    given = None
    if offsets is not None:
        given = list(offsets.shape)
    reason = f"ids have shape {list(shape)} and offsets {given}"
    raise ValueError(f"{reason}; give ids [B, N], or ids [N] with offsets [B]")


class _KernelVectors(torch.autograd.Function):
    """Vectors of tables of one look-up, whose gradients are summed for them."""

    @staticmethod
    def forward(
        ctx: Any, trained: Tensor, uses: list[Use], bags: Bags | None
    ) -> tuple[Tensor, ...]:
        """Return vectors [N, D] of each table; `trained` needs a gradient."""
        ctx.set_materialize_grads(False)
        ctx.uses, ctx.bags = uses, bags
        first = uses[0].rows
        vectors_ND = first.look_up.vectors(first.index if len(uses) == 1 else None, bags)
        counts = [bags.number if bags else use.rows.shape.numel() for use in uses]
        # Not views, which could not be changed in place.
        return vectors_ND.unsafe_split_with_sizes(counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        uses, bags = ctx.uses, ctx.bags
        table, rows, _ = uses[0]
        present = [grad for grad in grads if grad is not None]
        has_padding = rows.look_up.paddings.count(None) < len(uses)
        with table.store.lock:
            # One launch leaves out the padding row of one table at most.
            if len(uses) > 1 and len(present) == len(uses) and not has_padding:
                whole = None
                if bags:
                    whole = stacked(present)
                if whole is None:
                    whole = torch.cat(present)
                _sum_gradients(uses, None, whole, bags)
            else:
                bags = bags and bags._replace(tables=1)
                for use, grad in zip(uses, grads, strict=True):
                    if grad is not None:
                        _sum_gradients([use], use.rows.index, grad, bags)
        return (None,) * 3


def _sum_gradients(
    uses: list[Use],
    index: int | None,  # of the table; None: all tables of the look-up
    grad: Tensor,
    bags: Bags | None,
) -> None:
    """Sum gradients of ids or bags by row, with those that wait for the step."""
    if grad.dtype != torch.float32 or grad.stride(-1) != 1 or grad.dim() == 2:
        grad = grad.float().contiguous()
    pending = {rows.index: _pending(table, rows) for table, rows, _ in uses}
    sums = uses[0].rows.look_up.add_gradients(index, grad, bags, pending)
    for use, sum_UD in zip(uses, sums, strict=True):
        _add_grad(use, sum_UD)
