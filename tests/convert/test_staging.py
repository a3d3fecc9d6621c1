"""Where a conversion may write, and what becomes of the folder that is there."""

import os
import shutil

import pytest

from convert import staging
from laneformer_jax.errors import LaneformerError


@pytest.fixture
def older(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("older")
    return target


def build(target, text="newer", **options):
    with staging.building(target, **options) as folder:
        (folder / "config.json").write_text(text)


def test_folder_appears_with_its_parents_and_nothing_beside_it(tmp_path):
    target = tmp_path / "a" / "b"
    with staging.building(target) as folder:
        (folder / "config.json").write_text("new")
        assert not target.exists()
    assert (target / "config.json").read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_older_folder_stays_as_it_is_until_the_exchange(older):
    with staging.building(older, overwrite=True) as folder:
        (folder / "config.json").write_text("newer")
        assert (older / "config.json").read_text() == "older"
    assert (older / "config.json").read_text() == "newer"
    assert list(older.parent.iterdir()) == [older]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_leaves_the_older_folder_and_nothing_else(older, error):
    with pytest.raises(error):
        with staging.building(older, overwrite=True) as folder:
            (folder / "config.json").write_text("newer")
            raise error
    assert (older / "config.json").read_text() == "older"
    assert list(older.parent.iterdir()) == [older]


def test_existing_target_is_refused_at_the_start(older):
    with pytest.raises(LaneformerError, match="exists: .* --overwrite"):
        build(older)
    assert (older / "config.json").read_text() == "older"


def test_only_model_folders_and_empty_ones_are_replaced(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    build(home, overwrite=True)
    (home / "config.json").rename(home / "letters.txt")
    with pytest.raises(LaneformerError, match="is not a model folder .* refused to replace it"):
        build(home, overwrite=True)
    assert (home / "letters.txt").exists()
    with pytest.raises(LaneformerError, match="is no folder"):
        build(home / "letters.txt", overwrite=True)


def test_what_a_killed_run_left_is_cleared(tmp_path):
    target = tmp_path / "target"
    left = staging.staging_path(target)
    (left / "orbax" / "deep").mkdir(parents=True)
    (left / "stale.json").touch()
    (left / "link").symlink_to(tmp_path)
    with staging.building(target) as folder:
        assert list(folder.iterdir()) == []
    assert tmp_path.exists() and list(tmp_path.iterdir()) == [target]


def test_two_runs_into_one_target_do_not_meet(older):
    with staging.building(older, overwrite=True) as folder:
        (folder / "config.json").write_text("first")
        with pytest.raises(LaneformerError, match="another conversion is writing"):
            build(older, "second", overwrite=True)
    assert (older / "config.json").read_text() == "first"
    build(older, "third", overwrite=True)
    assert (older / "config.json").read_text() == "third"


def test_file_system_that_cannot_exchange_is_found_out_before_the_work(older, monkeypatch):
    def refuse(one, other):
        raise OSError(22, os.strerror(22))

    monkeypatch.setattr(staging, "_exchange", refuse)
    with pytest.raises(LaneformerError, match="cannot exchange two folders"):
        with staging.building(older, overwrite=True):
            raise AssertionError("the work began")
    assert list(older.parent.iterdir()) == [older]
    shutil.rmtree(older)
    build(older)  # needs no exchange
    assert (older / "config.json").read_text() == "newer"


def test_exchange_is_one_step_for_whole_folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    staging._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    with pytest.raises(OSError):
        staging._exchange(tmp_path / "a", tmp_path / "missing")
