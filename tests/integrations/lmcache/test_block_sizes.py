import torch

from kvxfer_lmcache.block_sizes import BlockSizes, reported
from kvxfer_lmcache.objects import Origin


def origin(shape=(3, 64, 256), model="m", ranks=1):
    return Origin(model, 0, ranks, 0, 32, (shape,), (torch.float32,))


def test_what_lmcaches_modules_report():
    engine_driven = {
        "registered_non_cuda_instance_ids": [7],
        "non_cuda_context_meta": {
            "7": {"model_name": "m", "world_size": 2, "block_size": 32, "use_mla": False}
        },
    }
    group = {"tokens_per_block": 64, "slots_per_block": 64}
    lmcache_driven = {
        "cache_context_meta": {
            "8": {"model_name": "n", "world_size": 1, "kv_cache_layout": {"kernel_groups": [group]}}
        }
    }
    assert reported(engine_driven) == [("m", 2, 32)]
    assert reported(lmcache_driven) == [("n", 1, 64)]
    assert reported({}) == []


def test_sizes_are_those_of_one_model_and_worker_count_and_never_forgotten():
    sizes = BlockSizes()
    assert sizes.of(origin()) == ()
    sizes.ask(lambda: [("m", 1, 32), ("m", 2, 64), ("n", 1, 16)])
    assert sizes.of(origin()) == (32,)
    assert sizes.of(origin(ranks=2)) == (64,)
    sizes.ask(lambda: [("m", 1, 64)])
    assert sizes.of(origin()) == (32, 64)
    assert sizes.of(origin(shape=(1, 3, 64, 256))) == (32, 64)


def test_objects_whose_bytes_do_not_depend_on_it_have_none():
    sizes = BlockSizes()
    sizes.ask(lambda: [("m", 1, 32)])
    assert sizes.of(origin(shape=(2, 3, 64, 128))) == ()


def test_a_server_that_does_not_answer_is_one_that_does_not_know():
    sizes = BlockSizes()
    sizes.ask(lambda: reported({"non_cuda_context_meta": {"1": {}}}))
    assert sizes.of(origin()) == ()
