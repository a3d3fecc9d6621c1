"""`laneformer convert --verify`: PyTorch on the source beside JAX on the result."""

import shutil
import sys
from types import SimpleNamespace

import folders
import pytest
from tolerances import LOGITS_FLOAT32

from convert import convert as conversion
from convert.convert import convert
from convert.source import find_source
from convert.verify import Verification
from experiments import reference
from laneformer_jax import cli
from laneformer_jax.errors import LaneformerError


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return folders.write(tmp_path_factory.mktemp("verify") / "source")


def verified(source, target, kind="own", **options):
    check = Verification(source, kind)
    convert(find_source(str(source), None), target, check=check, **options)
    return check


def test_exact_conversions_agree_in_both_directions(source, tmp_path):
    for start, target in ((source, tmp_path / "orbax"), (tmp_path / "orbax", tmp_path / "back")):
        check = verified(start, target)
        assert check.difference < LOGITS_FLOAT32
        assert check.agreement == 1


def test_narrowing_shows_its_price_and_is_no_error(source, tmp_path):
    check = verified(source, tmp_path / "half", dtype="bfloat16")
    assert 1e-3 < check.difference < 0.2
    assert 0.5 < check.agreement <= 1


def test_command_prints_difference_and_agreement(source, tmp_path, capsys):
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--verify"]) == 0
    assert "greedy agreement 100% of 32 tokens" in capsys.readouterr().out


def test_wrong_result_never_appears(source, tmp_path, monkeypatch):
    """Two tensors of one shape change places while they are written."""
    read = conversion.Reader.read
    swapped = {"model.layers.0.attention.wk.weight": "wv", "model.layers.0.attention.wv.weight": "wk"}

    def swap(reader, item, index):
        if item.source in swapped:
            name = f"model.layers.0.attention.{swapped[item.source]}.weight"
            return reader.source.read_slice(name, index)
        return read(reader, item, index)

    monkeypatch.setattr(conversion.Reader, "read", swap)
    with pytest.raises(LaneformerError, match="the result differs from the source: largest logit difference"):
        verified(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class Published:
    """Stands for a Transformers model class: what `from_pretrained` gives is the reference behind its interface."""

    @classmethod
    def from_pretrained(cls, folder, trust_remote_code, torch_dtype):
        assert trust_remote_code
        model = reference.load(folder, torch_dtype)
        called = lambda input_ids, use_cache: SimpleNamespace(logits=model(input_ids))  # noqa: E731
        called.eval = lambda: called
        return called


def test_published_code_runs_only_when_trusted_and_there(source, tmp_path, monkeypatch, capsys):
    source = shutil.copytree(source, tmp_path / "source")
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=Published))
    with pytest.raises(LaneformerError, match="carries no modelling code"):
        verified(source, tmp_path / "out", "hub")
    (source / "modeling_laneformer.py").touch()
    check = verified(source, tmp_path / "out", "hub")
    assert check.difference < LOGITS_FLOAT32 and check.agreement == 1
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(LaneformerError, match="pip install transformers"):
        verified(source, tmp_path / "again", "hub")
    arguments = ["convert", str(source), str(tmp_path / "again"), "--verify", "--reference", "hub"]
    assert cli.main(arguments) == 2
    assert "--trust-remote-code" in capsys.readouterr().err


def test_context_too_short_to_verify(source, tmp_path):
    plan = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=16))
    with pytest.raises(LaneformerError, match="too short to verify"):
        Verification(source)(tmp_path, plan)
