"""Vectors and steps by fused kernels: several tables in one launch.

Shapes: N ids or bags, T tables, U unique rows, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from w2v.api.embedding.ids import Identity, Ids
from w2v.api.embedding.look_up import LookUp, RowPage, RowsOfIds
from w2v.api.embedding.table import PagedTable
from w2v.kernels.cuda import Bags
from w2v.model.optim import RowOptimizer


def fused_vectors(table: PagedTable, ids: Ids, offsets: Tensor | None = None) -> Tensor:
    """Return vectors of ids or bags by kernels, which sum their gradients.

    The first table of an announced batch computes those of all tables; the others take theirs.
    """
    with table.store.lock:
        found = table.find(ids)
        look_up, trains = found.look_up, table.trains
        if trains and (vectors := found.take_vectors(offsets)) is not None:
            return vectors
        bags = _bags(table, found.shape, offsets)
        if not trains:
            look_up.page_of(found)
            return found.in_shape(look_up.vectors(found.index, bags), bags)
        users = _tables_to_compute(table, found, bags)
        bags = bags and bags._replace(tables=len(users))
        pages = [(user, look_up.page_of(rows)) for user, rows in users]
        computed = _KernelVectors.apply(table.parameter, pages, bags)
        seen = Identity(offsets)
        for (_, rows), vectors_ND in zip(users, computed, strict=True):
            rows.keep_vectors(rows.in_shape(vectors_ND, bags), seen)
        return found.take_vectors(offsets)


def launch_key(table: PagedTable, rows: RowsOfIds) -> Any:
    """Return what is equal for tables whose vectors one launch computes."""
    is_bag = table.mode is not None
    # Kernels leave out one padding row at a time: bags of such tables are by themselves.
    if not table.uses_kernels or (is_bag and table.padding_idx is not None) or table.mode == "max":
        return table
    return is_bag and (table.mode, table.include_last_offset, rows.shape)


def step_fused(tables: list[PagedTable], optimizer: RowOptimizer, lr: float) -> None:
    """Step rows by fused kernels: one launch for the tables of a look-up."""
    by_look_up: dict[Any, list[PagedTable]] = {}
    for table in tables:
        if table.grad is not None:
            owned = table.page.owned
            is_together = owned and owned.look_up.group is table.store.group
            by_look_up.setdefault(owned.look_up if is_together else table, []).append(table)
    for look_up, its_tables in by_look_up.items():
        with its_tables[0].store.lock:
            group = its_tables[0].store.group
            for table in its_tables:
                table.store.table.begin_step()
            counts = [optimizer.count_step(table.store.table) for table in its_tables]
            seeds = [table.store.table.next_rounding_seed() for table in its_tables]
            is_whole = isinstance(look_up, LookUp) and look_up.has_all(
                {table.page.owned.index: table.grad for table in its_tables}
            )
            if is_whole and len(set(counts)) == 1:
                rows = look_up.rows, look_up.narrow_N, look_up.known
                group.step(optimizer, counts[0], seeds[0], look_up.sums_UD, lr, *rows)
                group.keep_zeros(look_up.take_sums())  # the step has made them 0
            else:
                for table, counted, seed in zip(its_tables, counts, seeds, strict=True):
                    rows_U = table.page.rows_of(table.store)
                    table.store.group.step(optimizer, counted, seed, table.grad, lr, rows_U)
            for table in its_tables:
                table.store.version += 1
                table.drop_page()


def _tables_to_compute(
    table: PagedTable, found: RowsOfIds, bags: Bags | None
) -> list[tuple[PagedTable, RowsOfIds]]:
    """Return this table, or at the first use of an announced batch all.

    Bags are summed together until offsets of tables are found to differ.
    """
    together = table.together if found is table.announced else []
    is_alone = found.look_up.is_computed or (bags and table.store.group.bags_differ)
    if not together or is_alone or not all(each.trains for each, _ in together):
        return [(table, found)]
    found.look_up.is_computed = True
    return together


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
    given = None if offsets is None else list(offsets.shape)
    reason = f"ids have shape {list(shape)} and offsets {given}"
    raise ValueError(f"{reason}; give ids [B, N], or ids [N] with offsets [B]")


class _KernelVectors(torch.autograd.Function):
    """Vectors of tables of one look-up, whose gradients are summed for them."""

    @staticmethod
    def forward(
        ctx: Any, trained: Tensor, pages: list[tuple[PagedTable, RowPage]], bags: Bags | None
    ) -> tuple[Tensor, ...]:
        """Return vectors [N, D] of each table; `trained` needs a gradient."""
        ctx.set_materialize_grads(False)
        ctx.pages, ctx.bags = pages, bags
        ((_, page), *others) = pages
        vectors_ND = page.requested.look_up.vectors(None if others else page.requested.index, bags)
        counts = [bags.number if bags else page.requested.shape.numel() for _, page in pages]
        # Not views, which could not be changed in place.
        return vectors_ND.unsafe_split_with_sizes(counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        pages, bags = ctx.pages, ctx.bags
        table, page = pages[0]
        has_padding = page.requested.look_up.paddings.count(None) < len(pages)
        has_all = all(grad is not None for grad in grads)
        with table.store.lock:
            # One launch leaves out the padding row of one table at most.
            if len(pages) > 1 and has_all and not has_padding:
                whole = _evenly_spaced(grads) if bags else None
                _sum_gradients(pages, None, torch.cat(grads) if whole is None else whole, bags)
            else:
                bags = bags and bags._replace(tables=1)
                for (table, page), grad in zip(pages, grads, strict=True):
                    if grad is not None:
                        _sum_gradients([(table, page)], page.requested.index, grad, bags)
        return (None,) * 3


def _sum_gradients(
    pages: list[tuple[PagedTable, RowPage]],
    index: int | None,  # of the table; None: all tables of the look-up
    grad: Tensor,
    bags: Bags | None,
) -> None:
    """Sum gradients of ids or bags by row, with those that wait for the step."""
    if grad.dtype != torch.float32 or grad.stride(-1) != 1 or grad.dim() == 2:
        grad = grad.float().contiguous()
    pending = {page.requested.index: table.pending_of(page) for table, page in pages}
    _, first = pages[0]
    sums = first.requested.look_up.add_gradients(index, grad, bags, pending)
    for (table, page), sum_UD in zip(pages, sums, strict=True):
        table.add_grad(page, sum_UD)


def _evenly_spaced(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors at equal distances in one memory as one [T, ...].

    So are the gradients of vectors that were stacked. Of others, None.
    """
    first, second = tensors[:2]
    step = second.data_ptr() - first.data_ptr()
    layouts = {
        (t.untyped_storage().data_ptr(), t.data_ptr() - n * step, t.dtype, t.shape, t.stride())
        for n, t in enumerate(tensors)
    }
    if len(layouts) > 1 or step <= 0 or step % first.element_size():
        return None
    strides = step // first.element_size(), *first.stride()
    return first.as_strided((len(tensors), *first.shape), strides)
