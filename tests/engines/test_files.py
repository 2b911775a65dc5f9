"""Atomic writing: the old or the new, never a half, and nobody's other files."""

from __future__ import annotations

import os

import pytest

from spot_deploy import SpotDeployError
from spot_deploy.engines import files
from spot_deploy.engines.files import read_json, staged_folder, write_json, write_text


def has_mark(folder):
    return (folder / "mark").is_file()


def make(target, content, *, force=False):
    with staged_folder(target, force=force, ours=has_mark) as stage:
        (stage / "mark").write_text(content)


@pytest.mark.parametrize("exchange", [True, False], ids=["one-step", "renames"])
def test_folder_is_replaced_whole(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())
    target = tmp_path / "out"
    make(target, "one")
    make(target, "two", force=True)
    assert (target / "mark").read_text() == "two"
    assert list(tmp_path.iterdir()) == [target]


def test_an_error_leaves_the_old_folder_and_no_rest(tmp_path):
    target = tmp_path / "out"
    make(target, "one")

    def interrupted():
        with staged_folder(target, force=True, ours=has_mark) as stage:
            (stage / "mark").write_text("two")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (target / "mark").read_text() == "one"
    assert list(tmp_path.iterdir()) == [target]


def test_an_empty_folder_may_be_filled_and_a_full_one_may_not(tmp_path):
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty", "one")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear")
    with pytest.raises(SpotDeployError, match="already there"):
        make(tmp_path / "full", "one", force=True)
    make(tmp_path / "real", "one")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    make(tmp_path / "link", "two", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "mark").read_text() == "two"
    with pytest.raises(SpotDeployError, match="cannot write"):
        make(tmp_path / "no" / "parent", "one")
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpotDeployError, match="already there"):
        make(tmp_path / "file", "one", force=True)


def test_whoever_comes_second_does_not_replace_silently(tmp_path):
    target = tmp_path / "out"

    def second():
        with staged_folder(target, force=False, ours=has_mark) as stage:
            (stage / "mark").write_text("second")
            make(target, "first")

    with pytest.raises(SpotDeployError, match="already there"):
        second()
    assert (target / "mark").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_links_that_loop(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SpotDeployError):
        make(tmp_path / "loop", "x")


def test_file_is_kept_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert read_json(path, code="x", fix="y") == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_readable_by_others_as_the_umask_says(tmp_path):
    old = os.umask(0o022)
    try:
        write_text(tmp_path / "a", "x")
        with staged_folder(tmp_path / "folder", force=False, ours=has_mark) as stage:
            (stage / "private").touch(mode=0o600)
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "folder" / "private").stat().st_mode & 0o777 == 0o644


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_being_written_is_told_from_what_a_killed_run_left(tmp_path):
    with staged_folder(tmp_path / "out", force=False, ours=has_mark) as stage:
        assert files.in_use(stage)
        (stage / "mark").write_text("one")
    assert not files.in_use(tmp_path / "out")
    (tmp_path / f"{files.STAGING}x").mkdir()
    assert not files.in_use(tmp_path / f"{files.STAGING}x")
