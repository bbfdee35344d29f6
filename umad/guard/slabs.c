/* Tensors smaller than 16 KiB: slabs of 64 KiB with blocks of one size each.
 *
 * Small tensors have a home of their own because "a slow leak of small ones" must end in a refusal
 * of the model that leaks: only an address can tell whose block is freed by another thread.  A slab
 * is filled from its start and charged page by page as far as it was ever filled, for most of a
 * size's only slab is never reached.  It is given back whole when its last block goes, but for one
 * empty slab per size that is kept until a trim.  Which blocks are free is in a bitmap outside, so
 * that a sweep, which zeroes the pages, breaks no list.
 */
#include "guard.h"

#define CLASSES 32
#define STEP 64u

struct slab {
    uint32_t prev, next; /* in its class's list of partial slabs, or the list of vacant ones */
    uint16_t kind, live, capacity, size_steps;
    uint32_t charged; /* bytes from its start, in whole pages */
    uint64_t free[SLAB_BYTES / STEP / 64];
};

size_t slab_meta_bytes(uint32_t capacity) {
    return ((size_t)capacity + 1) * sizeof(struct slab);
}

/* 64-byte steps up to 1 KiB, then four sizes per power of two. */
static unsigned class_of(size_t size) {
    unsigned steps = size ? (unsigned)((size + STEP - 1) / STEP) : 1;
    if (steps <= 16)
        return steps - 1;
    unsigned power = 31u - (unsigned)__builtin_clz(steps - 1);
    return 16 + (power - 4) * 4 + (((steps - 1) >> (power - 2)) & 3);
}

static unsigned steps_of(unsigned kind) {
    if (kind < 16)
        return kind + 1;
    return (5 + ((kind - 16) & 3)) << (2 + (kind - 16) / 4);
}

static void list_add(struct slabs *slabs, uint32_t at) {
    struct slab *slab = &slabs->table[at];
    slab->prev = 0;
    slab->next = slabs->partial[slab->kind];
    if (slab->next)
        slabs->table[slab->next].prev = at;
    slabs->partial[slab->kind] = at;
}

static void list_remove(struct slabs *slabs, uint32_t at) {
    struct slab *slab = &slabs->table[at];
    if (slab->next)
        slabs->table[slab->next].prev = slab->prev;
    if (slab->prev)
        slabs->table[slab->prev].next = slab->next;
    else
        slabs->partial[slab->kind] = slab->next;
}

static uint32_t open_slab(struct slabs *slabs, unsigned kind) {
    uint32_t at = slabs->vacant ? slabs->vacant : slabs->top;
    if (at >= slabs->capacity)
        return 0;
    struct slab *slab = &slabs->table[at];
    if (slabs->vacant) {
        slabs->vacant = slab->next;
    } else {
        slabs->top++;
        atomic_store_explicit(&slabs->high, slabs->top, memory_order_release);
    }
    slab->kind = (uint16_t)kind;
    slab->size_steps = (uint16_t)steps_of(kind);
    slab->capacity = (uint16_t)(SLAB_BYTES / STEP / slab->size_steps);
    slab->live = 0;
    slab->charged = 0;
    for (unsigned word = 0; word < SLAB_BYTES / STEP / 64; word++) {
        unsigned left = slab->capacity > word * 64 ? slab->capacity - word * 64 : 0;
        slab->free[word] = left >= 64 ? ~0ull : (1ull << left) - 1;
    }
    list_add(slabs, at);
    return at;
}

static void close_slab(struct slabs *slabs, uint32_t at) {
    struct slab *slab = &slabs->table[at];
    list_remove(slabs, at);
    give_pages(slabs->base + (size_t)at * SLAB_BYTES, slab->charged);
    slab->size_steps = 0;
    slab->next = slabs->vacant;
    slabs->vacant = at;
    atomic_fetch_sub_explicit(&slabs->charged, slab->charged, memory_order_relaxed);
    uncharge(slabs->account, slab->charged);
}

/* Charges the slab up to `end`, the end of a block; false: refused, and nothing has changed. */
static bool reach(struct slabs *slabs, struct slab *slab, uint32_t end, uint32_t sequence) {
    if (LIKELY(end <= slab->charged))
        return true;
    uint32_t more = ((end + slabs->page - 1) & ~(slabs->page - 1)) - slab->charged;
    if (!charge(slabs->account, more, sequence))
        return false;
    slab->charged += more;
    atomic_fetch_add_explicit(&slabs->charged, more, memory_order_relaxed);
    return true;
}

void *slab_take(struct slabs *slabs, size_t size, uint32_t sequence) {
    unsigned kind = class_of(size);
    char *block = NULL;
    lock_take(&slabs->lock);
    uint32_t at = slabs->partial[kind];
    if (LIKELY(permitted(slabs->account, sequence)) && (at || (at = open_slab(slabs, kind)))) {
        struct slab *slab = &slabs->table[at];
        unsigned word = 0;
        while (!slab->free[word])
            word++;
        uint32_t index = word * 64 + (uint32_t)__builtin_ctzll(slab->free[word]);
        uint32_t bytes = slab->size_steps * STEP;
        if (reach(slabs, slab, (index + 1) * bytes, sequence)) {
            slab->free[word] &= slab->free[word] - 1;
            if (++slab->live == slab->capacity)
                list_remove(slabs, at);
            block = slabs->base + (size_t)at * SLAB_BYTES + (size_t)index * bytes;
        } else if (!slab->live) {
            close_slab(slabs, at);
        }
    }
    lock_drop(&slabs->lock);
    return block;
}

void slab_give(struct slabs *slabs, char *block) {
    size_t offset = (size_t)(block - slabs->base);
    uint32_t at = (uint32_t)(offset / SLAB_BYTES), within = offset % SLAB_BYTES;
    lock_take(&slabs->lock);
    struct slab *slab = &slabs->table[at];
    unsigned size = slab->size_steps * STEP;
    if (UNLIKELY(!size || within % size))
        broken("a pointer into a small tensor", block);
    unsigned index = within / size;
    uint64_t bit = 1ull << (index % 64);
    if (UNLIKELY(slab->free[index / 64] & bit))
        broken("a small tensor that is not allocated", block);
    slab->free[index / 64] |= bit;
    if (slab->live == slab->capacity)
        list_add(slabs, at);
    bool only = !slab->prev && !slab->next;
    if (!--slab->live && (!only || LOAD(line_of(slabs->account)->state) != UMAD_OPEN))
        close_slab(slabs, at);
    lock_drop(&slabs->lock);
}

void slab_trim(struct slabs *slabs) {
    lock_take(&slabs->lock);
    for (unsigned kind = 0; kind < CLASSES; kind++)
        for (uint32_t at = slabs->partial[kind], next; at; at = next) {
            next = slabs->table[at].next;
            if (!slabs->table[at].live)
                close_slab(slabs, at);
        }
    lock_drop(&slabs->lock);
}

size_t slab_size(const struct slabs *slabs, const char *block) {
    size_t offset = (size_t)(block - slabs->base);
    return (size_t)slabs->table[offset / SLAB_BYTES].size_steps * STEP;
}
