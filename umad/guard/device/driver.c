/* Finding the CUDA or HIP runtime of this process. */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct driver found;
static bool is_found;
static pthread_once_t sought = PTHREAD_ONCE_INIT;

bool find_function(void *library, const char *prefix, const char *name, void *function) {
    char symbol[40];
    snprintf(symbol, sizeof symbol, "%s%s", prefix, name);
    void *address = dlsym(library, symbol);
    memcpy(function, &address, sizeof address); /* ISO C casts no object to a function */
    return address;
}

static bool use(void *library) {
    static const char *const prefixes[] = {"cuda", "hip"};
    for (size_t at = 0; library && at < 2; at++) {
        const char *prefix = found.prefix = prefixes[at];
        if (find_function(library, prefix, "Malloc", &found.allocate) &&
            find_function(library, prefix, "Free", &found.release) &&
            find_function(library, prefix, "GetLastError", &found.last_error) &&
            find_function(library, prefix, "GetDevice", &found.get_device) &&
            find_function(library, prefix, "SetDevice", &found.set_device) &&
            find_function(library, prefix, "GetDeviceFlags", &found.get_flags) &&
            find_function(library, prefix, "SetDeviceFlags", &found.set_flags) &&
            find_function(library, prefix, "DeviceCanAccessPeer", &found.can_access) &&
            find_function(library, prefix, "DeviceEnablePeerAccess", &found.enable_access))
            return true;
    }
    return false;
}

/* What torch has loaded already comes first: the machine may have another one as well, of another
 * version or the other vendor's. */
static void seek(void) {
    static const char *const names[] = {"libcudart.so.13",  "libcudart.so.12",  "libcudart.so",
                                        "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};
    static const int modes[] = {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW};
    const char *wanted = getenv("UMAD_DEVICE_RUNTIME"); /* the tests' */
    if (wanted && *wanted) {
        is_found = use(dlopen(wanted, RTLD_NOW));
        return;
    }
    for (size_t mode = 0; mode < 2; mode++)
        for (size_t at = 0; at < sizeof names / sizeof *names && !is_found; at++)
            is_found = use(dlopen(names[at], modes[mode]));
}

const struct driver *find_driver(void) {
    pthread_once(&sought, seek);
    return is_found ? &found : NULL;
}

int run_on(const struct driver *driver, int device, int (*act)(const struct driver *, void *),
           void *argument) {
    int before = device;
    int failed = driver->get_device(&before);
    if (!failed && before != device)
        failed = driver->set_device(device);
    if (!failed)
        failed = act(driver, argument);
    if (before != device)
        driver->set_device(before);
    return failed;
}
