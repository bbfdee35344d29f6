/* Eight threads allocate and free at random under two accounts, and free each other's blocks, while
 * the page is attached again and again and a limit moves.  Linked with device.c itself, so that
 * sanitizers see it.  Prints refusals; any byte over a limit, or left behind, ends it with 1. */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include "page.h"

int umad_device_attach(int fd);
uint64_t umad_device_enter(int slot);
void umad_device_leave(uint64_t token);
uint64_t umad_device_held(int slot);
void *umad_device_alloc(ssize_t size, int device, void *stream);
void umad_device_free(void *block, ssize_t size, int device, void *stream);

#define THREADS 8
#define SHELF 64
#define LIMIT ((uint64_t)64 << 20)

static struct umad_page *page;
static void *_Atomic shelf[SHELF]; /* a block put here is freed by whoever takes it out */
static _Atomic bool done;
static _Atomic int wrong;
static int rounds;

static uint32_t random_next(uint32_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 17;
    return *state ^= *state << 5;
}

static void *work(void *argument) {
    uint32_t state = 1 + (uint32_t)(uintptr_t)argument * 7919;
    uint64_t before = umad_device_enter((int)((uintptr_t)argument % 2));
    for (int round = 0; round < rounds; round++) {
        ssize_t size = (ssize_t)(random_next(&state) % (32u << 20)) + 1;
        void *block = umad_device_alloc(size, 0, NULL);
        void *other = atomic_exchange(&shelf[random_next(&state) % SHELF], block);
        umad_device_free(other, 0, 0, NULL);
    }
    umad_device_leave(before);
    return NULL;
}

static void *watch(void *argument) {
    int fd = *(int *)argument;
    while (!done) {
        for (int slot = 0; slot < 2; slot++)
            if (__atomic_load_n(&page->account[slot].used, __ATOMIC_ACQUIRE) > LIMIT)
                wrong++;
        if (umad_device_attach(fd) != 0)
            wrong++;
    }
    return NULL;
}

int main(int count, char **arguments) {
    rounds = count > 1 ? atoi(arguments[1]) : 1000;
    int fd = memfd_create("page", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (ftruncate(fd, UMAD_PAGE_BYTES) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW))
        return 2;
    page = mmap(NULL, UMAD_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memcpy(page->header.magic, UMAD_PAGE_MAGIC, 8);
    page->header.version = UMAD_PAGE_VERSION;
    page->header.slots = UMAD_PAGE_SLOTS;
    for (int slot = 0; slot < 2; slot++) {
        page->account[slot].limit = LIMIT;
        page->account[slot].state = UMAD_OPEN;
        page->account[slot].sequence = 5;
    }
    if (umad_device_attach(fd) != 0)
        return 3;
    pthread_t workers[THREADS], watcher;
    pthread_create(&watcher, NULL, watch, &fd);
    for (uintptr_t at = 0; at < THREADS; at++)
        pthread_create(&workers[at], NULL, work, (void *)at);
    for (int at = 0; at < THREADS; at++)
        pthread_join(workers[at], NULL);
    done = true;
    pthread_join(watcher, NULL);
    for (int at = 0; at < SHELF; at++)
        umad_device_free(shelf[at], 0, 0, NULL);
    uint64_t refused = 0;
    for (int slot = 0; slot < 2; slot++) {
        const struct umad_account *line = &page->account[slot];
        refused += line->refused;
        if (line->used || umad_device_held(slot) || line->peak > LIMIT || line->peak < LIMIT / 2)
            wrong++;
    }
    printf("%" PRIu64 "\n", refused);
    return wrong ? 1 : 0;
}
