/* Ranges of addresses, and charging.
 *
 * One reservation holds 63 ranges of equal size, so the owner of an address is a shift.  A range is
 *   1/8 nothing, 2/8 tensors on huge pages | 1/8 tensors on small pages | 1/8 slabs of small
 *   tensors | 2/8 others on huge pages | 1/8 others on small pages
 * and only what lies in the first five eighths may ever be taken away by force.  A thread that
 * sorts tensors while they turn to zeros can run past their ends (seen in torch.sort): the empty
 * eighth gives it tens of seconds of zeros to read, in which the process can be replaced, and a
 * page without access on either side ends the process before it reaches anybody's memory.
 * Taking 2 GiB away takes some 10 ms from huge pages and 170-360 ms from small ones (measured on
 * two cores), so tensors are on huge pages from 512 KiB on; below that, single blocks would pin
 * whole huge pages.  All of it is reserved without memory; that is why `ulimit -v`,
 * overcommit_memory=2 and mlockall exclude the guard.
 *
 * What is counted in `used`: every block >= 64 KiB and every tensor of any size that a thread of
 * the account allocates through malloc and its kin, in whole pages (huge ones where it is on them),
 * plus freed blocks that are kept warm.  What is not: blocks < 64 KiB that are no tensors, which
 * are glibc's; memory from mmap (CPython's arenas, mapped files, thread stacks); pages the kernel
 * holds for the process; device memory.  Those show in the auditor's physical figure only.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "guard.h"

#ifndef SHIFT_WANTED    /* valgrind has room for less */
#define SHIFT_WANTED 39 /* 512 GiB a range, 32 TiB in all: a quarter of what x86-64 has */
#define SHIFT_LEAST 33
#endif

_Thread_local token_t current_token __attribute__((tls_model("initial-exec")));
_Atomic uintptr_t ranges_base = UINTPTR_MAX, ranges_end;
uint32_t range_shift;
struct account accounts[UMAD_PAGE_SLOTS];
_Atomic bool attached;
_Atomic uint64_t shared_bytes;
lock_t attach_lock;
bool huge_pages;

struct umad_page unattached;
struct umad_page *_Atomic page = &unattached;

/* ---- locks ---- */
static void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

void lock_wait(lock_t *lock) {
    for (unsigned spins = 0; spins < 100; spins++) {
        uint32_t unheld = 0;
        if (atomic_compare_exchange_weak(&lock->word, &unheld, 1))
            return;
        cpu_relax();
    }
    int saved = errno;
    while (atomic_exchange_explicit(&lock->word, 2, memory_order_acquire) != 0)
        syscall(SYS_futex, &lock->word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
    errno = saved;
}

void lock_wake(lock_t *lock) {
    int saved = errno;
    syscall(SYS_futex, &lock->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    errno = saved;
}

_Noreturn void broken(const char *what, const void *block) {
    static const char digits[] = "0123456789abcdef";
    char text[160] = "umad guard: free() of ";
    size_t end = strlen(text);
    while (*what && end < sizeof text - 24)
        text[end++] = *what++;
    memcpy(text + end, ": 0x", 4);
    end += 4;
    for (int shift = 60; shift >= 0; shift -= 4)
        text[end++] = digits[((uintptr_t)block >> shift) & 15];
    text[end++] = '\n';
    if (write(2, text, end) < 0)
        abort();
    abort();
}

/* ---- owners ---- */
struct umad_account *line_of(const struct account *account) {
    return &atomic_load_explicit(&page, memory_order_acquire)->account[account->slot];
}

struct account *owner_of(const void *block) {
    uintptr_t base = atomic_load_explicit(&ranges_base, memory_order_relaxed);
    return &accounts[((uintptr_t)block - base) >> range_shift];
}

struct pool *pool_of(struct account *account, const void *block) {
    static const uint8_t pool_of_eighth[8] = {TENSOR_HUGE, TENSOR_HUGE, TENSOR_HUGE, TENSOR_PAGE,
                                              POOLS,       OTHER_HUGE,  OTHER_HUGE,  OTHER_PAGE};
    uintptr_t offset = (uintptr_t)block - atomic_load_explicit(&ranges_base, memory_order_relaxed);
    unsigned kind = pool_of_eighth[(offset >> (range_shift - 3)) & 7];
    return kind == POOLS ? NULL : &account->pool[kind];
}

/* ---- charging: under a lock of the account, so that attach and fork can hold it still ---- */
/* A limit that was lowered below `used` refuses what would cost nothing more, too. */
bool permitted(struct account *account, uint32_t sequence) {
    struct umad_account *line = line_of(account);
    return LOAD(line->state) == UMAD_OPEN && LOAD(line->sequence) == sequence &&
           LOAD(line->used) <= LOAD(line->limit);
}

/* Compare-and-swap rather than add and roll back: `used` never shows more than the limit, and a
 * giant request that fails cannot make a neighbour's small one fail in passing. */
bool charge(struct account *account, uint64_t bytes, uint32_t sequence) {
    if (!permitted(account, sequence))
        return false;
    struct umad_account *line = line_of(account);
    uint64_t used = __atomic_load_n(&line->used, __ATOMIC_RELAXED), limit = LOAD(line->limit);
    do {
        if (bytes > limit || used > limit - bytes)
            return false;
    } while (!__atomic_compare_exchange_n(&line->used, &used, used + bytes, true, __ATOMIC_ACQ_REL,
                                          __ATOMIC_RELAXED));
    used += bytes;
    uint64_t peak = __atomic_load_n(&line->peak, __ATOMIC_RELAXED);
    while (used > peak && !__atomic_compare_exchange_n(&line->peak, &peak, used, true,
                                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    raise_high(account);
    return true;
}

/* Without what is kept warm: that goes before anybody is refused, so nobody needs it. */
uint64_t live_bytes(struct account *account) {
    uint64_t used = LOAD(line_of(account)->used);
    uint64_t warm = atomic_load_explicit(&account->warm, memory_order_relaxed);
    return used > warm ? used - warm : 0;
}

/* Two words are read one after the other: while another thread evicts a warm block, the figure may
 * be too high by that block, never too low. */
void raise_high(struct account *account) {
    uint64_t live = live_bytes(account);
    uint64_t high = atomic_load_explicit(&account->high, memory_order_relaxed);
    while (live > high && !atomic_compare_exchange_weak(&account->high, &high, live))
        ;
}

void uncharge(struct account *account, uint64_t bytes) {
    __atomic_fetch_sub(&line_of(account)->used, bytes, __ATOMIC_ACQ_REL);
}

void refuse(struct account *account, size_t size) {
    struct umad_account *line = line_of(account);
    STORE(line->requested, (uint64_t)size);
    __atomic_fetch_add(&line->refused, 1, __ATOMIC_RELAXED);
    errno = ENOMEM;
}

void warm_add(struct account *account, int64_t bytes) {
    uint64_t warm =
        atomic_fetch_add_explicit(&account->warm, (uint64_t)bytes, memory_order_relaxed) +
        (uint64_t)bytes;
    __atomic_store_n(&line_of(account)->warm, warm, __ATOMIC_RELAXED);
}

/* The oldest blocks of the pool at hand go first, then those of its siblings. */
void trim_warm(struct account *account, struct pool *first, uint64_t keep) {
    int saved = errno;
    size_t start = first ? (size_t)(first - account->pool) : 0;
    for (size_t step = 0; step < POOLS; step++) {
        struct pool *pool = &account->pool[(start + step) % POOLS];
        while (atomic_load(&account->warm) > keep && pool_evict(pool))
            ;
    }
    if (!keep)
        slab_trim(&account->slabs);
    errno = saved;
}

/* Whoever locked the pages of a block (pinned buffers do) has given the block up, or is fenced:
 * the lock ends with it, or the pages would stay for ever. */
bool drop_pages(char *from, size_t bytes) {
    if (madvise(from, bytes, MADV_DONTNEED) == 0)
        return true;
    munlock(from, bytes);
    return madvise(from, bytes, MADV_DONTNEED) == 0;
}

void give_pages(char *from, size_t bytes) {
    int saved = errno;
    if (!drop_pages(from, bytes))
        memset(from, 0, bytes); /* it must read as zeros all the same */
    errno = saved;
}

/* ---- reservation ---- */
static void *reserve(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return NULL;
    madvise(at, bytes, MADV_DONTDUMP); /* a core file must not be 32 TiB long */
    return at;
}

static bool has_huge_units(void) {
    char text[32] = {0};
    int fd = open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    return got > 0 && strtoull(text, NULL, 10) == HUGE_UNIT;
}

static char *set_pool(struct account *account, enum pool_kind kind, char *base, size_t bytes,
                      char *meta, uint32_t page_shift) {
    struct pool *pool = &account->pool[kind];
    bool huge = kind == TENSOR_HUGE || kind == OTHER_HUGE;
    pool->account = account;
    pool->base = base;
    pool->granule_shift = huge ? 16 : page_shift;
    pool->unit_shift = huge ? 5 : 0;
    pool->capacity = (uint32_t)(bytes >> pool->granule_shift);
    pool->top = 1u << pool->unit_shift; /* granule 0 is "none", and a gap between the pools */
    pool->high = pool->top;
    pool->table = (struct extent *)meta;
    meta += (extent_meta_bytes(pool->capacity) + 63) & ~(size_t)63;
    if (huge) {
        pool->refs = (uint8_t *)meta;
        meta += ((pool->capacity >> pool->unit_shift) + 64) & ~(size_t)63;
    }
    madvise(base, bytes, huge && huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    if (huge) /* walls before the tensors and behind them; granule 0 is unused */
        mprotect(base, HUGE_UNIT, PROT_NONE);
    if (kind == TENSOR_HUGE)
        pool->top = pool->high = pool->capacity / 3 & ~31u;
    return meta;
}

static void set_account(uint32_t slot, char *base, char *meta, uint32_t page_shift) {
    struct account *account = &accounts[slot];
    size_t eighth = (size_t)1 << (range_shift - 3);
    account->slot = slot;
    meta = set_pool(account, TENSOR_HUGE, base, 3 * eighth, meta, page_shift);
    meta = set_pool(account, TENSOR_PAGE, base + 3 * eighth, eighth, meta, page_shift);
    meta = set_pool(account, OTHER_HUGE, base + 5 * eighth, 2 * eighth, meta, page_shift);
    meta = set_pool(account, OTHER_PAGE, base + 7 * eighth, eighth, meta, page_shift);
    account->slabs.account = account;
    account->slabs.base = base + 4 * eighth;
    account->slabs.page = 1u << page_shift;
    account->slabs.capacity = (uint32_t)(eighth / SLAB_BYTES);
    account->slabs.top = account->slabs.high = 1;
    account->slabs.table = (struct slab *)meta;
    madvise(account->slabs.base, eighth, MADV_NOHUGEPAGE);
}

static size_t meta_bytes(uint32_t page_shift) {
    size_t eighth = (size_t)1 << (range_shift - 3), pages = 2 * (eighth >> page_shift);
    size_t granules = 5 * (eighth >> 16);
    return (extent_meta_bytes((uint32_t)(pages + granules)) + (granules >> 5) +
            slab_meta_bytes((uint32_t)(eighth / SLAB_BYTES)) + 4096) &
           ~(size_t)4095;
}

int reserve_ranges(void) {
    if (range_shift)
        return 0; /* inherited by a fork */
    uint32_t page_shift = (uint32_t)__builtin_ctzl((unsigned long)sysconf(_SC_PAGESIZE));
    for (range_shift = SHIFT_WANTED; range_shift >= SHIFT_LEAST; range_shift--) {
        size_t range = (size_t)1 << range_shift, meta_each = meta_bytes(page_shift);
        size_t whole = UMAD_PAGE_SLOTS * range + HUGE_UNIT;
        char *base = reserve(whole);
        char *meta = base ? reserve(UMAD_PAGE_SLOTS * meta_each) : NULL;
        if (meta) {
            huge_pages = has_huge_units();
            base = (char *)(((uintptr_t)base + HUGE_UNIT - 1) & ~(HUGE_UNIT - 1));
            for (uint32_t slot = 0; slot < UMAD_PAGE_SLOTS; slot++)
                set_account(slot, base + slot * range, meta + slot * meta_each, page_shift);
            atomic_store(&ranges_end, (uintptr_t)base + UMAD_PAGE_SLOTS * range);
            atomic_store(&ranges_base, (uintptr_t)base);
            return 0;
        }
        if (base)
            munmap(base, whole);
    }
    range_shift = 0;
    return -ENOMEM;
}
