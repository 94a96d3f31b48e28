"""`kvxfer doctor` names the cause, and nothing else, in set-ups that are broken on purpose."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from kvstore_xfer.blocks.chain import HASH_SCHEME, chain_hashes
from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.cli.doctor import examine
from kvstore_xfer.cli.main import main
from kvstore_xfer.doctor.findings import Level
from kvstore_xfer.gate.record import REJECTED
from kvstore_xfer.mapper.artifact import WEIGHTS_FILE, record_gate
from kvstore_xfer.models.description import describe
from kvstore_xfer.store.url import open_store
from kvstore_xfer.tier.open import Engine, announce, open_tier
from kvstore_xfer.tier.watch import Watcher

BLOCK = 16
TOKENS = list(range(64))


class Setup:
    """Both models' folders, the mapper and the manifest, and both engines that ran over the store.

    Everything can be changed before `run`, which returns the causes of the problems found.
    """

    def __init__(self, pair, folder):
        self.folder, self.pair = folder, pair
        self.models = {
            "small": folder / "small",
            "large": folder / "large",
        }
        for name, model in (("small", pair.source), ("large", pair.target)):
            shutil.copytree(model.description.name, self.models[name])
        shutil.copytree(pair.folder, folder / "mapper")
        self.manifest = {
            "family": "doctor",
            "store": "local:store?min_free=0",
            "models": {name: {"path": str(path)} for name, path in self.models.items()},
            "pairs": [{"source": "small", "target": "large", "mapper": "mapper"}],
        }
        self.engines = {"small": {}, "large": {}}
        self.salts = {"small": "", "large": ""}
        self.placed = True
        self.urls = ()

    @property
    def mapper(self):
        return self.folder / "mapper"

    @property
    def file(self):
        return self.folder / "family.yaml"

    def engine(self, name):
        fields = {"kv_dtype": "float32", "block_tokens": BLOCK, "hash_scheme": HASH_SCHEME}
        return Engine(describe(self.models[name]), **{**fields, **self.engines[name]})

    def write_manifest(self):
        self.file.write_text(yaml.safe_dump(self.manifest))

    def run_engines(self):
        """Each engine announces itself and stores one prompt."""
        self.write_manifest()
        for name in self.models:
            tier = open_tier(self.file, name, self.engine(name))
            hashes = chain_hashes(TOKENS, tier.identity.block_tokens, self.salts[name])
            pages = [KvPage.empty(tier.shape) for _ in hashes]
            for page in pages:
                page.keys.zero_()
                page.values.zero_()
            tier.write(hashes, pages, 0 if self.placed else None)
            tier.close()

    def problems(self):
        self.write_manifest()
        return [f for f in examine(self.file, self.urls) if f.level is Level.PROBLEM]


@pytest.fixture
def setup(family_mapper, tmp_path):
    return Setup(family_mapper, tmp_path)


def test_a_sound_set_up_has_no_problem(setup, capsys):
    setup.run_engines()
    assert setup.problems() == []
    assert main(["doctor", str(setup.file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the blocks of both models can match" in shown
    assert "reachable, writable" in shown


@pytest.mark.parametrize("url", ["local:store?min_free=0", "local:store?min_free=0&more=second"])
def test_a_folder_that_is_gone_stays_gone(setup, capsys, url):
    setup.manifest["store"] = url
    setup.run_engines()
    shutil.rmtree(setup.folder / "store")
    assert main(["doctor", str(setup.file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"note store: {setup.folder}/store is not there" in shown
    assert not (setup.folder / "store").exists()


def test_beside_a_folder_that_is_gone_the_rest_is_checked(setup):
    setup.manifest["store"] = ["local:gone", "valkey://127.0.0.1:1"]
    (found,) = setup.problems()
    assert (found.cause, "127.0.0.1:1" in found.text) == ("store", True)
    setup.manifest["store"] = ["local:gone", "local:there?min_free=0"]
    (setup.folder / "there").mkdir()
    assert setup.problems() == []
    assert not (setup.folder / "gone").exists()


def test_the_report_names_the_remedy(setup, capsys):
    shutil.rmtree(setup.mapper)
    setup.write_manifest()
    assert main(["doctor", str(setup.file)]) == 1
    shown = capsys.readouterr().out
    assert "PROBLEM" in shown
    assert "remedy: kvxfer fit" in shown


def unreadable_manifest(setup):
    setup.manifest["pairs"][0]["sourse"] = "small"


def missing_model(setup):
    setup.run_engines()
    setup.manifest["models"]["large"]["path"] = "nowhere"


def unsupported_model(setup):
    config = json.loads((setup.models["large"] / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    (setup.models["large"] / "config.json").write_text(json.dumps(config))


def store_that_is_a_file(setup):
    (setup.folder / "store").write_text("not a folder")


def store_of_an_unknown_scheme(setup):
    setup.manifest["store"] = "carrier-pigeon://loft"


def missing_mapper(setup):
    setup.run_engines()
    shutil.rmtree(setup.mapper)


def damaged_mapper(setup):
    setup.run_engines()
    data = bytearray((setup.mapper / WEIGHTS_FILE).read_bytes())
    data[-1] ^= 1
    (setup.mapper / WEIGHTS_FILE).write_bytes(data)


def mapper_of_other_models(setup):
    setup.run_engines()
    setup.manifest["pairs"][0] |= {"source": "large", "target": "small"}


def wrong_direction(setup):
    setup.run_engines()
    setup.manifest["pairs"][0]["direction"] = "down"


def disabled_pair(setup):
    setup.run_engines()
    setup.manifest["pairs"][0]["policy"] = {"enabled": False}


def other_tokenizer(setup):
    path = setup.models["small"] / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))


def unchecked_mapper(setup):
    from kvstore_xfer.mapper.artifact import load, save

    save(setup.mapper, replace(load(setup.mapper), gate={}))
    setup.run_engines()


def rejected_mapper(setup):
    record = replace(setup.pair.record, verdict=REJECTED, reason="top1: too low")
    record_gate(setup.mapper, "float32", record.to_json())
    setup.run_engines()


def checked_with_more_held_back(setup):
    record = replace(setup.pair.record, hold_back_tokens=64)
    record_gate(setup.mapper, "float32", record.to_json())
    setup.run_engines()


def engines_in_another_dtype(setup):
    for fields in setup.engines.values():
        fields["kv_dtype"] = "bfloat16"
    setup.run_engines()


def engines_of_two_dtypes(setup):
    setup.engines["small"]["kv_dtype"] = "bfloat16"
    setup.run_engines()


def other_page_size(setup):
    setup.engines["small"]["block_tokens"] = 32
    setup.run_engines()


def other_hash_scheme(setup):
    setup.engines["large"]["hash_scheme"] = f"{HASH_SCHEME}-bigram"
    setup.run_engines()


def private_engine(setup):
    setup.engines["small"]["variant"] = "private=0123"
    setup.run_engines()


def blocks_without_position(setup):
    setup.placed = False
    setup.run_engines()


def two_salts(setup):
    setup.salts["large"] = "tenant"
    setup.run_engines()


def engine_with_other_weights(setup):
    setup.run_engines()
    from safetensors.torch import load_file, save_file

    other = next(setup.models["large"].glob("*.safetensors"))
    tensors = load_file(other)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 1
    with open_store("local:store?min_free=0", base=setup.folder) as store:
        keys = [row.key for row in store.scan() if "/record/" in row.key]
        store.delete(keys)
        backup = other.read_bytes()
        save_file(tensors, other, {"format": "pt"})
        announce(store, setup.engine("large"))
        other.write_bytes(backup)
        announce(store, setup.engine("small"))


def switched_off_pair(setup):
    from kvstore_xfer.gate.relation import Relation
    from kvstore_xfer.gate.watch import WatchRecord, save_watch

    relation = Relation(((1.0, 0.0),), (0.1,), 0.9)
    artifact = setup.pair.artifact
    record = WatchRecord(artifact.mapper.digest, relation, torch.zeros(9, 4, 16, 32).half())
    save_watch(setup.mapper, "float32", record)
    setup.run_engines()
    tier = open_tier(setup.file, "large", setup.engine("large"))
    assert isinstance(tier._watcher, Watcher)
    tier._watcher._record_off(tier.pairs[0], "a test")
    tier.close()


BROKEN = {
    unreadable_manifest: "manifest",
    missing_model: "model",
    unsupported_model: "unsupported_model",
    store_that_is_a_file: "store",
    store_of_an_unknown_scheme: "store",
    missing_mapper: "mapper",
    damaged_mapper: "mapper",
    mapper_of_other_models: "fingerprint",
    wrong_direction: "direction",
    disabled_pair: "disabled",
    other_tokenizer: "tokenizer",
    unchecked_mapper: "gate_missing",
    rejected_mapper: "gate_rejected",
    checked_with_more_held_back: "gate_rejected",
    engines_in_another_dtype: "gate_dtype",
    engines_of_two_dtypes: "kv_dtype",
    other_page_size: "page_size",
    other_hash_scheme: "hash_scheme",
    private_engine: "variant",
    blocks_without_position: "position",
    two_salts: "salt",
    engine_with_other_weights: "identity",
    switched_off_pair: "retention",
}


@pytest.mark.parametrize("breaking", BROKEN, ids=lambda breaking: breaking.__name__)
def test_doctor_names_the_cause_and_nothing_else(breaking, setup):
    breaking(setup)
    found = setup.problems()
    assert [problem.cause for problem in found] == [BROKEN[breaking]], found
    assert found[0].remedy
    assert "\n" not in found[0].text + found[0].remedy


@pytest.fixture
def endpoint():
    """``endpoint(name, value, **labels)``: a metrics endpoint with one gauge."""
    stops = []

    def start(name, value, **labels):
        registry = CollectorRegistry()
        Gauge(name, "", list(labels), registry=registry).labels(**labels).set(value)
        server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        stops.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in stops:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("sample", "cause"),
    [
        (("kvxfer_conversion_refused", 1, {"target": "large", "reason": "lora"}), "refused_lora"),
        (("kvxfer_store_up", 0, {"store": "valkey"}), "store_down"),
        (("kvxfer_errors_total", 3, {"target": "large", "call": "read"}), "errors"),
    ],
)
def test_a_running_engine_is_asked_what_ails_it(sample, cause, setup, endpoint):
    name, value, labels = sample
    setup.run_engines()
    setup.urls = [endpoint(name, value, **labels)]
    assert [problem.cause for problem in setup.problems()] == [cause]


def test_an_engine_without_our_metrics_is_a_problem(setup):
    setup.run_engines()
    setup.urls = ["http://127.0.0.1:1"]
    assert [problem.cause for problem in setup.problems()] == ["no_metrics"]
