/* stress LIBC10 THREADS SECONDS SEED: random blocks of all kinds and sizes, handed about and
 * freed by other threads than their makers, under limits that are hit all the time.  Every block
 * carries a pattern, so a block handed out twice or zeroed is seen; at the end every count is 0.
 * Prints: operations, refusals, the growth of VmRSS over the last half in KiB. */
#include "common.h"

#define SHARED_PLACES 256
#define ACCOUNTS 3
#define LIMIT ((uint64_t)40 << 20)

struct block {
    size_t size;
    uint64_t mark;
};

static struct block *_Atomic places[SHARED_PLACES];
static _Atomic bool stop;
static _Atomic unsigned long operations, refusals;
static tensor_t *tensor;

static uint64_t *last_word(struct block *block) {
    return (uint64_t *)((char *)block + block->size) - 1;
}

static void sign(struct block *block, size_t size, uint64_t mark) {
    block->size = size;
    block->mark = mark;
    *last_word(block) = mark;
    if (size > 65536)
        ((uint64_t *)block)[size / 16] = mark;
}

static void verify(struct block *block) {
    CHECK(block->size >= 32 && *last_word(block) == block->mark);
    if (block->size > 65536)
        CHECK(((uint64_t *)block)[block->size / 16] == block->mark);
    CHECK(malloc_usable_size(block) >= block->size);
}

static size_t some_size(uint64_t r) {
    static const size_t scale[8] = {256, 4096, 32768, 131072, 131072, 1 << 20, 3 << 20, 8 << 20};
    return (32 + (r >> 8) % scale[r & 7]) & ~(size_t)7;
}

static struct block *make(uint64_t r) {
    size_t size = some_size(r), alignment = 64;
    void *block = NULL;
    switch ((r >> 40) % 4) {
    case 0:
        block = malloc(size);
        break;
    case 1:
        block = calloc(size / 8, 8);
        for (size_t at = 0; block && at < size / 8; at += size > 65536 ? 61 : 1)
            CHECK(((uint64_t *)block)[at] == 0);
        break;
    case 2:
        alignment = (size_t)16 << (r >> 50) % 18; /* 16 bytes .. 2 MiB */
        if (posix_memalign(&block, alignment, size) != 0)
            block = NULL;
        CHECK((uintptr_t)block % alignment == 0);
        break;
    default:
        block = tensor(size, alignment);
        CHECK((uintptr_t)block % alignment == 0);
    }
    atomic_fetch_add(&operations, 1);
    if (!block) {
        atomic_fetch_add(&refusals, 1);
        return NULL;
    }
    sign(block, size, r | 1);
    return block;
}

static void *work(void *argument) {
    uint64_t state = (uint64_t)(uintptr_t)argument * 0x9E3779B97F4A7C15u + 1;
    int mine = (int)((uintptr_t)argument % (ACCOUNTS + 1)) - 1;
    while (!atomic_load(&stop)) {
        uint64_t previous = umad_guard_enter(mine);
        for (int step = 0; step < 64; step++) {
            uint64_t r = next_random(&state);
            struct block *_Atomic *place = &places[r % SHARED_PLACES];
            r = next_random(&state);
            struct block *taken = atomic_exchange(place, NULL);
            if (taken) {
                verify(taken);
                if (r % 5 == 0) {
                    size_t size = some_size(next_random(&state)), old = taken->size;
                    uint64_t mark = taken->mark;
                    struct block *moved = realloc(taken, size);
                    if (moved) {
                        CHECK(moved->mark == mark && moved->size == old);
                        sign(moved, size, mark);
                        taken = moved;
                    }
                }
                free(taken);
            }
            for (int slot = 0; slot < ACCOUNTS; slot++)
                CHECK(used(slot) <= LIMIT);
            if (r % 3 != 0) {
                struct block *fresh = make(r), *there = NULL;
                if (fresh && !atomic_compare_exchange_strong(place, &there, fresh))
                    free(fresh);
            }
        }
        umad_guard_leave(previous);
        if (next_random(&state) % 64 == 0)
            umad_guard_trim((int)(next_random(&state) % ACCOUNTS));
    }
    return NULL;
}

static long resident_kib(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    long pages = 0;
    CHECK(file && fscanf(file, "%*d %ld", &pages) == 1);
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static long drained_kib(void) {
    for (int at = 0; at < SHARED_PLACES; at++) {
        struct block *left = atomic_exchange(&places[at], NULL);
        if (left)
            verify(left);
        free(left);
    }
    for (int slot = 0; slot < ACCOUNTS; slot++)
        umad_guard_trim(slot);
    malloc_trim(0);
    return resident_kib();
}

static void run(int count, double seconds, unsigned seed) {
    pthread_t threads[16];
    atomic_store(&stop, false);
    for (int at = 0; at < count; at++)
        CHECK(pthread_create(&threads[at], NULL, work, (void *)(uintptr_t)(at + 8 * seed)) == 0);
    struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
    atomic_store(&stop, true);
    for (int at = 0; at < count; at++)
        pthread_join(threads[at], NULL);
}

int main(int count, char **arguments) {
    CHECK(count == 5);
    int threads = atoi(arguments[2]);
    double seconds = atof(arguments[3]);
    unsigned seed = (unsigned)atoi(arguments[4]);
    CHECK(threads > 0 && threads <= 16);
    CHECK(umad_guard_attach(make_page()) == 0);
    for (int slot = 0; slot < ACCOUNTS; slot++)
        open_account(slot, LIMIT);
    tensor = load_tensors(arguments[1]);
    run(threads, seconds / 2, seed);
    long before = drained_kib();
    run(threads, seconds / 2, seed + 1);
    long after = drained_kib();
    for (int slot = 0; slot < ACCOUNTS; slot++)
        CHECK(used(slot) == 0 && page->account[slot].warm == 0);
    printf("%lu %lu %ld\n", operations, refusals, after - before);
    return 0;
}
