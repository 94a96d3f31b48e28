from hypothesis import given
from hypothesis import strategies as st

from kvxfer_lmcache.positions import Positions


def chain(*parts):
    """Stand-ins for chunk hashes: each names all chunks before it."""
    return ["/".join(map(str, parts[: end + 1])).encode() for end in range(len(parts))]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_every_chunk_of_every_prompt_keeps_its_place(prompts):
    positions = Positions()
    for prompt in prompts:
        positions.learn(chain(*prompt))
    assert positions.conflicts == 0
    for prompt in prompts:
        assert [positions.of(chunk) for chunk in chain(*prompt)] == list(range(len(prompt)))


def test_an_unknown_chunk_has_no_place():
    assert Positions().of(b"x") is None


def test_a_part_of_a_prompt_contradicts_the_whole():
    positions = Positions()
    whole = chain(1, 2, 3)
    positions.learn(whole)
    positions.learn(whole[1:])
    assert positions.conflicts
    assert positions.of(whole[0]) == 0
    assert positions.of(whole[1]) is None
    positions.learn(whole)
    assert positions.of(whole[1]) is None  # for good


def test_the_same_place_behind_another_chunk_is_a_contradiction():
    positions = Positions()
    positions.learn([b"a", b"b"])
    positions.learn([b"c", b"b"])
    assert positions.of(b"b") is None


def test_single_chunks_may_be_learned_where_they_stand():
    positions = Positions()
    positions.learn([b"b"], first=1)
    positions.learn([b"a", b"b"])
    assert positions.of(b"b") == 1
    assert positions.conflicts == 0


def test_the_oldest_are_forgotten():
    positions = Positions(capacity=2)
    positions.learn([b"a", b"b", b"c"])
    assert [positions.of(chunk) for chunk in (b"a", b"b", b"c")] == [None, 1, 2]
