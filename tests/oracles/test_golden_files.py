"""Makes the golden files again, live, and compares: `PAGEDJAX_ORACLE_PYTHON=python-with-torch pytest -m oracle`.

The interpreter needs torch and transformers, and gguf and accelerate for SmolLM2.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pagedjax.loading.hub import demo_path

ORACLES = Path(__file__).parent
pytestmark = pytest.mark.oracle


def remake(script: str, *arguments: Path) -> None:
    python = os.environ["PAGEDJAX_ORACLE_PYTHON"]
    subprocess.run([python, ORACLES / script, *arguments], check=True, timeout=3600)


def test_tiny_models_are_what_transformers_computes_today(tmp_path):
    golden = np.load(ORACLES / "golden" / "tiny_models.npz")
    remake("make_tiny_models.py", tmp_path / "remade.npz")
    remade = np.load(tmp_path / "remade.npz")
    assert sorted(remade.files) == sorted(golden.files)
    for name in golden.files:
        np.testing.assert_allclose(remade[name], golden[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_beam_searches_find_what_transformers_finds_today(tmp_path):
    remake("make_beam_search.py", tmp_path / "remade.json")
    golden = json.loads((ORACLES / "golden" / "beam_search.json").read_text())
    remade = json.loads((tmp_path / "remade.json").read_text())
    assert [one["sequences"] for one in remade] == [one["sequences"] for one in golden]


def test_rope_frequencies_are_what_transformers_computes_today(tmp_path):
    remake("make_rope.py", tmp_path / "remade.json")
    remade, golden = (json.loads(path.read_text()) for path in (tmp_path / "remade.json", ORACLES / "golden/rope.json"))
    assert remade == golden


def test_smollm2_is_what_transformers_computes_today(tmp_path):
    remake("make_smollm2.py", demo_path(), tmp_path / "remade.json")
    remade = json.loads((tmp_path / "remade.json").read_text())
    golden = json.loads((ORACLES / "golden" / "smollm2.json").read_text())
    assert remade["perplexity"]["perplexity"] == pytest.approx(golden["perplexity"]["perplexity"], rel=1e-5)
    assert remade["prompts"].keys() == golden["prompts"].keys()
    for name, prompt in golden["prompts"].items():
        assert remade["prompts"][name]["token_ids"] == prompt["token_ids"], name
        assert remade["prompts"][name]["greedy"] == prompt["greedy"], name
        assert remade["prompts"][name]["top_logits"] == pytest.approx(prompt["top_logits"], abs=1e-3), name
