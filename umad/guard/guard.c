/* The interposed functions: who is asked for a block, and who gets one back.
 *
 * Preloaded into umad-serve.  Decisions, in order, for each allocation:
 * 1. Below 64 KiB and not a tensor: the C library's, untouched.
 * 2. The thread has no account: the C library's; counted as shared when >= 64 KiB.
 * 3. Otherwise the account's range; over the limit: NULL with ENOMEM, nothing else changes.
 * A tensor is what libc10.so itself asks aligned memory for.  A tensor of any size may be refused,
 * since torch turns that into its own RuntimeError; other code is refused only blocks so large
 * that it has to expect it.  free() goes by the address alone, so any thread may free any block.
 */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "guard.h"

/* ---- which calls come from torch's tensor allocator ---- */
static _Atomic uintptr_t tensor_code, tensor_code_end;
static _Atomic unsigned long long libraries_seen;

static int look_for_tensors(struct dl_phdr_info *info, size_t size, void *first) {
    (void)size;
    if (*(bool *)first) { /* nothing was loaded since the last look */
        *(bool *)first = false;
        if (info->dlpi_adds == atomic_load(&libraries_seen))
            return 1;
        atomic_store(&libraries_seen, info->dlpi_adds);
    }
    const char *name = strrchr(info->dlpi_name, '/');
    if (!name || strcmp(name, "/libc10.so") != 0)
        return 0;
    for (int at = 0; at < info->dlpi_phnum; at++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[at];
        if (part->p_type == PT_LOAD && part->p_flags & PF_X) {
            uintptr_t code = info->dlpi_addr + part->p_vaddr;
            atomic_store(&tensor_code_end, code + part->p_memsz);
            atomic_store(&tensor_code, code);
            return 1;
        }
    }
    return 0;
}

void find_tensor_library(void) {
    bool first = true;
    if (!atomic_load_explicit(&tensor_code, memory_order_acquire))
        dl_iterate_phdr(look_for_tensors, &first);
}

static bool is_tensor(const void *caller) {
    if (UNLIKELY(!atomic_load_explicit(&tensor_code, memory_order_acquire)))
        find_tensor_library();
    uintptr_t code = atomic_load_explicit(&tensor_code, memory_order_acquire);
    return code && (uintptr_t)caller - code <
                       atomic_load_explicit(&tensor_code_end, memory_order_relaxed) - code;
}

/* ---- blocks without an account ---- */
/* The size word of glibc's block header, for one load instead of a call on each free(); checked
 * once against malloc_usable_size, and without it `shared` stays 0. */
static bool headers_known;

static size_t header_size(const void *block) {
    return ((const size_t *)block)[-1] & ~(size_t)7;
}

static void *count_shared(void *block) {
    if (headers_known && block && header_size(block) >= BIG)
        atomic_fetch_add_explicit(&shared_bytes, header_size(block), memory_order_relaxed);
    return block;
}

static void free_shared(void *block) {
    if (headers_known && block && UNLIKELY(header_size(block) >= BIG))
        atomic_fetch_sub_explicit(&shared_bytes, header_size(block), memory_order_relaxed);
    libc_free(block);
}

typedef size_t usable_size_t(void *);
typedef int pthread_create_t(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
static usable_size_t *real_usable_size;
static pthread_create_t *real_create;

#ifdef UMAD_GUARD_EMBEDDED
__attribute__((constructor)) static void find_real(void) {
    real_usable_size = malloc_usable_size;
    real_create = pthread_create;
}
#else
__attribute__((constructor)) static void find_real(void) {
    if (real_create)
        return;
    *(void **)&real_usable_size = dlsym(RTLD_NEXT, "malloc_usable_size");
    *(void **)&real_create = dlsym(RTLD_NEXT, "pthread_create");
    void *probe = libc_malloc(2 * BIG), *mapped = libc_malloc(HUGE_UNIT * 16);
    headers_known = probe && mapped && real_usable_size(probe) == header_size(probe) - 8 &&
                    real_usable_size(mapped) == header_size(mapped) - 16;
    libc_free(probe);
    libc_free(mapped);
}
#endif

static size_t libc_usable_size(void *block) {
    if (UNLIKELY(!real_usable_size))
        find_real();
    return real_usable_size(block);
}

/* ---- blocks of an account ---- */
static struct grant take_from(struct account *account, struct pool *pool, size_t size,
                              size_t alignment, token_t token) {
    uint32_t sequence = (uint32_t)(token >> 32);
    struct grant grant = pool_take(pool, size, alignment, sequence);
    if (UNLIKELY(!grant.block)) {
        if (atomic_load(&account->warm)) {
            trim_warm(account, pool, 0); /* what is kept warm must not cost anybody a refusal */
            grant = pool_take(pool, size, alignment, sequence);
        }
        if (!grant.block)
            refuse(account, size);
    }
    return grant;
}

static struct grant take(token_t token, size_t size, size_t alignment, bool tensor) {
    struct account *account = &accounts[(uint32_t)token - 1];
    enum pool_kind kind = tensor ? (size >= HUGE_TENSOR ? TENSOR_HUGE : TENSOR_PAGE)
                                 : (size >= HUGE_UNIT ? OTHER_HUGE : OTHER_PAGE);
    return take_from(account, &account->pool[kind], size, alignment, token);
}

static void *take_small_tensor(token_t token, size_t size) {
    struct account *account = &accounts[(uint32_t)token - 1];
    if (size > SLAB_MAX)
        return take(token, size, 0, true).block;
    void *block = slab_take(&account->slabs, size, (uint32_t)(token >> 32));
    if (UNLIKELY(!block)) {
        trim_warm(account, NULL, 0);
        block = slab_take(&account->slabs, size, (uint32_t)(token >> 32));
        if (!block)
            refuse(account, size);
    }
    return block;
}

static void give(void *block) {
    struct account *account = owner_of(block);
    struct pool *pool = pool_of(account, block);
    if (pool)
        pool_give(pool, block);
    else
        slab_give(&account->slabs, block);
}

static size_t size_of(void *block) {
    if (!is_ours(block))
        return libc_usable_size(block);
    struct account *account = owner_of(block);
    struct pool *pool = pool_of(account, block);
    return pool ? pool_size(pool, block) : slab_size(&account->slabs, block);
}

/* ---- the C library's names ---- */
EXPORT void *GUARDED(malloc)(size_t size) {
    if (LIKELY(size < BIG))
        return libc_malloc(size);
    token_t token = current_token;
    return token ? take(token, size, 0, false).block : count_shared(libc_malloc(size));
}

EXPORT void GUARDED(free)(void *block) {
    if (UNLIKELY(is_ours(block)))
        give(block);
    else
        free_shared(block);
}

EXPORT void *GUARDED(calloc)(size_t count, size_t each) {
    size_t size;
    token_t token = current_token;
    if (LIKELY(!__builtin_mul_overflow(count, each, &size) && size < BIG))
        return libc_calloc(count, each);
    if (!token)
        return count_shared(libc_calloc(count, each)); /* it refuses an overflow too */
    if (__builtin_mul_overflow(count, each, &size)) {
        errno = ENOMEM;
        return NULL;
    }
    struct grant grant = take(token, size, 0, false);
    if (grant.block) {
        char *end = grant.block + size;
        if (grant.clean_from > end)
            grant.clean_from = grant.clean_to = end;
        memset(grant.block, 0, (size_t)(grant.clean_from - grant.block));
        if (end > grant.clean_to)
            memset(grant.clean_to, 0, (size_t)(end - grant.clean_to));
    }
    return grant.block;
}

static void *aligned(size_t alignment, size_t size, const void *caller) {
    token_t token = current_token;
    if (LIKELY(!token))
        return size < BIG ? libc_memalign(alignment, size)
                          : count_shared(libc_memalign(alignment, size));
    bool tensor = is_tensor(caller);
    if (size < BIG) {
        if (!tensor || alignment > 64)
            return libc_memalign(alignment, size);
        return take_small_tensor(token, size);
    }
    if (UNLIKELY(alignment > HUGE_UNIT))
        return count_shared(libc_memalign(alignment, size)); /* nobody asks for that */
    return take(token, size, alignment, tensor).block;
}

EXPORT int GUARDED(posix_memalign)(void **result, size_t alignment, size_t size) {
    if (UNLIKELY(alignment % sizeof(void *) || !alignment || alignment & (alignment - 1)))
        return EINVAL;
    int saved = errno;
    void *block = aligned(alignment, size, __builtin_return_address(0));
    errno = saved;
    if (UNLIKELY(!block))
        return ENOMEM;
    *result = block;
    return 0;
}

EXPORT void *GUARDED(aligned_alloc)(size_t alignment, size_t size) {
    if (UNLIKELY(!alignment || alignment & (alignment - 1))) {
        errno = EINVAL;
        return NULL;
    }
    return aligned(alignment, size, __builtin_return_address(0));
}

EXPORT void *GUARDED(memalign)(size_t alignment, size_t size) {
    size_t power = sizeof(void *);
    while (power < alignment && power) /* glibc rounds up what is no power of two */
        power <<= 1;
    if (UNLIKELY(!power)) {
        errno = EINVAL;
        return NULL;
    }
    return aligned(power, size, __builtin_return_address(0));
}

EXPORT void *GUARDED(valloc)(size_t size) {
    return aligned((size_t)sysconf(_SC_PAGESIZE), size, __builtin_return_address(0));
}

EXPORT void *GUARDED(pvalloc)(size_t size) {
    size_t whole = (size_t)sysconf(_SC_PAGESIZE);
    if (UNLIKELY(size > SIZE_MAX - whole)) {
        errno = ENOMEM;
        return NULL;
    }
    return aligned(whole, (size + whole - 1) & ~(whole - 1), __builtin_return_address(0));
}

static void *move(void *block, size_t old, size_t size) {
    void *fresh = GUARDED(malloc)(size);
    if (fresh) {
        memcpy(fresh, block, old < size ? old : size);
        GUARDED(free)(block);
    }
    return fresh;
}

EXPORT void *GUARDED(realloc)(void *block, size_t size) {
    token_t token = current_token;
    if (!block)
        return GUARDED(malloc)(size);
    if (LIKELY(!is_ours(block))) {
        if (LIKELY(!token || size < BIG)) {
            size_t counted = headers_known ? header_size(block) : 0;
            void *fresh = libc_realloc(block, size);
            if (fresh || !size) {
                if (UNLIKELY(counted >= BIG))
                    atomic_fetch_sub_explicit(&shared_bytes, counted, memory_order_relaxed);
                count_shared(fresh);
            }
            return fresh;
        }
        return move(block, libc_usable_size(block), size);
    }
    if (!size) {
        give(block);
        return NULL;
    }
    size_t old = size_of(block);
    if (size <= old && size >= BIG && size > old - old / 4)
        return block;
    struct account *account = owner_of(block);
    struct pool *pool = pool_of(account, block);
    if (pool && size > old && token && account == &accounts[(uint32_t)token - 1] &&
        pool_grow(pool, block, size, (uint32_t)(token >> 32)))
        return block;
    return move(block, old, size);
}

EXPORT void *GUARDED(reallocarray)(void *block, size_t count, size_t each) {
    size_t size;
    if (__builtin_mul_overflow(count, each, &size)) {
        errno = ENOMEM;
        return NULL;
    }
    return GUARDED(realloc)(block, size);
}

EXPORT size_t GUARDED(malloc_usable_size)(void *block) {
    return block ? size_of(block) : 0;
}

/* ---- threads inherit the account of who starts them ---- */
struct start {
    void *(*run)(void *);
    void *argument;
    token_t token;
};

int real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                        void *argument) {
    if (UNLIKELY(!real_create))
        find_real();
    return real_create(thread, attributes, run, argument);
}

static void *start_in_account(void *pointer) {
    struct start start = *(struct start *)pointer;
    libc_free(pointer);
    current_token = start.token;
    return start.run(start.argument);
}

EXPORT int GUARDED(pthread_create)(pthread_t *thread, const pthread_attr_t *attributes,
                                   void *(*run)(void *), void *argument) {
    token_t token = current_token;
    if (!token)
        return real_pthread_create(thread, attributes, run, argument);
    struct start *start = libc_malloc(sizeof *start);
    if (!start)
        return EAGAIN;
    *start = (struct start){run, argument, token};
    int failed = real_pthread_create(thread, attributes, start_in_account, start);
    if (failed)
        libc_free(start);
    return failed;
}
