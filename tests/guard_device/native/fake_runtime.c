/* A libcudart (-DPREFIX=cuda) or libamdhip64 (-DPREFIX=hip) without a device: blocks are a few
 * bytes of malloc, what they stand for is only counted.  The fake_ variables are the tests'. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define API(name) JOIN(PREFIX, name)

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, PEER_ALREADY_ENABLED = 704, DEVICES = 4 };

_Atomic uint64_t fake_live, fake_high, fake_mallocs, fake_frees, fake_capacity = UINT64_MAX;
_Atomic int fake_fail_malloc, fake_fail_free, fake_fail_flags, fake_malloc_device = -1;
_Atomic int fake_can_access = 1, fake_fail_peer, fake_peers[DEVICES][DEVICES];
_Atomic unsigned fake_flags[DEVICES] = {8, 8, 8, 8};
_Thread_local int fake_device, fake_error;

struct block {
    uint64_t size;
};

static int answer(int code) {
    if (code)
        fake_error = code;
    return code;
}

int API(Malloc)(void **block, size_t size) {
    fake_mallocs++;
    fake_malloc_device = fake_device;
    *block = NULL;
    if (fake_fail_malloc)
        return answer(fake_fail_malloc);
    uint64_t live = atomic_fetch_add(&fake_live, size) + size, high = fake_high;
    struct block *fresh = live > fake_capacity ? NULL : malloc(sizeof *fresh);
    if (!fresh) {
        fake_live -= size;
        return answer(OUT_OF_MEMORY);
    }
    while (live > high && !atomic_compare_exchange_weak(&fake_high, &high, live))
        ;
    fresh->size = size;
    *block = fresh;
    return SUCCESS;
}

int API(Free)(void *block) {
    fake_frees++;
    if (fake_fail_free)
        return answer(fake_fail_free);
    fake_live -= ((struct block *)block)->size;
    free(block);
    return SUCCESS;
}

int API(GetLastError)(void) {
    int error = fake_error;
    fake_error = SUCCESS;
    return error;
}

int fake_peek_error(void) {
    return fake_error;
}

int API(GetDevice)(int *device) {
    *device = fake_device;
    return SUCCESS;
}

int API(SetDevice)(int device) {
    if (device < 0 || device >= DEVICES)
        return answer(INVALID_VALUE);
    fake_device = device;
    return SUCCESS;
}

int API(GetDeviceFlags)(unsigned *flags) {
    *flags = fake_flags[fake_device];
    return SUCCESS;
}

int API(SetDeviceFlags)(unsigned flags) {
    if (fake_fail_flags)
        return answer(fake_fail_flags);
    fake_flags[fake_device] = flags;
    return SUCCESS;
}

int API(DeviceCanAccessPeer)(int *can, int device, int peer) {
    if (device < 0 || device >= DEVICES || peer < 0 || peer >= DEVICES)
        return answer(INVALID_VALUE);
    *can = device != peer && fake_can_access;
    return SUCCESS;
}

int API(DeviceEnablePeerAccess)(int peer, unsigned flags) {
    if (fake_fail_peer || flags)
        return answer(fake_fail_peer ? fake_fail_peer : INVALID_VALUE);
    if (fake_peers[fake_device][peer])
        return answer(PEER_ALREADY_ENABLED);
    fake_peers[fake_device][peer] = 1;
    return SUCCESS;
}
