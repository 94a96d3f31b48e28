"""The weights digest follows the bytes, and is read from the cache when they did not change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvstore_xfer.errors import ModelError
from kvstore_xfer.models import weights
from kvstore_xfer.models.description import describe

MIB = 1 << 20


@pytest.fixture
def large_file(tmp_path):
    """16 MiB of weights: far more than everything else a description reads."""
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(4 * MIB, dtype=torch.float32)}, file)
    return file


def bytes_read(action):
    """Bytes that this process read from any file during `action`."""

    def count():
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"])

    before = count()
    action()
    return count() - before


def test_the_second_digest_reads_no_weights(large_file):
    first = weights.content_digest([large_file])
    assert bytes_read(lambda: weights.content_digest([large_file])) < MIB / 16
    assert weights.content_digest([large_file]) == first


def test_the_first_digest_reads_them_all(large_file):
    assert bytes_read(lambda: weights.content_digest([large_file])) >= 16 * MIB


def test_counting_parameters_reads_headers_only(large_file):
    assert bytes_read(lambda: weights.summarise([large_file])) < MIB / 16
    assert weights.summarise([large_file]) == weights.WeightsSummary(4 * MIB, "float32")


@pytest.mark.parametrize("keep_times", [False, True])
def test_one_changed_byte_changes_the_digest(large_file, keep_times):
    before = weights.content_digest([large_file])
    state = large_file.stat()
    with large_file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x01")
    if keep_times:
        os.utime(large_file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert weights.content_digest([large_file]) != before


def test_segments_are_hashed_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_SEGMENT", 4096)
    monkeypatch.setattr(weights, "_READ", 1024)
    digests = set()
    for number, content in enumerate((b"a" * 4096 + b"b" * 5000, b"b" * 4096 + b"a" * 5000)):
        file = tmp_path / str(number) / "model.safetensors"
        file.parent.mkdir()
        file.write_bytes(content)
        digests.add(weights.content_digest([file]))
    assert len(digests) == 2


def test_a_renamed_file_in_another_folder_with_equal_bytes_has_an_equal_digest(large_file):
    copy = large_file.parent / "copy" / large_file.name
    copy.parent.mkdir()
    copy.write_bytes(large_file.read_bytes())
    assert weights.content_digest([copy]) == weights.content_digest([large_file])


def test_a_damaged_cache_entry_is_hashed_again(large_file, digest_cache):
    before = weights.content_digest([large_file])
    (entry,) = (digest_cache / "digests").iterdir()
    entry.write_text("nonsense")
    assert weights.content_digest([large_file]) == before
    assert entry.read_text() != "nonsense"


def test_a_cache_that_cannot_be_written_costs_time_only(large_file, monkeypatch, caplog):
    before = weights.content_digest([large_file])
    monkeypatch.setenv("KVXFER_CACHE_DIR", "/dev/null/none")
    assert weights.content_digest([large_file]) == before
    assert "not cached" in caplog.text


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"KVXFER_CACHE_DIR": "one", "XDG_CACHE_HOME": "two"}, "one"),
        ({"XDG_CACHE_HOME": "two"}, "two/kvxfer"),
        ({}, ".cache/kvxfer"),
    ],
)
def test_where_digests_are_kept(large_file, tmp_path, monkeypatch, environment, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KVXFER_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    weights.content_digest([large_file])
    assert len(list((tmp_path / folder / "digests").iterdir())) == 1


@pytest.mark.parametrize("kept", [0, 7, 8, 40, 8 * MIB, 16 * MIB])
def test_a_truncated_file_is_named_with_the_remedy(make_model, large_file, kept):
    folder = make_model()
    file = folder / "model.safetensors"
    file.write_bytes(large_file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated.*download it") as told:
        describe(folder)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x02\0\0\0\0\0\0\0{}", "holds no tensors"),
        (b"\x02\0\0\0\0\0\0\0{}extra", "damaged"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a safetensors file"),
        (b"\x07\0\0\0\0\0\0\0" + b'{"w":3}', "not a safetensors file"),
        (b"\xff" * 64, "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "truncated"),
    ],
)
def test_other_bytes_are_refused(tmp_path, content, said):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=said):
        weights.summarise([file])


def test_parameters_are_counted_over_all_shards(make_model):
    folder = make_model()
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    save_file({"q": torch.zeros(5, dtype=torch.int32)}, folder / "part-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "part-1.safetensors", "q": "part-2.safetensors"}}'
    )
    save_file({"w": torch.zeros(999)}, folder / "consolidated.safetensors")  # a second copy
    assert describe(folder).parameters == 32 * 64 + 7 + 5
