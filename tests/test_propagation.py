"""Entity propagation (Eq. 9) against the double sum it stands for."""

import equations
import pytest
import torch
from builders import SIZES, Dice, bank_of, sample
from torch import Tensor
from torch.autograd import gradcheck
from torch.testing import assert_close

from zeromem_torch import backends
from zeromem_torch.bank import axis_of
from zeromem_torch.retrieval.propagation import EntityPropagation
from zeromem_torch.sparse import Csr

SETTINGS = [(0, 0.5), (1, 1.0), (2, 0.5), (3, 0.25)]


@pytest.fixture(autouse=True, params=["torch", "numba"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `auto` resolves to, wherever it can."""
    name = str(request.param)
    if name == "numba":
        pytest.importorskip("numba")
    else:
        monkeypatch.setitem(backends._AUTO, "cpu", ("torch",))
    return name


def random_mentions(sentences: int, entities: int, seed: int = 0) -> Csr:
    """Sparse, with sentences that name nobody and entities that nobody names."""
    named = Dice(seed).uniform(sentences, entities) < 0.3
    named[:, : entities // 4] = False
    row, col = named.nonzero(as_tuple=True)
    return Csr.from_coo(row, col, torch.ones(len(row), dtype=torch.float64), sentences, entities)


def spread(seeds: Tensor, similarity: Tensor, mentions: Csr, hops: int, decay: float) -> Tensor:
    """In a bank of one memory."""
    entities = axis_of([mentions.cols])
    found: Tensor = EntityPropagation(hops, decay)(seeds, similarity, mentions, mentions.transpose(), entities)
    return found


def expected(seeds: Tensor, similarity: Tensor, mentions: Csr, hops: int, decay: float) -> Tensor:
    named = [set(row.nonzero()[:, 0].tolist()) for row in mentions.to_dense()]
    rows = [
        equations.propagation(seed, sim, named, hops=hops, decay=decay)
        for seed, sim in zip(seeds.tolist(), similarity.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(seeds.shape)


@pytest.mark.parametrize("entities", SIZES)
@pytest.mark.parametrize("sentences", SIZES)
@pytest.mark.parametrize(("hops", "decay"), SETTINGS)
def test_equals_the_double_sum(entities: int, sentences: int, hops: int, decay: float) -> None:
    dice, mentions = Dice(1), random_mentions(sentences, entities)
    seeds = dice.uniform(3, entities) * (dice.uniform(3, entities) < 0.3)
    seeds[2] = 0  # no entity known
    similarity = dice.uniform(3, sentences) * 2 - 1
    args = seeds, similarity, mentions, hops, decay
    assert_close(spread(*args), expected(*args))


@pytest.mark.parametrize(("hops", "decay"), SETTINGS)
def test_many_memories_at_once(hops: int, decay: float) -> None:
    memories = [sample(seed, units) for seed, units in enumerate((7, 0, 129, 1, 3))]
    bank, dice = bank_of(memories), Dice(1)
    entities, sentences = bank.axes["entities"], bank.axes["sentences"]
    seeds = dice.uniform(3, entities.size) * (dice.uniform(3, entities.size) < 0.2)
    similarity = dice.uniform(3, sentences.size) * 2 - 1
    found = EntityPropagation(hops, decay)(seeds, similarity, bank.mentions, bank.mentions_t, entities)
    for m, one in enumerate(memories):
        own = slice(entities.ptr[m], entities.ptr[m + 1])
        near = similarity[:, sentences.ptr[m] : sentences.ptr[m + 1]]
        for s in range(3):
            row = equations.propagation(seeds[s, own].tolist(), near[s].tolist(), one.sentences, hops=hops, decay=decay)
            assert found[s, own].tolist() == pytest.approx(row)


@pytest.mark.parametrize("hops", [1, 2, 5])
def test_a_hop_carries_decay_times_the_mass_of_the_one_before(hops: int) -> None:
    mentions, decay = random_mentions(129, 20), 0.5
    seeds = torch.zeros(1, 20, dtype=torch.float64)
    seeds[0, -1] = 3.0
    assert mentions.to_dense()[:, -1].any()
    found = spread(seeds, torch.ones(1, 129, dtype=torch.float64), mentions, hops, decay)
    assert float(found.sum()) == pytest.approx(3.0 * sum(decay**t for t in range(hops + 1)))


def test_nothing_moves_through_sentences_that_the_query_does_not_resemble() -> None:
    mentions, seeds = random_mentions(7, 5), Dice(1).uniform(2, 5)
    unlike = -Dice(2).uniform(2, 7)
    assert torch.equal(spread(seeds, unlike, mentions, 2, 0.5), seeds)


def test_without_seeds_nobody_is_active() -> None:
    none = torch.zeros(2, 5, dtype=torch.float64)
    assert not spread(none, torch.ones(2, 7, dtype=torch.float64), random_mentions(7, 5), 2, 0.5).any()


def test_an_entity_that_no_sentence_names_keeps_what_it_has() -> None:
    mentions, seeds = random_mentions(7, 8), torch.eye(8, dtype=torch.float64)
    found = spread(seeds, torch.ones(8, 7, dtype=torch.float64), mentions, 2, 0.5)
    isolated = ~mentions.to_dense().any(0)
    assert isolated.any()
    assert torch.equal(found[isolated], seeds[isolated])
    assert not found[~isolated][:, isolated].any()


def test_numbering_of_entities_and_sentences_does_not_matter() -> None:
    dice, mentions = Dice(1), random_mentions(20, 9)
    seeds, similarity = dice.uniform(2, 9), dice.uniform(2, 20)
    e, z = torch.randperm(9), torch.randperm(20)
    row, col = mentions.to_dense()[z][:, e].nonzero(as_tuple=True)
    turned = Csr.from_coo(row, col, torch.ones(len(row), dtype=torch.float64), 20, 9)
    straight = spread(seeds, similarity, mentions, 2, 0.5)
    assert_close(spread(seeds[:, e], similarity[:, z], turned, 2, 0.5), straight[:, e])


def test_a_query_alone_is_as_in_a_batch() -> None:
    dice, mentions = Dice(1), random_mentions(129, 40)
    seeds, similarity = dice.uniform(7, 40), dice.uniform(7, 129)
    whole = spread(seeds, similarity, mentions, 2, 0.5)
    for s in range(7):
        assert_close(spread(seeds[[s]], similarity[[s]], mentions, 2, 0.5), whole[[s]], rtol=1e-13, atol=0)


@pytest.mark.parametrize("backend", ["numba"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from zeromem_torch.kernels import propagation_numba

    dice, mentions = Dice(1), random_mentions(129, 40)
    seeds = (dice.uniform(9, 40) * (dice.uniform(9, 40) < 0.2)).to(dtype)
    similarity = dice.uniform(9, 129).to(dtype) - 0.5
    whole = spread(seeds, similarity, mentions, 3, 0.5)
    assert whole.dtype == dtype
    monkeypatch.setattr(propagation_numba, "INLINE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(spread(seeds, similarity, mentions, 3, 0.5), whole)
    for s in range(9):
        assert torch.equal(spread(seeds[[s]], similarity[[s]], mentions, 3, 0.5), whole[[s]])


def test_a_back_end_without_a_gradient_is_not_taken_for_one() -> None:
    mentions = random_mentions(7, 5)
    seeds = Dice(1).uniform(1, 5).requires_grad_()
    assert spread(seeds, torch.ones(1, 7, dtype=torch.float64), mentions, 1, 0.5).requires_grad


def test_nothing_asked() -> None:
    none = torch.zeros(0, 5, dtype=torch.float64)
    assert spread(none, torch.zeros(0, 7, dtype=torch.float64), random_mentions(7, 5), 2, 0.5).shape == (0, 5)


@pytest.mark.parametrize("hops", [1, 2])
def test_gradient_to_seeds_similarity_and_mentions(hops: int) -> None:
    mentions, dice = random_mentions(6, 5, seed=1), Dice(1)
    entities = axis_of([3, 2])
    seeds = dice.uniform(2, 5).requires_grad_()
    similarity = (0.1 + dice.uniform(2, 6)).requires_grad_()  # away from the clip at 0
    weight = (mentions.val + dice.uniform(len(mentions.val))).requires_grad_()

    def activation(seeds: Tensor, similarity: Tensor, weight: Tensor) -> Tensor:
        weighed = Csr(mentions.crow, mentions.col, weight, mentions.cols)
        found: Tensor = EntityPropagation(hops, 0.5)(seeds, similarity, weighed, weighed.transpose(), entities)
        return found

    assert gradcheck(activation, (seeds, similarity, weight))


def test_gradient_is_finite_where_nothing_is_reached() -> None:
    mentions = random_mentions(6, 5, seed=1)
    seeds = torch.zeros(1, 5, dtype=torch.float64, requires_grad=True)
    similarity = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    for grad in torch.autograd.grad(spread(seeds, similarity, mentions, 2, 0.5).sum(), (seeds, similarity)):
        assert bool(grad.isfinite().all())
