"""Orders of streams on the ranks of one group: torch.openreg.schedules on each of two processes."""

import pytest
import torch
import torch.distributed as dist
from workers import Workers

N = 64

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def ranks():
    with Workers(2) as workers:
        yield workers


def read_before_the_wait(fixed):
    x = torch.full((N,), 1.0 + dist.get_rank(), device="openreg")
    work = dist.all_reduce(x, async_op=True)
    if fixed:
        work.wait()
    y = x * 2
    work.wait()
    return y


def one_rank_changes_what_it_sends(fixed):
    """The mistake is on rank 1, and the wrong result on both."""
    mine = torch.full((N,), float(dist.get_rank()), device="openreg")
    every = [torch.zeros(N, device="openreg") for _ in range(2)]
    work = dist.all_gather(every, mine, async_op=True)
    if fixed or dist.get_rank() == 0:
        work.wait()
    mine.zero_()
    work.wait()
    return every


def point_to_point_meanwhile():
    """Rank 1 starts the collective only after it has received a message that rank 0 sends after its own start."""
    x, y = torch.ones(N, device="openreg"), torch.full((N,), 3.0, device="openreg")
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(y, 1)
    else:
        dist.recv(y, 0)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x, y


def check_orders(program, arguments, seeds):
    report = torch.openreg.schedules(program, *arguments, seeds=seeds)
    found = report.difference
    return report.passed, report.orders, found and (found.what, found.order, found.missing)


def check_that_fails():
    def program():
        x = torch.ones(N, device="openreg") * 2
        if dist.get_rank() == 1:
            raise KeyError("only here")
        return x

    with pytest.raises(KeyError if dist.get_rank() else RuntimeError, match="only here"):
        torch.openreg.schedules(program)


def check_other_seeds():
    with pytest.raises(
        ValueError, match=r"expected the same seeds on every rank, but got range\(0, \d\) on rank \d and"
    ):
        torch.openreg.schedules(point_to_point_meanwhile, seeds=3 + dist.get_rank())


def one_rank_stops(always):
    """Rank 1 raises before a collective, always or where it reads too early."""
    host = torch.zeros(1, pin_memory=True)
    seen = host.numpy()
    host.copy_(torch.ones(1, device="openreg"), non_blocking=True)
    if dist.get_rank() == 1 and (always or not seen[0]):
        raise KeyError("only here")
    x = torch.ones(N, device="openreg")
    dist.all_reduce(x)
    return x


def check_that_stops(always):
    error, match = (
        RuntimeError,
        "the ranks do not make the same calls of torch.distributed in the |mismatched collectives",
    )
    if dist.get_rank() == 1 and always:
        error, match = KeyError, "only here"
    elif dist.get_rank() == 1:
        match = r"the ranks do not make .* in the order of seed \d+. On rank 1, in the order of seed \d+, the program raises KeyError: 'only here'"
    with pytest.raises(error, match=match):
        torch.openreg.schedules(one_rank_stops, always, seeds=40)
    dist.destroy_process_group()  # for which the other rank may wait


@pytest.mark.parametrize("program", [read_before_the_wait, one_rank_changes_what_it_sends], ids=lambda p: p.__name__)
def test_a_missing_wait(ranks, program):
    first, second = ranks.run(check_orders, program, (False,), 50)
    assert first[:2] == second[:2] and not first[0]
    for _, _, (what, _, missing) in (first, second):
        assert "elements differ" in what and what.startswith("on rank ")
        assert "call wait() on the Work " in missing
    assert first[2] == second[2], "both ranks report the same"
    if program is one_rank_changes_what_it_sends:
        assert "  on rank 1:" in first[2][1] and "  on rank 0:" not in first[2][1]


@pytest.mark.parametrize("program", [read_before_the_wait, one_rank_changes_what_it_sends], ids=lambda p: p.__name__)
def test_with_the_wait(ranks, program):
    assert ranks.run(check_orders, program, (True,), 20) == [(True, 20, None)] * 2


def test_point_to_point_communication_during_a_collective(ranks):
    assert ranks.run(check_orders, point_to_point_meanwhile, (), 2) == [(True, 2, None)] * 2


def test_a_program_that_fails_on_one_rank(ranks):
    ranks.run(check_that_fails)


def test_seeds_that_differ(ranks):
    ranks.run(check_other_seeds)


@pytest.mark.parametrize("always", [True, False])
def test_a_program_that_stops_before_a_collective_on_one_rank(always):
    with Workers(2) as workers:  # whose group is of no use afterwards
        workers.run(check_that_stops, always)
