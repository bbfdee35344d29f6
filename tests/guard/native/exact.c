/* exact LIBC10 THREADS TRIES SEED: TRIES allocations over and under the limit of one account, by
 * all threads at once, while a watcher reads the count.  Prints: refusals, highest count seen. */
#include "common.h"

#define LIMIT (((uint64_t)96 << 20) + 12345)
#define KEEP 24

static tensor_t *tensor;
static _Atomic bool stop;
static _Atomic uint64_t highest;
static int tries;
static uint64_t seed;

static void *watch(void *unused) {
    (void)unused;
    while (!atomic_load(&stop)) {
        uint64_t now = used(0);
        if (now > atomic_load(&highest))
            atomic_store(&highest, now);
    }
    return NULL;
}

static void *work(void *number) {
    uint64_t state = seed * 7919 + (uintptr_t)number * 104729 + 1;
    void *kept[KEEP] = {0};
    for (int at = 0; at < tries; at++) {
        uint64_t r = next_random(&state);
        size_t size = (size_t)1 << (16 + r % 10);
        size += next_random(&state) % size; /* 64 KiB .. 64 MiB */
        void **place = &kept[(r >> 20) % KEEP];
        free(*place);
        *place = (r >> 40) % 2 ? malloc(size) : tensor(size, 64);
        if (*place)
            *(volatile char *)*place = 1;
        CHECK(used(0) <= LIMIT);
    }
    for (int at = 0; at < KEEP; at++)
        free(kept[at]);
    return NULL;
}

int main(int count, char **arguments) {
    CHECK(count == 5);
    int threads = atoi(arguments[2]);
    tries = atoi(arguments[3]) / threads;
    seed = (uint64_t)atoi(arguments[4]);
    CHECK(umad_guard_attach(make_page()) == 0);
    open_account(0, LIMIT);
    tensor = load_tensors(arguments[1]);
    pthread_t watcher, workers[8];
    CHECK(threads <= 8 && pthread_create(&watcher, NULL, watch, NULL) == 0);
    umad_guard_enter(0);
    for (intptr_t at = 0; at < threads; at++)
        CHECK(pthread_create(&workers[at], NULL, work, (void *)at) == 0);
    for (int at = 0; at < threads; at++)
        pthread_join(workers[at], NULL);
    atomic_store(&stop, true);
    pthread_join(watcher, NULL);
    CHECK(page->account[0].peak <= LIMIT && highest <= LIMIT);
    umad_guard_trim(0);
    CHECK(used(0) == 0);
    printf("%lu %lu\n", (unsigned long)page->account[0].refused, (unsigned long)highest);
    return 0;
}
