/* What the parts of the guard know of each other.
 *
 *   guard.c    the interposed functions: who is asked, what goes to the C library
 *   accounts.c the ranges, owners, charging
 *   api.c      attach, fork, what Python calls
 *   extents.c  blocks >= 64 KiB inside one pool of an account
 *   slabs.c    tensors < 16 KiB
 *   sweep.c    the thread that takes a closed account's tensor pages away
 *
 * Lock order: accounts' pool and slab locks are leaves, one at a time, and no C library
 * allocation happens under any of them; attach and fork take all of them in address order.
 */
#ifndef UMAD_GUARD_H
#define UMAD_GUARD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "page.h"

#define EXPORT __attribute__((visibility("default")))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

#define BIG ((size_t)64 << 10)       /* smaller blocks that are no tensors go to the C library */
#define HUGE_UNIT ((size_t)2 << 20)  /* one huge page; blocks of this size live on them */
#define HUGE_TENSOR ((size_t)512 << 10) /* tensors from here on are on huge pages: accounts.c */
#define SLAB_BYTES ((size_t)64 << 10)
#define SLAB_MAX ((size_t)16 << 10)  /* the largest tensor that lives in a slab */
#define WARM_MAX ((uint64_t)64 << 20) /* freed bytes an account may keep for reuse */

/* Built into a test program the functions get other names and the C library's are used plainly. */
#ifdef UMAD_GUARD_EMBEDDED
#include <malloc.h>
#include <stdlib.h>
#define GUARDED(name) guarded_##name
#define libc_malloc malloc
#define libc_calloc calloc
#define libc_realloc realloc
#define libc_free free
#define libc_memalign memalign
#else
#define GUARDED(name) name
/* glibc exports these for interposers, so nothing has to be looked up before the first call. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void __libc_free(void *);
extern void *__libc_memalign(size_t, size_t);
#define libc_malloc __libc_malloc
#define libc_calloc __libc_calloc
#define libc_realloc __libc_realloc
#define libc_free __libc_free
#define libc_memalign __libc_memalign
#endif

/* ---- locks: three states in a word, so that a forked child can reset them by a store ---- */
typedef struct {
    _Atomic uint32_t word; /* 0 free, 1 held, 2 held and somebody waits */
} lock_t;

void lock_wait(lock_t *lock);
void lock_wake(lock_t *lock);

static inline void lock_take(lock_t *lock) {
    uint32_t unheld = 0;
    if (UNLIKELY(!atomic_compare_exchange_strong_explicit(&lock->word, &unheld, 1,
                                                          memory_order_acquire,
                                                          memory_order_relaxed)))
        lock_wait(lock);
}

static inline void lock_drop(lock_t *lock) {
    if (UNLIKELY(atomic_exchange_explicit(&lock->word, 0, memory_order_release) == 2))
        lock_wake(lock);
}

/* ---- pools of blocks >= 64 KiB ---- */
#define BINS 192

struct extent; /* extents.c */

struct bins {
    uint64_t map[BINS / 64];
    uint32_t head[BINS];
};

struct account;

struct pool {
    lock_t lock;
    struct account *account;
    char *base;
    struct extent *table; /* one entry per granule; 0 is no extent */
    uint8_t *refs;        /* extents with pages per unit; NULL where a unit is a granule */
    uint32_t granule_shift;
    uint32_t unit_shift; /* granules in a unit, as a power of two */
    uint32_t capacity;   /* granules */
    uint32_t top;        /* granules from here on were never used, or are clean again */
    uint32_t oldest, newest; /* the warm extents by age */
    struct bins clean, warm;
    _Atomic uint64_t charged; /* bytes of the account's `used` that are here */
    _Atomic uint32_t high;    /* highest `top` so far: what a sweep has to cover */
};

struct slabs {
    lock_t lock;
    struct account *account;
    char *base;
    struct slab *table;
    uint32_t capacity, top, vacant; /* vacant: list of slabs without pages */
    uint32_t page;                  /* bytes */
    uint32_t partial[32];
    _Atomic uint64_t charged;
    _Atomic uint32_t high;
};

enum pool_kind { TENSOR_HUGE, TENSOR_PAGE, OTHER_HUGE, OTHER_PAGE, POOLS };

struct account {
    struct pool pool[POOLS];
    struct slabs slabs;
    _Atomic uint64_t warm;
    _Atomic uint64_t high; /* the most bytes in live blocks since umad_guard_mark */
    /* The sequence under which threads may enter.  It changes only under `sweep`, so no block of a
     * newly opened account exists while a sweep of the old one is still running. */
    lock_t sweep;
    _Atomic uint32_t admitted;
    uint32_t slot;
};

/* The block, or NULL when the account refuses; *dirty: it may hold old bytes outside of
 * [clean_from, clean_to). */
struct grant {
    char *block;
    char *clean_from, *clean_to;
};
struct grant pool_take(struct pool *pool, size_t size, size_t alignment, uint32_t sequence);
void pool_give(struct pool *pool, char *block);
bool pool_grow(struct pool *pool, char *block, size_t size, uint32_t sequence);
size_t pool_size(const struct pool *pool, const char *block);
bool pool_evict(struct pool *pool); /* one warm extent back to the system; false: there is none */

void *slab_take(struct slabs *slabs, size_t size, uint32_t sequence);
void slab_give(struct slabs *slabs, char *block);
void slab_trim(struct slabs *slabs);
size_t slab_size(const struct slabs *slabs, const char *block);
size_t slab_meta_bytes(uint32_t capacity);
size_t extent_meta_bytes(uint32_t capacity);

/* ---- accounts.c, api.c ---- */
/* Threads carry their account as slot + 1 below and the sequence they entered under above, so
 * that 0 is "shared" and a new thread starts there. */
typedef uint64_t token_t;
extern _Thread_local token_t current_token __attribute__((tls_model("initial-exec")));

extern _Atomic uintptr_t ranges_base, ranges_end; /* base is UINTPTR_MAX before attach */
extern uint32_t range_shift;
extern struct account accounts[UMAD_PAGE_SLOTS];
extern struct umad_page unattached; /* stands in before attach and in a forked child */
extern struct umad_page *_Atomic page;
extern _Atomic bool attached;
extern _Atomic uint64_t shared_bytes;
extern lock_t attach_lock;
extern bool huge_pages;

static inline bool is_ours(const void *block) {
    uintptr_t at = (uintptr_t)block;
    return at >= atomic_load_explicit(&ranges_base, memory_order_acquire) &&
           at < atomic_load_explicit(&ranges_end, memory_order_relaxed);
}
struct account *owner_of(const void *block);
struct pool *pool_of(struct account *account, const void *block); /* NULL: in a slab */

bool charge(struct account *account, uint64_t bytes, uint32_t sequence);
void uncharge(struct account *account, uint64_t bytes);
bool permitted(struct account *account, uint32_t sequence);
void warm_add(struct account *account, int64_t bytes);
uint64_t live_bytes(struct account *account);
void raise_high(struct account *account);
void trim_warm(struct account *account, struct pool *first, uint64_t keep);
void refuse(struct account *account, size_t size);
void give_pages(char *from, size_t bytes);
bool drop_pages(char *from, size_t bytes); /* zeroes them too */
_Noreturn void broken(const char *what, const void *block);

int reserve_ranges(void); /* 0 or a negative errno; once for a process and its forks */
bool sweeper_start(void);
void find_tensor_library(void); /* libc10.so, as soon as it is loaded */
struct umad_account *line_of(const struct account *account);

#define LOAD(field) __atomic_load_n(&(field), __ATOMIC_ACQUIRE)
#define STORE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELEASE)

#endif
