/* corners CASE LIBC10: one corner of the allocator a run; exits 0 when it holds. */
#include <signal.h>
#include <sys/wait.h>

#include "common.h"

#define BIG 65536
#define MIB ((size_t)1 << 20)

static tensor_t *tensor;
static const char *library;

static void enter_first(uint64_t limit) {
    CHECK(umad_guard_attach(make_page()) == 0);
    open_account(0, limit);
    umad_guard_enter(0);
    tensor = load_tensors(library); /* later than attach and enter: the guard has to notice */
}

/* realloc across 64 KiB both ways keeps the content, and the account is charged meanwhile only. */
static void border(void) {
    enter_first(64 * MIB);
    for (int round = 0; round < 200; round++) {
        unsigned char *block = malloc(1000);
        memset(block, round, 1000);
        CHECK((block = realloc(block, 3 * BIG)) && used(0) >= 3 * BIG);
        memset(block + 1000, round, 3 * BIG - 1000);
        CHECK((block = realloc(block, 3 * MIB)));
        for (size_t at = 0; at < 3 * BIG; at++)
            CHECK(block[at] == (unsigned char)round);
        CHECK((block = realloc(block, BIG - 1)));
        for (size_t at = 0; at < BIG - 1; at++)
            CHECK(block[at] == (unsigned char)round);
        CHECK(!realloc(block, 65 * MIB) && errno == ENOMEM && block[5] == (unsigned char)round);
        CHECK(realloc(block, 0) == NULL);
        char *grown = NULL; /* in place at the end of a pool: never two copies */
        for (size_t size = BIG; size < 40 * MIB; size += 700000)
            CHECK((grown = realloc(grown, size)));
        free(grown);
    }
    umad_guard_trim(0);
    CHECK(used(0) == 0 && page->account[0].peak <= 64 * MIB);
}

static void zeroed(void) {
    enter_first(256 * MIB);
    uint64_t state = 7;
    for (int round = 0; round < 300; round++) {
        size_t size = BIG + next_random(&state) % (6 * MIB);
        unsigned char *dirty = malloc(size), *keep = malloc(2 * MIB + 70000);
        memset(dirty, 0xAA, size);
        memset(keep, 0xBB, 2 * MIB + 70000);
        free(dirty);
        if (round % 3 == 0)
            umad_guard_trim(0);
        unsigned char *clean = calloc(1, size);
        for (size_t at = 0; at < size; at++)
            CHECK(clean[at] == 0);
        memset(clean, 0xCC, size);
        free(keep);
        free(clean);
    }
    volatile size_t half = SIZE_MAX / 2;
    CHECK(calloc(half, 4) == NULL && errno == ENOMEM);
}

static void aligned(void) {
    enter_first(512 * MIB);
    for (size_t alignment = sizeof(void *); alignment <= 2 * MIB; alignment *= 2)
        for (size_t size = 1; size <= 8 * MIB; size = size * 3 + 1) {
            void *block = NULL, *made = NULL;
            CHECK(posix_memalign(&block, alignment, size) == 0);
            CHECK((uintptr_t)block % alignment == 0 && malloc_usable_size(block) >= size);
            CHECK((made = tensor(size, alignment)) && (uintptr_t)made % alignment == 0);
            memset(block, 1, size);
            memset(made, 1, size);
            free(block);
            free(made);
        }
    void *block = &block;
    CHECK(posix_memalign(&block, 24, 100000) == EINVAL && block == &block);
    CHECK(posix_memalign(&block, 64, (size_t)1 << 40) == ENOMEM && block == &block);
    umad_guard_trim(0);
    CHECK(used(0) == 0);
}

static void *inherits(void *unused) {
    (void)unused;
    CHECK(umad_guard_current() == 0);
    return malloc(5 * MIB);
}

static void *has_none(void *unused) {
    (void)unused;
    CHECK(umad_guard_current() == -1);
    return NULL;
}

/* Threads inherit, and what one allocates another may free, of whatever account. */
static void threads(void) {
    enter_first(64 * MIB);
    pthread_t thread;
    void *block;
    CHECK(pthread_create(&thread, NULL, inherits, NULL) == 0 && pthread_join(thread, &block) == 0);
    CHECK(used(0) == 6 * MIB); /* three huge pages */
    uint64_t mine = umad_guard_enter(-1);
    CHECK(pthread_create(&thread, NULL, has_none, NULL) == 0 && pthread_join(thread, NULL) == 0);
    free(block);
    umad_guard_leave(mine);
    CHECK(umad_guard_current() == 0);
    umad_guard_trim(0);
    CHECK(used(0) == 0);
}

/* Small tensors alone end in a refusal; small blocks that are no tensors are never refused. */
static void leak(void) {
    enter_first(8 * MIB);
    size_t got = 0;
    void *block, *last = NULL;
    while ((block = tensor(1000, 64))) {
        *(void **)block = last;
        last = block;
        got += 1024;
        CHECK(got <= 8 * MIB);
        CHECK(malloc(64));
    }
    CHECK(got > 7 * MIB && used(0) <= 8 * MIB && page->account[0].refused == 1);
    while (last) {
        block = *(void **)last;
        free(last);
        last = block;
    }
    umad_guard_trim(0);
    CHECK(used(0) == 0);
}

/* A thread that entered under an earlier holder of the slot stays shut out. */
static void fenced(void) {
    enter_first(64 * MIB);
    void *old = malloc(MIB);
    CHECK(old);
    __atomic_store_n(&page->account[0].state, UMAD_FREE, __ATOMIC_RELEASE);
    open_account(0, 64 * MIB);
    CHECK(!malloc(MIB) && !tensor(100, 64) && malloc(100));
    umad_guard_enter(0);
    CHECK(malloc(MIB));
    free(old);
}

static _Atomic bool stop;

static void *churn(void *slot) {
    umad_guard_enter((int)(intptr_t)slot);
    uint64_t state = (uintptr_t)slot + 99;
    while (!atomic_load(&stop)) {
        char *block = malloc(BIG + next_random(&state) % (3 * MIB)), *small = tensor(500, 64);
        CHECK(block && small);
        block[0] = small[0] = 1;
        free(block);
        free(small);
    }
    return NULL;
}

static void *fill(void *number) {
    void *kept[20];
    double end = now_s() + 2;
    while (now_s() < end) {
        int count = 0;
        while (count < 20 && (kept[count] = (uintptr_t)number % 2 ? malloc(BIG) : tensor(BIG, 64)))
            count++;
        CHECK(used(0) <= MIB && page->account[0].peak <= MIB);
        while (count)
            free(kept[--count]);
        umad_guard_trim(0);
    }
    return NULL;
}

/* Two pools of one account reach a small limit together, again and again: a check and an addition
 * that were two steps would let both have the last bytes. */
static void race(void) {
    enter_first(MIB);
    pthread_t fillers[4];
    for (intptr_t at = 0; at < 4; at++)
        CHECK(pthread_create(&fillers[at], NULL, fill, (void *)at) == 0);
    for (int at = 0; at < 4; at++)
        pthread_join(fillers[at], NULL);
    CHECK(page->account[0].refused > 100);
}

/* fork while others allocate: both sides go on, the child without an account or a shared page. */
static void forked(void) {
    enter_first(256 * MIB);
    open_account(1, 256 * MIB);
    pthread_t others[3];
    for (intptr_t at = 0; at < 3; at++)
        CHECK(pthread_create(&others[at], NULL, churn, (void *)(at % 2)) == 0);
    for (int round = 0; round < 60; round++) {
        char *kept = malloc(4 * MIB);
        memset(kept, 42, 4 * MIB);
        uint64_t before = page->account[0].refused;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(20);
            CHECK(umad_guard_current() == -1 && kept[3 * MIB] == 42);
            free(kept);
            for (int again = 0; again < 20; again++) {
                char *block = malloc(3 * MIB), *small = tensor(700, 64);
                CHECK(block && small);
                free(realloc(block, 5 * MIB));
                free(small);
            }
            CHECK(umad_guard_enter(0) == 0 && umad_guard_current() == -1);
            page = NULL; /* a child may have a page of its own */
            CHECK(umad_guard_attach(make_page()) == 0);
            /* what the other threads held at the fork is still there, and nobody's to free */
            open_account(0, used(0) + 10 * MIB);
            umad_guard_enter(0);
            CHECK(malloc(MIB) && !malloc(100 * MIB) && page->account[0].refused == 1);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        CHECK(kept[0] == 42 && page->account[0].refused == before);
        free(kept);
    }
    atomic_store(&stop, true);
    for (int at = 0; at < 3; at++)
        pthread_join(others[at], NULL);
    umad_guard_trim(0);
    umad_guard_trim(1);
    CHECK(used(0) == 0 && used(1) == 0);
}

/* A damaged page is refused, another page takes the counts over. */
static void pages(void) {
    int pipe_ends[2], plain = memfd_create("plain", 0);
    CHECK(pipe(pipe_ends) == 0 && ftruncate(plain, UMAD_PAGE_BYTES) == 0);
    CHECK(umad_guard_attach(-1) == -EBADF);
    CHECK(umad_guard_attach(pipe_ends[0]) == -EINVAL && umad_guard_attach(plain) == -EINVAL);
    int fd = make_page();
    page->header.version = 99;
    CHECK(umad_guard_attach(fd) == -EPROTO);
    page->header.version = UMAD_PAGE_VERSION;
    CHECK(umad_guard_attach(fd) == 0 && umad_guard_attach(fd) == 0);
    open_account(4, 64 * MIB);
    umad_guard_enter(4);
    void *block = malloc(10 * MIB);
    CHECK(block && used(4) == 10 * MIB);
    page->account[5].sequence = 41;
    open_account(5, 64 * MIB);
    umad_guard_enter(5);
    uint64_t fenced_out = umad_guard_enter(4);
    page->account[5].state = UMAD_CLOSED;
    int second = make_page();
    open_account(4, 64 * MIB);
    open_account(5, 64 * MIB);
    CHECK(umad_guard_attach(second) == 0 && used(4) == 10 * MIB);
    CHECK(page->account[4].sequence == 1 && page->account[5].sequence == 43);
    uint64_t inside = umad_guard_enter(-1);
    umad_guard_leave(fenced_out);
    CHECK(!malloc(MIB));
    umad_guard_leave(inside);
    free(block);
    umad_guard_trim(4);
    CHECK(used(4) == 0);
    CHECK(!malloc(65 * MIB) && malloc(MIB));
}

/* Not attached: everything is the C library's. */
static void transparent(void) {
    umad_guard_enter(3);
    CHECK(umad_guard_current() == -1);
    tensor = load_tensors(library);
    for (size_t size = 1; size < 64 * MIB; size = size * 2 + 1) {
        char *block = malloc(size), *other = calloc(size, 1), *made = tensor(size, 64);
        CHECK(block && other && made);
        block = realloc(block, size * 2);
        block[size] = 1;
        free(block);
        free(other);
        free(made);
    }
}

static void double_free(void) {
    enter_first(64 * MIB);
    void *block = malloc(MIB);
    free(block);
    free(block); /* ends the process, as the C library does */
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    library = arguments[2];
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"border", border},   {"zeroed", zeroed}, {"aligned", aligned},
        {"threads", threads}, {"leak", leak},     {"fenced", fenced},
        {"forked", forked},   {"race", race},     {"pages", pages},
        {"transparent", transparent},             {"double_free", double_free},
    };
    for (size_t at = 0; at < sizeof cases / sizeof *cases; at++)
        if (strcmp(cases[at].name, arguments[1]) == 0) {
            cases[at].run();
            return 0;
        }
    return 2;
}
