"""A driver without GPUs: NVML's functions in C, built on the spot, telling of made-up GPUs.

Who opens it goes the same way as on a machine with a driver: `ctypes`, handles, error codes.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

GIB = 1 << 30
NAME = "libnvidia-ml.so.1"
# GPU 0 answers everything; GPU 1 is an older one that refuses power, energy and utilisation.
SOURCE = r"""
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned pid; unsigned long long used; unsigned slice, part; } Process;
static char cells[NUM_GPUS + NUM_SLICES + 1];
static const char *slices[] = {"MIG-eeee-0", "MIG-eeee-1", "MIG-eeee-2"};
static const char *uuids[] = {"GPU-aaaa-0000", "GPU-bbbb-1111", "GPU-bbcc-2222", "GPU-dddd-3333"};
static unsigned long long millijoules = 5000;
static int is_open = 0;
static int number(void *handle) { return (int)((char *)handle - cells); }

int nvmlInitWithFlags(unsigned flags) { is_open = 1; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  strncpy(text, "580.1", size);
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = NUM_GPUS; return is_open ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (index >= NUM_GPUS) return 2;
  *handle = &cells[index];
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  for (int n = 0; n < NUM_SLICES; n++)
    if (!strcmp(uuid, slices[n])) { *handle = &cells[NUM_GPUS + n]; return 0; }
  if (strcmp(uuid, "MIG-1")) return 6;
  *handle = &cells[0];
  return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  int n = number(handle);
  strncpy(text, n < NUM_GPUS ? uuids[n] : slices[n - NUM_GPUS], size);
  return 0;
}
#if NUM_SLICES
/* GPU 0 is in MIG mode; the first place for a slice is empty. */
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *later) {
  if (number(handle) >= NUM_GPUS) return 3;
  *now = *later = number(handle) == 0;
  return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice) {
  if (index < 1 || index > NUM_SLICES) return 6;
  *slice = &cells[NUM_GPUS + index - 1];
  return 0;
}
#endif
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  strncpy(text, "Made Up 16", size);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
  memory->total = 16ULL << 30;
  memory->used = (1ULL + number(handle)) << 30;
  memory->free = memory->total - memory->used;
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, Rates *rates) {
  if (number(handle)) return 3;
  rates->gpu = 37;
  rates->memory = 12;
  return 0;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
  if (number(handle)) return 3;
  *milliwatts = 123456;
  return 0;
}
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *milliwatts) {
  *milliwatts = 700000;
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *value) {
  if (number(handle)) return 3;
  *value = millijoules;
  millijoules += 250;
  return 0;
}
/* Two processes on GPU 0; the use of the second is not told. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *found) {
  unsigned room = *count;
  if (number(handle)) return 3;
  *count = 2;
  if (room < 2) return 7;
  found[0] = (Process){4242, 3ULL << 30, 0, 0};
  found[1] = (Process){77, ~0ULL, 0, 0};
  return 0;
}
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *mhz) {
  *mhz = kind == 1 ? 1980 : 1;
  return 0;
}
"""


def build(folder: Path, num_gpus: int = 2, num_slices: int = 0) -> Path:
    """The library in `folder`; skips where there is no C compiler. With slices, GPU 0 is in MIG
    mode."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = folder / "nvml.c", folder / NAME
    source.write_text(SOURCE)
    defines = [f"-DNUM_GPUS={num_gpus}", f"-DNUM_SLICES={num_slices}"]
    subprocess.run([compiler, "-shared", "-fPIC", *defines, "-o", library, source], check=True)
    return library
