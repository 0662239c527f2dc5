"""kvstore: what may be reused and where it lies. Pages, states, checkpoints, tiers.

In reading order:

    layout     how tokens and states lie in equal pages      chain, chains   block keys
    policy     where states are kept, what a unit is worth   config     sizes, places, policies by name
    pool       free + leased + cached == total               index      what one tier holds, and under which keys
    lookup     the two-phase look-up                         eviction   what goes first
    tiers      device, host, SSD, pool, and room in them     moves      what must happen to bytes, as values
    pending    what matches only after its moves             leased_pages   the page tables of one request
    lease      one request's pages, from hit to close        store      all of it: open, look up, check, stats
    totals     what is counted

    record     what one record on the SSD looks like         segments   where records lie, under a quota of bytes
    pool_object     what one object of the cluster-wide pool looks like, and its name
    pool_names, pool_find   what to ask the pool about a prompt        pool_address   where its master is

The index alone, driven by a recorded load (`forebay bench index`):

    reuse      how soon what was used is used again          forest     a load as paths of long nodes
    uses       what was last used together                   index_cache     names without bytes, and their eviction
    index_states    the same with checkpoints charged        index_replay    hit by hit: LRU, ours, optimal

All these know no clock, no I/O and no torch. Around them stand the bytes:

    device     the pool as tensors                           extents, arena   shared memory in a run folder
    shared_table   a directory as arrays, and what is decided from them     shared_file   the memory and the lock
    shared_entries   what one call does to its entries       directory  what the workers of a node share
    host       one worker's view of it, with checksums
    memory     a store whose moves are carried out           host_bench the host tier beside plain copies
    opening    a request whose hit is on its way up          ssd        pages below the host, with checksums
    segment_log, log_folder, log_writer   the log on disk that the SSD tier's pages lie in, crash-safe
    log_care   looks after its files from outside            ssd_slots  which folder is this worker's
    ssd_bench  the log beside plain files
    pool_tier  pages of the cluster-wide pool, as one worker sees them; pool_restore, its reads for one request
    pool_traffic, pool_fetch, pool_room   to and from it in the background, through registered memory
    pool_client, pool_master   Mooncake Store's client and master      pool_bench   beside Mooncake's own client
    handoff    prefill to decode, all or nothing             checksum   of every byte that leaves the device
    handoff_engine   the same between nodes, by Mooncake's Transfer Engine
"""
