"""The store's rules, one by one: hits, laws, leases, refusals, reasons."""

import numpy as np
import pytest

from forebay.kvstore.chain import Chain
from forebay.kvstore.config import StoreConfig
from forebay.kvstore.layout import Layout, make_layout
from forebay.kvstore.store import Lease, Refusal, Store
from tests.kvstore_twin import Owner, tiny_layout

K3 = make_layout(
    block_tokens=512,
    global_layers=(3, 7),
    kda_layers=(0, 1, 2, 4, 5, 6),
    latent_row_bytes=1152,
    index_row_bytes=132,
    state_bytes=6_512_640,
)

OWNER = Owner()


def make_store(
    layout: Layout = K3, pages: int = 200, host_pages: int = 0, policy: str = "prompt_end+junction"
) -> Store:
    config = StoreConfig(
        device_bytes=pages * layout.page_bytes,
        host_bytes=host_pages * layout.page_bytes,
        run_dir="unused",
        checkpoints=policy,
    )
    return Store(layout, config, "model")


def start(store: Store, ids: list[int], holder: Owner = OWNER) -> Lease:
    lease = store.open(holder, store.chain(ids), n_prompt=len(ids), capacity_tokens=len(ids))
    assert isinstance(lease, Lease)
    lease.ready()
    return lease


def serve(store: Store, ids: list[int]) -> int:
    """One whole request. Returns its hit."""
    with start(store, ids) as lease:
        for at in lease.checkpoints:
            lease.commit(at)
            lease.checkpoint(at)
            lease.ready()
        lease.commit(len(ids))
        store.check()
        return lease.hit_tokens


def hit(store: Store, ids: list[int]) -> int:
    return store.lookup(store.chain(ids), len(ids)).tokens


def prompt(n_tokens: int, tail_from: int | None = None) -> list[int]:
    """0, 1, 2, ... and from `tail_from` on other tokens."""
    cut = n_tokens if tail_from is None else tail_from
    return [*range(cut), *range(-n_tokens, cut - 2 * n_tokens, -1)][:n_tokens]


def test_the_published_example() -> None:
    """6144-token pages, 512-token blocks, a prefix of 2800 tokens, a checkpoint at 2560: it resumes at exactly 2560."""
    assert K3.paged[0].page_tokens == 6144
    store = make_store()
    assert serve(store, prompt(2800)) == 0
    other = prompt(5000, tail_from=2800)
    with start(store, other) as lease:
        assert lease.hit.run_tokens == 2560
        assert lease.hit_tokens == 2560
        assert lease.hit.miss == "never_stored"
        assert lease.checkpoints == (4608,), "nothing before the hit is computed or kept again"


def test_a_prompt_entirely_cached_still_computes_its_last_token() -> None:
    store = make_store()
    serve(store, prompt(2560))
    assert hit(store, prompt(2560)) == 2048
    assert hit(store, prompt(2561)) == 2560
    serve(store, prompt(512))
    assert hit(store, prompt(512)) == 0


def test_no_prompt_is_too_short() -> None:
    store = make_store()
    assert serve(store, prompt(1)) == 0
    assert serve(store, prompt(511)) == 0


def test_each_turn_extends_the_hit() -> None:
    store = make_store()
    hits = [serve(store, prompt(n_tokens)) for n_tokens in (1000, 1800, 7000, 14000)]
    assert hits == [0, 512, 1536, 6656]


def test_where_two_prefixes_part_a_checkpoint_is_kept() -> None:
    store = make_store()
    serve(store, prompt(9000))
    second = prompt(9000, tail_from=3000)
    assert store.lookup(store.chain(second), 9000).miss == "no_checkpoint"
    with start(store, second) as lease:
        assert (lease.hit_tokens, lease.hit.run_tokens) == (0, 2560)
        assert lease.checkpoints == (2560, 8704)
    serve(store, second)
    assert hit(store, prompt(8000, tail_from=2900)) == 2560


def test_the_page_in_which_the_hit_ends_is_copied() -> None:
    """Whole pages are shared; the writer's own pages are nobody else's."""
    store = make_store()
    serve(store, prompt(7000))
    a, b = start(store, prompt(8000)), start(store, prompt(9000, tail_from=7000))
    latent_a, latent_b = a.pages["latent"], b.pages["latent"]
    assert a.hit_tokens == b.hit_tokens == 6656
    assert (latent_a[:, 0] == latent_b[:, 0]).all()
    assert not np.isin(latent_a[:, 1], latent_b).any()
    assert not np.isin(a.pages["kda1"], b.pages["kda1"]).any()
    store.check()


def test_nothing_matches_before_its_moves_were_carried_out() -> None:
    store = make_store()
    lease = start(store, prompt(3000))
    lease.commit(2560)
    lease.checkpoint(2560)
    assert hit(store, prompt(3000)) == 0, "the copy of the state is still to be made"
    with pytest.raises(AssertionError):
        lease.commit(3000)
    lease.ready()
    assert hit(store, prompt(3000)) == 2560


def test_rows_match_only_once_committed() -> None:
    store = make_store()
    lease = start(store, prompt(3000))
    lease.checkpoint(1024)
    lease.ready()
    assert hit(store, prompt(3000)) == 0
    lease.commit(1023)
    assert hit(store, prompt(3000)) == 0
    lease.commit(1024)
    assert hit(store, prompt(3000)) == 1024


def test_a_lease_closed_before_its_moves_leaves_nothing_behind() -> None:
    store = make_store()
    serve(store, prompt(7000))
    before = store.stats().tiers
    lease = store.open(OWNER, store.chain(prompt(9000)), n_prompt=9000, capacity_tokens=9000)
    assert isinstance(lease, Lease)
    lease.close()
    lease.close()
    store.check()
    assert store.stats().tiers == before


def test_the_same_block_computed_twice_is_kept_once() -> None:
    store = make_store()
    a, b = start(store, prompt(6144)), start(store, prompt(6144))
    for lease in (a, b):
        lease.commit(6144)
    a.close()
    cached = store.stats().tiers[0].cached_pages
    b.close()
    store.check()
    assert store.stats().tiers[0].cached_pages == cached == 4


def test_a_turn_replaces_the_partly_filled_page_it_copied() -> None:
    store = make_store()
    serve(store, prompt(1000))
    serve(store, prompt(3000))
    tier = store.stats().tiers[0]
    assert tier.cached_pages == 2 + 2 + 2 * K3.state_pages


def test_dropping_one_groups_state_drops_its_siblings_in_every_tier() -> None:
    layout = tiny_layout()
    store = make_store(layout, pages=16, host_pages=32)
    ids = list(range(9))
    serve(store, ids)
    serve(store, [7] * 30)  # pushes the first to the host
    chain = store.chain(ids)
    assert store.lookup(chain, 9).state_tier == "host"
    store.drop_checkpoint(chain.keys[1])
    store.check()
    found = store.lookup(chain, 9)
    assert (found.tokens, found.run_tokens, found.miss) == (0, 8, "sibling_missing")


@pytest.mark.parametrize("group", ["latent", "index"])
def test_rows_are_a_hit_only_where_every_group_has_them(group: str) -> None:
    layout = tiny_layout()
    store = make_store(layout, policy="prompt_end+interval:24")
    ids = list(range(49))
    serve(store, ids)
    with start(store, ids) as lease:
        second = lease.pages[group][:, 1]
        page_tokens = {"latent": 12, "index": 24}[group]
    store.drop_corrupt("device", second)
    found = store.lookup(store.chain(ids), 49)
    assert (found.tokens, found.run_tokens, found.miss) == (page_tokens // 24 * 24, page_tokens, "corrupt")
    store.check()


def test_other_weights_and_other_tenants_are_never_found() -> None:
    store = make_store()
    serve(store, prompt(3000))
    foreign = Chain(fingerprint="other", keys=store.chain(prompt(3000)).keys)
    assert store.lookup(foreign, 3000).miss == "other_model"
    assert store.lookup(foreign, 3000).tokens == 0
    assert store.lookup(store.chain(prompt(3000), salt="tenant"), 3000).miss == "never_stored"


def test_a_decode_lease_looks_up_nothing_and_commits_nothing() -> None:
    store = make_store()
    serve(store, prompt(3000))
    lease = store.open(OWNER, None, n_prompt=3000, capacity_tokens=3001)
    assert isinstance(lease, Lease)
    lease.ready()
    lease.commit(3000)
    assert (lease.hit_tokens, lease.hit.miss, lease.checkpoints) == (0, None, ())
    assert store.stats().looked_up_tokens == 3000


def test_a_lease_grows() -> None:
    store = make_store()
    lease = start(store, prompt(100))
    before = lease.pages["latent"]
    assert lease.grow(6144) is None
    assert lease.pages["latent"].shape == (2, 1)
    assert lease.grow(6145) is None
    assert lease.pages["latent"].shape == (2, 2)
    assert (lease.pages["latent"][:, :1] == before).all()
    assert lease.grow(10) is None
    assert lease.capacity_tokens == 6145
    store.check()


def test_refusals_say_how_many_pages_and_change_nothing() -> None:
    store = make_store(pages=12)
    lease = start(store, prompt(100))  # 2 + 2 rows, 6 states
    refused = store.open(OWNER, store.chain(prompt(100)), n_prompt=100, capacity_tokens=100)
    assert refused == Refusal(kind="full", needed_pages=10, available_pages=2)
    never = store.open(OWNER, store.chain(prompt(13000)), n_prompt=13000, capacity_tokens=13000)
    assert isinstance(never, Refusal)
    assert never.kind == "too_large"
    assert lease.grow(6145) is None
    assert lease.grow(12289) == Refusal(kind="too_large", needed_pages=2, available_pages=0)
    store.check()
    assert store.stats().refusals == {"full": 1, "too_large": 1}


def test_a_hit_that_leaves_no_room_gives_way_to_a_cold_start() -> None:
    """The pool holds the request, but not the request and the state that it would resume from."""
    store = make_store(pages=16)
    serve(store, prompt(600))
    assert hit(store, prompt(700)) == 512
    with start(store, prompt(700)) as lease:
        assert (lease.hit_tokens, lease.hit.miss) == (0, "evicted")
    store.check()


def test_eviction_spares_what_is_pinned() -> None:
    store = make_store(pages=20)
    serve(store, prompt(600))
    with start(store, prompt(700)) as lease:
        refused = store.open(OWNER, store.chain([5] * 7000), n_prompt=7000, capacity_tokens=7000)
        assert isinstance(refused, Refusal)
        assert lease.hit_tokens == 512
        store.check()


def test_a_probe_is_not_a_use() -> None:
    """The one looked up but never used goes first, though it was looked up last."""
    layout = tiny_layout()
    store = make_store(layout, pages=21)  # 2 + 2 rows and 4 states each: two prompts kept, no third
    old, new = [1] * 9, [2] * 9
    serve(store, old)
    serve(store, new)
    for _ in range(5):
        assert hit(store, old) == 8
    serve(store, [3] * 9)
    assert (hit(store, old), hit(store, new)) == (0, 8)
    assert store.lookup(store.chain(old), 9).miss == "evicted"


def test_a_use_is() -> None:
    layout = tiny_layout()
    store = make_store(layout, pages=25)
    old, new = [1] * 9, [2] * 9
    serve(store, old)
    serve(store, new)
    serve(store, old)
    serve(store, [3] * 9)
    assert (hit(store, old), hit(store, new)) == (8, 0)


def test_rows_that_no_checkpoint_needs_go_first() -> None:
    layout = tiny_layout()
    store = make_store(layout, pages=28)
    useful, tail = [1] * 9, [2] * 30
    serve(store, useful)
    with start(store, tail) as lease:  # newer, but nothing can resume in it
        lease.commit(28)
    with start(store, [3] * 30):
        assert hit(store, useful) == 8
        assert store.lookup(store.chain(tail), 30).run_tokens < 28
    store.check()


def test_under_pressure_a_chain_is_cut_from_its_end_before_it_is_lost() -> None:
    """Checkpoints at 12, 24, 36 and 48: what is left can be resumed, and is ever less."""
    store = make_store(tiny_layout(), pages=38, policy="prompt_end+interval:12")
    ids = list(range(49))
    serve(store, ids)
    hits = []
    for n_tokens in (40, 60, 80, 100, 120):
        with start(store, [9] * n_tokens):
            hits.append(hit(store, ids))
    assert 0 < hits[2] < hits[0] < 48
    assert hits == sorted(hits, reverse=True)
    assert hits[-1] == 0
    store.check()


def test_a_holders_leases_end_with_it() -> None:
    store = make_store()
    old, new, other = Owner("ingress", 1), Owner("ingress", 2), Owner("other", 1)
    leases = [start(store, prompt(100), holder) for holder in (old, old, new, other)]
    assert store.release_holder(Owner("ingress", 1)) == 2
    assert [lease.closed for lease in leases] == [True, True, False, False]
    assert store.release_holder(Owner("ingress", 2)) == 1
    assert store.release_holder(Owner("ingress", 9)) == 0
    store.check()
    assert store.stats().leases == 1


def test_a_lease_is_given_back_on_an_error() -> None:
    store = make_store()
    with pytest.raises(RuntimeError), start(store, prompt(100)):
        raise RuntimeError
    assert store.stats().tiers[0].leased_pages == 0


def test_counts() -> None:
    store = make_store()
    serve(store, prompt(2800))
    serve(store, prompt(5000, tail_from=2800))
    stats = store.stats()
    assert stats.looked_up_tokens == 7800
    assert stats.hit_tokens == {"device": 2560}
    assert stats.misses == {"never_stored": 2}
