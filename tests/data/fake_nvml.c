/* libnvidia-ml.so.1 for machines that have no NVIDIA GPU: the functions that umad calls, answering
 * from a text file that is read anew at every nvmlDeviceGetCount.
 *
 *   driver VERSION
 *   fail CODE                     every call but nvmlInit fails so
 *   device PCI TOTAL USED         or: device PCI error CODE
 *   compute PID BYTES             or "-" for NVML_VALUE_NOT_AVAILABLE; graphics likewise
 *   lists CODE                    the process lists of this device fail so
 *
 * A FIFO in the place of the file blocks, as a stuck driver does.  No file: no driver. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, SIZE = 7, NO_DRIVER = 9, NO_SUCH = 6 };
enum { DEVICES = 4, LISTED = 16, KINDS = 2 };

typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} Pci;
typedef struct {
    char pci[32];
    int error, lists;
    unsigned long long total, used;
    unsigned count[KINDS];
    Process listed[KINDS][LISTED];
} Device;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char path[4096];
static char driver[80];
static Device devices[DEVICES];
static int count, fail, inits;

void fake_nvml_use(const char *file)
{
    pthread_mutex_lock(&lock);
    snprintf(path, sizeof path, "%s", file);
    pthread_mutex_unlock(&lock);
}

int fake_nvml_inits(void) { return inits; }

static int load(void)
{
    char name[sizeof path], line[256], word[64], last[64];
    pthread_mutex_lock(&lock);
    memcpy(name, path, sizeof name);
    pthread_mutex_unlock(&lock);
    FILE *file = name[0] ? fopen(name, "r") : NULL;
    if (!file)
        return NO_DRIVER;
    count = fail = 0;
    while (fgets(line, sizeof line, file)) {
        Device *now = count ? &devices[count - 1] : NULL;
        Process process = {0};
        int code;
        if (sscanf(line, "driver %79s", driver) == 1 || sscanf(line, "fail %d", &fail) == 1)
            continue;
        if (sscanf(line, "device %31s", word) == 1 && count < DEVICES) {
            now = &devices[count++];
            memset(now, 0, sizeof *now);
            strcpy(now->pci, word);
            if (sscanf(line, "device %*s error %d", &now->error) != 1)
                sscanf(line, "device %*s %llu %llu", &now->total, &now->used);
        } else if (now && sscanf(line, "lists %d", &code) == 1) {
            now->lists = code;
        } else if (now && sscanf(line, "%63s %u %63s", word, &process.pid, last) == 3) {
            int kind = strcmp(word, "compute") != 0;
            process.used = last[0] == '-' ? ~0ULL : strtoull(last, NULL, 10);
            process.gi = process.ci = ~0U;
            if (now->count[kind] < LISTED)
                now->listed[kind][now->count[kind]++] = process;
        }
    }
    fclose(file);
    return fail;
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    inits++;
    return path[0] ? SUCCESS : NO_DRIVER;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "fake error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned length)
{
    snprintf(text, length, "%s", driver);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *found)
{
    int code = load();
    *found = (unsigned)count;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device)
{
    *device = &devices[index];
    return index < (unsigned)count ? SUCCESS : NO_SUCH;
}

int nvmlDeviceGetPciInfo_v3(Device *device, Pci *pci)
{
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", device->pci);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *memory)
{
    memory[0] = device->total;
    memory[1] = device->total - device->used;
    memory[2] = device->used;
    return device->error;
}

static int list(Device *device, int kind, unsigned *length, Process *into)
{
    unsigned room = *length;
    if (device->lists)
        return device->lists;
    *length = device->count[kind];
    if (*length > room)
        return SIZE;
    memcpy(into, device->listed[kind], *length * sizeof *into);
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *length, Process *into)
{
    return list(device, 0, length, into);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, unsigned *length, Process *into)
{
    return list(device, 1, length, into);
}
