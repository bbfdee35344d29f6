/* Forced return: a thread that never takes the interpreter's lock.
 *
 * It waits on the page's doorbell and gives the tensor pages of every closed account back to the
 * system, again and again while the account stays closed, since the fenced thread may still run
 * and touch them.  Its tensors read as zeros then; whoever uses its results must know.  The other
 * half of the range is never touched: doing that hangs the process.
 *
 * Data that turns to zeros in the middle of a call can keep it from ending: torch.sort was seen to
 * run on past its tensor.  It holds no memory, but a fenced thread that is still there after some
 * seconds means that the process has to be replaced.  To let more calls come to their end a sweep
 * is repeated after 5 ms only while the process grows by more than 32 MiB, and otherwise after
 * twice the time each, up to 320 ms.
 */
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "guard.h"

#define CLOSED_PAUSE_NS 5000000L  /* between two looks at a closed account */
#define SWEEP_PAUSE_NS 320000000L /* at most, between two sweeps of one that stays empty */
#define IDLE_PAUSE_NS 50000000L   /* the doorbell comes first; this bounds a ring that was lost */
#define CHUNK ((size_t)256 << 20) /* a sweep lets mmap and munmap of others in between */
#define GROWTH ((uint64_t)32 << 20)

static void sweep_bytes(char *base, size_t bytes, struct umad_account *line) {
    for (size_t done = 0; done < bytes && LOAD(line->state) >= UMAD_CLOSED; done += CHUNK) {
        size_t left = bytes - done;
        drop_pages(base + done, left < CHUNK ? left : CHUNK);
    }
}

static void sweep(struct account *account) {
    struct umad_account *line = line_of(account);
    struct pool *huge = &account->pool[TENSOR_HUGE], *small = &account->pool[TENSOR_PAGE];
    lock_take(&account->sweep);
    /* Read under the lock: should the daemon open the slot to somebody else from here on, that
     * holder cannot enter, and so has no block here, before this sweep is over. */
    uint32_t state = LOAD(line->state);
    if (state == UMAD_CLOSED || state == UMAD_RETURNED) {
        sweep_bytes(huge->base, (size_t)atomic_load(&huge->high) << huge->granule_shift, line);
        sweep_bytes(small->base, (size_t)atomic_load(&small->high) << small->granule_shift, line);
        sweep_bytes(account->slabs.base, (size_t)atomic_load(&account->slabs.high) * SLAB_BYTES,
                    line);
        STORE(line->returned, atomic_load(&huge->charged) + atomic_load(&small->charged) +
                                  atomic_load(&account->slabs.charged));
        uint32_t closed = UMAD_CLOSED;
        __atomic_compare_exchange_n(&line->state, &closed, UMAD_RETURNED, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_RELAXED);
    }
    lock_drop(&account->sweep);
    if (state == UMAD_CLOSED || atomic_load(&account->warm))
        trim_warm(account, NULL, 0);
}

/* Physical bytes of this process; 0 when they cannot be read, which counts as growth. */
static uint64_t resident(void) {
    char text[128] = {0};
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    const char *second = got > 0 ? strchr(text, ' ') : NULL;
    return second ? strtoull(second, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* One round over the closed accounts; false when there is none. */
static bool round_of_sweeps(void) {
    static struct {
        int64_t due_ns, pause_ns;
    } plan[UMAD_PAGE_SLOTS];
    static uint64_t resident_after; /* the last sweep, or the least seen since */
    bool closed = false, swept = false;
    uint64_t resident_now = 0;
    for (uint32_t slot = 0; slot < UMAD_PAGE_SLOTS; slot++) {
        uint32_t state = LOAD(line_of(&accounts[slot])->state);
        if (state != UMAD_CLOSED && state != UMAD_RETURNED)
            continue;
        if (!closed)
            resident_now = resident();
        closed = true;
        bool grown = !resident_now || resident_now > resident_after + GROWTH;
        if (state == UMAD_CLOSED || grown)
            plan[slot].pause_ns = CLOSED_PAUSE_NS;
        else if (now_ns() < plan[slot].due_ns)
            continue;
        else if (plan[slot].pause_ns < SWEEP_PAUSE_NS)
            plan[slot].pause_ns *= 2;
        sweep(&accounts[slot]);
        plan[slot].due_ns = now_ns() + plan[slot].pause_ns;
        swept = true;
    }
    if (swept)
        resident_after = resident();
    else if (resident_now < resident_after)
        resident_after = resident_now;
    return closed;
}

static void *run(void *unused) {
    (void)unused;
    /* Ahead of what computes, where that is allowed (RLIMIT_NICE): its work is a few ms long. */
    setpriority(PRIO_PROCESS, 0, -10);
    for (;;) {
        struct umad_header *header = &atomic_load(&page)->header;
        uint32_t rung = LOAD(header->doorbell);
        bool closed = round_of_sweeps();
        /* Blocks older than the count may be freed under it. */
        int64_t shared = (int64_t)atomic_load_explicit(&shared_bytes, memory_order_relaxed);
        STORE(header->shared, shared > 0 ? (uint64_t)shared : 0);
        STORE(header->beats, header->beats + 1);
        struct timespec pause = {0, closed ? CLOSED_PAUSE_NS : IDLE_PAUSE_NS};
        syscall(SYS_futex, &header->doorbell, FUTEX_WAIT, rung, &pause, NULL, 0);
    }
    return NULL;
}

int real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

bool sweeper_start(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the program's signals are not for us */
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 128 << 10);
    bool started = real_pthread_create(&thread, &attributes, run, NULL) == 0;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}
