"""Kernels of fused tables, written in torch: they run without a GPU."""

import itertools

import torch

from w2v.rows import ops
from w2v.rows.group import RowGroup
from w2v.rows.ops import Bags, View
from w2v.rows.paged_table import PagedTable


def places_of_bags(places_N, bags, padding):
    """Yield the places of each bag of each table."""
    bags = bags or Bags(len(places_N))
    for its_n in places_N.split(len(places_N) // bags.tables):
        begins = range(0, len(its_n), bags.size) if bags.begins is None else bags.begins.tolist()
        for begin, end in itertools.pairwise([*begins, len(its_n)][: bags.number + 1]):
            of_bag = its_n[begin:end]
            yield of_bag[of_bag != (-1 if padding is None else padding)]


def share(places_n, bags):
    return 1 / max(1, len(places_n)) if bags and bags.is_mean else 1


def gather_vectors(view, rows_U, places_N, dim, bags=None, padding=None):
    weight_UD = view.records_SR[view.slots(rows_U).long(), :dim]
    found = places_of_bags(places_N, bags, padding)
    return torch.stack([weight_UD[its].sum(0) * share(its, bags) for its in found])


def add_gradients(grads, places_N, sums_UD, bags=None, padding=None):
    grad_ND = torch.cat([*grads])
    found = places_of_bags(places_N, bags, padding)
    for places_n, grad_D in zip(found, grad_ND, strict=True):
        sums_UD.index_add_(0, places_n, (grad_D * share(places_n, bags)).repeat(len(places_n), 1))


def step_rows(optimizer, counted, seed, view, rows_U, count, grad_UD, lr):
    """Step as SGD does."""
    view.records_SR[view.slots(rows_U).long(), : grad_UD.shape[1]] -= lr * grad_UD
    grad_UD.zero_()


def use_torch_kernels(monkeypatch):
    """Let tables on a CPU be fused."""
    for kernel in (gather_vectors, add_gradients, step_rows):
        monkeypatch.setattr(ops, kernel.__name__, kernel)
    monkeypatch.setattr(PagedTable, "check_fused", lambda *given: None)  # refuses a CPU
    monkeypatch.setattr(RowGroup, "in_place", lambda its, rows_U: View(its.table.records_VR, None))
