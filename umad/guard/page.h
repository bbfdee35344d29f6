/* The account page: what the daemon and the guard share, one 4 KiB memfd per process.
 *
 * Little-endian, naturally aligned, every field read and written as one atomic word; page.py has
 * the same layout and a test compares the two.  Line 0 is the header, line n + 1 is account n.
 * A word has one writer: (D) the daemon, (G) the guard in the serving process.  The page is
 * writable by a process that may lie, so the daemon never grants more because of it.
 */
#ifndef UMAD_GUARD_PAGE_H
#define UMAD_GUARD_PAGE_H

#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the account page is little-endian"
#endif

#define UMAD_PAGE_MAGIC "UMADPAGE"
#define UMAD_PAGE_VERSION 1u
#define UMAD_PAGE_SLOTS 63u
#define UMAD_PAGE_BYTES 4096u

enum umad_state {
    UMAD_FREE = 0,     /* (D) nobody's; nothing may be charged to it */
    UMAD_OPEN = 1,     /* (D) may allocate up to its limit */
    UMAD_CLOSED = 2,   /* (D) refuses everything; its tensor pages are taken away */
    UMAD_RETURNED = 3, /* (G) closed, and its tensor pages were taken at least once */
};

struct umad_header {
    char magic[8];       /* (D) */
    uint32_t version;    /* (D) */
    uint32_t slots;      /* (D) */
    uint64_t generation; /* (D) of the daemon that made the page */
    uint32_t doorbell;   /* (D) futex word: one more after each close */
    uint32_t guard;      /* (G) 1 + the page version once a guard is attached */
    uint64_t shared;     /* (G) bytes in blocks >= 64 KiB that have no account */
    uint64_t beats;      /* (G) rounds of the guard's thread, at least 10 a second */
    uint64_t reserved[2];
};

struct umad_account {
    uint64_t limit;     /* (D) bytes */
    uint64_t used;      /* (G) bytes charged now: live blocks and the warm cache */
    uint64_t peak;      /* (G) highest `used` since the account was opened */
    uint64_t refused;   /* (G) allocations refused since then */
    uint32_t state;     /* (D), and CLOSED -> RETURNED (G): enum umad_state */
    uint32_t sequence;  /* (D) one more at each opening; fences threads of an earlier holder */
    uint64_t requested; /* (G) bytes that the last refused call asked for */
    uint64_t returned;  /* (G) of `used`, what was taken away by force; 0 while open */
    uint64_t warm;      /* (G) of `used`, freed blocks that are kept for reuse */
};

struct umad_page {
    struct umad_header header;
    struct umad_account account[UMAD_PAGE_SLOTS];
};

_Static_assert(sizeof(struct umad_header) == 64, "one cache line");
_Static_assert(sizeof(struct umad_account) == 64, "one cache line");
_Static_assert(sizeof(struct umad_page) == UMAD_PAGE_BYTES, "one page");

#endif
