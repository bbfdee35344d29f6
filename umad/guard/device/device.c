/* Device memory under the account page: the allocator that torch's memory pools call.
 *
 * A block is charged to an account before the driver is asked for it and credited after the driver
 * has taken it back, so `used` is never less than what is really held.  The account is the one that
 * umad_device_enter bound to this thread, else the thread's account in the preloaded guard, else
 * none ("shared": counted here, never refused).  Every block remembers its account, since torch
 * frees on whatever thread empties a cache.
 *
 * Nothing here takes an exclusive lock or allocates: charging is one compare-and-swap under a
 * reader's lock that only a change of the page excludes; the driver is called outside of it.
 * CUDA and HIP are found at run time (driver.c), so that this is built without either.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "driver.h"
#include "page.h"

#define EXPORT __attribute__((visibility("default")))
#define LOAD(field) __atomic_load_n(&(field), __ATOMIC_ACQUIRE)
#define STORE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELEASE)

enum { SHARED = -1, REFUSED = -2 };

/* As in the guard: slot + 1 below, the sequence of the account's opening above; 0 is no account. */
typedef uint64_t token_t;

static _Thread_local token_t bound;

/* The preloaded guard's, or NULL. */
static token_t (*guard_enter)(int);
static void (*guard_leave)(token_t);
static int (*guard_attach)(int);
static void (*guard_charged)(int);

/* Holds `page` and `page_file` still.  Readers charge and credit, the writer changes the page. */
static pthread_rwlock_t switching = PTHREAD_RWLOCK_INITIALIZER;
static struct umad_page *page;
static struct stat page_file;

static _Atomic uint64_t held[UMAD_PAGE_SLOTS + 1]; /* bytes of live blocks; [0] has no account */
static _Atomic uint64_t failures;                  /* calls that the driver answered with an error */

static void forget_error(const struct driver *driver) {
    /* The driver keeps a failure for the next caller who asks; it is ours alone. */
    driver->last_error();
    atomic_fetch_add_explicit(&failures, 1, memory_order_relaxed);
}

/* ---- whose block is it: open addressing, one atomic word claims an entry ---- */
#define ENTRIES (1u << 17) /* torch's smallest segment is 2 MiB: 256 GiB of nothing else */
#define GONE 1u            /* a key that was taken out; its entry may be claimed again */

static struct {
    _Atomic uintptr_t block;
    _Atomic uint64_t owner; /* slot + 1 in the top byte, bytes below */
} table[ENTRIES];

static uint32_t home_of(const void *block) {
    return (uint32_t)(((uint64_t)(uintptr_t)block >> 9) * 0x9E3779B97F4A7C15ull >> (64 - 17));
}

/* The driver gives an address to one caller at a time, so a key is never put in twice. */
static bool remember(void *block, int slot, uint64_t bytes) {
    uint32_t home = home_of(block);
    for (uint32_t step = 0; step < ENTRIES; step++) {
        uint32_t at = (home + step) % ENTRIES;
        uintptr_t key = atomic_load(&table[at].block);
        while (key <= GONE) {
            if (atomic_compare_exchange_weak(&table[at].block, &key, (uintptr_t)block)) {
                atomic_store(&table[at].owner, (uint64_t)(slot + 1) << 56 | bytes);
                return true;
            }
        }
    }
    return false;
}

static bool forget(void *block, int *slot, uint64_t *bytes) {
    uint32_t home = home_of(block);
    for (uint32_t step = 0; step < ENTRIES; step++) {
        uint32_t at = (home + step) % ENTRIES;
        uintptr_t key = atomic_load(&table[at].block);
        if (key == 0)
            return false;
        if (key == (uintptr_t)block) {
            uint64_t owner = atomic_load(&table[at].owner);
            *slot = (int)(owner >> 56) - 1;
            *bytes = owner & (((uint64_t)1 << 56) - 1);
            /* Of two callers that free one block twice, one gets it. */
            return atomic_compare_exchange_strong(&table[at].block, &key, GONE);
        }
    }
    return false;
}

/* ---- charging ---- */
/* Compare-and-swap as in the guard, not add and roll back: the daemon never sees more than the
 * limit, and a giant that is refused takes no room from a small request in passing. */
static bool take(struct umad_account *line, uint32_t sequence, uint64_t bytes) {
    if (LOAD(line->state) != UMAD_OPEN || LOAD(line->sequence) != sequence)
        return false;
    uint64_t used = LOAD(line->used), limit = LOAD(line->limit);
    do {
        if (bytes > limit || used > limit - bytes)
            return false;
    } while (!__atomic_compare_exchange_n(&line->used, &used, used + bytes, true, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE));
    used += bytes;
    uint64_t peak = LOAD(line->peak);
    while (used > peak && !__atomic_compare_exchange_n(&line->peak, &peak, used, true,
                                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    return true;
}

/* This thread's account in the guard: what leaving it for a moment has to restore. */
static token_t guard_token(void) {
    if (!guard_enter || !guard_leave)
        return 0;
    token_t token = guard_enter(-1);
    guard_leave(token);
    return token;
}

static int charge(uint64_t bytes) {
    token_t token = bound ? bound : guard_token();
    int slot = (int)(uint32_t)token - 1;
    pthread_rwlock_rdlock(&switching);
    if (!page || slot < 0) {
        slot = SHARED;
    } else if (!take(&page->account[slot], (uint32_t)(token >> 32), bytes)) {
        STORE(page->account[slot].requested, bytes);
        __atomic_fetch_add(&page->account[slot].refused, 1, __ATOMIC_RELAXED);
        slot = REFUSED;
    }
    if (slot != REFUSED)
        atomic_fetch_add(&held[slot + 1], bytes);
    if (slot >= 0 && guard_charged)
        guard_charged(slot);
    pthread_rwlock_unlock(&switching);
    return slot;
}

static void credit(int slot, uint64_t bytes) {
    pthread_rwlock_rdlock(&switching);
    atomic_fetch_sub(&held[slot + 1], bytes);
    if (page && slot != SHARED)
        __atomic_fetch_sub(&page->account[slot].used, bytes, __ATOMIC_ACQ_REL);
    pthread_rwlock_unlock(&switching);
}

/* ---- what torch calls (torch.cuda.memory.CUDAPluggableAllocator) ---- */
struct wish {
    void *block;
    size_t size;
};

static int allocate(const struct driver *driver, void *argument) {
    struct wish *wish = argument;
    return driver->allocate(&wish->block, wish->size);
}

EXPORT void *umad_device_alloc(ssize_t size, int device, void *stream) {
    (void)stream;
    const struct driver *driver = find_driver();
    if (!driver || size <= 0)
        return NULL;
    int slot = charge((uint64_t)size);
    if (slot == REFUSED)
        return NULL;
    struct wish wish = {NULL, (size_t)size};
    bool failed = run_on(driver, device, allocate, &wish) != 0 || !wish.block;
    if (!failed && remember(wish.block, slot, (uint64_t)size))
        return wish.block;
    if (!failed && driver->release(wish.block) != 0)
        slot = REFUSED; /* it could not be given back: it stays charged */
    forget_error(driver);
    if (slot != REFUSED)
        credit(slot, (uint64_t)size);
    return NULL;
}

EXPORT void umad_device_free(void *block, ssize_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    const struct driver *driver = find_driver();
    int slot;
    uint64_t bytes;
    if (!block || !driver)
        return;
    /* Out of the table first: once the driver has the address, another thread may be given it. */
    if (!forget(block, &slot, &bytes)) {
        atomic_fetch_add_explicit(&failures, 1, memory_order_relaxed);
        return; /* not ours, or freed twice */
    }
    if (driver->release(block) != 0) {
        forget_error(driver);
        return; /* whether it is back is unknown, so it stays charged */
    }
    credit(slot, bytes);
}

/* ---- what Python calls ---- */
static int check_page(int fd, struct stat *file) {
    if (fstat(fd, file) != 0)
        return -errno;
    int seals = fcntl(fd, F_GET_SEALS);
    if (file->st_size != UMAD_PAGE_BYTES || seals < 0 ||
        (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
        return -EINVAL; /* a page that can shrink would end us with SIGBUS */
    return 0;
}

static int map_page(int fd, struct umad_page **fresh) {
    *fresh = mmap(NULL, UMAD_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (*fresh == MAP_FAILED)
        return -errno;
    const struct umad_header *header = &(*fresh)->header;
    if (memcmp(header->magic, UMAD_PAGE_MAGIC, 8) == 0 &&
        LOAD(header->version) == UMAD_PAGE_VERSION && LOAD(header->slots) == UMAD_PAGE_SLOTS)
        return 0;
    munmap(*fresh, UMAD_PAGE_BYTES);
    return -EPROTO;
}

/* What the guard does where it is preloaded.  A new daemon counts its openings from 1 again: who was
 * in an open account stays in, who was fenced out stays out. */
static void take_over(struct umad_page *fresh) {
    for (uint32_t slot = 0; slot < UMAD_PAGE_SLOTS; slot++) {
        struct umad_account *to = &fresh->account[slot];
        STORE(to->used, atomic_load(&held[slot + 1]));
        if (page && LOAD(page->account[slot].sequence) && LOAD(to->state) == UMAD_OPEN)
            STORE(to->sequence, LOAD(page->account[slot].sequence) +
                                    (LOAD(page->account[slot].state) != UMAD_OPEN));
    }
}

/* Binds the process to an account page, the preloaded guard with it: its copying of the counts to
 * a new page must not miss a charge of ours, so nothing is charged meanwhile.  Again with the same
 * page: nothing happens.  Returns 0 or a negative errno; then everything is as before. */
EXPORT int umad_device_attach(int fd) {
    struct stat file;
    struct umad_page *fresh;
    int failed = check_page(fd, &file);
    if (!failed)
        failed = map_page(fd, &fresh);
    if (failed)
        return failed;
    pthread_rwlock_wrlock(&switching);
    bool known = page && file.st_dev == page_file.st_dev && file.st_ino == page_file.st_ino;
    failed = guard_attach ? guard_attach(fd) : 0;
    if (!failed && !known) {
        if (!guard_attach)
            take_over(fresh);
        struct umad_page *old = page;
        page = fresh;
        page_file = file;
        fresh = old;
    }
    pthread_rwlock_unlock(&switching);
    if (fresh)
        munmap(fresh, UMAD_PAGE_BYTES);
    return failed;
}

/* Binds the calling thread's device memory to an account (-1: to none of its own).  Returns what
 * umad_device_leave restores.  Before attach the thread stays without one. */
EXPORT token_t umad_device_enter(int slot) {
    token_t before = bound;
    bound = 0;
    pthread_rwlock_rdlock(&switching);
    if (page && slot >= 0 && slot < (int)UMAD_PAGE_SLOTS)
        bound = (token_t)LOAD(page->account[slot].sequence) << 32 | (uint32_t)(slot + 1);
    pthread_rwlock_unlock(&switching);
    return before;
}

EXPORT void umad_device_leave(token_t before) {
    bound = before;
}

/* Copies an account's line; returns 0, or -1 for a slot that does not exist or before attach. */
EXPORT int umad_device_account(int slot, struct umad_account *line) {
    int failed = -1;
    pthread_rwlock_rdlock(&switching);
    if (page && slot >= 0 && slot < (int)UMAD_PAGE_SLOTS) {
        const uint64_t *from = (const uint64_t *)&page->account[slot];
        for (size_t word = 0; word < sizeof *line / sizeof *from; word++)
            ((uint64_t *)line)[word] = LOAD(from[word]);
        failed = 0;
    }
    pthread_rwlock_unlock(&switching);
    return failed;
}

/* Bytes of live device blocks of an account, -1: of those that have none. */
EXPORT uint64_t umad_device_held(int slot) {
    return slot < -1 || slot >= (int)UMAD_PAGE_SLOTS ? 0 : atomic_load(&held[slot + 1]);
}

EXPORT uint64_t umad_device_failures(void) {
    return atomic_load(&failures);
}

/* "cuda", "hip", or NULL where neither library can be loaded. */
EXPORT const char *umad_device_runtime(void) {
    const struct driver *driver = find_driver();
    return driver ? driver->prefix : NULL;
}

#define SCHEDULE_MASK 7u /* cudaDeviceScheduleMask and hipDeviceScheduleMask */
#define SCHEDULE_SPIN 1u /* cudaDeviceScheduleSpin and hipDeviceScheduleSpin */

static int spin(const struct driver *driver, void *unused) {
    (void)unused;
    unsigned flags = 0;
    int failed = driver->get_flags(&flags);
    return failed ? failed : driver->set_flags((flags & ~SCHEDULE_MASK) | SCHEDULE_SPIN);
}

/* Threads that wait for this device spin.  Returns 0, the driver's error, or -ENOSYS. */
EXPORT int umad_device_spin(int device) {
    const struct driver *driver = find_driver();
    if (!driver)
        return -ENOSYS;
    int failed = run_on(driver, device, spin, NULL);
    if (failed)
        forget_error(driver);
    return failed;
}

#define ALREADY_ENABLED 704 /* cudaErrorPeerAccessAlreadyEnabled, and HIP's of that name */

static int enable_access(const struct driver *driver, void *peer) {
    return driver->enable_access(*(int *)peer, 0);
}

/* `device` may read and write the memory of `peer`, where the two can at all.  Returns 0, the
 * driver's error, or -ENOSYS. */
EXPORT int umad_device_peer(int device, int peer) {
    const struct driver *driver = find_driver();
    if (!driver)
        return -ENOSYS;
    int can = 0;
    int failed = driver->can_access(&can, device, peer);
    if (!failed && can)
        failed = run_on(driver, device, enable_access, &peer);
    if (failed == ALREADY_ENABLED) {
        driver->last_error(); /* no failure, but the driver keeps it as one */
        failed = 0;
    } else if (failed) {
        forget_error(driver);
    }
    return failed;
}

/* A forked child has no account: what its exit frees must not be credited to its parent's. */
static void in_child(void) {
    switching = (pthread_rwlock_t)PTHREAD_RWLOCK_INITIALIZER;
    if (page)
        munmap(page, UMAD_PAGE_BYTES);
    page = NULL;
    bound = 0;
}

__attribute__((constructor)) static void start(void) {
    find_function(RTLD_DEFAULT, "umad_guard_", "enter", &guard_enter);
    find_function(RTLD_DEFAULT, "umad_guard_", "leave", &guard_leave);
    find_function(RTLD_DEFAULT, "umad_guard_", "attach", &guard_attach);
    find_function(RTLD_DEFAULT, "umad_guard_", "charged", &guard_charged);
    pthread_atfork(NULL, NULL, in_child);
}
