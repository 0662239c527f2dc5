"""`check resume` passes on honest stores, fails on planted faults, and states the boundaries it checks."""

import pytest
from hash_model import HashModel
from mooncake_rig import needs_mooncake

from forebay.workers import resume_check, resume_rig
from forebay.workers.resume_plants import PLANTS


def failed(cases):
    return [case for case in cases if not case.passed]


def test_all_pass_on_the_model_of_hashes_and_are_heard_as_they_come():
    heard = []
    cases = resume_check.run_cases(HashModel(), on_case=heard.append)
    assert failed(cases) == []
    assert heard == cases
    blocks = 3 * HashModel().layout.paged[0].page_tokens // 4
    assert len(cases) == 1 + 2 * 3 * blocks + 7 + 4 + 3 + 4
    assert any("cached 24 of 24" in case.detail for case in cases)


@pytest.mark.parametrize("plant", PLANTS)
def test_every_plant_is_seen_wherever_something_was_restored(plant):
    cases = resume_check.run_cases(HashModel(), plant)
    restored = [case for case in cases if "cached 0 of 0" not in case.detail]
    if plant == "flip":  # a page that requests share is flipped back by the second of two
        assert len(failed(restored)) > len(restored) // 2
    else:
        assert failed(restored) == restored
    assert failed(cases) == failed(restored)


def test_a_wrong_boundary_fails(monkeypatch):
    monkeypatch.setattr(resume_rig.Rig, "pair", short_of_one_checkpoint(resume_rig.Rig.pair))
    cases = failed(resume_check.run_cases(HashModel()))
    assert cases
    assert all("logits equal" in case.detail for case in cases)


def short_of_one_checkpoint(pair):
    """Keeps states at every third block only, whatever the case asked for."""
    return lambda rig, checkpoints="", **pages: pair(rig, "interval:12", **pages)


def test_a_model_without_index_keys_cannot_have_them_cut():
    model = HashModel()
    model.layout = model.layout.__class__(
        block_tokens=4, page_bytes=128, paged=model.layout.paged[:1], states=model.layout.states
    )
    with pytest.raises(ValueError, match="no index keys"):
        resume_check.run_cases(model, "short-index")


def test_all_pass_on_the_built_in_model(monkeypatch):
    for module, name, fewer in ((resume_rig, "PAGES", 1), (resume_check, "COMPANY", 3)):
        monkeypatch.setattr(module, name, fewer)
    assert failed(resume_check.check_resume("demo-random")) == []


@pytest.mark.soak
def test_all_pass_on_the_built_in_model_over_several_pages():
    assert failed(resume_check.check_resume("demo-random")) == []


@pytest.mark.parametrize("plant", PLANTS)
def test_plants_are_seen_on_the_built_in_model(monkeypatch, plant):
    monkeypatch.setattr(resume_rig, "PAGES", 1)
    for name, fewer in (("COMPANY", 1), ("TURNS", 2), ("ROUNDS", 1)):
        monkeypatch.setattr(resume_check, name, fewer)
    assert failed(resume_check.check_resume("demo-random", plant))


def test_all_pass_through_a_real_pool(monkeypatch):
    needs_mooncake()
    monkeypatch.setattr(resume_check, "ROUNDS", 1)
    assert failed(resume_check.run_cases(HashModel(), tier="mooncake")) == []


@pytest.mark.parametrize(
    "plant", [plant if plant == "skip-kda" else pytest.param(plant, marks=pytest.mark.soak) for plant in PLANTS]
)
def test_every_plant_is_seen_behind_a_real_pool(monkeypatch, plant):
    needs_mooncake()
    monkeypatch.setattr(resume_check, "ROUNDS", 1)
    monkeypatch.setattr(resume_rig, "PAGES", 1)
    cold, *restored = resume_check.check_resume("demo-random", plant, tier="mooncake")
    assert cold.passed
    assert len(restored) == 2
    assert failed(restored) == restored


def test_all_pass_where_the_transfer_engine_hands_over(monkeypatch):
    needs_mooncake()
    monkeypatch.setattr(resume_check, "ROUNDS", 2)
    assert failed(resume_check.run_cases(HashModel(), tier="dram", transfer="mooncake")) == []
