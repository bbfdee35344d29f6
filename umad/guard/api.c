/* Attach, fork, and the functions that umad's Python calls. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "guard.h"

static struct stat page_file;

/* ---- holding everything still ---- */
static void for_all_locks(void (*act)(lock_t *)) {
    for (uint32_t slot = 0; range_shift && slot < UMAD_PAGE_SLOTS; slot++) {
        for (int kind = 0; kind < POOLS; kind++)
            act(&accounts[slot].pool[kind].lock);
        act(&accounts[slot].slabs.lock);
    }
}

static void take(lock_t *lock) {
    lock_take(lock);
}
static void drop(lock_t *lock) {
    lock_drop(lock);
}
static void reset(lock_t *lock) {
    atomic_store(&lock->word, 0);
}

static void copy_counts(struct umad_page *to, const struct umad_page *from) {
    for (uint32_t slot = 0; slot < UMAD_PAGE_SLOTS; slot++) {
        STORE(to->account[slot].used, LOAD(from->account[slot].used));
        STORE(to->account[slot].peak, LOAD(from->account[slot].peak));
        STORE(to->account[slot].warm, LOAD(from->account[slot].warm));
    }
}

/* A new daemon counts its openings from 1 again: who was in an open account stays in, and who was
 * fenced out stays out. */
static void copy_sequences(struct umad_page *to, const struct umad_page *from) {
    for (uint32_t slot = 0; slot < UMAD_PAGE_SLOTS; slot++) {
        uint32_t before = LOAD(from->account[slot].sequence);
        if (before && LOAD(to->account[slot].state) == UMAD_OPEN)
            STORE(to->account[slot].sequence,
                  LOAD(from->account[slot].state) == UMAD_OPEN ? before : before + 1);
    }
}

static void before_fork(void) {
    lock_take(&attach_lock);
    for_all_locks(take);
}

static void after_fork_parent(void) {
    for_all_locks(drop);
    lock_drop(&attach_lock);
}

/* The child has no account: its page is its own memory, its blocks are copies. */
static void after_fork_child(void) {
    struct umad_page *old = atomic_load(&page);
    if (old != &unattached) {
        copy_counts(&unattached, old);
        atomic_store(&page, &unattached);
        munmap(old, UMAD_PAGE_BYTES);
    }
    atomic_store(&attached, false);
    current_token = 0;
    for_all_locks(reset);
    for (uint32_t slot = 0; slot < UMAD_PAGE_SLOTS; slot++)
        reset(&accounts[slot].sweep);
    reset(&attach_lock);
}

/* ---- the exported functions ---- */
static int check_page(int fd, struct stat *file) {
    if (fstat(fd, file) != 0)
        return -errno;
    int seals = fcntl(fd, F_GET_SEALS);
    if (file->st_size != UMAD_PAGE_BYTES || seals < 0 ||
        (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
        return -EINVAL; /* a page that can shrink would end us with SIGBUS */
    return 0;
}

static int use_page(int fd) {
    struct umad_page *fresh =
        mmap(NULL, UMAD_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fresh == MAP_FAILED)
        return -errno;
    if (memcmp(fresh->header.magic, UMAD_PAGE_MAGIC, 8) != 0 ||
        LOAD(fresh->header.version) != UMAD_PAGE_VERSION ||
        LOAD(fresh->header.slots) != UMAD_PAGE_SLOTS) {
        munmap(fresh, UMAD_PAGE_BYTES);
        return -EPROTO;
    }
    int failed = reserve_ranges();
    if (failed) {
        munmap(fresh, UMAD_PAGE_BYTES);
        return failed;
    }
    static bool prepared;
    if (!prepared && pthread_atfork(before_fork, after_fork_parent, after_fork_child) != 0) {
        munmap(fresh, UMAD_PAGE_BYTES);
        return -ENOMEM;
    }
    prepared = true;
    for_all_locks(take);
    copy_counts(fresh, atomic_load(&page));
    copy_sequences(fresh, atomic_load(&page));
    atomic_store(&page, fresh); /* the old one stays mapped: somebody may still be reading it */
    for_all_locks(drop);
    STORE(fresh->header.guard, 1 + UMAD_PAGE_VERSION);
    return 0;
}

/* Binds the process to an account page.  Again with the same page: nothing happens; with another
 * page (a new daemon made it): the counts move over, and each worker must be in its former slot.
 * Returns 0 or a negative errno: EINVAL no sealed page, EPROTO another layout, ENOMEM no ranges,
 * EAGAIN no thread. */
EXPORT int umad_guard_attach(int fd) {
    struct stat file;
    lock_take(&attach_lock);
    int failed = check_page(fd, &file);
    bool known = atomic_load(&attached);
    if (!failed &&
        !(known && file.st_dev == page_file.st_dev && file.st_ino == page_file.st_ino)) {
        failed = use_page(fd);
        if (!failed)
            page_file = file;
        if (!failed && !known && !sweeper_start())
            failed = -EAGAIN;
        if (!failed)
            atomic_store(&attached, true);
    }
    lock_drop(&attach_lock);
    return failed;
}

EXPORT int umad_guard_active(void) {
    return atomic_load(&attached);
}

EXPORT const char *umad_guard_version(void) {
    return "1";
}

EXPORT uint32_t umad_guard_page_version(void) {
    return UMAD_PAGE_VERSION;
}

/* The slot of the calling thread, -1 for shared. */
EXPORT int umad_guard_current(void) {
    return (int)(uint32_t)current_token - 1;
}

/* Puts the calling thread, and threads it starts from now on, into an account.
 * Returns the token of where it was, for umad_guard_leave.  Before attach: stays shared. */
EXPORT uint64_t umad_guard_enter(int slot) {
    token_t previous = current_token;
    if (slot < 0 || slot >= (int)UMAD_PAGE_SLOTS || !atomic_load(&attached)) {
        current_token = 0;
        return previous;
    }
    struct account *account = &accounts[slot];
    find_tensor_library();
    uint32_t sequence = LOAD(line_of(account)->sequence);
    if (atomic_load_explicit(&account->admitted, memory_order_acquire) != sequence) {
        lock_take(&account->sweep); /* a sweep of the former holder ends first */
        atomic_store_explicit(&account->admitted, sequence, memory_order_release);
        lock_drop(&account->sweep);
    }
    current_token = (token_t)sequence << 32 | (uint32_t)(slot + 1);
    return previous;
}

EXPORT void umad_guard_leave(uint64_t previous) {
    current_token = atomic_load_explicit(&attached, memory_order_relaxed) ? previous : 0;
}

/* Gives the freed blocks that an account keeps warm back to the system. */
EXPORT void umad_guard_trim(int slot) {
    if (slot >= 0 && slot < (int)UMAD_PAGE_SLOTS && range_shift)
        trim_warm(&accounts[slot], NULL, 0);
}

/* From now on the high-water mark counts anew; returns the bytes in live blocks of this moment. */
EXPORT uint64_t umad_guard_mark(int slot) {
    if (slot < 0 || slot >= (int)UMAD_PAGE_SLOTS)
        return 0;
    uint64_t live = live_bytes(&accounts[slot]);
    atomic_store(&accounts[slot].high, live);
    return live;
}

/* The most bytes that were in live blocks since the mark; what is kept warm is not among them. */
EXPORT uint64_t umad_guard_high(int slot) {
    return slot < 0 || slot >= (int)UMAD_PAGE_SLOTS ? 0 : atomic_load(&accounts[slot].high);
}

/* Somebody else has charged an account in the page: the allocator for devices. */
EXPORT void umad_guard_charged(int slot) {
    if (slot >= 0 && slot < (int)UMAD_PAGE_SLOTS)
        raise_high(&accounts[slot]);
}

struct umad_guard_info {
    uint64_t base, bytes;               /* of the whole range */
    uint64_t tensor_base, tensor_bytes; /* the part that may be taken away */
    uint64_t tensor_charged, other_charged, warm;
};

/* Returns 0, or -1 for a slot that does not exist or before attach. */
EXPORT int umad_guard_info(int slot, struct umad_guard_info *info) {
    if (slot < 0 || slot >= (int)UMAD_PAGE_SLOTS || !range_shift)
        return -1;
    struct account *account = &accounts[slot];
    size_t range = (size_t)1 << range_shift;
    info->base = info->tensor_base = (uintptr_t)account->pool[TENSOR_HUGE].base;
    info->bytes = range;
    info->tensor_bytes = range / 8 * 5;
    info->tensor_charged = atomic_load(&account->pool[TENSOR_HUGE].charged) +
                           atomic_load(&account->pool[TENSOR_PAGE].charged) +
                           atomic_load(&account->slabs.charged);
    info->other_charged = atomic_load(&account->pool[OTHER_HUGE].charged) +
                          atomic_load(&account->pool[OTHER_PAGE].charged);
    info->warm = atomic_load(&account->warm);
    return 0;
}
