"""Plain twins of the CUDA launchers that a sharded step needs, and what a fused optimizer's step is without a GPU."""

import torch

from w2v.batch import Page
from w2v.kernels import reference
from w2v.optim import RowOptimizer
from w2v.skipgram import expand, find_slots


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
    for (records_SR, slot_of_V), rows in ((inputs, slots.input_rows_U), (outputs, slots.output_rows_V)):
        weights.append(records_SR[rows if slot_of_V is None else slot_of_V[rows].long(), :dim].float())
    pairs = slots.context_slots_BC, slots.context_mask_BC, slots.target_slots_BT, slots.target_mask_BT
    result = reference.skipgram(*weights, *pairs)
    numbers = reference.count_pairs(*pairs, tuple(map(len, weights)))
    found = (slots.input_rows_U, result.grad_input_UD), (slots.output_rows_V, result.grad_output_VD)
    for claims, (rows, grad), number in zip((input_claims, output_claims), found, numbers, strict=True):
        claims.grad_UD.index_add_(0, claims.number_V[rows].long(), grad)
        if counted:
            claims.pairs_U.index_add_(0, claims.number_V[rows].long(), number.int())
    sums.loss.add_(result.loss)
    sums.pairs.add_(result.pairs)


class InPlace(RowOptimizer):
    """Steps rows in place by the torch.optim class."""

    def step_in_place(self, table, held, claims, count, stepped, lr, guard):
        numbers = slice(int(count))
        rows = claims.rows_U[numbers].long()
        places = rows if held.slot_of_V is None else held.slot_of_V[rows].long()
        page = Page(table, rows, held.records_SR[places].float(), table.columns, claims.grad_UD[numbers].clone(), claims.pairs_U[numbers])
        self.step(page, lr)
        if not guard.fault and not torch.isfinite(guard.loss):
            guard.fault.add_(guard.step + 1)
        if not guard.fault and not torch.isfinite(page.records_UR).all():
            guard.fault.add_(guard.step + guard.bit)
        if not guard.fault:
            held.records_SR[places] = table.encode(rows, page.records_UR)
        claims.number_V[rows], claims.grad_UD[numbers], claims.pairs_U[numbers] = -1, 0, 0


def deal(claims, counts, stride, tally_2N):
    rows_all, size = len(claims[0].number_V), tally_2N.shape[1]
    rows_in, rows_out = (claim.rows_U[: int(count)].long() for claim, count in zip(claims, counts, strict=True))
    owners = torch.cat([rows_in, rows_out]) % size
    order = torch.argsort(owners, stable=True)
    tally_2N += torch.bincount(owners, minlength=size)
    claims[0].number_V[rows_in] = -1
    claims[1].number_V[rows_out] = -1
    return torch.cat([rows_in, rows_out + rows_all])[order], torch.cat([rows_in // size, rows_out // size + stride]).int()[order]


def place(rows_U, place_TV):
    place_TV.view(-1)[rows_U] = torch.arange(len(rows_U), device=rows_U.device).int()


def split(ids_M, stride):
    """Where the ids of either table are, and their rows."""
    of_output = ids_M >= stride
    return [(of_this, ids_M[of_this].long() - number * stride) for number, of_this in enumerate((~of_output, of_output))]


def mark_lent(ids_M, stride, marks_TV):
    for (_, rows), marks_V in zip(split(ids_M, stride), marks_TV, strict=True):
        marks_V[rows] = True


def claim_lent(ids_M, stride, claims, counts):
    for (_, rows), its, count in zip(split(ids_M, stride), claims, counts, strict=True):
        _number(rows, its, count)


def lend(ids_M, stride, held, dim):
    weights_MD = held[0].records_SR.new_empty(len(ids_M), dim)
    for (of_this, rows), (records_SR, slot_of_V) in zip(split(ids_M, stride), held, strict=True):
        weights_MD[of_this] = records_SR[rows if slot_of_V is None else slot_of_V[rows].long(), :dim]
    return weights_MD


def collect(ids_M, stride, grad_MD, pairs_M, claims):
    for (of_this, rows), its in zip(split(ids_M, stride), claims, strict=True):
        its.grad_UD.index_add_(0, its.number_V[rows].long(), grad_MD[of_this])
        if pairs_M is not None:
            its.pairs_U.index_add_(0, its.number_V[rows].long(), pairs_M[of_this])


def report(loss, pairs, fault, bits):
    return torch.stack([loss, pairs.double(), *((fault >> bit & 1).double() for bit in range(bits))])


def heed(reported, step_before, fault):
    bits = sum(1 << bit for bit, ranks in enumerate(reported[2:].tolist()) if ranks)
    if bits and not fault:
        fault += step_before | bits
