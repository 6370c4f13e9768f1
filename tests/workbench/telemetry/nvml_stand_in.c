/* A small NVML: enough of the library's interface for pynvml to load it and ask. What it answers is set by the
 * environment, so that a test can be a machine with unified memory, with MIG, with a GPU that falls off the bus. */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };

struct device { int index; int mig; };
static struct device gpus[8];
static struct device instances[8][2];
static int utilization_calls[8];

static int flag(const char *name) { const char *value = getenv(name); return value ? atoi(value) : 0; }
static int is(const char *name, const struct device *gpu) {
    const char *value = getenv(name);
    return value && atoi(value) == gpu->index;
}
static int lost(const struct device *gpu) { return is("STAND_IN_LOST", gpu) && utilization_calls[gpu->index] > 4; }

int nvmlInitWithFlags(unsigned flags) { return flag("STAND_IN_INIT"); }
int nvmlInit_v2(void) { return flag("STAND_IN_INIT"); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "stand-in error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = flag("STAND_IN_COUNT"); return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out) {
    gpus[index].index = index;
    *out = &gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetMigMode(struct device *gpu, unsigned *current, unsigned *pending) {
    if (!getenv("STAND_IN_MIG")) return NOT_SUPPORTED;
    *current = *pending = is("STAND_IN_MIG", gpu);
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(struct device *gpu, unsigned *count) { *count = 2; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(struct device *gpu, unsigned index, struct device **out) {
    if (index == 1) return NOT_FOUND; /* an empty slot */
    instances[gpu->index][index].index = gpu->index;
    instances[gpu->index][index].mig = 1;
    *out = &instances[gpu->index][index];
    return SUCCESS;
}
struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(struct device *gpu, struct utilization *out) {
    utilization_calls[gpu->index]++;
    if (lost(gpu)) return GPU_IS_LOST;
    if (is("STAND_IN_UNIFIED", gpu)) return NOT_SUPPORTED;
    out->gpu = is("STAND_IN_MIG", gpu) ? 0 : 37; /* a GPU cut into instances says 0 */
    out->memory = 11;
    return SUCCESS;
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(struct device *gpu, struct memory *out) {
    if (lost(gpu)) return GPU_IS_LOST;
    if (is("STAND_IN_UNIFIED", gpu)) return NOT_SUPPORTED;
    out->total = gpu->mig ? 20ull << 30 : 80ull << 30;
    out->used = gpu->mig ? 1ull << 30 : 3ull << 30;
    out->free = out->total - out->used;
    return SUCCESS;
}
static int number(struct device *gpu, unsigned *out, unsigned value) {
    if (lost(gpu)) return GPU_IS_LOST;
    *out = value;
    return SUCCESS;
}
int nvmlDeviceGetTemperature(struct device *gpu, int sensor, unsigned *out) { return number(gpu, out, 55); }
int nvmlDeviceGetPowerUsage(struct device *gpu, unsigned *out) { return number(gpu, out, 250500); }
int nvmlDeviceGetEnforcedPowerLimit(struct device *gpu, unsigned *out) { return number(gpu, out, 700000); }
int nvmlDeviceGetClockInfo(struct device *gpu, int kind, unsigned *out) { return number(gpu, out, kind == 1 ? 1980 : 2619); }
int nvmlDeviceGetPcieThroughput(struct device *gpu, int kind, unsigned *out) { return number(gpu, out, 2048); }
int nvmlDeviceGetFanSpeed(struct device *gpu, unsigned *out) { return NOT_SUPPORTED; }
int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *gpu, unsigned long long *out) { *out = 4; return SUCCESS; }
int nvmlDeviceGetTotalEccErrors(struct device *gpu, int kind, int span, unsigned long long *out) { *out = 0; return SUCCESS; }
struct field { unsigned id, scope; long long timestamp, latency; int type, result; union { unsigned long long whole; } value; };
static unsigned long long moved;
int nvmlDeviceGetFieldValues(struct device *gpu, int count, struct field *values) {
    for (int i = 0; i < count; i++) {
        values[i].result = flag("STAND_IN_LINKS") ? SUCCESS : NOT_SUPPORTED;
        values[i].value.whole = moved += 1024;
    }
    return SUCCESS;
}
