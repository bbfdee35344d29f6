/* What the native tests share: an account page, a fake tensor library, a quick random. */
#ifndef NATIVE_COMMON_H
#define NATIVE_COMMON_H

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "../../../umad/guard/page.h"

#ifdef UMAD_GUARD_EMBEDDED
#define malloc guarded_malloc
#define calloc guarded_calloc
#define realloc guarded_realloc
#define free guarded_free
#define posix_memalign guarded_posix_memalign
#define malloc_usable_size guarded_malloc_usable_size
#define pthread_create guarded_pthread_create
void *malloc(size_t);
void *calloc(size_t, size_t);
void *realloc(void *, size_t);
void free(void *);
int posix_memalign(void **, size_t, size_t);
int pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
#endif
size_t malloc_usable_size(void *);
int malloc_trim(size_t);

__attribute__((weak)) int umad_guard_attach(int fd);
__attribute__((weak)) uint64_t umad_guard_enter(int slot);
__attribute__((weak)) void umad_guard_leave(uint64_t previous);
__attribute__((weak)) void umad_guard_trim(int slot);
__attribute__((weak)) int umad_guard_current(void);

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                    \
            _exit(1);                                                                          \
        }                                                                                      \
    } while (0)

static struct umad_page *page;

static int make_page(void) {
    int fd = memfd_create("accounts", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fd >= 0 && ftruncate(fd, UMAD_PAGE_BYTES) == 0);
    page = mmap(NULL, UMAD_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(page != MAP_FAILED);
    memcpy(page->header.magic, UMAD_PAGE_MAGIC, 8);
    page->header.version = UMAD_PAGE_VERSION;
    page->header.slots = UMAD_PAGE_SLOTS;
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    return fd;
}

static inline void open_account(int slot, uint64_t limit) {
    __atomic_store_n(&page->account[slot].limit, limit, __ATOMIC_RELEASE);
    __atomic_fetch_add(&page->account[slot].sequence, 1, __ATOMIC_RELEASE);
    __atomic_store_n(&page->account[slot].state, UMAD_OPEN, __ATOMIC_RELEASE);
}

static inline uint64_t used(int slot) {
    return __atomic_load_n(&page->account[slot].used, __ATOMIC_ACQUIRE);
}

typedef void *tensor_t(size_t size, size_t alignment);

static inline tensor_t *load_tensors(const char *library) {
    void *handle = dlopen(library, RTLD_NOW);
    CHECK(handle);
    tensor_t *function;
    *(void **)&function = dlsym(handle, "fake_tensor");
    CHECK(function);
    return function;
}

static inline uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static inline double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
