"""What the launcher reads of a model folder."""

import json
import shutil
from pathlib import Path

import pytest

from forebay.cluster.model_facts import read_facts
from forebay.workers.config_fields import FolderError
from forebay.workers.demo import resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(resolve("demo"), tmp_path / "demo")
    return tmp_path / "demo"


def advise(folder: Path, **fields: object) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_folder_advises_on_sampling(folder: Path) -> None:
    advise(folder, temperature=0.25, top_p=0.5)
    facts = read_facts(str(folder), 32)
    assert (facts.temperature, facts.top_p) == (0.25, 0.5)


def test_a_folder_without_advice_is_sampled_as_it_is(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    facts = read_facts(str(folder), 32)
    assert (facts.temperature, facts.top_p) == (1.0, 1.0)


@pytest.mark.parametrize("temperature", [-1, 9, "hot", None, float("nan")])
def test_wrong_advice_is_named(folder: Path, temperature: object) -> None:
    advise(folder, temperature=temperature)
    with pytest.raises(FolderError, match=r"generation_config\.json"):
        read_facts(str(folder), 32)
