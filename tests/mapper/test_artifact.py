"""A mapper folder loads as it was written, or not at all."""

import json
import random
from dataclasses import replace

import pytest
import torch

from kvstore_xfer.errors import ArtifactError
from kvstore_xfer.mapper import artifact as module
from kvstore_xfer.mapper.artifact import Artifact, load, record_gate, save
from kvstore_xfer.mapper.maps import Method, assign_heads

MANIFEST, WEIGHTS = "manifest.json", "mapper.safetensors"


@pytest.fixture
def folder(make_mapper, tmp_path):
    save(tmp_path / "m", Artifact(make_mapper(), {"calibration": {"digest": "d"}}))
    record_gate(tmp_path / "m", "float32", {"verdict": "rejected", "passages": 3})
    return tmp_path / "m"


def same(one, other):
    maps = [(*mapper.keys, *mapper.values) for mapper in (one, other)]
    for a, b in zip(*maps, strict=True):
        assert a.source_layers == b.source_layers
        assert a.weight.dtype == b.weight.dtype
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.bias, b.bias)
        assert len(a.before) == len(b.before)
        assert all(map(torch.equal, a.before, b.before))
    assert (one.encoder is None) == (other.encoder is None)
    assert one.encoder is None or torch.equal(one.encoder, other.encoder)
    facts = [(m.method, m.source, m.target, m.head_assignment, m.digest) for m in (one, other)]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("method", Method)
def test_what_is_saved_is_loaded(make_mapper, tmp_path, method):
    made = save(tmp_path, Artifact(make_mapper((3, 4, 8, 6), (2, 2, 4, 8), method), {"a": [1.5]}))
    found = load(tmp_path)
    same(found.mapper, made.mapper)
    assert (found.fit, found.gate) == ({"a": [1.5]}, {})
    assert {path.name for path in tmp_path.iterdir()} == {MANIFEST, WEIGHTS}


def test_equal_mappers_make_equal_folders(make_mapper, tmp_path):
    for name in "ab":
        save(tmp_path / name, Artifact(make_mapper()))
    for file in (MANIFEST, WEIGHTS):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_mapper_digest_names_the_maps(make_mapper, tmp_path):
    base = make_mapper()
    changed = [
        base,
        replace(base, keys=base.keys[::-1]),
        replace(base, source=replace(base.source, weights_digest="x")),
        replace(base, target=replace(base.target, weights_digest="x")),
        replace(base, head_assignment=(1, 1)),
        make_mapper(seed=1),
    ]
    digests = [
        save(tmp_path / str(n), Artifact(mapper)).mapper.digest for n, mapper in enumerate(changed)
    ]
    assert len(set(digests)) == len(changed)


def test_one_flipped_bit_anywhere_in_the_manifest_is_refused(folder):
    file = folder / MANIFEST
    intact = file.read_bytes()
    for position in range(len(intact)):
        file.write_bytes(flipped(intact, position))
        with pytest.raises(ArtifactError):
            load(folder)
    file.write_bytes(intact)
    load(folder)


def test_one_flipped_bit_in_the_weights_is_refused(folder):
    file = folder / WEIGHTS
    intact = file.read_bytes()
    for position in [*range(64), *range(0, len(intact), 37), len(intact) - 1]:
        file.write_bytes(flipped(intact, position))
        with pytest.raises(ArtifactError, match=r"mapper\.safetensors: does not match the digest"):
            load(folder)


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS])
@pytest.mark.parametrize("change", ["empty", "short", "long", "missing", "folder"])
def test_a_damaged_file_is_named_with_its_remedy(folder, name, change):
    file = folder / name
    raw = file.read_bytes()
    file.unlink()
    if change == "folder":
        file.mkdir()
    elif change != "missing":
        file.write_bytes({"empty": b"", "short": raw[:-1], "long": raw + b"\n"}[change])
    with pytest.raises(ArtifactError, match=rf"{name}: .*; fit the pair again") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"none/manifest\.json: No such file or directory"):
        load(tmp_path / "none")


def test_values_in_another_order_or_form_are_refused(folder):
    """Byte for byte: the same JSON written otherwise is not what was sealed."""
    file = folder / MANIFEST
    manifest = json.loads(file.read_text())
    for text in (json.dumps(manifest), json.dumps(manifest, indent=1) + "\n\n"):
        file.write_text(text)
        with pytest.raises(ArtifactError, match="does not match its own digest"):
            load(folder)


def test_the_gate_record_is_inside_the_seal(folder):
    file = folder / MANIFEST
    file.write_text(file.read_text().replace('"rejected"', '"accepted"'))
    with pytest.raises(ArtifactError, match="does not match its own digest"):
        load(folder)


def test_recording_a_check_changes_the_seal_and_not_the_mapper(folder):
    before = load(folder)
    digest = json.loads((folder / MANIFEST).read_text())["digest"]
    weights = (folder / WEIGHTS).read_bytes()
    record_gate(folder, "bfloat16", {"verdict": "accepted"})
    record_gate(folder, "float32", {"verdict": "accepted", "passages": 4})
    after = load(folder)
    same(after.mapper, before.mapper)
    assert after.gate == {
        "bfloat16": {"verdict": "accepted"},
        "float32": {"verdict": "accepted", "passages": 4},
    }
    assert after.fit == before.fit
    assert json.loads((folder / MANIFEST).read_text())["digest"] != digest
    assert (folder / WEIGHTS).read_bytes() == weights


RESEALED = {
    "another format": {"format": 2},
    "no format": {"format": None},
    "no mapper": {"mapper": {}},
    "a mapper that is no object": {"mapper": 7},
    "another mapper digest": {"mapper_digest": "0" * 32},
}


@pytest.mark.parametrize("change", RESEALED)
def test_a_manifest_sealed_by_somebody_else_is_still_checked(folder, change):
    file = folder / MANIFEST
    body = {**json.loads(file.read_text()), **RESEALED[change]}
    del body["digest"]
    file.write_text(module._canonical({**body, "digest": module._digest(body)}))
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        load(folder)


@pytest.mark.parametrize("field", ["key_layers", "method", "head_assignment", "source"])
def test_maps_that_do_not_follow_from_the_models_are_refused(folder, field):
    file = folder / MANIFEST
    body = json.loads(file.read_text())
    del body["digest"]
    body["mapper"][field] = {
        "key_layers": [[0, 7], [0, 2]],
        "method": "full-head",
        "head_assignment": [0, 2],
        "source": {**body["mapper"]["source"], "key_dim": 4},
    }[field]
    body["mapper_digest"] = module._digest(body["mapper"])[:32]
    file.write_text(module._canonical({**body, "digest": module._digest(body)}))
    with pytest.raises(ArtifactError):
        load(folder)


def test_garbage_is_refused(folder):
    chance = random.Random(1)
    for content in (b"null", b"[]", b'"x"', b"{}", b"[" * 100_000, chance.randbytes(500)):
        (folder / MANIFEST).write_bytes(content)
        with pytest.raises(ArtifactError, match="does not match its own digest"):
            load(folder)


def test_a_record_that_cannot_be_written_leaves_the_old_one(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "write_text", full)
    with pytest.raises(ArtifactError, match=r"manifest\.json: cannot be written \(No space left"):
        record_gate(folder, "float32", {"verdict": "accepted"})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (4, 4, (0, 1, 2, 3)),
        (8, 2, (0, 4)),
        (2, 8, (0, 0, 0, 0, 1, 1, 1, 1)),
        (3, 2, (0, 1)),
        (2, 3, (0, 0, 1)),
    ],
)
def test_heads_are_assigned_by_their_relative_place(source, target, expected):
    assert assign_heads(source, target) == expected


def flipped(raw, position):
    return raw[:position] + bytes([raw[position] ^ 1 << position % 8]) + raw[position + 1 :]
