"""What the adapter relies on of SGLang itself, seen through a backend that records every call.

The engines here are also those that the tier itself is tried on in further layouts of the host
pool: `test_tier` has ``page_first_direct``, `test_plugin_alone` SGLang's default ``page_first``.
"""

import json

import pytest
from sglang_cpu.engine import TierEngine
from sglang_cpu.server import eventually

PAGE = 16
PROMPT = [1 + 7 * i % 2000 for i in range(23 * PAGE + 5)]
OTHER = PROMPT[::-1]
LONGER = PROMPT + [2 + 11 * i % 2000 for i in range(13 * PAGE)]


class Recorder:
    """A server on the recording backend, and the calls that its backend wrote down."""

    def __init__(self, start_server, folder, **settings):
        self.file = folder / "calls.jsonl"
        self.file.touch()
        self.extra_config = {
            "backend_name": "recording",
            "module_path": "recording_storage",
            "class_name": "RecordingStorage",
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            "prefetch_threshold": PAGE,
            "record": str(self.file),
        }
        settings["arguments"] = ["--enable-metrics"]
        self.server = start_server("small", storage=self.extra_config, page_size=PAGE, **settings)

    def calls(self, *names):
        lines = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [line for line in lines if not names or line["call"] in names]

    def stored(self):
        return {key for call in self.calls("set") for key in call["keys"]}

    def generate(self, prompt, **request):
        """One answer; returns when the pages of the prompt are stored."""
        before = len(self.calls("set"))
        reply = self.server.generate(prompt, **request)
        if not reply.cached:
            eventually(lambda: len(self.calls("set")) > before, 30)
        return reply


@pytest.fixture(scope="module", params=["layer_first", "page_head"])
def recorder(request, start_server, tmp_path_factory):
    """One server at a time."""
    recorder = Recorder(start_server, tmp_path_factory.mktemp("calls"), layout=request.param)
    yield recorder
    recorder.server.stop()


def test_a_flushed_prompt_is_served_from_storage_and_answered_alike(recorder):
    own = recorder.generate(PROMPT)
    recorder.server.flush_cache()
    again = recorder.generate(PROMPT)
    assert again.from_storage == 23 * PAGE
    assert again.cached["storage_backend"] == "RecordingStorage"
    assert again.token_ids == own.token_ids


def test_prefix_keys_tell_positions_on_backup_and_not_on_prefetch(recorder):
    recorder.generate(PROMPT)
    recorder.generate(LONGER)
    eventually(lambda: len(recorder.stored()) >= 36, 30)
    first, second = [call for call in recorder.calls("set") if len(call["keys"]) > 1][:2]
    assert (len(first["keys"]), first["prefix"]) == (23, [])
    assert (len(second["keys"]), second["prefix"]) == (13, first["keys"])
    assert {call["prefix"] is None for call in recorder.calls("exists")} == {True}

    recorder.server.flush_cache()
    recorder.generate(PROMPT)
    reads = len(recorder.calls("get"))
    recorder.generate(LONGER)
    read = recorder.calls("get")[reads:]
    assert [call["keys"] for call in read] == [second["keys"]]
    assert read[0]["prefix"] == []  # though 23 pages precede


def test_tenants_never_share_a_page_hash(recorder):
    recorder.generate(PROMPT, extra_key="one")
    own = recorder.calls("exists")[-1]["keys"]
    recorder.generate(PROMPT, extra_key="two")
    other = recorder.calls("exists")[-1]["keys"]
    assert len(own) == len(other) == 23
    assert not set(own) & set(other)


def test_storage_can_be_detached_cleared_and_attached_again(recorder):
    server = recorder.server
    server.detach_storage()
    assert recorder.calls()[-1]["call"] == "close"
    server.attach_storage(recorder.extra_config)
    server.clear_storage()
    assert [call["call"] for call in recorder.calls()[-4:]] == ["init", "pool", "facts", "clear"]


def test_the_engine_describes_itself(recorder):
    call = recorder.calls("facts")[0]
    facts = call["facts"]
    assert call["refusals"] == []
    assert facts["model_path"] == str(recorder.server.launch.model)
    assert facts["kv_dtype"] == facts["compute_dtype"] == "bfloat16"
    assert (facts["layers"], facts["head_range"], facts["page_size"]) == (6, [0, 4], PAGE)
    assert facts["layout"] == recorder.server.launch.layout
    assert facts["hash_scheme"] == "sglang-sha256"


def test_new_weights_keep_the_storage_and_are_told_by_their_version(recorder):
    """The trap behind `weights_in_use`: SGLang serves the old weights' pages to the new ones."""
    server = recorder.server
    recorder.generate(OTHER)
    server.flush_cache()
    update = {"model_path": str(server.launch.model), "weight_version": "second"}
    server.call("POST", "/update_weights_from_disk", update)
    assert recorder.generate(OTHER).from_storage == 23 * PAGE
    server.detach_storage()
    server.attach_storage(recorder.extra_config)
    versions = [call["facts"]["weight_version"] for call in recorder.calls("facts")]
    assert versions[-2:] == ["default", "second"]


def test_the_tier_answers_alike_in_this_layout(recorder, manifest, texts, tmp_path):
    engine = TierEngine(recorder.server)
    engine.attach(manifest(tmp_path))
    engine.assert_serves_its_own_pages(texts(20))
    assert engine.errors() == 0
    recorder.server.detach_storage()
