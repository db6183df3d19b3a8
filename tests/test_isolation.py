"""A search sees the boundary it names and no other, whatever the others are called and whatever they hold."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import memory_of, same_evidence, talk

from zeromem_torch.substrate.traces import Trace

# Prefixes of each other, wildcards of SQL and of shells, names that fold together, names that are no words.
NAMES = ["a", "a_b", "a%", "ab", "A", "ａ", "a ", "a\n", "acme", "acme-corp", "acme/corp", "é", "e\u0301", "🚣"]
NAMES += ["..", "*", "'; DROP TABLE traces; --", "None", "0", "-1"]
TEXTS = [
    "The red boat sank.",
    "Was it the red boat?",
    "Yes.",
    "Ann bought the Oslo lighthouse.",
    "Oslo has a lighthouse.",
    "🚣",
    "Where is it now? They keep it in Bergen.",
    "On 9 May 2023 it rained in Bergen.",
]
QUERIES = ["What sank?", "Who bought the lighthouse of Oslo?", "When did it rain?", "the", "🚣", "Yes."]


@st.composite
def records(draw: st.DrawFn) -> dict[str, list[Trace]]:
    """Boundaries with texts in common: talks, or documents whose titles other boundaries name."""
    made = {}
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=2, max_size=6, unique=True)):
        texts = draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6))
        if draw(st.booleans()):
            made[name] = talk(name, texts[::2], texts[1::2])
        else:
            made[name] = [
                Trace(f"{name}#{i}", name, text, title=draw(st.sampled_from(["", "Oslo", "The Red Boat"])))
                for i, text in enumerate(texts)
            ]
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(made=records(), data=st.data())
def test_results_are_those_of_a_memory_that_holds_the_boundary_alone(
    made: dict[str, list[Trace]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations([trace for own in made.values() for trace in own]))
    asked = [(query, name) for name in made for query in data.draw(st.lists(st.sampled_from(QUERIES), max_size=3))]
    budget = data.draw(st.sampled_from([None, 20, 1000]))
    everybody = memory_of(*order)
    found = everybody.search_batch([q for q, _ in asked], boundaries=[b for _, b in asked], token_budget=budget)
    alone = {name: memory_of(*(trace for trace in order if trace.boundary == name)) for name in made}
    for (query, name), evidence in zip(asked, found, strict=True):
        home = {trace.id for trace in made[name]}
        for items in (evidence.main, evidence.closed, evidence.items):
            assert {item.trace_id for item in items} <= home
            assert {item.source for item in items} <= home | {None}
        # Min-max over a few units that are nearly equal stretches rounding a hundredfold.
        same_evidence(evidence, alone[name].search(query, boundary=name, token_budget=budget), tolerance=1e-3)


def test_a_boundary_is_not_starved_by_a_larger_one() -> None:
    crowd = [Trace(f"acme/{n}", "acme", f"The red boat sank, they say for the {n}th time.") for n in range(500)]
    lone = Trace("acme-corp/1", "acme-corp", "A blue kite.")
    memory = memory_of(*crowd, lone)
    both = memory.search_batch(["What red boat sank?"] * 2, boundaries=["acme", "acme-corp"], top_k=5)
    assert [len(evidence.main) for evidence in both] == [5, 1]
    assert [item.trace_id for item in both[1].items] == ["acme-corp/1"]


def test_additions_elsewhere_change_nothing_here() -> None:
    here = talk("a", TEXTS[:4], TEXTS[4:])
    memory = memory_of(*here)
    before = [memory.search(query, boundary="a") for query in QUERIES]
    memory.add([Trace(f"{name}!{i}", name, text) for name in NAMES[1:] for i, text in enumerate(TEXTS)])
    assert [memory.search(query, boundary="a") for query in QUERIES] == before
    asked = [name for name in ("a", *NAMES[1:]) for _ in QUERIES]
    found = memory.search_batch(QUERIES * len(NAMES), boundaries=asked)[: len(QUERIES)]
    assert all(same_evidence(one, other) for one, other in zip(found, before, strict=True))
