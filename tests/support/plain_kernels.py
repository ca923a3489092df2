"""Plain twins of the CUDA launchers that a sharded step needs, and what a fused optimizer's step is without a GPU."""

import functools

import torch

from w2v.kernels import reference
from w2v.kernels.batch import Page
from w2v.model.optim import RowOptimizer
from w2v.model.skipgram import expand, find_slots


def _number(rows, claims, count):
    """Claim the rows that are not claimed yet."""
    fresh = torch.unique(rows)[claims.number_V[torch.unique(rows)] == -1]
    numbers = torch.arange(int(count), int(count) + len(fresh), device=rows.device).int()
    claims.number_V[fresh], claims.rows_U[numbers.long()] = numbers, fresh.int()
    count += len(fresh)


def claim(batch, inputs, outputs, counts):
    slots = find_slots(expand(batch), len(inputs.number_V))
    _number(slots.input_rows_U, inputs, counts[0])
    _number(slots.output_rows_V, outputs, counts[1])


def skipgram(batch, inputs, input_claims, outputs, output_claims, sums, counted=False):
    slots = find_slots(expand(batch), len(input_claims.number_V))
    dim, weights = input_claims.grad_UD.shape[1], []
    for (records_SR, slot_of_V), rows in (
        (inputs, slots.input_rows_U),
        (outputs, slots.output_rows_V),
    ):
        weights.append(
            records_SR[rows if slot_of_V is None else slot_of_V[rows].long(), :dim].float()
        )
    pairs = (
        slots.context_slots_BC,
        slots.context_mask_BC,
        slots.target_slots_BT,
        slots.target_mask_BT,
    )
    result = reference.skipgram(*weights, *pairs)
    numbers = reference.count_pairs(*pairs, tuple(map(len, weights)))
    found = (slots.input_rows_U, result.grad_input_UD), (slots.output_rows_V, result.grad_output_VD)
    for claims, (rows, grad), number in zip(
        (input_claims, output_claims), found, numbers, strict=True
    ):
        claims.grad_UD.index_add_(0, claims.number_V[rows].long(), grad)
        if counted:
            claims.pairs_U.index_add_(0, claims.number_V[rows].long(), number.int())
    sums.loss.add_(result.loss)
    sums.pairs.add_(result.pairs)


class InPlace(RowOptimizer):
    """Steps rows in place by the torch.optim class."""

    def step_in_place(self, tables, held, claims, claimed, stepped, lr, guard):
        self._step_table(tables[0], held[0], claims[0], claimed[0], lr, guard)
        self._step_table(
            tables[1], held[1], claims[1], claimed[1], lr, guard._replace(bit=2 * guard.bit)
        )
        stepped += sum(claimed)

    def _step_table(self, table, held, claims, count, lr, guard):
        numbers = slice(int(count))
        rows = claims.rows_U[numbers].long()
        places = rows if held.slot_of_V is None else held.slot_of_V[rows].long()
        page = Page(
            table,
            rows,
            held.records_SR[places].float(),
            table.columns,
            claims.grad_UD[numbers].clone(),
            claims.pairs_U[numbers],
        )
        self.step(page, lr)
        if not guard.fault and not torch.isfinite(guard.loss):
            guard.fault.add_(guard.step + 1)
        if not guard.fault and not torch.isfinite(page.records_UR).all():
            guard.fault.add_(guard.step + guard.bit)
        if not guard.fault:
            held.records_SR[places] = table.encode(rows, page.records_UR)
        claims.number_V[rows], claims.grad_UD[numbers], claims.pairs_U[numbers] = -1, 0, 0


def deal(claims, claimed, stride, heads, tally, before):
    (rows_all, size), device = (len(claims[0].number_V), len(tally[0])), tally[0].device
    rows_in, rows_out = (
        claim.rows_U[: int(count)].long() for claim, count in zip(claims, claimed, strict=True)
    )
    owners = torch.cat(
        [
            torch.arange(size, device=device).repeat_interleave(heads),
            rows_in % size,
            rows_out % size,
        ]
    )
    order = torch.argsort(owners, stable=True)
    nobodys = torch.full((size * heads,), -1, device=device)
    tally[0].add_(torch.bincount(owners, minlength=size))
    (ids_before, asked_before), (asked, _) = before, tally
    ids_before[asked_before.cumsum(0) - asked_before] = ~asked
    claims[0].number_V[rows_in] = -1
    claims[1].number_V[rows_out] = -1
    rows, ids = (
        torch.cat([nobodys, rows_in, rows_out + rows_all]),
        torch.cat([nobodys, rows_in // size, rows_out // size + stride]),
    )
    return rows[order], ids.int()[order]


def place(rows_U, place_TV, dim, counted):
    ours = rows_U >= 0
    place_TV.view(-1)[rows_U[ours]] = torch.arange(len(rows_U), device=rows_U.device).int()[ours]
    return torch.zeros(len(rows_U), dim, device=rows_U.device), torch.zeros_like(
        rows_U
    ).int() if counted else None


def hear(ids_M, lent_N, next_asked_N, next_lent_N, told_2N):
    next_lent_N.copy_(~ids_M[lent_N.cumsum(0) - lent_N])
    told_2N.copy_(torch.stack([next_asked_N, next_lent_N]))


def split(ids_M, stride):
    """Where the ids of either table are, and their rows."""
    of_tables = (ids_M >= 0) & (ids_M < stride), ids_M >= stride
    return [
        (of_this, ids_M[of_this].long() - number * stride)
        for number, of_this in enumerate(of_tables)
    ]


def mark_lent(ids_M, stride, marks_TV):
    for (_, rows), marks_V in zip(split(ids_M, stride), marks_TV, strict=True):
        marks_V[rows] = True


def lend(ids_M, stride, held, dim, claims, claimed):
    weights_MD = held[0].records_SR.new_zeros(len(ids_M), dim)
    for (of_this, rows), (records_SR, slot_of_V), its, count in zip(
        split(ids_M, stride), held, claims, claimed, strict=True
    ):
        weights_MD[of_this] = records_SR[
            rows if slot_of_V is None else slot_of_V[rows].long(), :dim
        ]
        _number(rows, its, count)
    return weights_MD


def report(sums, fault, asked_N, grad_UD):
    facts = torch.stack([sums.loss.view(torch.int64), sums.pairs, fault])
    for begin in (asked_N.cumsum(0) - asked_N).tolist():
        grad_UD.view(torch.int32)[begin:].view(-1)[:6] = facts.view(torch.int32)


def collect(ids_M, stride, lent_N, grad_MD, pairs_M, claims, sums, fault):
    for (of_this, rows), its in zip(split(ids_M, stride), claims, strict=True):
        its.grad_UD.index_add_(0, its.number_V[rows].long(), grad_MD[of_this])
        if pairs_M is not None:
            its.pairs_U.index_add_(0, its.number_V[rows].long(), pairs_M[of_this])
    of_ranks = [
        grad_MD[begin:].view(-1)[:6].clone().view(torch.int64)
        for begin in (lent_N.cumsum(0) - lent_N).tolist()
    ]
    losses, pairs, faults = (list(facts) for facts in zip(*of_ranks, strict=True))
    sums.loss.copy_(sum(loss.view(torch.float64) for loss in losses))
    sums.pairs.copy_(sum(pairs))
    fault.copy_(functools.reduce(torch.bitwise_or, faults))
