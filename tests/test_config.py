"""Configuration: the paper's values, files that hold only what differs, and mistakes that are named."""

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import RULES, HashEncoder, memory_of, talk

from zeromem_torch.config import (
    CalibrationConfig,
    ClosureConfig,
    EncoderConfig,
    RoutingConfig,
    SignalWeights,
    SubstrateConfig,
    ZeroMemConfig,
)
from zeromem_torch.library import ZeroMem

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
FILES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.toml") if path.parent.name != "training")


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "mine.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_what_the_paper_fixes_is_the_default() -> None:
    config = ZeroMemConfig()
    assert (config.routing.rho, config.graph.damping, config.calibration.top_k) == (0.6, 0.6, 5)


def test_a_file_holds_only_what_differs(written: Any) -> None:
    path = written('[routing]\nrho = 0.7\n\n[substrate]\nstemmer = ""\nk1 = 1\n')
    config = ZeroMemConfig.from_toml(path)
    assert config.routing == RoutingConfig(rho=0.7)
    assert config.substrate == SubstrateConfig(stemmer="", k1=1.0)
    assert isinstance(config.substrate.k1, float)
    default = ZeroMemConfig()
    same = {"encoder", "signals", "graph", "hierarchy", "fusion", "closure", "calibration"}
    assert all(getattr(config, name) == getattr(default, name) for name in same)
    assert ZeroMemConfig.from_toml(written("")) == default


def test_a_table_inside_a_table_keeps_what_it_does_not_name(written: Any) -> None:
    config = ZeroMemConfig.from_toml(written("[graph.prior]\nphrase = 0.9\n"))
    assert config.graph.prior == dataclasses.replace(ZeroMemConfig().graph.prior, phrase=0.9)
    assert config.graph.prior.maxsim_turn > 0


def test_every_value_can_be_read_back() -> None:
    config = ZeroMemConfig.from_dict({"routing": {"rho": 0.7}, "calibration": {"weights": {"subject": 0.3}}})
    assert ZeroMemConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[rooting]\nrho = 0.7\n", ["mine.toml", "'rooting'", "'routing'"]),
        ("[routing]\nrhoo = 0.7\n", ["mine.toml: [routing]", "'rhoo'", "'rho'"]),
        ("[graph.prior]\nmaxsim_turns = 1.0\n", ["[graph]: [prior]", "'maxsim_turns'", "'maxsim_turn'"]),
        ("rho = 0.7\n", ["mine.toml", "'rho'", "nearest"]),
        ("[routing]\nrho = 'high'\n", ["rho must be float", "'high'"]),
        ("[substrate]\nwindow = 3.5\n", ["window must be int", "3.5"]),
        ("[substrate]\nwindow = true\n", ["window must be int", "True"]),
        ("[substrate]\nstop_words = 1\n", ["stop_words must be bool", "1"]),
        ("[substrate]\nstemmer = false\n", ["stemmer must be str", "False"]),
        ("[graph]\nprior = 0.5\n", ["prior is a table", "[prior]"]),
        ("routing = 1\n", ["routing is a table", "[routing]"]),
        ("[substrate]\nwindow = 0\n", ["[substrate]", "window must be at least 1", "0"]),
        ("[substrate]\nentities = 'spicy'\n", ["[substrate]", "entities must be one of", "rules", "'spicy'"]),
        ("[substrate]\nlexicon = 'bm52'\n", ["[substrate]", "lexicon must be one of bm25, learned", "'bm52'"]),
        ("[routing]\nviews = 'none'\n", ["[routing]", "views must be one of both, graph, hierarchy", "'none'"]),
        ("[closure]\nmost = -1\n", ["[closure]", "most must be at least 0", "-1"]),
        ("[calibration]\ntop_k = 0\n", ["[calibration]", "top_k must be at least 1", "0"]),
        ("[routing\n", ["mine.toml: expected TOML", "line 1"]),
        (b"\xff\xfe", ["mine.toml: expected TOML"]),
    ],
)
def test_mistakes_are_named(written: Any, text: str | bytes, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"mine\.toml") as error:
        ZeroMemConfig.from_toml(written(text))
    assert [word for word in words if word not in str(error.value)] == []
    assert "\n" not in str(error.value)


def test_a_record_is_not_to_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZeroMemConfig().routing.rho = 0.5  # type: ignore[misc]


# The files that come with it


def leaves(tables: Mapping[str, Any], *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from leaves(value, *path, key)
        else:
            yield (*path, key), value


@pytest.mark.parametrize("name", FILES, ids=str)
def test_every_file_loads_and_differs_where_it_says(name: Path) -> None:
    config, default = ZeroMemConfig.from_toml(CONFIGS / name), ZeroMemConfig()
    for path, value in leaves(tomllib.loads((CONFIGS / name).read_text())):
        here: Any = config
        there: Any = default
        for key in path:
            here, there = getattr(here, key), getattr(there, key)
        assert here == value
        assert here != there or name == Path("cpu.toml"), f"{name}: {'.'.join(path)} is the default"


def test_the_files_there_are() -> None:
    ablations = [f"ablation/{name}.toml" for name in ("graph", "hierarchy", "no_calibration", "no_closure")]
    assert {*ablations, "cpu.toml", "paper.toml"} <= {str(name) for name in FILES}


def test_the_paper_and_the_embedded_encoder() -> None:
    paper = ZeroMemConfig.from_toml(CONFIGS / "paper.toml")
    assert paper.encoder.name == "bge-m3"
    assert paper.fusion.graph_contrast == paper.fusion.hierarchy_contrast == 1.0
    assert ZeroMemConfig.from_toml(CONFIGS / "cpu.toml").encoder == EncoderConfig("minilm")
    assert ZeroMem(ZeroMemConfig()).encoder.fingerprint.startswith("minilm-")


SAID = talk("a", ["We saw the Opera.", "Was it cold?", "It was. The Opera is by the sea."], ["The sea rose.", "No!"])
ASKED = ["Where does the Opera stand?", "Was it cold?", "What did Ann say of the sea?"]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("no_closure", {"close": False}),
        ("no_calibration", {"calibrate": False}),
    ],
)
def test_an_ablation_file_is_the_stage_left_out(name: str, changed: dict[str, bool]) -> None:
    config = ZeroMemConfig.from_toml(CONFIGS / "ablation" / f"{name}.toml")
    plain, ablated = memory_of(*SAID), memory_of(*SAID, config=dataclasses.replace(config, substrate=RULES.substrate))
    asked = (ASKED, ["a"] * len(ASKED), [None] * len(ASKED))
    (group,), (same,) = plain.batches(*asked), ablated.batches(*asked)
    expected = plain.pipeline.select(plain.pipeline.views(group.batch, group.bank), group.bank, 2, **changed)
    got = ablated.pipeline.select(ablated.pipeline.views(same.batch, same.bank), same.bank, 2)
    assert torch.equal(got.main, expected.main)
    assert torch.equal(got.ranked, expected.ranked)
    rows = [[row for row in slot if row >= 0] for slot in got.result[:, 0].tolist()]
    assert rows == [[row for row in slot if row >= 0] for slot in expected.result[:, 0].tolist()]


@pytest.mark.parametrize("view", ["graph", "hierarchy"])
def test_an_ablation_file_leaves_one_view(view: str) -> None:
    config = ZeroMemConfig.from_toml(CONFIGS / "ablation" / f"{view}.toml")
    memory = memory_of(*SAID, config=dataclasses.replace(config, substrate=RULES.substrate))
    contrast = getattr(config.fusion, f"{view}_contrast")
    for query in ASKED:
        for item in memory.search(query, boundary="a", top_k=9).main:
            assert item.parts["fused"] == pytest.approx(item.views[view] ** contrast, abs=1e-6)


def test_without_a_stage_nothing_of_it_is_left() -> None:
    assert ZeroMemConfig.from_toml(CONFIGS / "ablation" / "no_closure.toml").closure == ClosureConfig(0.0, 0.0, 0)
    weights = ZeroMemConfig.from_toml(CONFIGS / "ablation" / "no_calibration.toml").calibration
    assert weights == CalibrationConfig(weights=SignalWeights())


def test_the_encoder_of_the_configuration_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def load(name: str, *, device: str, dtype: None) -> HashEncoder:
        loaded.append((name, device))
        return HashEncoder()

    monkeypatch.setattr("zeromem_torch.library.load_encoder", load)
    config = ZeroMemConfig(encoder=EncoderConfig("bge-m3"))
    ZeroMem(config)
    ZeroMem(config, encoder="some/folder")
    ZeroMem(config, encoder=HashEncoder())
    assert loaded == [("bge-m3", "cpu"), ("some/folder", "cpu")]


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("graph", "sharpness", "0.0"),
        ("graph", "hops", "-1"),
        ("graph", "named", "nan"),
        ("graph", "affinity", "inf"),
        ("graph", "damping", "1.5"),
        ("routing", "rho", "1.5"),
        ("signals", "candidates", "-5"),
        ("signals", "date_reach", "0.0"),
        ("hierarchy", "keep_episodes", "-1"),
        ("fusion", "graph_contrast", "-1.0"),
        ("substrate", "k1", "-1.0"),
        ("substrate", "b", "5.0"),
    ],
)
def test_a_value_out_of_range_names_its_place(tmp_path: Path, table: str, key: str, value: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(f"[{table}]\n{key} = {value}\n")
    with pytest.raises(ValueError, match=rf"wrong\.toml.*\[{table}\].*{key} must"):
        ZeroMemConfig.from_toml(file)
