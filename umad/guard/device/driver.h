/* The CUDA or HIP runtime of this process, found at run time: both have the same functions. */
#ifndef UMAD_DEVICE_DRIVER_H
#define UMAD_DEVICE_DRIVER_H

#include <stdbool.h>
#include <stddef.h>

struct driver {
    const char *prefix; /* "cuda" or "hip" */
    int (*allocate)(void **, size_t);
    int (*release)(void *);
    int (*last_error)(void);
    int (*get_device)(int *);
    int (*set_device)(int);
    int (*get_flags)(unsigned *);
    int (*set_flags)(unsigned);
    int (*can_access)(int *, int, int);
    int (*enable_access)(int, unsigned);
};

/* NULL where neither can be loaded; sought once. */
const struct driver *find_driver(void);

/* Stores the function prefix + name of a library, NULL where it has none; says whether it has. */
bool find_function(void *library, const char *prefix, const char *name, void *function);

/* Runs `act` with `device` as this thread's current one; returns the driver's error or 0. */
int run_on(const struct driver *driver, int device, int (*act)(const struct driver *, void *),
           void *argument);

#endif
