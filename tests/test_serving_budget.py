"""A declared number of bytes: shared out, refused when it cannot hold, taken at the start and kept."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeromem_torch.errors import ZeroMemError
from zeromem_torch.serving.budget import (
    CONTEXT,
    LEAST_RESIDENT,
    LEAST_SLACK,
    LEAST_WORKSPACE,
    MIB,
    SLACK,
    Plan,
    TorchAllocator,
    claim,
    device_bytes,
    held,
    plan,
    steady,
)

GIB = 1 << 30
CARD = 24 * GIB
ENCODER = 1140 * MIB
"""About the weights of BGE-M3 in half precision."""


class Card:
    """A GPU and PyTorch's allocator on it, in numbers: pieces are got from the device, kept, and used again."""

    def __init__(self, total: int = CARD, others: int = 0, context: int = CONTEXT[True]) -> None:
        self.size, self.others, self.context = total, others, context
        self.most = total
        self.pieces: list[int] = []  # got from the device
        self.used = 0
        self.tried_again = 0

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size - self.others - self.context - self.reserved()

    def allocated(self) -> int:
        return self.used

    def reserved(self) -> int:
        return sum(self.pieces)

    def retries(self) -> int:
        return self.tried_again

    def segments(self) -> int:
        return len(self.pieces)

    def limit(self, fraction: float) -> None:
        self.most = int(fraction * self.size)

    def reserve(self, nbytes: int) -> None:
        self.allocate(nbytes)
        self.used -= nbytes

    def allocate(self, nbytes: int) -> None:
        """A tensor: from what is kept, else from the device; if there is no room, what is kept is given back first."""
        if nbytes > self.reserved() - self.used:
            if self.reserved() + nbytes > self.most or nbytes > self.free():
                self.tried_again += 1
                self.pieces = [self.used] if self.used else []
                if self.reserved() + nbytes > self.most or nbytes > self.free():
                    raise MemoryError(f"{nbytes} bytes")
            self.pieces.append(nbytes)
        self.used += nbytes


def the_plan(total: str = "5GiB") -> Plan:
    return plan(total, device_total=CARD, encoder=ENCODER, on_gpu=True)


def loaded(card: Card) -> Card:
    card.allocate(ENCODER)
    return card


# The plan


def test_the_table_of_a_4090() -> None:
    assert str(the_plan()) == (
        "memory budget    5.00 GiB  of the GPU's 24.00 GiB\n"
        "  context        0.50 GiB  libraries, outside PyTorch's allocator\n"
        "  encoder        1.11 GiB  weights\n"
        "  workspace      1.00 GiB  a batch of queries, or a burst of indexing\n"
        "  resident       2.14 GiB  memories held ready\n"
        "  slack          0.25 GiB  fragments, and what was measured short\n"
        "leaves vLLM   --gpu-memory-utilization 0.77, started when this is ready"
    )


def test_without_a_gpu_there_is_no_vllm_beside() -> None:
    assert "vLLM" not in str(plan("1GiB", device_total=4 * GIB, encoder=0, on_gpu=False))


@given(
    total=st.integers(1, 40 * GIB),
    encoder=st.integers(0, 4 * GIB),
    device=st.integers(GIB, 80 * GIB),
    on_gpu=st.booleans(),
    workspace=st.none() | st.integers(1, 4 * GIB),
)
def test_the_parts_are_the_whole_and_a_refusal_says_what_would_hold(
    total: int, encoder: int, device: int, on_gpu: bool, workspace: int | None
) -> None:
    try:
        made = plan(total, device_total=device, encoder=encoder, on_gpu=on_gpu, workspace=workspace)
    except ZeroMemError as error:
        message = str(error)
        assert re.search(rf"encoder +{encoder / GIB:.2f} GiB", message)  # the whole table
        if total > device:
            assert "pass less" in message
        elif found := re.search(r"--memory-budget (\d+MiB)", message):
            enough = plan(found[1], device_total=device, encoder=encoder, on_gpu=on_gpu, workspace=workspace)
            assert total < enough.total <= device
            with pytest.raises(ZeroMemError):  # and no less: what is given is rounded up to a MiB
                plan(
                    max(1, enough.total - 2 * MIB), device_total=device, encoder=encoder, on_gpu=on_gpu,
                    workspace=workspace,
                )  # fmt: skip
        else:  # the device is too small for it all
            with pytest.raises(ZeroMemError, match="smaller"):
                plan(device, device_total=device, encoder=encoder, on_gpu=on_gpu, workspace=workspace)
        return
    assert sum(made.parts().values()) == made.total == total <= device
    assert made.encoder == encoder
    assert made.resident >= LEAST_RESIDENT
    assert made.workspace == workspace if workspace else made.workspace >= LEAST_WORKSPACE
    assert made.slack >= max(SLACK * total, LEAST_SLACK[on_gpu])
    assert 0 <= made.left <= 1 - total / device


@pytest.mark.parametrize("part", ["25%", "25.0 %", " .25 ", "0.25", 0.25])
def test_a_budget_may_be_a_part_of_the_device(part: str | float) -> None:
    assert plan(part, device_total=CARD, encoder=ENCODER, on_gpu=True).total == CARD // 4


@pytest.mark.parametrize("whole", [6 * GIB, "6GiB", f"{6 * GIB}"])
def test_or_a_size(whole: str | int) -> None:
    assert plan(whole, device_total=CARD, encoder=ENCODER, on_gpu=True) == the_plan("25%")


@pytest.mark.parametrize(
    "wrong", ["", "much", "0%", "101%", "-5%", 0, -1, 0.0, 1.5, float("nan"), True, "5 apples", None]
)
def test_anything_else_is_refused_by_its_name(wrong: object) -> None:
    with pytest.raises(ZeroMemError, match="memory-budget"):
        plan(wrong, device_total=CARD, encoder=0, on_gpu=True)  # type: ignore[arg-type]


def test_a_workspace_of_nothing_is_refused() -> None:
    with pytest.raises(ZeroMemError, match="workspace"):
        plan("5GiB", device_total=CARD, encoder=0, on_gpu=True, workspace=0)


def test_a_device_has_some_memory() -> None:
    assert device_bytes("cpu") > 100 * MIB


# Taking it


def test_what_is_claimed_is_enough_for_good() -> None:
    card = loaded(Card())
    claim(the_plan(), card)
    assert card.reserved() == ENCODER + the_plan().workspace
    assert card.used == ENCODER
    before = held(card)
    for _ in range(3):  # batches come and go in the workspace
        card.allocate(the_plan().workspace)
        card.used -= the_plan().workspace
        assert steady(card, before)
    card.allocate(the_plan().workspace + the_plan().resident)
    assert card.reserved() + card.context <= the_plan().total
    assert not steady(card, before)  # it grew: vLLM must not be measuring now


def test_no_more_is_ever_held_than_declared() -> None:
    card = loaded(Card())
    claim(the_plan(), card)
    before = held(card)
    with pytest.raises(MemoryError):
        card.allocate(the_plan().total - the_plan().context - ENCODER + 1)
    assert card.reserved() + card.context <= the_plan().total
    assert not steady(card, before)  # an allocation was tried again, and the workspace given back


def test_an_allocation_that_had_to_be_tried_again_is_not_steady() -> None:
    card = loaded(Card())
    claim(the_plan(), card)
    card.tried_again = 1  # the pieces may be as many and as large as before
    assert not steady(card, held(card))


def test_what_is_kept_already_counts_and_a_second_claim_changes_nothing() -> None:
    card = loaded(Card())
    card.reserve(300 * MIB)  # of warming up
    claim(the_plan(), card)
    assert card.reserved() == ENCODER + the_plan().workspace
    before = held(card)
    claim(the_plan(), card)
    assert steady(card, before)


def test_a_reader_that_started_first_is_named() -> None:
    card = loaded(Card(others=int(0.85 * CARD)))
    with pytest.raises(ZeroMemError, match=r"before vLLM, or lower vLLM's --gpu-memory-utilization(?s:.*)workspace"):
        claim(the_plan(), card)
    assert card.most == CARD


def test_beside_a_reader_that_leaves_what_is_needed_it_starts_later_too() -> None:
    card = loaded(Card(others=int(the_plan().left * CARD)))
    claim(the_plan(), card)
    assert steady(card, held(card))


def test_an_encoder_larger_than_planned_is_told() -> None:
    card = Card()
    card.allocate(2 * ENCODER)
    with pytest.raises(ZeroMemError, match=r"1\.11 GiB as planned, got '2\.23 GiB on the device'"):
        claim(the_plan(), card)


def test_a_workspace_that_the_device_does_not_give_is_told() -> None:
    class Torn(Card):
        def reserve(self, nbytes: int) -> None:
            raise MemoryError("no piece of that size")

    with pytest.raises(ZeroMemError, match=r"no piece of that size(?s:.*)--workspace"):
        claim(the_plan(), loaded(Torn()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_card_keeps_what_was_claimed() -> None:
    allocator = TorchAllocator("cuda")
    torch.zeros(1, device="cuda")
    made = plan("2GiB", device_total=device_bytes("cuda"), encoder=0, on_gpu=True)
    try:
        claim(made, allocator)
        assert allocator.reserved() >= made.workspace
        before = held(allocator)
        for _ in range(3):
            torch.empty(made.workspace - 2 * MIB, dtype=torch.uint8, device="cuda")
        assert steady(allocator, before)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(made.total, dtype=torch.uint8, device="cuda")
        assert not steady(allocator, before)
    finally:
        allocator.limit(1.0)
