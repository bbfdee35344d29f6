/* Blocks >= 64 KiB of one pool: extents of granules, all their records outside of the blocks.
 *
 * A pool is a piece of address space.  Its *granule* is what block sizes are rounded to, its
 * *unit* what physical memory comes and goes in: both a page in the page pools; 64 KiB and one
 * huge page in the huge pools, where two blocks may share a unit at their seam.  An extent is
 *   USED   handed out, or about to be given back to the system by one thread,
 *   WARM   freed, pages kept and still charged,
 *   CLEAN  without pages and not charged.
 * A unit is charged while a USED or WARM extent lies in it (`refs` counts them), so `used` is what
 * the blocks can occupy, never less, and a unit nobody refers to holds no pages and reads as zeros.
 * Free extents of one state are merged and found by size through bins with a bitmap; warm ones are
 * tried first, and are in a list by age from which the oldest go.
 */
#include <sys/mman.h>

#include "guard.h"

enum { NONE = 0, USED, WARM, CLEAN };

struct extent { /* valid in an extent's first granule; `len` and `state` also in its last */
    uint32_t len;
    uint32_t state;
    uint32_t bin_prev, bin_next;
    uint32_t older, newer;
};

size_t extent_meta_bytes(uint32_t capacity) {
    return ((size_t)capacity + 1) * sizeof(struct extent);
}

/* ---- bins: 8 per power of two ---- */
static unsigned bin_of(uint32_t len) {
    if (len < 8)
        return len;
    unsigned power = 31u - (unsigned)__builtin_clz(len);
    return 8 * (power - 2) + ((len >> (power - 3)) & 7);
}

static void bin_add(struct pool *pool, struct bins *bins, uint32_t at) {
    struct extent *table = pool->table;
    unsigned bin = bin_of(table[at].len);
    uint32_t next = bins->head[bin];
    table[at].bin_prev = 0;
    table[at].bin_next = next;
    if (next)
        table[next].bin_prev = at;
    bins->head[bin] = at;
    bins->map[bin / 64] |= 1ull << (bin % 64);
}

static void bin_remove(struct pool *pool, struct bins *bins, uint32_t at) {
    struct extent *table = pool->table;
    unsigned bin = bin_of(table[at].len);
    uint32_t prev = table[at].bin_prev, next = table[at].bin_next;
    if (next)
        table[next].bin_prev = prev;
    if (prev) {
        table[prev].bin_next = next;
    } else {
        bins->head[bin] = next;
        if (!next)
            bins->map[bin / 64] &= ~(1ull << (bin % 64));
    }
}

/* An extent that surely holds `len` granules at this alignment (a mask of granules), or 0. */
static uint32_t bin_find(const struct pool *pool, const struct bins *bins, uint32_t len,
                         uint32_t mask) {
    const struct extent *table = pool->table;
    unsigned bin = bin_of(len);
    unsigned tries = 8; /* the bin of the size itself may hold a fit; bound the look */
    for (uint32_t at = bins->head[bin]; at && tries; at = table[at].bin_next, tries--) {
        uint32_t skip = -at & mask;
        if (table[at].len >= len + skip)
            return at;
    }
    unsigned above = bin_of(len + mask) + 1;
    for (unsigned word = above / 64; word < BINS / 64; word++) {
        uint64_t map = bins->map[word];
        if (word == above / 64)
            map &= ~0ull << (above % 64);
        if (map)
            return bins->head[word * 64 + (unsigned)__builtin_ctzll(map)];
    }
    return 0;
}

/* ---- extents ---- */
static void mark(struct pool *pool, uint32_t at, uint32_t len, uint32_t state) {
    pool->table[at].len = len;
    pool->table[at].state = state;
    pool->table[at + len - 1].len = len;
    pool->table[at + len - 1].state = state;
}

static uint64_t bytes_of(const struct pool *pool, uint32_t len) {
    return (uint64_t)len << pool->granule_shift;
}
static char *address_of(const struct pool *pool, uint32_t at) {
    return pool->base + bytes_of(pool, at);
}

/* Two extents with pages meet at `at`: inside a unit each of them counts. */
static void seam(struct pool *pool, uint32_t at, int change) {
    if (pool->refs && (at & ((1u << pool->unit_shift) - 1)))
        pool->refs[at >> pool->unit_shift] = (uint8_t)(pool->refs[at >> pool->unit_shift] + change);
}

static uint64_t unit_bytes(const struct pool *pool) {
    return (uint64_t)1 << (pool->granule_shift + pool->unit_shift);
}

/* What [at, at + len) would have to be charged: its units that hold nothing yet. */
static uint64_t new_bytes(const struct pool *pool, uint32_t at, uint32_t len) {
    if (!pool->refs)
        return bytes_of(pool, len);
    uint32_t first = at >> pool->unit_shift, last = (at + len - 1) >> pool->unit_shift;
    uint64_t units = last - first + 1; /* only the outer two can be shared */
    if (pool->refs[first])
        units--;
    if (last != first && pool->refs[last])
        units--;
    return units * unit_bytes(pool);
}

static void refer(struct pool *pool, uint32_t at, uint32_t len) {
    if (!pool->refs)
        return;
    for (uint32_t unit = at >> pool->unit_shift; unit <= (at + len - 1) >> pool->unit_shift; unit++)
        pool->refs[unit]++;
}

static void add_warm(struct pool *pool, uint32_t at, uint32_t len) {
    struct extent *table = pool->table;
    mark(pool, at, len, WARM);
    bin_add(pool, &pool->warm, at);
    table[at].newer = 0;
    table[at].older = pool->newest;
    if (pool->newest)
        table[pool->newest].newer = at;
    else
        pool->oldest = at;
    pool->newest = at;
}

static void remove_warm(struct pool *pool, uint32_t at) {
    struct extent *table = pool->table;
    uint32_t older = table[at].older, newer = table[at].newer;
    bin_remove(pool, &pool->warm, at);
    if (older)
        table[older].newer = newer;
    else
        pool->oldest = newer;
    if (newer)
        table[newer].older = older;
    else
        pool->newest = older;
}

static void add_clean(struct pool *pool, uint32_t at, uint32_t len) {
    struct extent *table = pool->table;
    if (table[at - 1].state == CLEAN) {
        uint32_t before = table[at - 1].len;
        at -= before;
        bin_remove(pool, &pool->clean, at);
        len += before;
    }
    if (at + len < pool->top && table[at + len].state == CLEAN) {
        bin_remove(pool, &pool->clean, at + len);
        len += table[at + len].len;
    }
    if (at + len == pool->top) {
        mark(pool, at, len, NONE);
        pool->top = at;
        return;
    }
    mark(pool, at, len, CLEAN);
    bin_add(pool, &pool->clean, at);
}

/* Gives the pages of a USED extent back; called with the lock held, which it drops meanwhile. */
static void purge(struct pool *pool, uint32_t at, uint32_t len) {
    uint32_t units = 1u << pool->unit_shift;
    uint32_t first = (at + units - 1) >> pool->unit_shift; /* units that are wholly inside */
    uint32_t end = (at + len) >> pool->unit_shift;
    if (first < end) {
        lock_drop(&pool->lock);
        give_pages(address_of(pool, first << pool->unit_shift), (end - first) * unit_bytes(pool));
        lock_take(&pool->lock);
    }
    uint64_t freed = bytes_of(pool, len);
    if (pool->refs) {
        freed = 0;
        for (uint32_t unit = at >> pool->unit_shift; unit <= (at + len - 1) >> pool->unit_shift;
             unit++) {
            if (--pool->refs[unit])
                continue;
            freed += unit_bytes(pool);
            /* A seam's other side may be handed out by another thread as soon as the lock is
             * dropped, so its page goes under the lock. */
            if (unit < first || unit >= end)
                give_pages(address_of(pool, unit << pool->unit_shift), unit_bytes(pool));
        }
    }
    add_clean(pool, at, len);
    atomic_fetch_sub_explicit(&pool->charged, freed, memory_order_relaxed);
    uncharge(pool->account, freed);
}

static void cut_warm(struct pool *pool, uint32_t at, uint32_t skip, uint32_t len) {
    uint32_t whole = pool->table[at].len;
    remove_warm(pool, at);
    if (skip) {
        add_warm(pool, at, skip);
        seam(pool, at + skip, 1);
    }
    if (whole > skip + len) {
        add_warm(pool, at + skip + len, whole - skip - len);
        seam(pool, at + skip + len, 1);
    }
    mark(pool, at + skip, len, USED);
}

static void cut_clean(struct pool *pool, uint32_t at, uint32_t skip, uint32_t len) {
    uint32_t whole = pool->table[at].len;
    bin_remove(pool, &pool->clean, at);
    if (skip) {
        mark(pool, at, skip, CLEAN);
        bin_add(pool, &pool->clean, at);
    }
    if (whole > skip + len) {
        mark(pool, at + skip + len, whole - skip - len, CLEAN);
        bin_add(pool, &pool->clean, at + skip + len);
    }
    mark(pool, at + skip, len, USED);
}

static void raise_top(struct pool *pool, uint32_t top) {
    pool->top = top;
    if (top > atomic_load_explicit(&pool->high, memory_order_relaxed))
        atomic_store_explicit(&pool->high, top, memory_order_release);
}

static bool charge_here(struct pool *pool, uint64_t bytes, uint32_t sequence) {
    if (!charge(pool->account, bytes, sequence))
        return false;
    atomic_fetch_add_explicit(&pool->charged, bytes, memory_order_relaxed);
    return true;
}

static struct grant take_clean(struct pool *pool, uint32_t len, uint32_t mask, uint32_t sequence) {
    struct grant none = {0};
    uint32_t at = bin_find(pool, &pool->clean, len, mask);
    bool fresh = !at;
    if (fresh)
        at = pool->top;
    uint32_t skip = -at & mask, start = at + skip;
    if (fresh && (start < at || start > pool->capacity || len > pool->capacity - start))
        return none; /* out of address space: as if refused */
    if (!charge_here(pool, new_bytes(pool, start, len), sequence))
        return none;
    char *from = address_of(pool, start), *to = from + bytes_of(pool, len);
    struct grant grant = {from, from, to};
    if (pool->refs) { /* a shared unit at either end may hold old bytes */
        uintptr_t unit = unit_bytes(pool);
        if (pool->refs[start >> pool->unit_shift])
            grant.clean_from = pool->base + ((size_t)(from - pool->base) / unit + 1) * unit;
        if (pool->refs[(start + len - 1) >> pool->unit_shift])
            grant.clean_to = pool->base + (size_t)(to - 1 - pool->base) / unit * unit;
        if (grant.clean_from > grant.clean_to)
            grant.clean_from = grant.clean_to = from;
    }
    if (fresh) {
        raise_top(pool, start + len);
        mark(pool, start, len, USED);
        if (skip)
            add_clean(pool, at, skip);
    } else {
        cut_clean(pool, at, skip, len);
    }
    refer(pool, start, len);
    return grant;
}

struct grant pool_take(struct pool *pool, size_t size, size_t alignment, uint32_t sequence) {
    struct grant grant = {0};
    size_t granule = (size_t)1 << pool->granule_shift;
    if (UNLIKELY(size > bytes_of(pool, pool->capacity) || alignment > HUGE_UNIT))
        return grant;
    uint32_t len = (uint32_t)((size + granule - 1) >> pool->granule_shift);
    uint32_t mask = alignment > granule ? (uint32_t)(alignment >> pool->granule_shift) - 1 : 0;
    lock_take(&pool->lock);
    if (LIKELY(permitted(pool->account, sequence))) {
        uint32_t at = bin_find(pool, &pool->warm, len, mask);
        if (at) {
            uint32_t skip = -at & mask;
            cut_warm(pool, at, skip, len);
            warm_add(pool->account, -(int64_t)bytes_of(pool, len));
            raise_high(pool->account);
            grant.block = address_of(pool, at + skip);
            grant.clean_from = grant.clean_to = grant.block;
        } else {
            grant = take_clean(pool, len, mask, sequence);
        }
    }
    lock_drop(&pool->lock);
    return grant;
}

static uint32_t index_of(const struct pool *pool, const char *block) {
    size_t offset = (size_t)(block - pool->base);
    uint32_t at = (uint32_t)(offset >> pool->granule_shift);
    if (UNLIKELY(offset & (((size_t)1 << pool->granule_shift) - 1)))
        broken("a pointer into a block", block);
    return at;
}

void pool_give(struct pool *pool, char *block) {
    uint32_t at = index_of(pool, block);
    struct account *account = pool->account;
    lock_take(&pool->lock);
    struct extent *table = pool->table;
    if (UNLIKELY(table[at].state != USED))
        broken("a block that is not allocated", block);
    uint32_t len = table[at].len;
    uint64_t bytes = bytes_of(pool, len);
    if (bytes > WARM_MAX || LOAD(line_of(account)->state) != UMAD_OPEN) {
        purge(pool, at, len);
        lock_drop(&pool->lock);
        return;
    }
    if (table[at - 1].state == WARM) {
        uint32_t before = table[at - 1].len;
        seam(pool, at, -1);
        at -= before;
        remove_warm(pool, at);
        len += before;
    }
    if (at + len < pool->top && table[at + len].state == WARM) {
        seam(pool, at + len, -1);
        remove_warm(pool, at + len);
        len += table[at + len].len;
    }
    add_warm(pool, at, len);
    warm_add(account, (int64_t)bytes);
    lock_drop(&pool->lock);
    if (UNLIKELY(atomic_load_explicit(&account->warm, memory_order_relaxed) > WARM_MAX))
        trim_warm(account, pool, WARM_MAX);
}

bool pool_evict(struct pool *pool) {
    lock_take(&pool->lock);
    uint32_t at = pool->oldest;
    if (at) {
        uint32_t len = pool->table[at].len;
        remove_warm(pool, at);
        mark(pool, at, len, USED);
        warm_add(pool->account, -(int64_t)bytes_of(pool, len));
        purge(pool, at, len);
    }
    lock_drop(&pool->lock);
    return at != 0;
}

bool pool_grow(struct pool *pool, char *block, size_t size, uint32_t sequence) {
    uint32_t at = index_of(pool, block);
    size_t granule = (size_t)1 << pool->granule_shift;
    if (size > bytes_of(pool, pool->capacity))
        return false;
    uint32_t want = (uint32_t)((size + granule - 1) >> pool->granule_shift);
    lock_take(&pool->lock);
    struct extent *table = pool->table;
    uint32_t len = table[at].len, next = at + len, more = want - len;
    bool done = false;
    if (table[at].state == USED && want > len && permitted(pool->account, sequence)) {
        if (next == pool->top) {
            if (more <= pool->capacity - next &&
                charge_here(pool, new_bytes(pool, next, more), sequence)) {
                raise_top(pool, next + more);
                refer(pool, next, more);
                done = true;
            }
        } else if (table[next].state == WARM && table[next].len >= more) {
            cut_warm(pool, next, 0, more);
            warm_add(pool->account, -(int64_t)bytes_of(pool, more));
            raise_high(pool->account);
            done = true;
        } else if (table[next].state == CLEAN && table[next].len >= more &&
                   charge_here(pool, new_bytes(pool, next, more), sequence)) {
            cut_clean(pool, next, 0, more);
            refer(pool, next, more);
            done = true;
        }
        if (done) {
            seam(pool, next, -1);
            mark(pool, at, want, USED);
        }
    }
    lock_drop(&pool->lock);
    return done;
}

size_t pool_size(const struct pool *pool, const char *block) {
    uint32_t at = index_of(pool, block);
    return bytes_of(pool, pool->table[at].len); /* the caller owns it: no lock needed */
}
