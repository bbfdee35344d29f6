/* Built as libc10.so: the guard takes what asks from here for tensors. */
#include <stddef.h>

#ifdef UMAD_GUARD_EMBEDDED
#define posix_memalign guarded_posix_memalign
#endif
int posix_memalign(void **result, size_t alignment, size_t size);

void *fake_tensor(size_t size, size_t alignment);
void *fake_tensor(size_t size, size_t alignment) {
    void *block = NULL;
    return posix_memalign(&block, alignment, size) == 0 ? block : NULL;
}
